"""`dpo push ADDRESS`: copy an export to any fsspec address, such as s3://bucket/models.

The copy is a folder named after the manifest's hash. The manifest is written last, so a folder with a manifest holds
a complete model.
"""

import hashlib
from pathlib import Path

from tasks.config.paths import MODEL
from tasks.errors import UserError
from tasks.runs.open_run import weights_of
from tasks.system.files import read_json, sha256
from tasks.tracking.model_names import registered_version
from tasks.tracking.verify import CHECKSUM, MANIFEST, SIGNATURE, require_intact


def push(folder: Path, address: str) -> str:
    """Copy every file, read it back and compare its hash; the address of the copy."""
    import fsspec

    target = f"{address.rstrip('/')}/{sha256(folder / MANIFEST)[:12]}"
    try:
        filesystem, root = fsspec.core.url_to_fs(target)
        last = {name: sha256(folder / name) for name in (CHECKSUM, SIGNATURE, MANIFEST)}
        for name, digest in {**read_json(folder / MANIFEST)["files"], **last}.items():
            path = f"{root}/{name}"
            filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            filesystem.put_file(str(folder / name), path)
            with filesystem.open(path, "rb") as copy:
                if hashlib.file_digest(copy, "sha256").hexdigest() != digest:
                    raise UserError(f"{target}/{name} differs from the file that was sent. Run `dpo push` again.")
    except UserError:
        raise
    except Exception as error:  # each kind of store raises errors of its own
        raise UserError(
            f"The model could not be copied to {address}: {type(error).__name__}: {error}. Check the address and its "
            f"credentials, then run `dpo push {address}`."
        ) from error
    return target


def push_model(address: str, name: str | None) -> str:
    """Verify a registered version, or data/model, and copy it; the address of the copy."""
    folder = MODEL
    if name:
        with registered_version(name) as (_, models, version):
            folder = weights_of(models, version)
    require_intact(folder)
    return push(folder, address)
