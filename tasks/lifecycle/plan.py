"""Which stages would run, and why (`dpo plan`). Runs and writes nothing.

DVC decides when a run starts. This compares the same command, params and hashes with the entries that earlier runs
left in dvc.lock and in DVC's run cache.
"""

from dataclasses import dataclass
from typing import Any

from tasks.config.paths import ROOT
from tasks.lifecycle import reuse
from tasks.runs import dvc, dvc_lock
from tasks.runs.dvc_lock import Entry, StageInputs

RUNS, RESTORED, UNCHANGED, MAY_RUN = "runs", "restored", "unchanged", "may run"


@dataclass(frozen=True)
class StagePlan:
    stage: str
    state: str
    reasons: list[str]


def plan_stages(params: dict[str, Any]) -> list[StagePlan]:
    """What would become of each stage with this content of params.yaml, in order."""
    locks, run_cache = list(reuse.earlier_locks()), list(dvc.run_cache())
    upstream = reuse.fingerprint_output(params)
    plans: list[StagePlan] = []
    for name, stage in dvc_lock.stages(ROOT).items():
        inputs = dvc_lock.current_inputs(ROOT, stage, upstream, params)
        locked = [lock[name] for lock in locks if name in lock]
        restorable = [entry for entry in run_cache if entry["cmd"] == stage["cmd"]]
        plan, entry = _plan(name, inputs, locked, restorable, plans)
        if not dvc_lock.is_disabled(name, params):
            plans.append(plan)
        upstream |= dvc_lock.outs(entry) if entry else dict.fromkeys(dvc_lock.out_paths(stage))
    return plans


def _plan(
    name: str, inputs: StageInputs, locked: list[Entry], restorable: list[Entry], earlier: list[StagePlan]
) -> tuple[StagePlan, Entry | None]:
    """The plan of a stage and, if the stage need not run, the entry whose outs the next stages get."""
    differences = reuse.fewest_differences(inputs, locked)
    if not inputs.is_known():
        unknown = [path for path, md5 in inputs.deps.items() if md5 is None]
        changes = [reason for reason in differences if not reason.endswith(tuple(unknown))]
        last = [plan.stage for plan in earlier if plan.state in (RUNS, MAY_RUN)][-1:]
        depends = f"depends on {', '.join(last)}: {', '.join(unknown)} may change"
        return StagePlan(name, RUNS if changes else MAY_RUN, [*changes, depends]), None
    for state, entries, reasons in ((UNCHANGED, locked, []), (RESTORED, restorable, differences)):
        fitting = [entry for entry in entries if dvc_lock.recorded_inputs(entry) == inputs]
        if cached := next(filter(dvc.is_cached, fitting), None):
            return StagePlan(name, state, reasons), cached
        if fitting:
            return StagePlan(name, RUNS, ["its result is no longer in DVC's cache"]), None
    return StagePlan(name, RUNS, differences or ["it never ran here"]), None
