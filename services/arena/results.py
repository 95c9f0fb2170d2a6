"""The figures of an arena: progress by rater, agreement, and the win rate of the second answers with its interval."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from tasks.evaluation.bootstrap import mean_interval
from tasks.evaluation.win_rate import SHARE
from tasks.feedback.agreement import agreement

WINS = {"first": 0.0, "second": 1.0, "tie": 0.5, "both_bad": 0.5}  # of the second answer


def results(votes: Sequence[Mapping[str, str]], identical: int) -> dict[str, Any]:
    """`votes` holds, for each comparison, the vote of each rater; identical answers count as ties."""
    voted = [list(by_rater.values()) for by_rater in votes if by_rater]
    outcomes = [mean(WINS[value] for value in values) for values in voted]
    return {
        "raters": dict(sorted(Counter(rater for by_rater in votes for rater in by_rater).items())),
        "votes": Counter(value for values in voted for value in values),
        "identical": identical,
        "agreement": agreement(voted),
        "win_rate": _win_rate([*outcomes, *[0.5] * identical]) if voted else None,
    }


def _win_rate(outcomes: Sequence[float]) -> dict[str, float]:
    """One outcome per comparison: the votes on a comparison are not independent."""
    rate = mean_interval(outcomes, [str(number) for number in range(len(outcomes))], 0, SHARE)
    return {"rate": rate.mean, **rate.bounds(), "comparisons": len(outcomes)}
