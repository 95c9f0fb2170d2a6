"""Whether an exported model is what its manifest says, to the last byte.

`python -m tasks.release.verify [FOLDER]` (or `make verify`); data/model without an argument.
"""

import sys
from pathlib import Path

from tasks.errors import UserError
from tasks.files import hash_files, read_json, sha256
from tasks.paths import MODEL

MANIFEST = "manifest.json"
SUM = "manifest.sha256"  # as `sha256sum -c` reads it: a manifest cannot hold a hash of itself


def seal(folder: Path) -> None:
    """Note the manifest's own hash; the last thing that an export writes."""
    (folder / SUM).write_text(f"{sha256(folder / MANIFEST)}  {MANIFEST}\n")


def problems(folder: Path) -> list[str]:
    """What is not as the manifest says; none when the export is whole."""
    if not (folder / MANIFEST).exists() or not (folder / SUM).exists():
        raise UserError(f"{folder} has no {MANIFEST} or {SUM}. Run `dvc repro export`, or `dvc checkout data/model`.")
    if (folder / SUM).read_text(errors="replace") != f"{sha256(folder / MANIFEST)}  {MANIFEST}\n":
        return [f"{MANIFEST} has changed, or {SUM} has"]
    expected = read_json(folder / MANIFEST)["files"]
    found = {name: digest for name, digest in hash_files(folder).items() if name not in (MANIFEST, SUM)}
    missing = [f"{name} is missing" for name in expected if name not in found]
    strange = [f"{name} is not of this export" for name in found if name not in expected]
    changed = [
        f"{name} has changed: sha256 {found[name][:12]}, and {digest[:12]} was exported"
        for name, digest in expected.items()
        if name in found and found[name] != digest
    ]
    return missing + changed + strange


def require_whole(folder: Path) -> None:
    if found := problems(folder):
        raise UserError(
            f"{folder} is not what was exported: {'; '.join(found)}. Restore it with `dvc checkout --force "
            "data/model`, or make it anew with `dvc repro -f export`."
        )


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL
    try:
        require_whole(folder)
    except UserError as error:
        sys.exit(f"error: {error}")
    manifest = read_json(folder / MANIFEST)
    print(f"{folder}: {manifest['model']}, {len(manifest['files'])} files, each as the manifest says")


if __name__ == "__main__":
    main()
