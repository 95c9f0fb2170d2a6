"""`source.model: registry:NAME`: a registered version, such as the champion, as the model that a run starts from.

NAME is `champion`, `3`, `MODEL/champion` or `MODEL/3`; without MODEL it is promote.model_name. While there is no such
version, a run starts from ADDRESS of `registry:NAME|ADDRESS`, and fails if there is none.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tasks.config.params import load_params
from tasks.errors import UserError
from tasks.models import REGISTRY, registered_name
from tasks.release.verify import CHECKSUM, MANIFEST, SIGNATURE, require_intact_version
from tasks.runs.open_run import weights_of
from tasks.tracking.model_names import registered_version
from tasks.tracking.registry import NotRegistered, Registry, Version

T = TypeVar("T")
NOT_THE_MODEL = (MANIFEST, CHECKSUM, SIGNATURE, "Modelfile", "*.gguf")  # of an export


def start_version(address: str) -> tuple[str, str] | None:
    """The address of the version that `address` means now, and the hash of its manifest; None: use the fallback."""
    return _with_version(address, lambda models, version: (_address(models, version), models.digest(version)))


def copy_start_model(address: str, folder: Path) -> tuple[str, str] | None:
    """The same, with the verified files of the model copied into `folder`."""

    def copy(models: Registry, version: Version) -> tuple[str, str]:
        require_intact_version(models, version)
        ignore = shutil.ignore_patterns(*NOT_THE_MODEL)
        shutil.copytree(weights_of(models, version), folder, dirs_exist_ok=True, ignore=ignore)
        return _address(models, version), models.digest(version)

    return _with_version(address, copy)


def _with_version(address: str, use: Callable[[Registry, Version], T]) -> T | None:
    """What `use` returns for the version; None where the registry has none, but not where it is unreachable."""
    name, fallback = registered_name(address)
    try:
        with registered_version(name if "/" in name else f"{load_params().promote.model_name}/{name}") as found:
            return use(*found[1:])
    except NotRegistered as error:
        if fallback:
            return None
        raise UserError(
            f"source.model: {error} To start from another model until there is one, write it behind a bar: "
            f"{REGISTRY}{name}|hub:owner/name@revision."
        ) from None


def _address(models: Registry, version: Version) -> str:
    return f"{REGISTRY}{models.name}/{version.number}"
