"""After the stages: put the export into MLflow's registry and, where the gate lets it, make it the champion.

Not a stage of dvc.yaml: its decision depends on who is champion now, which DVC cannot know. Run again it does nothing
new: the same export is one version. A model that does not pass is a finished run with reasons, not a crash; one that
passes and wants a person's word waits for `make approve`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks import stage
from tasks.access import check_push, configured
from tasks.errors import UserError
from tasks.evaluation.compare import Comparison, compare, read_side, version_side
from tasks.evaluation.earlier import FILE, Earlier, on_earlier_pairs
from tasks.evaluation.sharding import evaluators
from tasks.files import read_json, sha256, write_json
from tasks.machines.pool import Workers
from tasks.params import Params, load_cluster, load_params
from tasks.paths import METRICS, MODEL, PAIRS
from tasks.release import outbox
from tasks.release.gate import by_slash, gate, regressions
from tasks.release.push import push
from tasks.release.stored import require_stored
from tasks.release.verify import require_whole
from tasks.reports.markup import plain
from tasks.tracking.journal import Run
from tasks.tracking.registry import CHALLENGER, PREVIOUS, Moves, Registry, Version, registry, run_id

NOTED = ("promoted", "reasons", "waiting", "champion_before")
EVALUATION = ("evaluate.json", "samples.jsonl", "pairs.jsonl")


def promote(run: Run) -> None:
    params = load_params()
    require_whole(MODEL)
    address = params.promote.push and check_push(params.promote.push, configured())
    cluster = load_cluster()
    with registry(cluster, params.promote.model_name, run.folder) as found:
        with evaluators(cluster, "promote") as workers:
            decision = _settled(workers, params, found, _version(found, run))
        copies = outbox.complete(found, address)
    write_json(METRICS / "promote.json", decision)
    version = f"{found.name} {decision['version']}"
    run.tags({"model_version": version, "promoted": _text(decision["promoted"])})
    run.summary({"promoted": float(decision["promoted"]), **_differences(decision)})
    run.artifact(METRICS / "promote.json")
    print(f"promote: {sentence(decision)}", flush=True)
    if decision["already"] and address and not copies:  # promote.push may be newer than the champion
        copies = [push(MODEL, address)]
    for copy in copies:
        print(f"promote: copied to {copy}", flush=True)


def _settled(workers: Workers, params: Params, found: Registry, version: Version) -> dict[str, Any]:
    """Decide, and move the aliases while nobody else can; decide again where the champion changed in between.

    Deciding may take minutes, since models answer prompts for it, so the model's lock is held for the moves alone.
    """
    alias = params.promote.alias
    while True:
        decision = decide(workers, params, found, version)
        with found.exclusively() as held:
            champion = found.at(alias)
            if (champion.number if champion else None) == decision["champion_before"]:
                found.tag(version, {name: _text(decision[name]) for name in NOTED})
                moves = Moves({CHALLENGER: version.number})
                if decision["promoted"] and not decision["already"]:
                    details = against(decision["comparison"], version, champion)
                    run = version.tags.get("run", "")
                    promotion = outbox.add(found.name, version.number, alias, "it passed the gate", run, details)
                    moves = to_champion(alias, version, champion, promotion.id)
                    moves = replace(moves, aliases={CHALLENGER: version.number, **moves.aliases})
                found.move(moves, held)
                return decision
        now = f"version {champion.number}" if champion else "nobody"
        print(f"promote: {alias} became {now} meanwhile; comparing again", flush=True)
        version = found.version(version.number) or version


def against(comparison: Comparison, version: Version, champion: Version | None) -> str:
    """For who is told: by how much it is better than the champion before, and whether it learnt from other data."""
    if champion is None:
        return "there was no champion before"
    margins = ", ".join(f"{name} {row['difference']:+.4g}" for name, row in comparison.items()) or "not compared"
    same = version.tags.get("data_sha256") == champion.tags.get("data_sha256")
    return f"against version {champion.number}: {margins}; {'the same' if same else 'other'} data"


def decide(workers: Workers, params: Params, found: Registry, version: Version) -> dict[str, Any]:
    """Whether the version becomes champion, and why not. Nothing is moved here."""
    manifest, champion = read_json(MODEL / "manifest.json"), found.at(params.promote.alias)
    already = champion is not None and champion.number == version.number
    reasons = gate(params.promote, manifest["metrics"], manifest["checks"])
    comparison: Comparison = {}
    earlier: Earlier | None = None
    if champion is not None and not already:
        comparison, more = _against(workers, params, found, champion)
        earlier = on_earlier_pairs(workers, params, found, champion)
        reasons += more + _against_earlier(params, earlier, champion)
    person = bool(params.promote.approval_hours or version.tags.get("rolled_back"))
    waiting = person and not already and not reasons
    return {
        "model": params.promote.model_name,
        "version": version.number,
        "alias": params.promote.alias,
        "manifest_sha256": version.tags["manifest_sha256"],
        "promoted": already or not (reasons or waiting),
        "already": already,
        "waiting": waiting,
        "reasons": [] if already else reasons,
        "rolled_back": version.tags.get("rolled_back", ""),
        "champion_before": champion.number if champion else None,
        "comparison": comparison,
        "earlier": earlier.told() if earlier else None,
    }


def sentence(decision: dict[str, Any]) -> str:
    what = f"{decision['model']} version {decision['version']}"
    if decision["already"]:
        return f"{what} is {decision['alias']} already"
    if decision["promoted"]:
        before = decision["champion_before"]
        return f"{what} is now {decision['alias']}" + (f", and version {before} is {PREVIOUS}" if before else "")
    if decision["waiting"]:
        when = f", having been rolled back on {decision['rolled_back']}" if decision["rolled_back"] else ""
        how = f"`make approve VERSION={decision['version']} BY=name`"
        return f"{what} passed the gate and{when} is not promoted before a person says so: {how}"
    return f"{what} is registered and not promoted, because {'; '.join(decision['reasons'])}"


def _version(found: Registry, run: Run) -> Version:
    digest = sha256(MODEL / "manifest.json")
    known = found.with_manifest(digest)
    if known is not None:
        require_stored(found, known)  # what becomes champion is what lies there
        return known
    evaluation = [METRICS / name for name in EVALUATION] + [path for path in [PAIRS / FILE] if path.exists()]
    manifest = read_json(MODEL / "manifest.json")
    tags = {
        "manifest_sha256": digest,
        "data_sha256": manifest["data"]["sha256"],
        "commit": manifest["made"]["commit"],
        "run": run.folder.name,
    }
    about = _description(manifest, run.folder.name)
    return found.add(run_id(run.folder), Path(MODEL), evaluation, tags, about)


def _description(manifest: dict[str, Any], run: str) -> str:
    """Two lines that MLflow's page of the version shows: headline figures, and where the model comes from."""
    values = by_slash(manifest["metrics"])
    shown = {
        "win rate vs. base model": "win_rate/rate",
        "reward accuracy": "rewards/accuracies",
        "reward margin": "rewards/margins",
        "KL per answer": "kl/answers",
    }
    figures = [f"{what} {values[name]:.4g}" for what, name in shown.items() if name in values]
    data = manifest["data"]
    source = f"data {plain(data.get('source', ''))} ({data['sha256'][:12]})"
    base = f"base {plain(manifest['base']['model'])} ({manifest['base']['sha256'][:12]})"
    return f"{', '.join(figures) or 'not evaluated'}  \nRun {plain(run)}, {source}, {base}"


