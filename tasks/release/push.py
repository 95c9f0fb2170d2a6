"""A whole export to any fsspec address: `python -m tasks.release.push s3://bucket/models/dpo` (or `make push TO=...`).

The files lie in a folder named by the manifest's hash, the manifest last: who finds a manifest finds a whole model.
"""

import hashlib
import sys
from pathlib import Path

from tasks.errors import UserError
from tasks.files import read_json, sha256
from tasks.output import as_command
from tasks.paths import MODEL
from tasks.release.verify import MANIFEST, SIGNATURE, SUM, require_whole

CHUNK = 2**22


def push(folder: Path, address: str) -> str:
    """Copy, read back and compare; the address of the copy."""
    import fsspec

    target = f"{address.rstrip('/')}/{sha256(folder / MANIFEST)[:12]}"
    try:
        files, root = fsspec.core.url_to_fs(target)
        last = {name: sha256(folder / name) for name in (SUM, SIGNATURE, MANIFEST)}
        for name, digest in {**read_json(folder / MANIFEST)["files"], **last}.items():
            there = f"{root}/{name}"
            files.makedirs(there.rpartition("/")[0], exist_ok=True)
            files.put_file(str(folder / name), there)
            if _sha256(files, there) != digest:
                raise UserError(f"{target}/{name} is not what was sent. Push again.")
    except UserError:
        raise
    except Exception as error:  # each kind of address fails in its own way
        raise UserError(
            f"The model could not be copied to {address}: {type(error).__name__}: {error}. Look at the address and its "
            "credentials, then run `make push TO=address`."
        ) from error
    return target


def _sha256(files, path: str) -> str:
    digest = hashlib.sha256()
    with files.open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@as_command
def main() -> None:
    if len(sys.argv) != 2 or not sys.argv[1]:
        raise UserError("Say where to: `make push TO=s3://bucket/models`.")
    require_whole(MODEL)
    print(f"copied to {push(MODEL, sys.argv[1])}")


if __name__ == "__main__":
    main()
