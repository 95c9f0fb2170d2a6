"""Stage `source`: fetch or make the preference data and the base model, and hash them.

data/raw holds the data unchanged. A model that is a local folder or in the hub's cache stays there; data/base then
holds only a manifest with the hash of each file.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.artifacts import adapters, demo
from tasks.artifacts.models import (
    HUB,
    OTHER_REFERENCE,
    REGISTRY,
    adapter_hashes,
    file_hashes,
    hub_address,
    hub_snapshot,
    model_hashes,
    registered_name,
    source_path,
)
from tasks.config.addresses import local_path
from tasks.config.params import load_params
from tasks.config.paths import BASE, RAW
from tasks.config.source import Source
from tasks.errors import UserError
from tasks.source.fetch import check_address, data_sources, errors_of_stores, fetch
from tasks.source.readers import SUFFIXES, count_rows, read_chunks, read_rows, suffix_of
from tasks.source.start_model import start_version
from tasks.system import limited_child
from tasks.system.files import fingerprint, hash_files, publish, write_json
from tasks.system.progress import Bar
from tasks.tracking.journal import StageJournal
from tasks.tracking.results import lineage
from training.models.adapter_config import adapter_options
from training.models.model_files import weight_files

DATA_KEY, MODEL_KEY, SFT_KEY = "source.data", "source.model", "source.sft"
KEYS = {DATA_KEY: DATA_KEY, MODEL_KEY: MODEL_KEY}  # as errors call them
PAIR_ID = re.compile(r"[0-9a-f]{16}")
BASE_STEPS = 125  # of the demo's supervised base model
CHECK_SECONDS, CHECK_MEMORY = 120.0, 4 << 30  # of the check of a model's folder; 19,000 tensors take four seconds


def source(run: StageJournal) -> None:
    whole = load_params()
    params, template = whole.source, whole.prepare.template
    check_addresses(params, template)
    with publish(RAW) as raw, publish(BASE) as base:
        data = fetch_data(params, raw)
        model = fetch_model(params, base, template)
        if params.model != "demo":  # whose layers take every adapter
            adapters.check(source_path(params.model, model, base), whole)
        if whole.train.reference_model == "base" and model["model"].startswith(REGISTRY):
            _fetch_reference(params, base, template)
    print(f"source: {data['rows']} rows from {data['source']}, model {model['model']} ({model['sha256'][:12]})")
    run.dataset("raw", digest=data["sha256"], source=data["source"])
    run.tags(lineage())
    run.summary({"rows": data["rows"]})


def check_addresses(params: Source, template: str = "auto", called: Mapping[str, str] = KEYS) -> None:
    """UserError for an address that cannot work, before anything is fetched. `called`: what its user knows a key as."""
    for entry in data_sources(params):
        check_address(called.get(entry["key"], entry["key"]), entry["address"])
    model = (registered_name(params.model)[1] or "demo") if params.model.startswith(REGISTRY) else params.model
    if params.exclude:
        excluded_ids(params.exclude)
    if not model.startswith(HUB) and model != "demo":
        folder = local_path(model)
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{called[MODEL_KEY]}: there is no model in {model} (no config.json). Set a folder that "
                "`save_pretrained` wrote, `demo`, a model of the hub as `hub:owner/name@revision`, or a registered "
                "one as `registry:champion`."
            )
        if not _has_weights(folder, model, called[MODEL_KEY]):
            raise UserError(f"{called[MODEL_KEY]}: {model} has no .safetensors file. Save its weights as safetensors.")
        _check_model(folder, model, template, params.adapter, called[MODEL_KEY])
    if params.adapter:
        _check_adapter(params.adapter)


def _has_weights(folder: Path, model: str, key: str) -> bool:
    try:
        return bool(weight_files(folder))
    except ValueError as error:
        raise UserError(f"{key}: {model} cannot be used: {error}.") from None


def _check_adapter(adapter: str) -> None:
    if not (local_path(adapter) / "adapter_config.json").is_file():
        raise UserError(
            f"source.adapter: there is no adapter in {adapter} (no adapter_config.json). Set a folder that "
            "peft's `save_pretrained` wrote, or null."
        )
    if not (local_path(adapter) / "adapter_model.safetensors").is_file():
        raise UserError(
            f"source.adapter: {adapter} has no adapter_model.safetensors. Other formats can run code when they are "
            "loaded. Save it as safetensors."
        )
    try:
        adapter_options(local_path(adapter))
    except ValueError as error:
        raise UserError(f"source.adapter: {adapter} cannot be used: {error}.") from None


def _check_model(folder: Path, model: str, template: str, adapter: str | None, key: str) -> None:
    """UserError within seconds if the model cannot be trained. Code that comes with a model is never run."""
    from training.models.folder_checks import check_folder  # heavy: torch, transformers
    from training.models.remote_code import needs_remote_code

    if part := needs_remote_code(folder):
        raise UserError(
            f"{key}: {model} needs its own Python code ({part}, `auto_map` in its configuration), and code that "
            "comes with a model is never run. Choose a model that transformers supports, or convert it."
        )
    is_adapter = adapter is not None and local_path(adapter).resolve() == folder.resolve()
    try:
        notes = _call_limited(check_folder, str(folder), template, is_adapter)
    except ValueError as error:
        raise UserError(f"{key}: {model} cannot be used: {error}.") from None
    for note in notes:
        print(f"note: {key}: {note}")


def _call_limited(check: Callable[..., Any], *args: Any) -> Any:
    return limited_child.call(check, *args, seconds=CHECK_SECONDS, memory=CHECK_MEMORY)


def fetch_data(params: Source, raw: Path, called: Mapping[str, str] = KEYS) -> dict[str, Any]:
    sources = []
    for entry in data_sources(params):
        folder, key = raw / entry["name"], called.get(entry["key"], entry["key"])
        fetch(key, entry["address"], params.seed, folder)
        sources.append({**entry, "files": _inspect(folder, entry, key)})
    pairs = [entry for entry in sources if entry["key"] != SFT_KEY]
    rows = sum(file["rows"] for entry in pairs for file in entry["files"])
    hashes = {f"{entry['name']}/{file['file']}": file["sha256"] for entry in sources for file in entry["files"]}
    excluded = {"excluded": excluded_ids(params.exclude)} if params.exclude else {}
    address = " + ".join(entry["address"] for entry in pairs)
    manifest = {
        "source": address,
        "sha256": fingerprint(hashes | excluded),
        "rows": rows,
        "sources": sources,
        **excluded,
    }
    write_json(raw / "manifest.json", manifest)
    return manifest


def excluded_ids(address: str) -> list[str]:
    """The pair ids in the file of `source.exclude`."""
    path = local_path(address)
    if not path.is_file() or suffix_of(path) not in SUFFIXES:
        raise UserError(f"source.exclude: {address} is no file of rows. Set the file that `dpo blame` wrote, or null.")
    ids = {number: str(row.get("id")) if isinstance(row, dict) else "" for number, row in read_rows(path, address)}
    if wrong := [number for number, pair in ids.items() if not PAIR_ID.fullmatch(pair)]:
        raise UserError(
            f"source.exclude: row {wrong[0]} of {address} has no `id` of a pair (16 hexadecimal digits). "
            "data/metrics/pairs.jsonl and the files of `dpo blame` have such ids."
        )
    return sorted(set(ids.values()))


def _inspect(folder: Path, entry: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The hash and number of rows of each file. A damaged or empty file is an error."""
    files, hashes = [], hash_files(folder)
    for file, digest in hashes.items():
        name = entry["address"] if len(hashes) == 1 else f"{entry['address'].rstrip('/')}/{file}"
        rows = sum(count_rows(chunk) for chunk in read_chunks(folder / file, name))
        if not rows:
            raise UserError(f"{key}: {name} has no rows. Add rows, or remove the file.")
        files.append({"file": file, "called": name, "sha256": digest, "rows": rows})
    return files


