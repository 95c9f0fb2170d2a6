"""Stage `source`: fetch or make the preference data and the base model, and hash them.

Data lands in data/raw as it came. A model that is already a folder, or is in the hub's cache, stays there: data/base
then holds a manifest with a hash per file.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from tasks import demo, stage
from tasks.errors import UserError
from tasks.files import fingerprint, known_sha256, publish, read_json, sha256, write_json
from tasks.formats import READERS, read_rows
from tasks.models import HUB, hub_address, hub_snapshot, local_path
from tasks.params import Source, load_params
from tasks.paths import BASE, RAW
from tasks.progress import Bar
from tasks.tracking import Run, lineage

BASE_STEPS = 125  # of the demo's supervised base model


def source(run: Run) -> None:
    params = load_params().source
    _check_address(params.data, params.model)
    with publish(RAW) as raw, publish(BASE) as base:
        data = fetch_data(params.data, params.seed, raw)
        model = fetch_model(params.model, params.seed, base)
    print(f"source: {data['rows']} rows from {params.data}, model {params.model} ({model['sha256'][:12]})")
    run.dataset("raw", data["sha256"], params.data)
    run.tags(lineage())
    run.summary({"rows": data["rows"]})


def _check_address(data: str, model: str) -> None:
    """What can be wrong with the addresses is said before anything is fetched."""
    if not data.startswith(HUB) and data != "demo":
        path = local_path(data)
        if not path.is_file():
            raise UserError(
                f"source.data: there is no file {data}. Give a file, `demo`, or a data set as "
                "`hub:owner/name@revision`."
            )
        if path.suffix not in READERS:
            raise UserError(f"source.data: {data} must end in one of {', '.join(READERS)}.")
    if not model.startswith(HUB) and model != "demo":
        folder = local_path(model)
        if not (folder / "config.json").is_file():
            raise UserError(
                f"source.model: there is no model in {model} (no config.json). Give the folder of a model as "
                "`save_pretrained` writes it, `demo`, or a model as `hub:owner/name@revision`."
            )
        if not list(folder.glob("*.safetensors")):
            raise UserError(f"source.model: {model} has no .safetensors file. Save its weights as safetensors.")


def fetch_data(address: str, seed: int, raw: Path) -> dict[str, Any]:
    if address == "demo":
        target = raw / "pairs.jsonl"
        target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in demo.rows(seed)))
    elif address.startswith(HUB):
        target = raw / "pairs.parquet"
        _hub_rows(address, target)
    else:
        target = raw / ("pairs" + Path(address).suffix)
        shutil.copyfile(local_path(address), target)
    rows = sum(1 for _ in read_rows(target, address))  # a broken line is found here
    if not rows:
        raise UserError(f"source.data: {address} has no rows.")
    manifest = {"source": address, "file": target.name, "rows": rows, "sha256": sha256(target)}
    write_json(raw / "manifest.json", manifest)
    return manifest


def _hub_rows(address: str, target: Path) -> None:
    from datasets import load_dataset

    name, revision = hub_address(address)
    try:
        load_dataset(name, revision=revision, split="train").to_parquet(str(target))
    except Exception as error:
        raise UserError(
            f"source.data: the data set {name} (revision {revision or 'newest'}) could not be loaded from the hub: "
            f"{str(error).splitlines()[0]} Check the name, your network and HF_TOKEN."
        ) from error


def fetch_model(address: str, seed: int, base: Path) -> dict[str, Any]:
    revision = None
    if address == "demo":
        _make_demo_model(base, seed)
        folder = base
    elif address.startswith(HUB):
        folder, revision = _hub_model(address)
    else:
        folder = local_path(address)
    files = _model_hashes(folder)
    sizes = {name: (folder / name).stat().st_size for name in files}
    manifest = {"model": address, "revision": revision, "sha256": fingerprint(files), "files": files, "sizes": sizes}
    write_json(base / "manifest.json", manifest)
    return manifest


def _model_hashes(folder: Path) -> dict[str, str]:
    """Of a model folder's own files; what a tool keeps there under a dot is not the model."""
    return {
        path.name: known_sha256(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."
    }


def changed(params: Source, root: Path) -> bool:
    """Whether a local file behind an address is no longer what this stage saw: DVC watches params, not addresses."""
    data, model = local_path(params.data), local_path(params.model)
    raw, base = root / RAW / "manifest.json", root / BASE / "manifest.json"
    if not (raw.exists() and base.exists()):
        return False  # DVC knows that the stage must run
    new_data = data.is_file() and known_sha256(data) != read_json(raw)["sha256"]
    new_model = model.is_dir() and fingerprint(_model_hashes(model)) != read_json(base)["sha256"]
    return new_data or new_model


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
