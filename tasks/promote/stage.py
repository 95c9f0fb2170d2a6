"""After the stages: register the export in MLflow and, if it passes the gate, make it the champion.

Not a stage of dvc.yaml: the decision depends on the current champion, which DVC cannot track. Promoting the same
export again changes nothing: it is the same version. A model that fails the gate is a finished run with reasons, not a
crash. A model that passes but needs approval waits for `dpo approve`.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from tasks.artifacts.evaluation import headlines
from tasks.artifacts.markup import plain
from tasks.cluster.worker_pool import WorkerPool
from tasks.compare.compare import Comparison, Paired, evaluated_version, pair_up, read_results, results_here, summarize
from tasks.config.access import check_push, configured
from tasks.config.cluster import load_cluster
from tasks.config.params import Params, load_params
from tasks.config.paths import METRICS, MODEL, PAIRS
from tasks.config.promote import ErrorBudget, Promote
from tasks.errors import UserError
from tasks.evaluate.scoring import evaluator_pool
from tasks.promote import error_budget, outbox
from tasks.promote.champion import promotion_moves
from tasks.promote.champion_regression import FILE, ChampionRegression, champion_regression
from tasks.promote.gate import change, gate, regressions
from tasks.promote.push import push
from tasks.reports.headline import describe_decision
from tasks.system.files import read_json, sha256, write_json
from tasks.tracking.journal import StageJournal, flatten_metrics
from tasks.tracking.registry import CHALLENGER, Moves, Registry, Version, registry, run_id
from tasks.tracking.verify import require_intact, require_intact_version

DECISION_TAGS = ("promoted", "reasons", "waiting", "champion_before")
EVALUATION = ("evaluate.json", "samples.jsonl", "pairs.jsonl")


@dataclass(frozen=True)
class Compared:
    """The new model against a registered version, on today's held-out set and on that version's own."""

    paired: dict[str, Paired] = field(default_factory=dict)
    regression: ChampionRegression | None = None
    why_not: str = ""


def promote(run: StageJournal) -> None:
    params, cluster = load_params(), load_cluster()
    require_intact(MODEL)
    address = params.promote.push and check_push(params.promote.push, configured())
    with registry(cluster, params.promote.model_name, run.folder) as model_registry:
        with evaluator_pool(cluster, "promote") as workers:
            version = _register(model_registry, run)
            decision = _decide_and_move(workers, params, model_registry, version)
        copies = outbox.complete(model_registry, address)
    write_json(METRICS / "promote.json", decision)
    run.tags({"model_version": f"{decision['model']} {version.number}", "promoted": _text(decision["promoted"])})
    run.summary({"promoted": float(decision["promoted"]), **_differences(decision)})
    run.artifact(METRICS / "promote.json")
    print(f"promote: {describe_decision(decision)}", flush=True)
    if decision["promoted"] and decision["comparison"]:
        changes = "; ".join(f"{name} {change(row)}" for name, row in decision["comparison"].items())
        print(f"promote: against version {decision['champion_before']}: {changes}", flush=True)
    if decision["already"] and address and not copies:  # promote.push may have been set after the promotion
        copies = [push(MODEL, address)]
    for copy in copies:
        print(f"promote: copied to {copy}", flush=True)


def _register(model_registry: Registry, run: StageJournal) -> Version:
    """The version of this export, added to the registry if it is new."""
    digest = sha256(MODEL / "manifest.json")
    if known := model_registry.with_manifest(digest):
        require_intact_version(model_registry, known)  # the files in the registry are what becomes champion
        model_registry.restore_weights(known, MODEL)
        return known
    evaluation = [METRICS / name for name in EVALUATION]
    evaluation += [path for path in [PAIRS / FILE] if path.exists()]
    manifest = read_json(MODEL / "manifest.json")
    tags = {
        "manifest_sha256": digest,
        "data_sha256": manifest["data"]["sha256"],
        "commit": manifest["made"]["commit"],
        "run": run.folder.name,
    }
    return model_registry.add(run_id(run.folder), MODEL, evaluation, tags, _description(manifest, run.folder.name))


def _description(manifest: dict[str, Any], run: str) -> str:
    """Two lines for the version's page in MLflow: headline metrics, and the run, data and base model."""
    metrics = [f"{one.label} {one.value:.4g}" for one in headlines(flatten_metrics(manifest["metrics"]))]
    data = manifest["data"]
    source = f"data {plain(data.get('source', ''))} ({data['sha256'][:12]})"
    base = f"base {plain(manifest['base']['model'])} ({manifest['base']['sha256'][:12]})"
    return f"{', '.join(metrics) or 'not evaluated'}  \nRun {plain(run)}, {source}, {base}"


