"""`dpo verify [WHAT]`, and `dpo sign [WHAT]`: sign what was made without this project's key or with another one.

WHAT is the folder of an export (data/model by default), the folder of a checkpoint, or a registered version
(model_names.py). Only files that agree with their manifest are signed. A signature means that you trust whoever made
the files: loading a checkpoint runs code that its files name.
"""

import json
import tempfile
from pathlib import Path

from tasks.config.paths import MODEL
from tasks.errors import UserError
from tasks.system import signing
from tasks.system.files import read_json, sha256
from tasks.tracking.model_names import registered_version
from tasks.tracking.verify import (
    MANIFEST,
    SIGNATURE,
    problems,
    require_intact,
    require_intact_version,
    version_problems,
    write_signature,
)
from training.trainer import checkpoint_files


def sign(what: str) -> str:
    folder = Path(what) if what else MODEL
    if what and not folder.exists():
        return _sign_version(what)
    if (folder / "state.json").exists():
        sign_checkpoint(folder, signing.checkpoint_key())
        return f"{folder}: signed as a checkpoint of this project"
    _require_no_problems(problems(folder, signed=False), str(folder))
    write_signature(folder, folder / SIGNATURE)
    hint = " Run `dvc commit --force export` so that DVC records the change." if folder == MODEL else ""
    return f"{folder}: signed by key {signing.public_key()[:16]}.{hint}"


def sign_checkpoint(folder: Path, key: bytes) -> None:
    """Authenticate a checkpoint whose files agree with its manifest."""
    content = (folder / checkpoint_files.MANIFEST).read_bytes()
    changed = [name for name, digest in json.loads(content)["files"].items() if sha256(folder / name) != digest]
    _require_no_problems([f"{name} has changed" for name in changed], str(folder))
    checkpoint_files.write_atomically(folder / checkpoint_files.MAC, checkpoint_files.mac_of(content, key) + "\n")


def print_verification(what: str) -> None:
    """Of a folder, or of a registered version and who approved it."""
    folder, approval = Path(what) if what else MODEL, ""
    if not what or folder.exists():
        require_intact(folder)
    else:
        with registered_version(what) as (_, models, version):
            folder, tags = require_intact_version(models, version), version.tags
        approval = f"; approved by {tags['approved_by']}" if tags.get("approved_by") else ""
        if tags.get("override_reason"):
            approval += f" against the gate ({tags['overruled']}): {tags['override_reason']}"
    manifest = read_json(folder / MANIFEST)
    print(f"{folder}: {manifest['model']}, {len(manifest['files'])} files, all as in the signed manifest{approval}")


def _sign_version(name: str) -> str:
    with registered_version(name) as (_, models, version), tempfile.TemporaryDirectory() as temporary:
        folder, what = models.fetch(version, "model"), f"{models.name} version {version.number}"
        _require_no_problems(version_problems(models, version, folder, False), what)
        write_signature(folder, Path(temporary) / SIGNATURE)
        models.store(version, Path(temporary) / SIGNATURE)
    return f"{what}: signed by key {signing.public_key()[:16]}"


def _require_no_problems(broken: list[str], what: str) -> None:
    if broken:
        raise UserError(f"{what} differs from its manifest, so it was not signed: {'; '.join(broken)}.")
