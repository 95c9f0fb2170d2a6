"""`source.model: registry:NAME`: a registered version, such as the champion, as the model that a run starts from.

NAME is `champion`, `3`, `MODEL/champion` or `MODEL/3`; without MODEL it is promote.model_name. While there is no such
version, a run starts from ADDRESS of `registry:NAME|ADDRESS`, and fails if there is none.
"""

import shutil
from pathlib import Path

from tasks.artifacts.models import REGISTRY, registered_name
from tasks.config.params import load_params
from tasks.errors import UserError
from tasks.runs.open_run import weights_of
from tasks.tracking.model_names import registered_version
from tasks.tracking.registry import NotRegistered
from tasks.tracking.verify import CHECKSUM, MANIFEST, SIGNATURE, require_intact_version

NOT_THE_MODEL = shutil.ignore_patterns(MANIFEST, CHECKSUM, SIGNATURE, "Modelfile", "*.gguf")  # of an export


def start_version(address: str, folder: Path | None = None) -> tuple[str, str] | None:
    """The address of the version that `address` means now, and the hash of its manifest; None: use the fallback.

    With a folder, the verified files of the model are copied into it.
    """
    name, fallback = registered_name(address)
    full_name = name if "/" in name else f"{load_params().promote.model_name}/{name}"
    try:
        with registered_version(full_name) as (_, models, version):
            if folder:
                require_intact_version(models, version)
                shutil.copytree(weights_of(models, version), folder, dirs_exist_ok=True, ignore=NOT_THE_MODEL)
            return f"{REGISTRY}{models.name}/{version.number}", models.digest(version)
    except NotRegistered as error:  # not where the registry is unreachable
        if fallback:
            return None
        raise UserError(
            f"source.model: {error} To start from another model until there is one, write it behind a bar: "
            f"{REGISTRY}{name}|hub:owner/name@revision."
        ) from None
