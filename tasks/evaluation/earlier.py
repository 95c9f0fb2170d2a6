"""The new model on the held-out set that the champion was evaluated on: what was learnt must not be lost for new data.

A version keeps its held-out pairs in the registry. Those whose prompt is in today's training data are left out.
"""

from dataclasses import dataclass
from typing import Any

from tasks.dataset.pairs import read_rows
from tasks.errors import UserError
from tasks.evaluation.asked import HeldOut, ask, earlier, ready_for, refuse_other_tokens
from tasks.evaluation.compare import Comparison, Side, compare, eval_hash, manifest_of, read_side, weights_of
from tasks.files import read_json
from tasks.machines.pool import Workers
from tasks.params import Params
from tasks.paths import MODEL, PAIRS
from tasks.tracking.registry import Registry, Version

FILE = "eval.parquet"


@dataclass(frozen=True)
class Earlier:
    """What came of it: the comparison, or why there is none."""

    comparison: Comparison
    pairs: int = 0
    trained_on: int = 0  # of the champion's held-out pairs, which prove nothing any more
    why_not: str = ""

    def told(self) -> dict[str, Any]:
        counts = {"pairs": self.pairs, "trained_on": self.trained_on, "why_not": self.why_not}
        return {"comparison": self.comparison, **counts}


def on_earlier_pairs(workers: Workers, params: Params, found: Registry, champion: Version) -> Earlier | None:
    """None where the champion was evaluated on the very pairs of today."""
    ours, theirs = read_json(MODEL / "manifest.json"), manifest_of(found, champion)
    if eval_hash(ours) == eval_hash(theirs):
        return None
    try:
        held = earlier(_file(found, champion))
        refuse_other_tokens(ours, theirs)
        return _compared(workers, params, found, champion, held)
    except UserError as error:
        return Earlier({}, why_not=str(error))


def _compared(workers: Workers, params: Params, found: Registry, champion: Version, held: HeldOut) -> Earlier:
    ours, theirs = read_json(MODEL / "manifest.json"), manifest_of(found, champion)
    left = held.without({row["prompt"] for row in read_rows(PAIRS / "train.parquet")})
    trained_on = len(held.pairs) - len(left.pairs)
    if not left.pairs:
        return Earlier({}, 0, trained_on, "all of the champion's held-out prompts are trained on by now")
    print(f"compare: the new model answers version {champion.number}'s held-out prompts", flush=True)
    left = ready_for(workers, params, left, ours)
    new = Side(*ask(workers, params, MODEL, left, ours))
    if theirs["params"]["evaluate"] == ours["params"]["evaluate"]:
        old = read_side(found.fetch(champion, "evaluation"))
    else:
        left = ready_for(workers, params, left, theirs)
        old = Side(*ask(workers, params, weights_of(found, champion), left, theirs))
    return Earlier(compare(params.evaluate, new, old), len(left.pairs), trained_on)


def _file(found: Registry, champion: Version) -> Any:
    try:
        file = found.fetch(champion, "evaluation", FILE)
    except Exception as error:  # whatever a store says of a file that is not there
        raise UserError(f"version {champion.number}'s held-out pairs cannot be fetched: {error}") from error
    if not file.exists():
        raise UserError(f"version {champion.number} was registered without its held-out pairs")
    return file
