"""`python -m flows.plan [--recipe NAME] [--set KEY=VALUE ...]` (or `make plan`): which stages would run, why, how long,
and each value that is not the default with where it comes from.

Nothing is run and nothing is written. DVC decides when it comes to it; this compares the same command, params and
hashes with what earlier runs have left in dvc.lock and in DVC's run cache.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from flows import ROOT, inputs, runs, workspace
from flows.inputs import Entry, Inputs
from flows.workspace import Files
from tasks.configuration import Value, read_yaml
from tasks.output import as_command
from tasks.place import OVERRIDES, RECIPE
from tasks.redact import redact

RUNS, RESTORED, UNCHANGED, MAYBE = "runs", "restored", "unchanged", "may run"


@dataclass(frozen=True)
class Step:
    stage: str
    what: str
    why: list[str]


def look(files: Files) -> list[Step]:
    """What would become of each stage, in order."""
    locks, cached = list(inputs.locks()), list(_run_cache())
    here = inputs.lock_of(ROOT) or next((lock for lock in locks if lock), {})
    upstream = inputs.watched(files.get("params.yaml") or read_yaml(ROOT / "params.yaml"))
    steps: list[Step] = []
    for name, stage in inputs.stages(ROOT).items():
        now = inputs.current(ROOT, stage, upstream, files)
        known = [lock[name] for lock in locks if name in lock]
        restorable = [entry for entry in cached if entry["cmd"] == stage["cmd"]]
        step, entry = _step(name, now, known, restorable, steps)
        if step.what != UNCHANGED and name in here and not step.why:
            step = Step(name, step.what, now.differences(inputs.recorded(here[name])))
        steps.append(step)
        upstream |= inputs.outs(entry) if entry else dict.fromkeys(inputs.out_paths(stage))
    return steps


def _step(
    name: str, now: Inputs, known: list[Entry], cached: list[Entry], before: list[Step]
) -> tuple[Step, Entry | None]:
    """The step, and the entry whose outs the next stages get where it need not run."""
    if not now.known():
        unknown = [path for path, digest in now.deps.items() if digest is None]
        changed = [reason for reason in inputs.closest(now, known) or [] if not reason.endswith(tuple(unknown))]
        behind = [step.stage for step in before if step.what in (RUNS, MAYBE)]
        why = [*changed, f"behind {', '.join(behind[-1:])}: {', '.join(unknown)} may come out different"]
        return Step(name, RUNS if changed else MAYBE, why), None
    for what, entries in ((UNCHANGED, known), (RESTORED, cached)):
        fits = [entry for entry in entries if inputs.recorded(entry) == now]
        if whole := [entry for entry in fits if _in_cache(entry)]:
            return Step(name, what, []), whole[0]
        if fits:
            return Step(name, RUNS, ["its result is no longer in DVC's cache"]), None
    return Step(name, RUNS, inputs.closest(now, known) or ["it never ran here"]), None


def _in_cache(entry: Entry) -> bool:
    cache = Path(workspace.cache_folder()) / "files" / "md5"
    return all(digest and (cache / digest[:2] / digest[2:]).exists() for digest in inputs.outs(entry).values())


def _run_cache() -> Iterator[Entry]:
    """DVC's run cache keeps an entry, as in dvc.lock, of each execution."""
    for path in (Path(workspace.cache_folder()) / "runs").glob("*/*/*"):
        entry = yaml.safe_load(path.read_text())
        if isinstance(entry, dict) and "cmd" in entry:
            yield entry


def show(steps: list[Step], files: Files) -> None:
    from tasks.doctor import needs
    from tasks.params import Params, load_cluster, validate
    from tasks.reports import cost

    params = validate(Params, files.get("params.yaml") or read_yaml(ROOT / "params.yaml"), Path("params.yaml"))
    cluster = load_cluster(ROOT, *(files.get(str(path), {}) for path in (RECIPE, OVERRIDES)))
    rows, total, gpu_seconds, unknown = [], 0.0, 0.0, False
    for step in steps:
        time, memory = "", ""
        if step.what in (RUNS, MAYBE):
            found = needs.measured(runs.runs_folder(), params, step.stage)
            gib = needs.worker_memory(params, cluster, ROOT, step.stage)
            time = f"about {_duration(found.seconds)}" if found.seconds is not None else "unknown"
            memory = _memory(found.gib, gib)
            total, unknown = total + (found.seconds or 0), unknown or found.seconds is None
            gpu_seconds += (found.seconds or 0) * cost.gpus(cluster, step.stage)
        rows.append((step.stage, step.what, time, memory, step.why[0] if step.why else ""))
        rows += [("", "", "", "", reason) for reason in step.why[1:]]
    print(runs.table(rows, ("stage", "", "time", "memory", "why")))
    whole = (
        f"at least {_duration(total)}, some unknown"
        if unknown and total
        else "unknown"
        if unknown
        else _duration(total)
    )
    if gpu_seconds:
        whole += f"; {cost.in_words(cluster, gpu_seconds / 3600)}"
    print(
        f"\nIn all: {whole}, by runs on the same data and model."
        if any(row[2] for row in rows)
        else "\nNothing to run."
    )


def _memory(measured: float | None, estimated: float | None) -> str:
    found = ((measured, "measured"), (estimated, "a worker counted"))
    return ", ".join(f"{gib:.1f} GiB {how}" for gib, how in found if gib is not None) or "unknown"


def _duration(seconds: float | None) -> str:
    seconds = round(seconds or 0)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_origins(values: Mapping[str, Value]) -> None:
    if not values:
        print("\nEvery value is the default.")
        return
    rows = [(name, redact(json.dumps(found.value)), found.origin) for name, found in values.items()]
    print("\nNot the default:\n" + runs.table(rows, ("key", "value", "from")))


@as_command
def main() -> None:
    from flows.dpo import override

    parser = argparse.ArgumentParser(prog="python -m flows.plan", description="which stages would run, and why")
    parser.add_argument("--recipe", help="a named overlay of params.yaml, from flows/recipes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="train.beta=0.2, as in YAML")
    asked = parser.parse_args()
    overrides = dict(override(text) for text in asked.set)
    files = workspace.plan(asked.recipe, overrides)
    show(look(files), files)
    show_origins(workspace.not_default(asked.recipe, overrides))


if __name__ == "__main__":
    main()
