"""Whether there is anything new to train on, and whether the data has drifted. See docs/retraining.md.

`dpo retrain` (the deployment dpo/nightly) finishes in seconds if data, base model, code and params equal those of the
last run that finished with the same recipe and overrides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime
from prefect.artifacts import create_table_artifact

from flows.promote import decision
from tasks.config.old_train import to_new_form
from tasks.config.params import load_params
from tasks.config.paths import FINGERPRINT, ROOT
from tasks.config.source import Source
from tasks.errors import UserError
from tasks.prepare.card.drift import shifts
from tasks.runs import dvc_lock
from tasks.runs.run_config import RunConfig
from tasks.runs.workspace import Workspace
from tasks.source.fingerprint import content_ids_or_fail
from tasks.system.files import fingerprint, read_json, read_json_or_empty, write_json
from tasks.tracking.journal import flatten

Content = dict[str, Any]
CLOCK_TOLERANCE = timedelta(minutes=5)  # by which the clocks of two machines may differ
CARD = Path("data") / "card" / "report.json"


def started_with(config: RunConfig, root: Path = ROOT) -> Content:
    """What the record of a new run keeps for the next retraining: the checkout may change while the run works."""
    return {"recipe": config.recipe, "overrides": config.overrides, "code": code_hashes(root)}


def last_run(started_with: Content) -> Content | None:
    """What the last finished run with the same recipe and overrides left."""
    return (read_json_or_empty(_path(started_with)) or None) if started_with else None


def nothing_new(config: RunConfig, started_with: Content) -> str | None:
    """Why a new run with this configuration has nothing to do."""
    return RetrainCheck(config.values(), started_with["code"], last_run(started_with)).nothing_new()


@dataclass(frozen=True)
class RetrainCheck:
    """Compares a new run with the last finished run that had the same recipe and overrides."""

    params: Content
    code: Mapping[str, str]
    last: Content | None  # the last run's record

    def nothing_new(self, due: datetime | None = None) -> str | None:
        """Why there is nothing to do. If there is something to do: None, and the log says what is new."""
        log, last = get_run_logger(), self.last
        if last is None:
            log.info("retrain: the first run with this recipe and these overrides; the next one is compared with it")
            return None
        due = due or runtime.flow_run.scheduled_start_time or datetime.now().astimezone()
        began, clock = datetime.fromisoformat(last["began"]), datetime.now().astimezone()
        since, run = _local(began), last["run"]
        if began > clock + CLOCK_TOLERANCE:
            log.warning(
                "retrain: the record says that %s began at %s, but it is %s now: a clock is or was wrong. Only the "
                "content is compared, not the times.",
                *(run, since, _local(clock)),
            )
        elif due < began:
            # Of several runs that a stopped worker missed, the first did the work of all.
            return f"nothing new since {since}: {run} began then, after this run was due ({_local(due)})"
        changes = self.changes()
        if not changes:
            return f"nothing new since {since}, when {run} began: the same data, model, code and params"
        log.info("retrain: new since %s, when %s began: %s", since, run, "; ".join(changes))
        return None

    def changes(self) -> list[str]:
        """What changed since the last run, in words."""
        assert self.last is not None
        last = self.last
        before, params = flatten(to_new_form(last["params"])), flatten(self.params)
        names = [name for name in {**before, **params} if before.get(name) != params.get(name)]
        changes = [f"{name} {before.get(name)} -> {params.get(name)}" for name in names]
        old, new = last["code"], self.code
        files = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
        changes += [f"code ({', '.join(files)})"] if files else []
        if last["params"]["source"] != self.params["source"]:
            return changes  # other addresses: the content behind the old ones does not matter
        content = content_ids_or_fail(Source.model_validate(self.params["source"]))
        seen = last.get("fingerprint", {})
        return changes + [f"the content of {name}" for name in content if content[name] != seen.get(name)]


def check_drift(workspace: Workspace, last: Content | None) -> None:
    """Between prepare and reference: stop or warn if the data has drifted from the data of the last promotion."""
    card = workspace.root / CARD
    params = load_params(workspace.root / "params.yaml")
    if not (last and last["card"] and params.promote.drift and card.exists()):
        return
    log, baseline_run = get_run_logger(), last["card_of"]
    if change := new_baseline(last, params.model_dump(mode="json")):
        log.info("retrain: %s; the data is not compared with that of %s", change, baseline_run)
        return
    changes = shifts(params.promote.drift, last["card"], read_json(card))
    rows = [{"figure": s.name, "change": s.detail, "moved": s.moved, "allowed": s.allowed} for s in changes]
    create_table_artifact(rows, key="dpo-drift", description=f"The data compared with that of {baseline_run}")
    drifted = [str(shift) for shift in changes if shift.too_far]
    message = f"The data has drifted from that of {baseline_run}: {'; '.join(drifted)}."
    if drifted and params.promote.on_drift == "stop":
        command = f"dpo resume {workspace.run_name}" if workspace.is_worktree else "dpo run"
        raise UserError(
            f"{message} Nothing was trained, and the champion is unchanged. Look at {card}. If the data is right, "
            f"`{command}` continues with it; it becomes the new baseline once its model is promoted. The limits "
            "are in promote.drift."
        )
    if drifted:
        log.warning("retrain: %s", message)


def outcome(workspace: Workspace, began: datetime, started_with: Content, last: Content | None) -> Content | None:
    """The record for the next run. Its card is that of the last promoted data, so that slow drift adds up."""
    if not started_with or not (workspace.root / FINGERPRINT).exists():
        return None
    card = {name: (last or {}).get(name) for name in ("card", "card_of", "card_for")}
    params = load_params(workspace.root / "params.yaml").model_dump(mode="json")  # `dpo resume --set` changes them
    if last and new_baseline(last, params):
        card = dict.fromkeys(card)
    if (workspace.root / CARD).exists() and (decision(workspace).get("promoted") or not card["card"]):
        card = {"card": read_json(workspace.root / CARD), "card_of": workspace.run_name}
        card["card_for"] = _baseline(params)
    run = {"run": workspace.run_name, "began": began.isoformat(timespec="seconds"), "code": started_with["code"]}
    return {**run, "params": params, "fingerprint": read_json(workspace.root / FINGERPRINT), **card}


def write(outcome: Content | None, started_with: Content) -> None:
    """Called when the run is over, and not before: a scheduled run that failed is tried again."""
    if outcome:
        write_json(_path(started_with), outcome)


def _path(started_with: Content) -> Path:
    return record_path(started_with["recipe"], started_with["overrides"])


def record_path(recipe: str | None, overrides: Mapping[str, Any] | None, root: Path = ROOT) -> Path:
    """The file that records the last finished run with this recipe and these overrides."""
    return root / ".scratch" / "retrain" / f"{fingerprint({'recipe': recipe, 'overrides': overrides or {}})}.json"


def code_hashes(root: Path = ROOT) -> dict[str, str]:
    """The hash of each dependency in dvc.yaml that is no output of a stage, and of all stage commands."""
    stages = dvc_lock.stages(root)
    outputs = {path for stage in stages.values() for path in dvc_lock.out_paths(stage)}
    deps = sorted({dep for stage in stages.values() for dep in stage.get("deps", [])} - outputs - {str(FINGERPRINT)})
    commands = {name: stage["cmd"] for name, stage in stages.items()}
    return {**{dep: dvc_lock.dvc_hash(root / dep) or "not there" for dep in deps}, "dvc.yaml": fingerprint(commands)}


def new_baseline(last: Content, params: Content) -> str | None:
    """Why this run's data becomes a new baseline for drift: it reads other addresses, or trains another model."""
    before = last.get("card_for") or _baseline(last["params"])  # records of older versions have no `card_for`
    now = _baseline(params)
    changes = [f"{name} is {now[name]} and was {before[name]}" for name in now if now[name] != before[name]]
    return "; ".join(changes) or None


def _baseline(params: Content) -> Content:
    source, promote = params["source"], params["promote"]
    names = {"source.data": source["data"], "source.eval": source["eval"]}
    return {**names, "promote.model_name": promote["model_name"]}


def _local(when: datetime) -> str:
    return f"{when.astimezone():%Y-%m-%d %H:%M %Z}"
