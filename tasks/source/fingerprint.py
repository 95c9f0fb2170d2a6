"""Stage `fingerprint`: hash the content behind the addresses of `source`, so that `dvc repro` notices an edited file.

DVC runs it every time, and `source` depends on its output. The same content gives the same bytes, and then no other
stage runs.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

from tasks.artifacts.models import HUB, REGISTRY, adapter_hashes, file_hashes, registered_name
from tasks.config.addresses import local_path
from tasks.config.params import load_params
from tasks.config.paths import FINGERPRINT, main_checkout
from tasks.config.source import Source
from tasks.errors import UserError
from tasks.source.fetch import content_id, data_sources, is_pinned, remote_version
from tasks.source.start_model import start_version
from tasks.system.files import fingerprint as hash_of
from tasks.system.files import read_json_or_empty, write_json, write_text

ContentIds = dict[str, str]  # by key and address, "source.data pairs.jsonl": a hash, an ETag or a commit


def fingerprint() -> None:
    before = read_json_or_empty(FINGERPRINT)
    now = content_ids(load_params().source, known=before, warn=lambda text: print(f"fingerprint: {text}", flush=True))
    write_text(FINGERPRINT, to_json(now))
    for name in now:
        if name in before and now[name] != before[name]:
            print(f"fingerprint: the content of {name} changed", flush=True)


def content_ids(
    source: Source, *, known: Mapping[str, str] = MappingProxyType({}), warn: Callable[[str], None] = lambda text: None
) -> ContentIds:
    """The id of the content behind each address that can change. An unreachable address keeps its last known id."""
    cache = main_checkout() / ".scratch" / "addresses.json"
    last = read_json_or_empty(cache)
    ids: ContentIds = {}
    for name, compute in _changeable(source):
        try:
            ids[name] = compute()
        except UserError as error:
            if not (value := last.get(name) or known.get(name)):
                continue  # `source` runs and reports the error
            ids[name] = value
            warn(f"{error} The run uses the content that was fetched before.")
    if {**last, **ids} != last:
        write_json(cache, {**last, **ids})
    return ids


def content_ids_or_fail(source: Source) -> ContentIds:
    """The same, but an unreachable address is an error."""
    return {name: compute() for name, compute in _changeable(source)}


def to_json(ids: ContentIds) -> str:
    """The content of the stage's output."""
    return json.dumps(ids, indent=2, ensure_ascii=False) + "\n"


def _changeable(source: Source) -> Iterator[tuple[str, partial[str]]]:
    """(name, function that computes the id) of each address whose content can change: not the demo or a commit."""
    for entry in data_sources(source):
        key, address = entry["key"], entry["address"]
        if address != "demo" and not is_pinned(address):
            yield f"{key} {address}", partial(content_id, key, address)
    if source.exclude:
        yield f"source.exclude {source.exclude}", partial(content_id, "source.exclude", source.exclude)
    for key, folder in (("source.model", source.model), ("source.adapter", source.adapter)):
        if folder and folder != "demo" and not is_pinned(folder):
            yield f"{key} {folder}", partial(_model_id, key, folder)


def _model_id(key: str, address: str) -> str:
    if address.startswith(REGISTRY):
        version, first = start_version(address), registered_name(address)[1]
        return " ".join(version) if version else "demo" if first == "demo" else _model_id(key, str(first))
    if address.startswith(HUB):
        return remote_version(key, address, "model")
    if not (folder := local_path(address)).is_dir():
        raise UserError(f"{key}: there is no folder {address}. Restore it, or correct {key} in params.yaml.")
    return hash_of(adapter_hashes(folder) if key == "source.adapter" else file_hashes(folder))
