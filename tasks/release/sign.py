"""Sign what was made before there was a key, or with another key: `python -m tasks.release.sign [WHAT]` (`make sign`).

WHAT is the folder of an export (data/model without an argument), the folder of a checkpoint, or the number of a version
in the registry. Only files that agree with their manifest are signed. A signature says that you trust whoever made
them: loading a checkpoint runs code that its files name.
"""

import json
import sys
import tempfile
from pathlib import Path

from tasks import signing
from tasks.errors import UserError
from tasks.files import sha256
from tasks.output import as_command
from tasks.params import load_cluster, load_params
from tasks.paths import MODEL
from tasks.release.verify import MANIFEST, SIGNATURE, problems
from tasks.tracking.registry import registry
from training import checkpoint


def sign(what: str) -> str:
    if what.isdecimal():
        return _version(what)
    folder = Path(what) if what else MODEL
    if (folder / "state.json").exists():
        accept(folder, signing.checkpoint_key())
        return f"{folder}: signed as a checkpoint of this project"
    _must_agree(problems(folder, signed=False), str(folder))
    (folder / SIGNATURE).write_text(signing.sign((folder / MANIFEST).read_bytes()))
    hint = " `dvc commit --force export` tells DVC." if folder == MODEL else ""
    return f"{folder}: signed by key {signing.public_key()[:16]}.{hint}"


def accept(folder: Path, key: bytes) -> None:
    """Authenticate a checkpoint whose files agree with its manifest."""
    content = (folder / checkpoint.MANIFEST).read_bytes()
    changed = [name for name, digest in json.loads(content)["files"].items() if sha256(folder / name) != digest]
    _must_agree([f"{name} has changed" for name in changed], str(folder))
    checkpoint.write_atomically(folder / checkpoint.MAC, checkpoint.mac_of(content, key) + "\n")


def _version(number: str) -> str:
    name = load_params().promote.model_name
    with registry(load_cluster(), name) as found, tempfile.TemporaryDirectory() as aside:
        version = found.version(number)
        if version is None:
            raise UserError(f"{name} has no version {number}: {[v.number for v in found.versions()]}.")
        folder = found.fetch(version, "model")
        broken = problems(folder, signed=False, weights=version.tags.get("weights") == "stored")
        if sha256(folder / MANIFEST) != found.digest(version):
            broken = [f"{MANIFEST} is not the one whose hash the tag manifest_sha256 holds"]
        _must_agree(broken, f"version {number} of {name}")
        signature = Path(aside) / SIGNATURE
        signature.write_text(signing.sign((folder / MANIFEST).read_bytes()))
        found.store(version, "model", signature)
    return f"{name} version {number}: signed by key {signing.public_key()[:16]}"


def _must_agree(broken: list[str], what: str) -> None:
    if broken:
        raise UserError(f"{what} is not as its manifest says, so it was not signed: {'; '.join(broken)}.")


@as_command
def main() -> None:
    print(sign(sys.argv[1] if len(sys.argv) > 1 else ""))


if __name__ == "__main__":
    main()
