"""Stage `source`: fetch or make the preference data and the base model, and hash them.

Data lands in data/raw as it came. A model that is already a folder, or is in the hub's cache, stays there: data/base
then holds a manifest with a hash per file.
"""

from pathlib import Path
from typing import Any

from tasks import stage
from tasks.dataset import demo
from tasks.dataset.fetch import check_address, fetch, origins
from tasks.dataset.readers import count_rows, read_chunks
from tasks.errors import UserError
from tasks.files import fingerprint, hash_files, publish, write_json
from tasks.models import HUB, file_hashes, hub_address, hub_snapshot, local_path
from tasks.params import Source, load_params
from tasks.paths import BASE, RAW
from tasks.progress import Bar
from tasks.tracking.journal import Run, lineage

BASE_STEPS = 125  # of the demo's supervised base model


def source(run: Run) -> None:
    params = load_params().source
    _check(params)
    with publish(RAW) as raw, publish(BASE) as base:
        data = fetch_data(params, raw)
        model = fetch_model(params, base)
    print(f"source: {data['rows']} rows from {data['source']}, model {params.model} ({model['sha256'][:12]})")
    run.dataset("raw", digest=data["sha256"], source=data["source"])
    run.tags(lineage())
    run.summary({"rows": data["rows"]})


def _check(params: Source) -> None:
    """What can be wrong with the addresses is said before anything is fetched."""
    for origin in origins(params):
        check_address(origin["key"], origin["address"])
    model = params.model
    if not model.startswith(HUB) and model != "demo":
        folder = local_path(model)
        if not (folder / "config.json").is_file():
            raise UserError(
                f"source.model: there is no model in {model} (no config.json). Give the folder of a model as "
                "`save_pretrained` writes it, `demo`, or a model as `hub:owner/name@revision`."
            )
        if not list(folder.glob("*.safetensors")):
            raise UserError(f"source.model: {model} has no .safetensors file. Save its weights as safetensors.")
        _refuse_code(folder, model)
    if params.adapter and not (local_path(params.adapter) / "adapter_config.json").is_file():
        raise UserError(
            f"source.adapter: there is no adapter in {params.adapter} (no adapter_config.json). Give a folder as "
            "peft's `save_pretrained` writes it, or null."
        )
    if params.adapter and not (local_path(params.adapter) / "adapter_model.safetensors").is_file():
        raise UserError(
            f"source.adapter: {params.adapter} has no adapter_model.safetensors; other formats can run code when they "
            "are read. Save it as safetensors."
        )


def _refuse_code(folder: Path, model: str) -> None:
    """Code that comes with a model is never run."""
    from training.remote_code import needs_its_own_code, refuse_kernels

    try:
        refuse_kernels(folder)
    except ValueError as error:
        raise UserError(f"source.model: {error}.") from None
    if what := needs_its_own_code(folder):
        raise UserError(
            f"source.model: {model} works with Python code of its own alone ({what}, `auto_map` in its configuration), "
            "and code that comes with a model is not run. Choose a model that transformers has, or convert it."
        )


def fetch_data(params: Source, raw: Path) -> dict[str, Any]:
    sources = []
    for origin in origins(params):
        folder = raw / origin["name"]
        fetch(origin["key"], origin["address"], params.seed, folder)
        sources.append({**origin, "files": _inspect(folder, origin)})
    rows = sum(file["rows"] for one in sources for file in one["files"])
    hashes = {f"{one['name']}/{file['file']}": file["sha256"] for one in sources for file in one["files"]}
    address = " + ".join(one["address"] for one in sources)
    manifest = {"source": address, "sha256": fingerprint(hashes), "rows": rows, "sources": sources}
    write_json(raw / "manifest.json", manifest)
    return manifest


def _inspect(folder: Path, origin: dict[str, Any]) -> list[dict[str, Any]]:
    """Each file's hash and rows; one that is damaged, cut off or empty is found here."""
    files, hashes = [], hash_files(folder)
    for name, digest in hashes.items():
        called = origin["address"] if len(hashes) == 1 else f"{origin['address'].rstrip('/')}/{name}"
        rows = sum(count_rows(chunk) for chunk in read_chunks(folder / name, called))
        files.append({"file": name, "called": called, "sha256": digest, "rows": rows})
    for file in files:
        if not file["rows"]:
            raise UserError(f"{origin['key']}: {file['called']} has no rows. Give a file with rows, or take it away.")
    return files


def fetch_model(params: Source, base: Path) -> dict[str, Any]:
    """The base model's manifest; its files lie in data/base only where they were made here."""
    address, revision = params.model, None
    if address == "demo":
        _make_demo_model(base, params.seed)
        folder = base
    elif address.startswith(HUB):
        folder, revision = _hub_model(address)
        _refuse_code(folder, address)
    else:
        folder = local_path(address)
    came = {"model": address, "revision": revision, "origin": fingerprint(file_hashes(folder))}
    if params.adapter:
        came |= {"adapter": params.adapter, "adapter_sha256": fingerprint(file_hashes(local_path(params.adapter)))}
        _merge(folder, local_path(params.adapter), base)
        folder = base
    files = file_hashes(folder)
    sizes = {name: (folder / name).stat().st_size for name in files}
    manifest = {**came, "sha256": fingerprint(files), "files": files, "sizes": sizes}
    write_json(base / "manifest.json", manifest)
    return manifest


def _merge(folder: Path, adapter: Path, base: Path) -> None:
    """The reference of a run that follows an SFT is the model with that adapter, never the bare model."""
    from training.adapters import merge_folders

    try:
        merge_folders(folder, adapter, base)
    except (ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            f"source.adapter: {adapter} does not fit the model {folder}: {str(error).splitlines()[0]} "
            "Give the adapter that was trained on this model, or null."
        ) from error


def _hub_model(address: str) -> tuple[Path, str]:
    name, revision = hub_address(address)
    try:
        folder = hub_snapshot(name, revision)
    except Exception as error:
        raise UserError(
            f"source.model: {name} (revision {revision or 'newest'}) could not be fetched from the hub: "
            f"{str(error).splitlines()[0]} Check the name, your network and HF_TOKEN."
        ) from error
    return folder, folder.name  # the cache names a snapshot by its commit


def _make_demo_model(base: Path, seed: int) -> None:
    from training import tiny

    with Bar("source", total=BASE_STEPS, unit="steps of the demo's base model") as bar:

        def report(step: int, steps: int, loss: float) -> None:
            bar.update(step, f"loss {loss:.2f}")

        tiny.make(base, demo.conversations(seed), seed, BASE_STEPS, report)


if __name__ == "__main__":
    stage.main(source)
