"""Where the base model's files are, and that they are those that `source` saw."""

from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.files import home, known_sha256, read_json
from tasks.paths import BASE

HUB = "hub:"


def base_folder(address: str) -> Path:
    """The folder of the base model at `source.model`; its sizes and content hashes must be those of the manifest."""
    manifest = read_json(BASE / "manifest.json")
    folder = _locate(address, manifest)
    for name, size in manifest["sizes"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise UserError(
                f"{folder / name} is not the file that the source stage saw ({size} bytes). "
                "Restore it, or run `dvc repro` to take the model as it is now."
            )
        if known_sha256(folder / name) != manifest["files"][name]:
            raise UserError(
                f"{folder / name} is not the file that the source stage saw: its content hash differs. Restore it, or "
                "run `dvc repro` to take the model as it is now. If nobody edited it, DVC's cache is damaged: run "
                "`make check-cache FIX=1`, which removes damaged objects, and this again."
            )
    return folder


def base_hash() -> str:
    return read_json(BASE / "manifest.json")["sha256"]


def local_path(address: str) -> Path:
    """A file or folder as the user means it: a run in its own worktree finds what lies in the checkout."""
    path = Path(address).expanduser()
    return path if path.exists() else home() / path


def file_hashes(folder: Path) -> dict[str, str]:
    """Of a model folder's own files; what a tool keeps there under a dot is not the model."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    return {path.name: known_sha256(path) for path in files}


def hub_address(address: str) -> tuple[str, str | None]:
    name, _, revision = address.removeprefix(HUB).partition("@")
    return name, revision or None


def hub_snapshot(name: str, revision: str | None, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=local_files_only))


def _locate(address: str, manifest: dict[str, Any]) -> Path:
    if address == "demo" or manifest.get("adapter"):  # made here
        return BASE
    if address.startswith(HUB):
        return hub_snapshot(hub_address(address)[0], manifest["revision"], local_files_only=True)
    return local_path(address)
