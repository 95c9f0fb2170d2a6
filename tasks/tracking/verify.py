"""Verify an export: every file has the hash that the manifest records, and a trusted key signed the manifest.

`dpo verify [WHAT]` checks an exported folder or a registered version. Rollback, approval and promotion check the files
in the registry the same way: someone who can write to the registry but does not hold the signing key cannot forge a
version.
"""

from pathlib import Path

from tasks.errors import UserError
from tasks.system import signing
from tasks.system.files import hash_files, read_json, sha256
from tasks.tracking.registry import Registry, Version

MANIFEST = "manifest.json"
CHECKSUM = "manifest.sha256"  # in the format of `sha256sum -c`: a manifest cannot hold its own hash
SIGNATURE = "manifest.sig"


def seal(folder: Path) -> None:
    """Write the manifest's checksum and signature: the last step of an export."""
    (folder / CHECKSUM).write_text(_checksum_line(folder))
    write_signature(folder, folder / SIGNATURE)


def write_signature(folder: Path, file: Path) -> None:
    """Sign the manifest of `folder` with this project's key."""
    file.write_text(signing.sign((folder / MANIFEST).read_bytes()))


def problems(folder: Path, signed: bool = True, weights: bool = True) -> list[str]:
    """The differences between a folder and its signed manifest; empty for an intact export.

    With `weights=False` missing files are no problem: a registry may not store large ones.
    """
    if not (folder / MANIFEST).exists() or not (folder / CHECKSUM).exists():
        raise UserError(
            f"{folder} has no {MANIFEST} or {CHECKSUM}. Run `dvc repro export`, or `dvc checkout data/model`."
        )
    if (folder / CHECKSUM).read_text(errors="replace") != _checksum_line(folder):
        return [f"{MANIFEST} or {CHECKSUM} has changed"]
    if signed and (problem := _signature_problem(folder)):
        return [problem]
    expected = read_json(folder / MANIFEST)["files"]
    actual = hash_files(folder)
    for name in (MANIFEST, CHECKSUM, SIGNATURE):
        actual.pop(name, None)
    missing = [f"{name} is missing" for name in expected if name not in actual and weights]
    unknown = [f"{name} is not part of this export" for name in actual if name not in expected]
    changed = [
        f"{name} has changed: its sha256 is {actual[name][:12]}, and the manifest has {digest[:12]}"
        for name, digest in expected.items()
        if name in actual and actual[name] != digest
    ]
    return missing + changed + unknown


def version_problems(model_registry: Registry, version: Version, folder: Path, signed: bool = True) -> list[str]:
    """The same for the files of a registered version, whose tag must hold the hash of its manifest."""
    broken = problems(folder, signed, weights=version.tags.get("weights") == "stored")
    if not broken and sha256(folder / MANIFEST) != model_registry.digest(version):
        return [f"the hash of {MANIFEST} is not the one in the tag manifest_sha256"]
    return broken


def require_intact(folder: Path) -> None:
    if broken := problems(folder):
        raise UserError(
            f"{folder} is not what was exported: {'; '.join(broken)}. Restore it with `dvc checkout --force "
            "data/model`, or export again with `dvc repro -f export`. If only the signature is missing and you know "
            f"who made the export, sign it with your key: `dpo sign {folder}`."
        )


def require_intact_version(model_registry: Registry, version: Version) -> Path:
    """The folder with the verified files of a registered version."""
    folder = model_registry.fetch(version, "model")
    if broken := version_problems(model_registry, version, folder):
        raise UserError(
            f"Version {version.number} of {model_registry.name} is not what was registered: {'; '.join(broken)}. No "
            "alias was moved. Restore its files from a backup, or make the model again with `dpo reproduce`. If only "
            "the signature is missing and you know who made the export, sign it with your key: "
            f"`dpo sign {model_registry.name}/{version.number}`."
        )
    return folder


def _checksum_line(folder: Path) -> str:
    return f"{sha256(folder / MANIFEST)}  {MANIFEST}\n"


def _signature_problem(folder: Path) -> str | None:
    if not (folder / SIGNATURE).exists():
        return f"{SIGNATURE} is missing: the model was exported before exports were signed, or by someone else"
    line = (folder / SIGNATURE).read_text(errors="replace")
    problem = signing.signature_problem((folder / MANIFEST).read_bytes(), line)
    return f"{MANIFEST}: {problem}" if problem else None