def fetch_model(params: Source, base: Path, template: str = "auto") -> dict[str, Any]:
    """The base model's manifest. data/base holds the files only if this stage makes them."""
    address, revision = params.model, None
    if address.startswith(REGISTRY):
        version = start_version(address, base)
        address, revision = version or (str(registered_name(address)[1]), None)  # the revision is the manifest's hash
    if address == "demo":
        make_demo_model(base, params.seed)
    is_made = address == "demo" or address.startswith(REGISTRY)
    folder = base if is_made else model_folder(address, template, params.adapter)
    if address.startswith(HUB):
        revision = folder.name  # the cache names a snapshot by its commit
    origin = {"model": address, "revision": revision, "origin": fingerprint(file_hashes(folder))}
    if params.adapter:
        origin |= {"adapter": params.adapter, "adapter_sha256": fingerprint(adapter_hashes(local_path(params.adapter)))}
        _merge(folder, local_path(params.adapter), base)
        folder = base
    manifest = origin | model_hashes(folder)
    write_json(base / "manifest.json", manifest)
    return manifest


def _fetch_reference(params: Source, base: Path, template: str) -> None:
    """The model behind the bar of `registry:NAME|ADDRESS`, beside the start model."""
    from training.models.tokenizer import load_tokenizer  # heavy: transformers

    address, other = str(registered_name(params.model)[1]), base / OTHER_REFERENCE.name
    other.mkdir()
    fetch_model(params.model_copy(update={"model": address}), other, template)
    folder = other if address == "demo" else model_folder(address, template)
    if load_tokenizer(folder).get_vocab() != load_tokenizer(base).get_vocab():
        raise UserError(
            f"train.reference_model: {address} has another vocabulary than the model that the run starts from, so its "
            "log-probabilities are of other tokens. Set source.model to the base model of the registered one."
        )


def _merge(folder: Path, adapter: Path, base: Path) -> None:
    """After fine-tuning with LoRA, base and reference model are the model with that adapter merged."""
    from training.models.adapters import check_targets, merge_folders  # heavy: torch, peft

    try:
        _call_limited(check_targets, str(folder), str(adapter))
        merge_folders(folder, adapter, base)
    except (ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            f"source.adapter: {adapter} does not fit the model {folder}: {str(error).splitlines()[0]} "
            "Set the adapter that was trained on this model, or null."
        ) from error


def model_folder(address: str, template: str, adapter: str | None = None, key: str = MODEL_KEY) -> Path:
    """The folder of a model other than the demo's; a model of the hub is fetched."""
    if not address.startswith(HUB):
        return local_path(address)
    name, revision = hub_address(address)
    failure = f"{key}: {name} (revision {revision or 'newest'}) could not be fetched from the hub"
    with errors_of_stores(failure, "Check the name, your network and HF_TOKEN."):
        folder = hub_snapshot(name, revision)
    _check_model(folder, address, template, adapter, key)
    return folder


def make_demo_model(base: Path, seed: int) -> None:
    from training.models import tiny  # heavy: torch

    with Bar("source", total=BASE_STEPS, unit="steps of the demo's base model") as bar:

        def report(step: int, steps: int, loss: float) -> None:
            bar.update(step, f"loss {loss:.2f}")

        tiny.make(base, demo.conversations(seed), seed, BASE_STEPS, report)
