"""`make doctor`: is this machine ready, and will the configured run fit it? Says what is wrong and what to do.

python -m tasks.doctor.examine [RECIPE] [--fix]: `--fix` (`make doctor FIX=1`) clears locks that killed processes left.
Nothing here waits for long: every question to another machine has a few seconds.
"""

import os
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from tasks import params as parameters
from tasks.doctor import locks, network, nodes, space
from tasks.doctor.findings import Findings
from tasks.errors import UserError
from tasks.files import home, read_json
from tasks.output import as_command
from tasks.paths import BASE

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def look(recipe: str | None, fix: bool = False) -> int:
    found = Findings(fix)
    tools(found)
    packages(found, ROOT / "requirements.lock")
    machine(found)
    space.shared_memory(found)
    locks.locks(found, home())
    network.ports(found)
    try:
        params, cluster = _configured(recipe)
    except UserError as error:
        for sentence in str(error).splitlines():
            found.wrong(sentence)
    else:
        found.good("params.yaml and infra/cluster.yaml are good" + (f" with recipe {recipe}" if recipe else ""))
        network.tracking(found, cluster)
        network.hub(found, params)
        network.remotes(found, home())
        fit(found, params, cluster)
        nodes.nodes(found, cluster)
    print("ready" if not found.bad else f"{found.bad} to mend")
    return 1 if found.bad else 0


def _configured(recipe: str | None) -> tuple[parameters.Params, parameters.Cluster]:
    content, place = parameters.read_yaml(parameters.PARAMS), {}
    if recipe:
        content = parameters.overlay(content, parameters.read_recipe(recipe))
        place = parameters.read_recipe(recipe, "cluster")
    params = parameters.validate(parameters.Params, content, parameters.PARAMS)
    return params, parameters.load_cluster(Path(), place)


def tools(found: Findings) -> None:
    running = ".".join(map(str, sys.version_info[:3]))
    (found.good if sys.version_info >= (3, 11) else found.wrong)(f"Python {running} (3.11 or newer is needed)")
    for name in ("git", "dvc"):
        where = shutil.which(name)
        found.good(f"{name}: {where}") if where else found.wrong(f"{name} is not on the PATH. Install it.")


def packages(found: Findings, lock: Path) -> None:
    """What is installed against the lock file."""
    from packaging.markers import Marker

    lines = re.findall(r"^([\w.-]+)==([^\s;]+)(?: ; (.+?))?(?: \\)?$", lock.read_text(), re.M)
    wanted = {name: pinned for name, pinned, marker in lines if not marker or Marker(marker).evaluate()}
    other = []
    for name, locked in wanted.items():
        try:
            if version(name).split("+")[0] != locked.split("+")[0]:
                other.append(f"{name} {version(name)} (locked: {locked})")
        except PackageNotFoundError:
            other.append(f"{name} is missing (locked: {locked})")
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        found.wrong(f"not as locked: {', '.join(other[:3])}{more}. Run `rm .venv/.ready`, then `make doctor`.")
    else:
        found.good(f"{len(wanted)} packages as locked")


def machine(found: Findings) -> None:
    from training.driver import mismatch, stack
    from training.hardware import gpus

    memory = psutil.virtual_memory().available / GIB
    found.good(f"{os.cpu_count()} CPUs, {memory:.0f} GiB of memory free")
    there = stack()
    if problem := mismatch(there):
        found.wrong(f"{problem}.")
    for name, size in gpus():
        found.good(f"{name}, {size / GIB:.0f} GiB, driver {there.driver}, torch {there.torch} for CUDA {there.cuda}")


def fit(found: Findings, params: parameters.Params, cluster: parameters.Cluster) -> None:
    """Disk and each device's memory against what this run needs, as far as the model is known here."""
    folder = _model(params)
    if folder is None:
        space.disk(found, params, cluster, None)
        found.note(f"{params.source.model} is not here yet: `dvc repro source` fetches it, and then this can say more")
        return
    from training.memory import measure

    adapter = params.train.adapter.model_dump() if params.train.adapter else None
    space.disk(found, params, cluster, measure(folder, adapter, params.train.quantization))
    _memory(found, params, cluster, folder)


def _model(params: parameters.Params) -> Path | None:
    from tasks.models import base_folder, local_path

    manifest = BASE / "manifest.json"
    seen = manifest.exists() and read_json(manifest)["model"] == params.source.model
    folder = base_folder(params.source.model) if seen else local_path(params.source.model)
    return folder if (folder / "config.json").exists() else None


def _memory(found: Findings, params: parameters.Params, cluster: parameters.Cluster, folder: Path) -> None:
    from tasks.train import make_settings
    from training import memory

    settings = make_settings(params, cluster, folder, home() / cluster.output_dir, origin={})
    needed = memory.estimate(settings, cluster.actor_train.num_workers)
    _holds(found, cluster, "actor_train", f"train needs about {needed}", needed.total, memory.advice(settings))
    for name, dtype, quantization in (
        ("reference", params.reference.dtype, params.reference.quantization),
        ("evaluate", params.evaluate.dtype, params.train.quantization),
    ):
        group, weights = getattr(cluster, name), memory.weights(folder, dtype, quantization)
        weights /= group.num_workers if group.zero_stage == 3 else 1
        sentence = f"{name} needs {weights / GIB:.1f} GiB for the weights, and room for its passes,"
        advice = f"set {name}.dtype to bfloat16, or {name}.zero_stage in infra/cluster.yaml to 3 with several workers"
        _holds(found, cluster, name, sentence, weights, advice)


def _holds(found: Findings, cluster: parameters.Cluster, name: str, sentence: str, needed: float, advice: str) -> None:
    """Whether a worker of a group has as much memory as it needs."""
    from training.hardware import gpus

    group, cards = getattr(cluster, name), gpus()
    sentence = f"{sentence} on each of {group.num_workers} workers"
    if group.gpus_per_worker and not cards and cluster.ray.address == "local":
        found.wrong(
            f"{sentence}, {name}.gpus_per_worker asks for GPUs, and there is none here. "
            "Set it to 0, or ray.address to a cluster."
        )
    elif group.gpus_per_worker and not cards:
        found.note(f"{sentence}; there is no GPU on this machine to hold it against")
    elif group.gpus_per_worker and needed > cards[0][1]:
        found.wrong(f"{sentence}, and a GPU has {cards[0][1] / GIB:.0f} GiB: {advice}.")
    elif not group.gpus_per_worker and needed * group.num_workers > psutil.virtual_memory().total:
        found.wrong(f"{sentence}, more than this machine's memory: {advice}.")
    else:
        found.good(sentence)


@as_command
def main() -> None:
    given = [argument for argument in sys.argv[1:] if argument != "--fix"]
    sys.exit(look(given[0] if given else None, "--fix" in sys.argv))


if __name__ == "__main__":
    main()
