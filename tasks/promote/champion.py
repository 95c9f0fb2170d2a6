"""Change the champion: the alias moves of a promotion, `dpo approve` and `dpo rollback`."""

from datetime import datetime
from pathlib import Path

from tasks.config.access import check_push, configured
from tasks.config.cluster import load_cluster
from tasks.config.paths import METRICS, main_checkout
from tasks.config.promote import Promote
from tasks.errors import UserError
from tasks.promote import outbox
from tasks.runs.open_run import weights_of
from tasks.system.files import read_json_or_empty, write_json
from tasks.system.processes import is_alive, this_process
from tasks.tracking.model_names import promote_params, registered_version
from tasks.tracking.registry import PREVIOUS, Moves, Registry, Version, registry
from tasks.tracking.verify import require_intact_version


def promotion_moves(
    models: Registry, version: Version, champion: Version | None, alias: str, why: str, details: str = ""
) -> Moves:
    """Record a promotion in the outbox; the aliases and tags that make the version the champion."""
    promotion = outbox.add(models.name, version.number, alias, why, version.run, details)
    before = champion.number if champion else None
    tags = {"promoted": "true", "promoted_over": before or "", "rolled_back": "", "waiting": "false"}
    tags[outbox.TAG] = promotion.id
    return Moves({PREVIOUS: before, alias: version.number}, {version.number: tags})


def approve(name: str, by: str, reason: str = "") -> str:
    """Make a version that waits for approval the champion; `by` is the person who approves.

    With a reason, that person overrides the gate. It takes a version and not a workspace, so that the model that was
    evaluated becomes champion, however much later.
    """
    with registered_version(name) as (params, models, version):
        address = params.push and check_push(params.push, configured())
        copies = outbox.complete(models, address)  # also those of an approval that was interrupted
        if reason or version.tags.get("waiting") == "true":
            require_intact_version(models, version)  # before the lock: it may download the files
            models.restore_weights(version, weights_of(models, version))
        with models.exclusively() as lease:
            version, champion = models.version(version.number) or version, models.at(params.alias)
            label = f"{models.name} version {version.number}"
            approved_by = version.tags.get("approved_by")
            if champion is not None and champion.number == version.number and approved_by:
                return f"{label} is already {params.alias}, approved by {approved_by}{_copied(copies)}"
            reasons = _reasons_against(params, models, version, champion)
            if reasons and not reason:
                raise UserError(
                    f"{label} was not approved: {reasons}. To promote it in spite of that, put your reason on record: "
                    f'`dpo approve {models.name}/{version.number} {by} --reason "..."`.'
                )
            why = f"approved by {by}" + (f", who overrides the gate ({reasons}): {reason}" if reasons else "")
            tags = {"approved_by": by, "override_reason": reason if reasons else "", "overruled": reasons[:4000]}
            models.tag(version, tags)
            models.describe(version, why[0].upper() + why[1:])
            models.move(promotion_moves(models, version, champion, params.alias, why), lease)
        copies = outbox.complete(models, address)
    _update_decision(models, version, why)
    return f"{label} is now {params.alias}, {why}{_copied(copies)}"


def _update_decision(models: Registry, version: Version, why: str) -> None:
    """Record the approval where the run's report reads the decision."""
    kept = main_checkout() / load_cluster().logging_dir / version.run / "results" / METRICS
    for path in (folder / "promote.json" for folder in (METRICS, kept)):
        decision = read_json_or_empty(path)
        if (decision.get("model"), decision.get("version")) == (models.name, version.number):
            write_json(path, {**decision, "promoted": True, "waiting": False, "approved": why})


def _reasons_against(params: Promote, models: Registry, version: Version, champion: Version | None) -> str:
    if champion is not None and champion.number == version.number:
        raise UserError(f"Version {version.number} of {models.name} is {params.alias} already.")
    if version.tags.get("waiting") != "true":
        return version.tags.get("reasons") or "it does not wait for approval"
    if (champion.number if champion else "") != version.tags.get("champion_before", ""):
        now = f"version {champion.number} is {params.alias}" if champion else f"there is no {params.alias}"
        return f"it was compared with another {params.alias}, and now {now}; run the pipeline again to compare it"
    return ""


def _copied(copies: list[str]) -> str:
    return "".join(f"; copied to {copy}" for copy in copies)


def rollback(model: str | None = None) -> str:
    """Move the champion alias back to the version that the champion replaced.

    A note on disk records the rollback that is about to happen. The next rollback completes an interrupted one and
    goes no further.
    """
    params = promote_params(model and model.partition("/")[0])
    with registry(load_cluster(), params.model_name) as model_registry:
        champion = model_registry.at(params.alias)
        if champion is None:
            sentence = f"{params.model_name} has no {params.alias}, so there is nothing to roll back."
            raise UserError(f"{sentence} {model_registry.others()}".rstrip())
        if _was_interrupted(model_registry.name, champion.number):
            return (
                f"{params.model_name}: {params.alias} is version {champion.number} ({_manifest(champion)}). An "
                "interrupted rollback is now complete. Run `dpo rollback` again to go back one more version."
            )
        # A champion whose alias was moved by hand has no tags.
        target = _replaced_by(model_registry, champion) or model_registry.at(PREVIOUS)
        if target is None or target.number == champion.number:
            raise UserError(
                f"Version {champion.number} is the first {params.alias} of {params.model_name}: there is no "
                "earlier one to restore."
            )
        require_intact_version(model_registry, target)
        earlier = _replaced_by(model_registry, target)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        aliases = {params.alias: target.number, PREVIOUS: earlier.number if earlier else None}
        with model_registry.exclusively() as lease:
            current = model_registry.at(params.alias)
            if current is None or current.number != champion.number:
                raise UserError(
                    f"The {params.alias} changed in the meantime. No alias was moved. Run `dpo rollback` again."
                )
            write_json(_note(), {"model": model_registry.name, "to": target.number, "by": this_process()})
            tags = {champion.number: {"rolled_back": now, "promoted": "false"}}
            model_registry.move(Moves(aliases, tags), lease)
    return (
        f"{params.model_name}: {params.alias} was version {champion.number} ({_manifest(champion)}) and is version "
        f"{target.number} ({_manifest(target)}) again. Version {champion.number} stays in the registry, marked as "
        "rolled back: the pipeline does not promote it without approval."
    )


def print_rollback(model: str | None) -> None:
    """Roll back; the note about the rollback is removed only after its result was printed."""
    print(rollback(model), flush=True)
    _note().unlink(missing_ok=True)


def _was_interrupted(model: str, champion: str) -> bool:
    """Whether a rollback to the current champion died before it printed its result."""
    note = read_json_or_empty(_note())
    return (note.get("model"), note.get("to")) == (model, champion) and not is_alive(note["by"])


def _note() -> Path:
    return main_checkout() / ".scratch" / "rollback.json"


def _replaced_by(model_registry: Registry, version: Version) -> Version | None:
    """The champion that a version replaced, skipping versions that were rolled back themselves."""
    seen = {version.number}
    number = version.tags.get("promoted_over")
    while number and number not in seen:
        seen.add(number)
        candidate = model_registry.version(number)
        if candidate is None or not candidate.tags.get("rolled_back"):
            return candidate
        number = candidate.tags.get("promoted_over")
    return None


def _manifest(version: Version) -> str:
    return f"manifest {version.tags['manifest_sha256'][:12]}"
