"""Preference data from where it is: the demo, a file, a folder, an fsspec address (S3 and friends), a hub data set."""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from tasks.access import check_protocol, configured, guarded_client
from tasks.dataset import demo
from tasks.dataset.readers import COMPRESSED, SUFFIXES, suffix_of
from tasks.errors import UserError
from tasks.files import fingerprint, home, known_sha256
from tasks.models import HUB, hub_address, local_path

if TYPE_CHECKING:
    from tasks.params import Source

REMOTE = "://"
COMMIT = re.compile(r"[0-9a-f]{40}")
ASKED_SECONDS = 10.0  # that a hub may take to name its newest commit
NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # beside a data set's rows


def check_address(key: str, address: str) -> None:
    """What can be wrong with an address is said before anything is fetched."""
    if address == "demo" or address.startswith(HUB) or REMOTE in address:
        return
    path = local_path(address)
    if not path.exists():
        raise UserError(
            f"{key}: there is no file {address}. Give a file or folder, `demo`, an address such as "
            "s3://bucket/pairs.jsonl, or a data set as `hub:owner/name@revision`."
        )
    if path.is_file() and suffix_of(path) not in SUFFIXES:
        raise UserError(f"{key}: {address} must end in one of {', '.join(SUFFIXES)} (and {', '.join(COMPRESSED)}).")
    if path.is_dir() and not _row_files(path):
        raise UserError(f"{key}: there is no file of rows in the folder {address} ({', '.join(SUFFIXES)}).")


def fetch(key: str, address: str, seed: int, folder: Path) -> None:
    """Bring the files of an address into a folder, as they are."""
    folder.mkdir(parents=True)
    if address == "demo":
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in demo.rows(seed))
        (folder / "pairs.jsonl").write_text("".join(lines))
    elif address.startswith(HUB):
        _from_hub(key, address, folder / "rows.parquet")
    elif REMOTE in address:
        _from_afar(key, address, folder)
    elif (path := local_path(address)).is_file():
        shutil.copyfile(path, folder / path.name)
    else:
        for file in _row_files(path):
            target = folder / file.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def name_of(address: str) -> str:
    """What a source is called in reports, by the last part of its address."""
    last = address.partition("?")[0].partition("@")[0].rstrip("/").split("/")[-1]
    return re.sub(r"[^\w-]+", "-", last.partition(".")[0]).strip("-") or "data"


def origins(params: "Source") -> list[dict[str, Any]]:
    """Where rows come from: one address or a mixture, and the held-out data if it has an address of its own."""
    if isinstance(params.data, str):
        name = name_of(params.data)
        made = [{"key": "source.data", "name": name, "address": params.data, "weight": 1.0, "share": 1.0}]
    else:
        made = [
            {"key": "source.data", "name": one.name, "address": one.data, "weight": one.weight, "share": one.share}
            for one in params.data
        ]
    held = {"key": "source.eval", "name": "eval", "address": params.eval, "weight": 1.0, "share": 1.0}
    return [*made, held] if params.eval else made


def content_id(key: str, address: str) -> str:
    """Names the content behind an address: a hash of local files; of a store, what it says without sending them."""
    if REMOTE in address or address.startswith(HUB):
        return stamp(key, address)
    check_address(key, address)
    path = local_path(address)
    files = {".": path} if path.is_file() else {file.relative_to(path).as_posix(): file for file in _row_files(path)}
    return fingerprint({name: known_sha256(file) for name, file in files.items()})


def _row_files(folder: Path) -> list[Path]:
    """Files of rows below a folder, in a fixed order; what lies under a dot is a tool's."""
    paths = (path for path in folder.rglob("*") if not any(part[0] == "." for part in path.relative_to(folder).parts))
    files = sorted(path for path in paths if path.is_file() and _holds_rows(path.name))
    for path in files:
        _refuse_a_way_out(path, folder)
    return files


