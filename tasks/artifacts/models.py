"""The base model's files: where they are, and whether they still have the hashes that `source` recorded."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tasks.config.addresses import local_path
from tasks.config.paths import BASE, SFT
from tasks.errors import UserError
from tasks.system.files import fingerprint, known_sha256, read_json, read_json_or_empty
from training.models.model_files import ADAPTER, embedded_adapter, loadable, model_files
from training.models.remote_code import check_configuration

HUB = "hub:"
REGISTRY = "registry:"  # of a registered version: registry:champion, registry:champion|ADDRESS
OTHER_REFERENCE = BASE / "reference"  # with train.reference_model: base


def base_folder(address: str) -> Path:
    """The folder of the base model, which is the reference model: the one at `source.model`, or what `sft` made of it.

    Its files were checked against the manifest.
    """
    tuned = sft_manifest()
    return _checked(SFT, tuned) if tuned else source_folder(address)


def source_folder(address: str) -> Path:
    """The folder of the model at `source.model`, checked like the base model."""
    if not (BASE / "manifest.json").exists():
        raise UserError(
            f"{BASE} is missing: no run of this checkout has fetched a base model. `dpo run` fetches it; a command "
            "that takes a model also takes that of a registered one: MODEL/base."
        )
    manifest = read_json(BASE / "manifest.json")
    return _checked(source_path(address, manifest), manifest)


def _checked(folder: Path, manifest: dict[str, Any]) -> Path:
    origin = "sft stage wrote" if folder == SFT else "source stage read"
    if added := sorted(set(_model_files(folder)) - manifest["files"].keys()):
        raise UserError(
            f"{folder / added[0]} was not there when the {origin} this model. Remove it, or run `dvc repro` to use the "
            "model as it is now."
        )
    for name, size in manifest["sizes"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size or known_sha256(path) != manifest["files"][name]:
            raise UserError(
                f"{path} is not the file that the {origin}: its content hash differs. Restore it, or run `dvc repro` "
                "to use the model as it is now. If nobody edited it, DVC's cache is damaged: run `dpo check-cache "
                "--fix`, which removes damaged objects, and try again."
            )
    return folder


def reference_folder(address: str) -> Path:
    """The folder of the reference model: the base model, unless train.reference_model names another one."""
    manifest = read_json_or_empty(OTHER_REFERENCE / "manifest.json")
    if not manifest:
        return base_folder(address)
    return _checked(source_path(manifest["model"], manifest, OTHER_REFERENCE), manifest)


def reference_hash() -> str:
    return read_json_or_empty(OTHER_REFERENCE / "manifest.json").get("sha256") or base_hash()


def base_hash() -> str:
    return sft_manifest().get("sha256") or source_hash()


def sft_manifest() -> dict[str, Any]:
    """What the stage `sft` wrote; empty if it is off or has not run yet."""
    path = SFT / "manifest.json"
    return read_json(path) if path.exists() else {}


def source_hash() -> str:
    return read_json(BASE / "manifest.json")["sha256"]


def file_hashes(folder: Path) -> dict[str, str]:
    """sha256 of each file of a model folder that is ever read, by its name. Others cannot change a result."""
    return {name: known_sha256(folder / name) for name in _model_files(folder)}


def _model_files(folder: Path) -> list[str]:
    try:
        return model_files(folder)
    except ValueError as error:
        raise UserError(f"The model in {folder} cannot be used: {error}.") from None


@contextmanager
def model_links(folder: Path) -> Iterator[Path]:
    """A folder with links to the model's files, for another program; UserError if it could run code of the hub."""
    with ExitStack() as stack:
        try:
            check_configuration(folder)
            files = stack.enter_context(loadable(folder))
        except ValueError as error:
            raise UserError(f"The model in {folder} cannot be used: {error}.") from None
        yield files


def plain_folder(folder: Path) -> Path:
    """The folder of a model that is used as it is; UserError if it also holds an adapter."""
    if found := embedded_adapter(folder):
        raise UserError(
            f"{folder} also holds an adapter ({found}), which would be left out. Merge it with peft's "
            "`merge_and_unload`, or move the adapter's files away."
        )
    return folder


def adapter_hashes(folder: Path) -> dict[str, str]:
    """The same for the folder of an adapter."""
    return {name: known_sha256(folder / name) for name in ADAPTER if (folder / name).is_file()}


def model_hashes(folder: Path) -> dict[str, Any]:
    """What a manifest says about the files of a model."""
    files = file_hashes(folder)
    sizes = {name: (folder / name).stat().st_size for name in files}
    return {"sha256": fingerprint(files), "files": files, "sizes": sizes}


def hub_address(address: str) -> tuple[str, str | None]:
    name, _, revision = address.removeprefix(HUB).partition("@")
    return name, revision or None


def hub_snapshot(name: str, revision: str | None, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=local_files_only))


def registered_name(address: str) -> tuple[str, str | None]:
    """The name of a version in `registry:NAME|ADDRESS`, and the address to use while there is no such version."""
    name, _, first = address.removeprefix(REGISTRY).partition("|")
    return name, first or None


def source_path(address: str, manifest: dict[str, Any], written: Path = BASE) -> Path:
    """The folder of a model: `written` for files that the stage `source` wrote, else where they were."""
    address = manifest["model"] if address.startswith(REGISTRY) else address  # the version, or what stands in for it
    if address == "demo" or address.startswith(REGISTRY) or manifest.get("adapter"):
        return written
    if address.startswith(HUB):
        return hub_snapshot(hub_address(address)[0], manifest["revision"], local_files_only=True)
    return local_path(address)
