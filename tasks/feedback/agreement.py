"""How far raters agree: the share of agreeing pairs of votes, and Krippendorff's alpha (nominal)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


def agreement(units: Iterable[Sequence[str]]) -> dict[str, Any]:
    """`units` holds the votes on each comparison; those with fewer than two do not count.

    Alpha is 1 minus observed over expected disagreement: 0 is chance, 1 is perfect. Unlike Cohen's and Fleiss' kappa it
    takes any number of raters, and not every rater has to vote on every comparison. If all votes are the same, chance
    alone would agree too, and alpha is None.
    """
    counts = [Counter(votes) for votes in units if len(votes) > 1]
    pairs = sum(size * (size - 1) for size in map(Counter.total, counts))
    equal = sum(count * (count - 1) for unit in counts for count in unit.values())
    if not pairs:
        return {"comparisons": 0, "agreement": None, "alpha": None}
    total = sum(counts, Counter())
    votes = total.total()
    # Each comparison weighs by its number of votes, as in Krippendorff's coincidence matrix.
    observed = sum(
        (unit.total() ** 2 - sum(count**2 for count in unit.values())) / (unit.total() - 1) for unit in counts
    )
    expected = (votes**2 - sum(count**2 for count in total.values())) / (votes - 1)
    alpha = 1 - observed / expected if expected else None
    return {"comparisons": len(counts), "agreement": equal / pairs, "alpha": alpha}
