"""Stage `watch`: hash what the addresses of `source` lead to, so that `dvc repro` notices a file edited in place.

DVC runs it every time and `source` depends on what it writes. Equal content gives equal bytes, and then no stage runs.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

from tasks import stage
from tasks.dataset.fetch import content_id, hub_commit, origins, pinned
from tasks.errors import UserError
from tasks.files import fingerprint, home, recall, write_json, write_text
from tasks.models import HUB, file_hashes, local_path
from tasks.params import Source, load_params
from tasks.paths import WATCH

Content = dict[str, str]  # by key and address, "source.data pairs.jsonl": a hash, an ETag or a commit


def watch() -> None:
    before = recall(WATCH)
    seen = look(load_params().source, known=before, say=lambda note: print(f"watch: {note}", flush=True))
    write_text(WATCH, text(seen))
    for name in seen:
        if name in before and seen[name] != before[name]:
            print(f"watch: the content of {name} changed", flush=True)


def look(
    source: Source, *, known: Mapping[str, str] = MappingProxyType({}), say: Callable[[str], None] = lambda note: None
) -> Content:
    """The content behind each address that can change; what this machine does not reach is as it was last seen."""
    memory = home() / ".scratch" / "addresses.json"
    last = recall(memory)
    seen: Content = {}
    for name, ask in _questions(source):
        try:
            seen[name] = ask()
        except UserError as error:
            if not (value := last.get(name) or known.get(name)):
                continue  # `source` runs, and says what is wrong
            seen[name] = value
            say(f"{error} The run uses the content that was fetched before.")
    if {**last, **seen} != last:
        write_json(memory, {**last, **seen})
    return seen


def look_strictly(source: Source) -> Content:
    """The same, but an address that cannot be reached is an error."""
    return {name: ask() for name, ask in _questions(source)}


def text(seen: Content) -> str:
    """What the stage writes."""
    return json.dumps(seen, indent=2, ensure_ascii=False) + "\n"


def _questions(source: Source) -> Iterator[tuple[str, partial[str]]]:
    """Of each address that can change its content: its name, and how to ask. The demo and a pinned commit cannot."""
    for origin in origins(source):
        key, address = origin["key"], origin["address"]
        if address != "demo" and not pinned(address):
            yield f"{key} {address}", partial(content_id, key, address)
    for key, folder in (("source.model", source.model), ("source.adapter", source.adapter)):
        if folder and folder != "demo" and not pinned(folder):
            yield f"{key} {folder}", partial(_model_id, key, folder)


def _model_id(key: str, address: str) -> str:
    if address.startswith(HUB):
        try:
            return hub_commit(address, "model")
        except Exception as error:
            raise UserError(
                f"{key}: {address} could not be asked whether it is new ({str(error).splitlines()[0]}). Check the "
                "network and HF_TOKEN, or name a commit (hub:owner/name@commit)."
            ) from error
    if not (folder := local_path(address)).is_dir():
        raise UserError(f"{key}: there is no folder {address}. Restore it, or correct {key} in params.yaml.")
    return fingerprint(file_hashes(folder))


if __name__ == "__main__":
    stage.command(watch)