def _against(workers: Workers, params: Params, found: Registry, champion: Version) -> tuple[Comparison, list[str]]:
    try:
        comparison = compare(params.evaluate, read_side(METRICS), version_side(workers, found, champion))
    except UserError as error:
        return {}, [str(error)] if params.promote.max_regression else []
    return comparison, regressions(params.promote, comparison, champion.number)


def _against_earlier(params: Params, earlier: Earlier | None, champion: Version) -> list[str]:
    """Reasons from the champion's own held-out pairs; a set that cannot be asked about is told and is no reason."""
    if earlier is None:
        return []
    if earlier.why_not:
        print(f"promote: not compared on version {champion.number}'s held-out pairs: {earlier.why_not}", flush=True)
        return []
    found = regressions(params.promote, earlier.comparison, champion.number)
    return [f"{reason} on its own held-out pairs" for reason in found]


def to_champion(alias: str, version: Version, champion: Version | None, promotion: str) -> Moves:
    before = champion.number if champion else None
    tags = {"promoted": "true", "promoted_over": before or "", "rolled_back": "", "waiting": "false"}
    tags[outbox.TAG] = promotion
    return Moves({PREVIOUS: before, alias: version.number}, {version.number: tags})


def _differences(decision: dict[str, Any]) -> dict[str, float]:
    sets = {"champion": decision["comparison"], "champion/earlier": (decision["earlier"] or {}).get("comparison", {})}
    return {f"{where}/{name}": row["difference"] for where, rows in sets.items() for name, row in rows.items()}


def _text(value: Any) -> str:
    """A tag of a version."""
    if isinstance(value, bool):
        return str(value).lower()
    return ("; ".join(value) if isinstance(value, list) else value or "")[:4000]


if __name__ == "__main__":
    stage.main(promote)
