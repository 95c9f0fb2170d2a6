"""Fetch preference data from an address: the demo, a file, a folder, an fsspec URL (S3 and others), a hub data set,
feedback in MLflow.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from tasks.artifacts import demo
from tasks.artifacts.models import HUB, hub_address
from tasks.config.access import check_protocol, configured, guarded_client
from tasks.config.addresses import FILE, local_path
from tasks.config.source import RUN, Source
from tasks.errors import UserError
from tasks.feedback import rows as feedback
from tasks.feedback.rows import FEEDBACK
from tasks.source.readers import COMPRESSED, SUFFIXES, suffix_of
from tasks.source.run_data import copy_rows, run_commit
from tasks.system.files import fingerprint, known_sha256

REMOTE = "://"
DATASETS = "hf://datasets/"  # keeps `datasets` from reading a folder of this machine that has the same name
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_TIMEOUT = 10.0  # seconds for the hub to name its newest commit
# Saved beside the rows of a data set.
METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def check_address(key: str, address: str) -> None:
    """UserError for an address that cannot work, before anything is fetched."""
    if address.startswith(FEEDBACK):
        feedback.parse(key, address)
    if address.startswith(HUB):
        _hub_name(key, address)
    if not _is_local(address):
        return
    if address.startswith(FILE):
        check_protocol(key, address, configured())
    path = local_path(address)
    if not path.exists():
        raise UserError(
            f"{key}: there is no file {address}. Set a file or folder, `demo`, a URL such as s3://bucket/pairs.jsonl, "
            "a data set of the hub as `hub:owner/name@revision`, or feedback as `feedback:MODEL`."
        )
    if path.is_file() and suffix_of(path) not in SUFFIXES:
        raise UserError(f"{key}: {address} must end in one of {', '.join(SUFFIXES)} (and {', '.join(COMPRESSED)}).")
    if path.is_dir() and not _row_files(path):
        raise UserError(f"{key}: the folder {address} has no file of rows ({', '.join(SUFFIXES)}).")


def _is_local(address: str) -> bool:
    remote = REMOTE in address and not address.startswith(FILE)
    return address != "demo" and not address.startswith((HUB, RUN, FEEDBACK)) and not remote


def fetch(key: str, address: str, seed: int, folder: Path) -> None:
    """Copy the files of an address into a folder, unchanged."""
    folder.mkdir(parents=True)
    if address == "demo":
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in demo.rows(seed))
        (folder / "pairs.jsonl").write_text("".join(lines))
    elif address.startswith(FEEDBACK):
        if not (rows := feedback.lines(key, address)):
            raise UserError(f"{key}: no feedback matches {address}. {feedback.advice(key, address)}")
        (folder / "feedback.jsonl").write_text(rows)
    elif address.startswith(RUN):
        copy_rows(key, address.removeprefix(RUN), folder)
    elif address.startswith(HUB):
        _fetch_hub(key, address, folder / "rows.parquet")
    elif not _is_local(address):
        _fetch_remote(key, address, folder)
    else:
        check_address(key, address)
        path = local_path(address)
        for file in local_files(address):
            target = folder / file.relative_to(path if path.is_dir() else path.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def source_name(address: str) -> str:
    """The name of a source in reports: the last part of its address."""
    last = address.partition("?")[0].partition("@")[0].rstrip("/").split("/")[-1]
    return re.sub(r"[^\w-]+", "-", last.partition(".")[0]).strip("-") or "data"


def data_sources(params: Source) -> list[dict[str, Any]]:
    """The sources of rows: one address or a mixture, then held-out data and the data of `sft` where they are set."""

    def entry(key: str, name: str, address: str, weight: float = 1.0, share: float = 1.0) -> dict[str, Any]:
        return {"key": f"source.{key}", "name": name, "address": address, "weight": weight, "share": share}

    if isinstance(params.data, str):
        sources = [entry("data", source_name(params.data), params.data)]
    else:
        sources = [entry("data", part.name, part.data, part.weight, part.share) for part in params.data]
    return sources + [entry(key, key, address) for key in ("eval", "sft") if (address := getattr(params, key))]


def content_id(key: str, address: str) -> str:
    """Identifies the content behind an address: a hash of local files, or the version that a remote store reports."""
    if address.startswith(FEEDBACK):
        return fingerprint(feedback.lines(key, address))
    if address.startswith(RUN):
        return run_commit(key, address.removeprefix(RUN))
    if not _is_local(address):
        return remote_version(key, address)
    check_address(key, address)
    path = local_path(address)
    files = {".": path} if path.is_file() else {file.relative_to(path).as_posix(): file for file in _row_files(path)}
    return fingerprint({name: known_sha256(file) for name, file in files.items()})


def local_files(address: str) -> list[Path]:
    """The files of rows behind a local address; none for the demo and for addresses elsewhere."""
    if not _is_local(address) or not (path := local_path(address)).exists():
        return []
    return [path] if path.is_file() else _row_files(path)


def _row_files(folder: Path) -> list[Path]:
    """Files of rows below a folder, in a fixed order. Names that start with a dot belong to tools and are ignored."""
    paths = (path for path in folder.rglob("*") if not any(part[0] == "." for part in path.relative_to(folder).parts))
    return sorted(path for path in paths if path.is_file() and _is_row_file(path.name))


def _path_inside(folder: Path, name: str) -> Path:
    """A store may name a file `../../x`: refuse paths outside the folder."""
    target = folder / name
    if not target.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the store names a file '{name}', which would lie outside {folder}")
    return target


def _is_row_file(name: str) -> bool:
    return suffix_of(name) in SUFFIXES and name not in METADATA_FILES


def _fetch_hub(key: str, address: str, target: Path) -> None:
    from datasets import load_dataset_builder

    repository, _, query = address.partition("?")
    options = dict(parse_qsl(query))
    if unknown := options.keys() - {"split", "config"}:
        raise UserError(f"{key}: `{unknown.pop()}` in {address} is an unknown option. Use `split` or `config`.")
    name, revision = _hub_name(key, address), hub_address(repository)[1]
    _guard_http(configured().networks)
    failure = f"{key}: the data set {name} (revision {revision or 'newest'}) could not be loaded from the hub"
    with errors_of_stores(failure, "Check the name, ?split=, your network and HF_TOKEN."):
        builder = load_dataset_builder(f"{DATASETS}{name}", options.get("config"), revision=revision)
        _check_data_files(key, address, builder)
        builder.download_and_prepare()
        builder.as_dataset(split=options.get("split", "train")).to_parquet(str(target))


def _hub_name(key: str, address: str) -> str:
    name = hub_address(address.partition("?")[0])[0]
    if not HUB_NAME.fullmatch(name):
        raise UserError(f"{key}: {address} must name a data set of the hub as hub:OWNER/NAME. A path needs no `hub:`.")
    return name


def _check_data_files(key: str, address: str, builder: Any) -> None:
    """A data set's card names its files, and `datasets` also reads those of this machine."""
    own = (f"{str(builder.base_path).rstrip('/')}/", "hf://", "https://", "http://")
    for file in (str(file) for files in (builder.config.data_files or {}).values() for file in files):
        if not file.startswith(own) or ".." in file.split("/"):
            raise UserError(f"{key}: the card of {address} names {file}, which is not a file of that data set.")