def _decide_and_move(workers: WorkerPool, params: Params, model_registry: Registry, version: Version) -> dict[str, Any]:
    """Decide, then move the aliases under the model's lock; decide again if the champion changed in between.

    The decision may take minutes, since models answer prompts for it, so only the moves hold the lock.
    """
    alias = params.promote.alias
    while True:
        decision = decide(workers, params, model_registry, version)
        with model_registry.exclusively() as lease:
            champion = model_registry.at(alias)
            is_same = (champion.number if champion else None) == decision["champion_before"]
            if is_same and error_budget.spend(params.promote.error_budget, model_registry, decision, lease):
                model_registry.tag(version, {name: _text(decision[name]) for name in DECISION_TAGS})
                aliases = {CHALLENGER: version.number, **error_budget.anchor_alias(decision)}
                moves = Moves(aliases)
                if decision["promoted"] and not decision["already"]:
                    details = _comparison_text(decision["comparison"], version, champion)
                    moves = promotion_moves(model_registry, version, champion, alias, "it passed the gate", details)
                    moves = replace(moves, aliases={**aliases, **moves.aliases})
                model_registry.move(moves, lease)
                return decision
        event = f"version {champion.number} became {alias}" if champion else f"the alias {alias} was removed"
        event = "another promotion spent the rest of the error budget" if is_same else event
        print(f"promote: {event} in the meantime; comparing again", flush=True)
        version = model_registry.version(version.number) or version


def _comparison_text(comparison: Comparison, version: Version, champion: Version | None) -> str:
    """For the notification: the differences to the champion, and whether the training data is the same."""
    if champion is None:
        return "there was no champion before"
    margins = ", ".join(f"{name} {row['difference']:+.4g}" for name, row in comparison.items()) or "not compared"
    same = version.tags.get("data_sha256") == champion.tags.get("data_sha256")
    return f"against version {champion.number}: {margins}; {'the same' if same else 'other'} data"


def decide(workers: WorkerPool, params: Params, model_registry: Registry, version: Version) -> dict[str, Any]:
    """Whether the version becomes champion, and the reasons against it. Moves no alias."""
    manifest, champion = read_json(MODEL / "manifest.json"), model_registry.at(params.promote.alias)
    already = champion is not None and champion.number == version.number
    budget = params.promote.error_budget
    reasons = gate(params.promote, manifest["metrics"], manifest["checks"])
    compared, comparison, test = Compared(), Comparison(), error_budget.Test()
    if champion is not None and not already:
        compared = _compare_with(champion, workers, params, model_registry)
        comparison = summarize(compared.paired)
        reasons += _regressions(params.promote, compared, comparison, champion)
    if budget is not None and not already:
        test = error_budget.plan_test(budget, model_registry, version, champion, compared.paired)
        reasons += test.reasons
        anchor = test.anchor
        if champion and anchor and anchor.number != version.number and not reasons:  # last, since it may take minutes
            is_champion = anchor.number == champion.number
            anchored = compared if is_champion else _compare_with(anchor, workers, params, model_registry)
            reasons += _losses(budget, anchored, anchor.number)
    needs_approval = bool(params.promote.approval_hours or version.tags.get("rolled_back"))
    waiting = needs_approval and not already and not reasons
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
        "earlier": compared.regression.record() if compared.regression else None,
        **(test.record() if budget else {}),
    }


def _compare_with(version: Version, workers: WorkerPool, params: Params, model_registry: Registry) -> Compared:
    why_not, paired = "", dict[str, Paired]()
    try:
        theirs = results_here(workers, evaluated_version(model_registry, version))
        paired = pair_up(params.evaluate, read_results(METRICS), theirs)
    except UserError as error:
        why_not = str(error)
    return Compared(paired, champion_regression(workers, params, model_registry, version), why_not)


def _regressions(params: Promote, compared: Compared, comparison: Comparison, champion: Version) -> list[str]:
    """Reasons from both held-out sets. The champion's own set, if it cannot be compared, is reported and no reason."""
    if compared.why_not:
        reasons = [compared.why_not] if params.max_regression or params.error_budget else []
    else:
        reasons = regressions(params, comparison, champion.number)
    regression = compared.regression
    if regression is not None and regression.why_not:
        number = champion.number
        print(f"promote: no comparison on the held-out pairs of version {number}: {regression.why_not}", flush=True)
    elif regression is not None:
        earlier = regressions(params, regression.comparison, champion.number)
        reasons += [f"{reason} on its own held-out pairs" for reason in earlier]
    return reasons


def _losses(budget: ErrorBudget, compared: Compared, anchor: str) -> list[str]:
    """Reasons from the comparison with the anchor, on both held-out sets."""
    if compared.why_not:
        return [f"the model cannot be compared with the anchor, version {anchor}: {compared.why_not}"]
    reasons = error_budget.lost_too_much(budget, compared.paired, anchor)
    if compared.regression is not None and not compared.regression.why_not:
        earlier = error_budget.lost_too_much(budget, compared.regression.paired, anchor)
        reasons += [f"{reason} (on its own held-out pairs)" for reason in earlier]
    return reasons


def _differences(decision: dict[str, Any]) -> dict[str, float]:
    sets = {"champion": decision["comparison"], "champion/earlier": (decision["earlier"] or {}).get("comparison", {})}
    return {f"{where}/{name}": row["difference"] for where, rows in sets.items() for name, row in rows.items()}


def _text(value: Any) -> str:
    """The value of a tag."""
    if isinstance(value, bool):
        return str(value).lower()
    return ("; ".join(value) if isinstance(value, list) else value or "")[:4000]
