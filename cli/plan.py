"""`dpo plan`: which stages would run and why, with the time and memory that they took before."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cli.options import Recipe, Set
from tasks.config.cluster import OVERRIDES, RECIPE
from tasks.config.paths import ROOT
from tasks.config.strict import Value, parse_overrides, read_yaml

if TYPE_CHECKING:
    from tasks.lifecycle.plan import StagePlan
    from tasks.runs.run_config import ConfigFiles


def plan(recipe: Recipe = None, set_: Set = None) -> None:
    """Show which stages would run and why, with estimated time and memory. Changes nothing."""
    from tasks.lifecycle.plan import plan_stages
    from tasks.runs import run_config

    overrides = parse_overrides(set_)
    files = run_config.changed_files(recipe, overrides)
    _show_stages(plan_stages(files), files)
    _show_values(run_config.non_default_values(recipe, overrides))


def _show_stages(plans: "Sequence[StagePlan]", files: "ConfigFiles") -> None:
    from tasks.config.params import Params, load_cluster, validate
    from tasks.lifecycle.plan import MAY_RUN, RUNS
    from tasks.reports import cost
    from tasks.runs import records
    from tasks.trainer import estimates

    params = validate(Params, files.get("params.yaml") or read_yaml(ROOT / "params.yaml"), Path("params.yaml"))
    cluster = load_cluster(ROOT, *(files.get(str(path), {}) for path in (RECIPE, OVERRIDES)))
    rows: list[tuple[str, ...]] = []
    seconds: list[float | None] = []
    gpu_seconds = 0.0
    for stage in plans:
        time, memory, (reason, *more) = "", "", stage.reasons or [""]
        if stage.state in (RUNS, MAY_RUN):
            measured = estimates.measured(records.runs_folder(), params, stage.stage)
            seconds.append(measured.seconds)
            time = "unknown" if measured.seconds is None else f"about {_duration(measured.seconds)}"
            memory = _memory(measured.gib, estimates.worker_memory(params, cluster, ROOT, stage.stage))
            gpu_seconds += (measured.seconds or 0) * cost.gpus(cluster, stage.stage)
        rows += [(stage.stage, stage.state, time, memory, reason), *(("", "", "", "", reason) for reason in more)]
    print(records.text_table(rows, ("stage", "", "time", "memory", "why")))
    trains = any(stage.stage == "train" and stage.state in (RUNS, MAY_RUN) for stage in plans)
    if trains and (adapter := estimates.adapter(params, ROOT)):
        print(f"\n{adapter}")
    price = f"; {cost.in_words(cluster, gpu_seconds / 3600)}" if gpu_seconds else ""
    print("\n" + _total(seconds, price))


def _total(seconds: Sequence[float | None], price: str) -> str:
    known = [value for value in seconds if value is not None]
    if not seconds:
        return "Nothing to run."
    if not known:
        return (
            "In total: unknown, because no run has used this data and model yet. "
            "`dpo init` prints an estimate for a new recipe."
        )
    total = _duration(sum(known))
    total = total if len(known) == len(seconds) else f"at least {total}, some unknown"
    return f"In total: {total}{price}, estimated from runs on the same data and model."


def _memory(measured: float | None, estimated: float | None) -> str:
    parts = ((measured, "measured"), (estimated, "per worker estimated"))
    return ", ".join(f"{gib:.1f} GiB {how}" for gib, how in parts if gib is not None) or "unknown"


def _duration(seconds: float) -> str:
    seconds = round(seconds)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _show_values(values: Mapping[str, Value]) -> None:
    from tasks.redact import redact
    from tasks.runs.records import text_table

    if not values:
        print("\nEvery value is the default.")
        return
    rows = [(name, redact(json.dumps(setting.value)), setting.origin) for name, setting in values.items()]
    print("\nNot the default:\n" + text_table(rows, ("key", "value", "from")))