def _fetch_remote(key: str, address: str, folder: Path) -> None:
    failure = f"{key}: {address} could not be read"
    with errors_of_stores(failure, "Check the address and the credentials in the environment."):
        system, paths = _remote_files(key, address)
        if not paths:
            raise FileNotFoundError("no file of rows")
        root = paths[0].rpartition("/")[0] if len(paths) == 1 else system._strip_protocol(address).rstrip("/")
        for path in paths:
            target = _path_inside(folder, path.removeprefix(root).lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(path, str(target))


@contextmanager
def errors_of_stores(failure: str, advice: str) -> Iterator[None]:
    """Any error of a store or the hub becomes a UserError with its first line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        advice = "Install the package." if isinstance(error, ImportError) else advice
        raise UserError(f"{failure} ({reason}). {advice}") from error


def _remote_files(key: str, address: str) -> tuple[Any, list[str]]:
    """The file system of a URL, and its files of rows in a fixed order."""
    import fsspec

    access = configured()
    check_protocol(key, address, access)
    _guard_http(access.networks)
    system, path = fsspec.core.url_to_fs(address)
    system.invalidate_cache()
    files = system.find(path) if system.isdir(path) else [path]
    return system, sorted(file for file in files if _is_row_file(file.rpartition("/")[2]))


def _guard_http(networks: list[str]) -> None:
    """Guard all HTTP reads of this process by fsspec: `datasets` follows URLs that a data set names."""
    import fsspec

    guarded = {"get_client": partial(guarded_client, networks)}
    fsspec.config.conf.update(http=guarded, https=guarded)


def remote_version(key: str, address: str, kind: str = "dataset") -> str:
    """The version that a store reports without sending the files: an ETag, a modification time, a hub commit.

    `kind` is of a hub address: dataset or model.
    """
    advice = "Check the network and the credentials in the environment (HF_TOKEN for the hub), or set a commit"
    with errors_of_stores(f"{key}: could not check whether {address} is new", f"{advice} (hub:owner/name@commit)."):
        if address.startswith(HUB):
            from huggingface_hub import HfApi

            name, revision = hub_address(address.partition("?")[0])
            api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
            return str(api.repo_info(name, repo_type=kind, revision=revision, timeout=HUB_TIMEOUT).sha)
        system, paths = _remote_files(key, address)
        return ",".join(str(system.ukey(path)) for path in paths)


def is_pinned(address: str) -> bool:
    """Whether a hub address names a commit, whose files never change."""
    return address.startswith(HUB) and bool(COMMIT.fullmatch(hub_address(address.partition("?")[0])[1] or ""))
