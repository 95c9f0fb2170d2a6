"""`dpo plan`: which stages would run and why, with the time and memory that they took before, or an estimate."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from cli.options import Recipe, Set
from tasks.config.paths import ROOT
from tasks.config.strict import Value, parse_overrides

if TYPE_CHECKING:
    from tasks.lifecycle.plan import StagePlan
    from tasks.runs.run_config import RunConfig


def plan(recipe: Recipe = None, set_: Set = None) -> None:
    """Show which stages would run and why, with estimated time and memory. Changes nothing."""
    from tasks.lifecycle.plan import plan_stages
    from tasks.runs import run_config

    config = run_config.resolve(recipe, parse_overrides(set_))
    _show_stages(plan_stages(config.content), config)
    _show_values(config.origins)


def _show_stages(plans: "Sequence[StagePlan]", config: "RunConfig") -> None:
    from tasks.init.times import estimate_here
    from tasks.lifecycle import estimates
    from tasks.lifecycle.plan import MAY_RUN, RUNS
    from tasks.reports import cost
    from tasks.runs import records

    params, cluster = config.params, config.cluster
    runs, run = records.runs_folder(), [plan.stage for plan in plans if plan.state in (RUNS, MAY_RUN)]
    measured = {stage: estimates.measured(runs, params, stage) for stage in run}
    unmeasured = any(needs.seconds is None for needs in measured.values())
    expected, longest = (estimate_here(params, cluster) if unmeasured else None) or ({}, 0)
    seconds = {
        stage: expected.get(stage) if needs.seconds is None else needs.seconds for stage, needs in measured.items()
    }
    gpu_seconds = sum((value or 0) * cost.gpus(cluster, stage) for stage, value in seconds.items())
    rows: list[tuple[str, ...]] = []
    for stage in plans:
        time, memory, (reason, *more) = "", "", stage.reasons or [""]
        if needs := measured.get(stage.stage):
            time = _time(needs.seconds, expected.get(stage.stage))
            memory = _memory(needs.gib, estimates.worker_memory(params, cluster, ROOT, stage.stage, longest))
        rows += [(stage.stage, stage.state, time, memory, reason), *(("", "", "", "", reason) for reason in more)]
    print(records.text_table(rows, ("stage", "", "time", "memory", "why")))
    trains = any(stage.stage == "train" and stage.state in (RUNS, MAY_RUN) for stage in plans)
    if trains and (adapter := estimates.adapter(params, ROOT)):
        print(f"\n{adapter}")
    price = f"; {cost.in_words(cluster, gpu_seconds / 3600)}" if gpu_seconds else ""
    is_estimate = {measured[stage].seconds is None for stage, value in seconds.items() if value is not None}
    print("\n" + _total(seconds.values(), price, is_estimate))


def _time(measured: float | None, estimated: float | None) -> str:
    if measured is not None:
        return f"about {_duration(measured)}"
    return "unknown" if estimated is None else f"about {_duration(estimated)}, estimated"


def _total(seconds: Collection[float | None], price: str, is_estimate: set[bool]) -> str:
    known = [value for value in seconds if value is not None]
    if not seconds:
        return "Nothing to run."
    if not known:
        return (
            "In total: unknown, because no run has used this data and model yet, and they cannot be examined here. "
            "`dpo init` prints an estimate for a new recipe."
        )
    total = _duration(sum(known))
    total = total if len(known) == len(seconds) else f"at least {total}, some unknown"
    by_runs, by_facts = "runs on the same data and model", "the data, the model and this machine's speed"
    origin = by_runs if is_estimate == {False} else by_facts if is_estimate == {True} else f"{by_runs}, or {by_facts}"
    return f"In total: {total}{price}, estimated from {origin}."


def _memory(measured: float | None, estimated: float | None) -> str:
    parts = ((measured, "measured"), (estimated, "per worker estimated"))
    return ", ".join(f"{gib:.1f} GiB {how}" for gib, how in parts if gib is not None)


def _duration(seconds: float) -> str:
    seconds = round(seconds)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _show_values(values: Mapping[str, Value]) -> None:
    from tasks.runs.records import text_table
    from tasks.secrets.redact import redact

    if not values:
        print("\nEvery value is the default.")
        return
    rows = [(name, redact(json.dumps(setting.value)), setting.origin) for name, setting in values.items()]
    print("\nNot the default:\n" + text_table(rows, ("key", "value", "from")))