def _refuse_a_way_out(path: Path, folder: Path) -> None:
    """A link may lead to another place of the folder or of the project (DVC's cache, say), and nowhere else."""
    there = path.resolve()
    if not any(there.is_relative_to(root) for root in (folder.resolve(), home())):
        raise UserError(
            f"{path} is a symbolic link to {there}, outside the folder {folder}. Copy the file there, or give its own "
            "address."
        )


def _inside(folder: Path, name: str) -> Path:
    """A store may call a file `../../x`; it lands in the folder or nowhere."""
    target = folder / name
    if not target.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the store names a file '{name}', which would lie outside {folder}")
    return target


def _holds_rows(name: str) -> bool:
    return suffix_of(name) in SUFFIXES and name not in NOT_ROWS


def _from_hub(key: str, address: str, target: Path) -> None:
    from datasets import load_dataset

    place, _, query = address.partition("?")
    options = dict(parse_qsl(query))
    if unknown := options.keys() - {"split", "config"}:
        raise UserError(f"{key}: `{unknown.pop()}` in {address} is neither `split` nor `config`.")
    name, revision = hub_address(place)
    _guard_http(configured().networks)
    try:
        rows = load_dataset(name, options.get("config"), revision=revision, split=options.get("split", "train"))
        rows.to_parquet(str(target))
    except Exception as error:
        raise UserError(
            f"{key}: the data set {name} (revision {revision or 'newest'}) could not be loaded from the hub: "
            f"{str(error).splitlines()[0]} Check the name, ?split=, your network and HF_TOKEN."
        ) from error


def _from_afar(key: str, address: str, folder: Path) -> None:
    try:
        system, paths = _remote_files(key, address)
        if not paths:
            raise FileNotFoundError("there is no file of rows")
        root = paths[0].rpartition("/")[0] if len(paths) == 1 else system._strip_protocol(address).rstrip("/")
        for path in paths:
            target = _inside(folder, path.removeprefix(root).lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(path, str(target))
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{key}: {address} needs one more package: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"{key}: {address} could not be read ({reason}). Check the address and the credentials in the environment."
        ) from error


def _remote_files(key: str, address: str) -> tuple[Any, list[str]]:
    """The file system behind an address, and its files of rows in a fixed order."""
    import fsspec

    access = configured()
    check_protocol(key, address, access)
    _guard_http(access.networks)
    system, path = fsspec.core.url_to_fs(address)
    system.invalidate_cache()
    found = system.find(path) if system.isdir(path) else [path]
    return system, sorted(file for file in found if _holds_rows(file.rpartition("/")[2]))


def _guard_http(networks: list[str]) -> None:
    """Of this whole process, as far as it reads by fsspec: `datasets` follows addresses that a data set names."""
    import fsspec

    guarded = {"get_client": partial(guarded_client, networks)}
    fsspec.config.conf.update(http=guarded, https=guarded)


def stamp(key: str, address: str) -> str:
    """What the store says of the files without sending them: an ETag, a time of change, a hub's commit."""
    try:
        if address.startswith(HUB):
            return hub_commit(address.partition("?")[0], "dataset")
        system, paths = _remote_files(key, address)
        return ",".join(str(system.ukey(path)) for path in paths)
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"{key}: {address} could not be asked whether it is new ({reason}). Check the network and the credentials "
            "in the environment, or name a commit (hub:owner/name@commit)."
        ) from error


def pinned(address: str) -> bool:
    """Whether a hub address names a commit, which leads to the same files for ever."""
    return address.startswith(HUB) and bool(COMMIT.fullmatch(hub_address(address.partition("?")[0])[1] or ""))


def hub_commit(address: str, kind: str) -> str:
    """The commit that a hub address leads to now; `kind` is model or dataset."""
    from huggingface_hub import HfApi

    name, revision = hub_address(address)
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    return str(api.repo_info(name, repo_type=kind, revision=revision, timeout=ASKED_SECONDS).sha)
