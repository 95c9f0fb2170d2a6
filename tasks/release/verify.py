"""Whether an exported model is what its manifest says, to the last byte, and whether a trusted key signed the manifest.

`python -m tasks.release.verify [FOLDER]` (or `make verify`); data/model without an argument.
"""

import sys
from pathlib import Path

from tasks import signing
from tasks.errors import UserError
from tasks.files import hash_files, read_json, sha256
from tasks.output import as_command
from tasks.paths import MODEL

MANIFEST = "manifest.json"
SUM = "manifest.sha256"  # as `sha256sum -c` reads it: a manifest cannot hold a hash of itself
SIGNATURE = "manifest.sig"
OF_THE_MANIFEST = (MANIFEST, SUM, SIGNATURE)


def seal(folder: Path) -> None:
    """Note the manifest's own hash and sign it; the last thing that an export writes."""
    (folder / SUM).write_text(f"{sha256(folder / MANIFEST)}  {MANIFEST}\n")
    (folder / SIGNATURE).write_text(signing.sign((folder / MANIFEST).read_bytes()))


def problems(folder: Path, signed: bool = True, weights: bool = True) -> list[str]:
    """What is not as the manifest says, or that no trusted key signed it; none when the export is whole.

    Without `weights` only the files that are there are compared: a registry may not hold large ones.
    """
    if not (folder / MANIFEST).exists() or not (folder / SUM).exists():
        raise UserError(f"{folder} has no {MANIFEST} or {SUM}. Run `dvc repro export`, or `dvc checkout data/model`.")
    if (folder / SUM).read_text(errors="replace") != f"{sha256(folder / MANIFEST)}  {MANIFEST}\n":
        return [f"{MANIFEST} has changed, or {SUM} has"]
    if signed and (unsigned := _unsigned(folder)):
        return [unsigned]
    expected = read_json(folder / MANIFEST)["files"]
    found = {name: digest for name, digest in hash_files(folder).items() if name not in OF_THE_MANIFEST}
    missing = [f"{name} is missing" for name in expected if name not in found and weights]
    strange = [f"{name} is not of this export" for name in found if name not in expected]
    changed = [
        f"{name} has changed: sha256 {found[name][:12]}, and {digest[:12]} was exported"
        for name, digest in expected.items()
        if name in found and found[name] != digest
    ]
    return missing + changed + strange


def _unsigned(folder: Path) -> str | None:
    if not (folder / SIGNATURE).exists():
        return f"{SIGNATURE} is missing: it was exported before exports were signed, or by somebody else"
    problem = signing.signature_problem(
        (folder / MANIFEST).read_bytes(), (folder / SIGNATURE).read_text(errors="replace")
    )
    return f"{MANIFEST}: {problem}" if problem else None


def require_whole(folder: Path) -> None:
    if found := problems(folder):
        raise UserError(
            f"{folder} is not what was exported: {'; '.join(found)}. Restore it with `dvc checkout --force "
            "data/model`, or make it anew with `dvc repro -f export`. If only the signature is missing and you know "
            f"who made it, `make sign WHAT={folder}` signs it with your key."
        )


@as_command
def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL
    require_whole(folder)
    manifest = read_json(folder / MANIFEST)
    print(f"{folder}: {manifest['model']}, {len(manifest['files'])} files, each as the signed manifest says")


if __name__ == "__main__":
    main()
