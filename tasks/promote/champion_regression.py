"""Compare the new model with the champion on the champion's own held-out set: new data must not cost old skills.

The registry stores the held-out pairs of each version. Pairs whose prompt is now in the training data are skipped.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.artifacts.pairs import pairs_file, read_rows
from tasks.cluster.worker_pool import WorkerPool
from tasks.compare.compare import (
    Comparison,
    Evaluated,
    Paired,
    eval_file,
    eval_hash,
    evaluated_version,
    pair_up,
    read_results,
    summarize,
)
from tasks.compare.reevaluate import add_reference, reevaluate, require_same_tokens, stored_held_out
from tasks.config.params import Params
from tasks.config.paths import MODEL
from tasks.errors import UserError
from tasks.system.files import read_json
from tasks.tracking.registry import Registry, Version

FILE = "eval.arrow"


@dataclass(frozen=True)
class ChampionRegression:
    """The comparison, or why there is none."""

    comparison: Comparison
    pairs: int = 0
    trained_on: int = 0  # the champion's held-out pairs that are training data by now
    why_not: str = ""
    paired: dict[str, Paired] = field(default_factory=dict, repr=False)  # behind the comparison

    def record(self) -> dict[str, Any]:
        """For promote.json."""
        return {name: value for name, value in vars(self).items() if name != "paired"}


def champion_regression(
    workers: WorkerPool, params: Params, model_registry: Registry, champion: Version
) -> ChampionRegression | None:
    """None if the champion was evaluated on today's held-out pairs."""
    ours, theirs = read_json(MODEL / "manifest.json"), evaluated_version(model_registry, champion)
    if eval_hash(ours) == eval_hash(theirs.manifest):
        return None
    try:
        pairs = _fetch_pairs(model_registry, champion, eval_file(theirs.manifest))
        return _compare(workers, params, ours, theirs, pairs)
    except UserError as error:
        return ChampionRegression({}, why_not=str(error))


def _compare(
    workers: WorkerPool, params: Params, ours: dict[str, Any], theirs: Evaluated, pairs: Path
) -> ChampionRegression:
    stored = stored_held_out(pairs)
    require_same_tokens(ours, theirs.manifest)
    held_out = stored.without({row["prompt"] for row in read_rows(pairs_file("train"))})
    trained_on = len(stored.pairs) - len(held_out.pairs)
    if not held_out.pairs:
        why_not = "the training data contains all of the champion's held-out prompts by now"
        return ChampionRegression({}, 0, trained_on, why_not)
    print(f"compare: evaluating the new model on the held-out prompts of {theirs.name}", flush=True)
    held_out = add_reference(workers, params, held_out, ours)
    new = reevaluate(workers, params, MODEL, held_out, ours)
    if theirs.manifest["params"]["evaluate"] == ours["params"]["evaluate"]:
        old = read_results(theirs.results)
    else:
        held_out = add_reference(workers, params, held_out, theirs.manifest)
        old = reevaluate(workers, params, theirs.weights(), held_out, theirs.manifest)
    paired = pair_up(params.evaluate, new, old)
    return ChampionRegression(summarize(paired), len(held_out.pairs), trained_on, paired=paired)


def _fetch_pairs(model_registry: Registry, champion: Version, name: str) -> Path:
    try:
        file = model_registry.fetch(champion, "evaluation", name)
    except Exception as error:  # each kind of artifact store raises errors of its own for a missing file
        raise UserError(f"the held-out pairs of version {champion.number} cannot be fetched: {error}") from error
    if not file.exists():
        raise UserError(f"version {champion.number} was registered without its held-out pairs")
    return file
