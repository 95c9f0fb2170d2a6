"""Is there anything new? What a scheduled run asks before it works, and what a finished run leaves for the next.

`python -m flows.dpo --only-if-new` (the deployment dpo/nightly) ends in seconds where data, base model, code and params
are those of the last run that finished with the same recipe and overrides. See docs/retraining.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime
from prefect.artifacts import create_table_artifact

from flows import ROOT, inputs, runs, workspace
from flows.promote import decision
from flows.workspace import Files, Workspace
from tasks.errors import UserError
from tasks.files import fingerprint, hash_files, read_json, recall, sha256, write_json
from tasks.paths import WATCH

Record = dict[str, Any]
ASKED = "asked.json"  # in the run's folder
SKEW = timedelta(minutes=5)  # by which the clocks of two machines may differ
CARD = Path("data") / "card" / "report.json"


@dataclass(frozen=True)
class Night:
    """A run with a past: what it is made of, and the last finished run of its kind."""

    record: Path | None  # None where nobody knows what a resumed run was asked
    now: Record
    last: Record | None

    def nothing_new(self) -> str | None:
        return nothing_new(last=self.last, now=self.now, due=due())

    def note(self, place: Workspace) -> None:
        """For when this run is resumed: by then code and params of the checkout may be others."""
        if self.record:
            write_json(place.logs / ASKED, {"record": str(self.record), "now": self.now})

    def check_drift(self, place: Workspace) -> None:
        check_drift(place, self.last)

    def outcome(self, place: Workspace, began: datetime) -> Record | None:
        return outcome(place, began, now=self.now, last=self.last)

    def write(self, left: Record | None) -> None:
        """When the run is over, and not before: a night that failed is tried again."""
        if left and self.record:
            write_json(self.record, left)


def asked(recipe: str | None, overrides: dict[str, Any] | None, resume: str | None = None) -> Night:
    if not resume:
        record, now = record_of(recipe, overrides), made_of(workspace.plan(recipe, overrides))
        return Night(record, now, _read(record))
    note = _read(runs.runs_folder() / resume / ASKED)
    return Night(Path(note["record"]), note["now"], _read(Path(note["record"]))) if note else Night(None, {}, None)


def _read(path: Path) -> Record | None:
    return recall(path) or None


def record_of(recipe: str | None, overrides: Mapping[str, Any] | None, root: Path = ROOT) -> Path:
    """Where the last finished run of this recipe and these overrides is written down."""
    return root / ".scratch" / "retrain" / f"{fingerprint({'recipe': recipe, 'overrides': overrides or {}})}.json"


def made_of(files: Files, root: Path = ROOT) -> Record:
    """What determines a run besides what its addresses lead to: its params, and the code that dvc.yaml names."""
    from tasks.params import Params, read_yaml, validate

    params = files.get("params.yaml") or read_yaml(root / "params.yaml")
    return {"params": validate(Params, params, root / "params.yaml").model_dump(mode="json"), "code": code(root)}


def code(root: Path) -> dict[str, str]:
    """The hash of each dependency of the stages that no stage makes, and of their commands."""
    stages = inputs.stages(root)
    made = {path for stage in stages.values() for path in inputs.out_paths(stage)}
    deps = sorted({dep for stage in stages.values() for dep in stage.get("deps", [])} - made - {str(WATCH)})
    commands = {name: stage["cmd"] for name, stage in stages.items()}
    return {**{dep: _hash(root / dep) for dep in deps}, "dvc.yaml": fingerprint(commands)}


def _hash(path: Path) -> str:
    if not path.exists():
        return "not there"
    return fingerprint(hash_files(path)) if path.is_dir() else sha256(path)


def nothing_new(*, last: Record | None, now: Record, due: datetime) -> str | None:
    """Why there is nothing to do; None where there is, and then the log says what."""
    if last is None:
        get_run_logger().info("retrain: the first run of its kind; what it leaves is what the next looks at")
        return None
    began, clock = datetime.fromisoformat(last["began"]), datetime.now().astimezone()
    if began > clock + SKEW:  # the clock was ahead then, or is behind now: only the content can tell
        get_run_logger().warning(
            "retrain: %s began at %s according to its record, and now it is %s: a clock is or was wrong. The times are "
            "not compared, the content is.",
            *(last["run"], _moment(last), _local(clock)),
        )
    elif due < began:
        # Of several that a stopped worker missed the first has done the work of all.
        return f"nothing new since {_moment(last)}: {last['run']} began then, after this run was due ({_local(due)})"
    found = news(last=last, now=now)
    if not found:
        return f"nothing new since {_moment(last)}, when {last['run']} began: the same data, model, code and params"
    get_run_logger().info("retrain: new since %s, when %s began: %s", _moment(last), last["run"], "; ".join(found))
    return None


def news(*, last: Record, now: Record) -> list[str]:
    """What is not as it was, in words."""
    from tasks.params import Source
    from tasks.tracking.journal import flatten
    from tasks.watch import look_strictly

    before, params = flatten(last["params"]), flatten(now["params"])
    names = [name for name in {**before, **params} if before.get(name) != params.get(name)]
    found = [f"{name} {before.get(name)} -> {params.get(name)}" for name in names]
    files = [name for name in {**last["code"], **now["code"]} if last["code"].get(name) != now["code"].get(name)]
    found += [f"code ({', '.join(sorted(files))})"] if files else []
    if last["params"]["source"] != now["params"]["source"]:
        return found  # other addresses: what the old ones lead to does not matter
    seen, before = look_strictly(Source.model_validate(now["params"]["source"])), last.get("watch", {})
    return found + [f"the content of {name}" for name in seen if seen[name] != before.get(name)]


def check_drift(place: Workspace, last: Record | None) -> None:
    """Between prepare and reference: stop, or warn, where the data are no longer what the champion learnt from."""
    from tasks.dataset.drift import shifts
    from tasks.params import load_params

    every, card = load_params(place.root / "params.yaml"), place.root / CARD
    params = every.promote
    if not (last and last["card"] and params.drift and card.exists()):
        return
    if changed := other_baseline(last, every.model_dump(mode="json")):
        get_run_logger().info("retrain: %s; the data are not compared with those of %s", changed, last["card_of"])
        return
    found = shifts(params.drift, last["card"], read_json(card))
    rows = [{"figure": s.name, "change": s.said, "moved": s.moved, "allowed": s.allowed} for s in found]
    create_table_artifact(rows, key="dpo-drift", description=f"The data against those of {last['card_of']}")
    bad = [str(shift) for shift in found if shift.too_far]
    said = f"The data have drifted from those of {last['card_of']}: {'; '.join(bad)}."
    if bad and params.on_drift == "stop":
        go_on = f"`make resume RUN={place.key}`" if place.own else "`make run`"
        raise UserError(
            f"{said} Nothing was trained and the champion is as it was. Look at {card}; if the data are right, {go_on} "
            "goes on with them, and they are the measure once their model is promoted. promote.drift has the limits."
        )
    if bad:
        get_run_logger().warning("retrain: %s", said)


def other_baseline(last: Record, params: Record) -> str | None:
    """Why the data of the last promoted run are no measure for this run's: it reads other addresses, or it is another
    model. None where they are."""
    before = last.get("card_for") or _baseline(last["params"])  # records of older versions have no `card_for`
    now = _baseline(params)
    changes = [f"{name} is {now[name]} and was {before[name]}" for name in now if now[name] != before[name]]
    return "; ".join(changes) or None


def _baseline(params: Record) -> Record:
    source, promote = params["source"], params["promote"]
    return {
        "source.data": source["data"],
        "source.eval": source["eval"],
        "promote.model_name": promote["model_name"],
    }


def outcome(place: Workspace, began: datetime, *, now: Record, last: Record | None) -> Record | None:
    """What the next run compares with; the card stays that of the last promoted data, so that slow drift adds up."""
    if not (place.root / WATCH).exists():
        return None
    card = {name: (last or {}).get(name) for name in ("card", "card_of", "card_for")}
    if last and other_baseline(last, now["params"]):
        card = dict.fromkeys(card)  # this run's data are the measure from now on
    if (place.root / CARD).exists() and (decision(place).get("promoted") or not card["card"]):
        measure = {"card": read_json(place.root / CARD), "card_of": place.key}
        card = {**measure, "card_for": _baseline(now["params"])}
    return {
        "run": place.key,
        "began": began.isoformat(timespec="seconds"),
        **now,
        "watch": read_json(place.root / WATCH),
        **card,
    }


def due() -> datetime:
    """When this flow run should have started."""
    return runtime.flow_run.scheduled_start_time or datetime.now().astimezone()


def _moment(record: Record) -> str:
    return _local(datetime.fromisoformat(record["began"]))


def _local(when: datetime) -> str:
    return f"{when.astimezone():%Y-%m-%d %H:%M %Z}"
