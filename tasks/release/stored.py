"""A version as the registry holds it, verified: the tag has its manifest's hash, a trusted key signed the manifest, and
every file is as the manifest says. Whoever can write the registry but does not hold the key cannot forge a version.
"""

from pathlib import Path

from tasks.errors import UserError
from tasks.files import sha256
from tasks.release.verify import MANIFEST, problems
from tasks.tracking.registry import Registry, Version


def require_stored(found: Registry, version: Version) -> Path:
    """The folder of a version's files, verified."""
    folder = found.fetch(version, "model")
    broken = problems(folder, weights=version.tags.get("weights") == "stored")
    if not broken and sha256(folder / MANIFEST) != found.digest(version):
        broken = [f"{MANIFEST} is not the one whose hash the tag manifest_sha256 holds"]
    if broken:
        raise UserError(
            f"Version {version.number} of {found.name} is not what was registered: {'; '.join(broken)}. Nothing was "
            "moved. Restore its files from a backup, or make the model again with `make reproduce`. If only the "
            f"signature is missing and you know who made it, `make sign WHAT={version.number}` signs it with your key."
        )
    return folder
