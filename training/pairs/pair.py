"""A tokenised pair, and how pairs are distributed over rows. Without torch: drivers read pairs, too."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import numpy as np

Ints = Sequence[int] | np.ndarray
Floats = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Pair:
    """A tokenised preference pair. Masks are 1 for response tokens in the loss. `ref_*_logps` has a value per token."""

    id: str
    prompt_ids: Ints
    chosen_ids: Ints
    rejected_ids: Ints
    chosen_mask: Ints
    rejected_mask: Ints
    _: KW_ONLY
    ref_chosen_logps: Floats | None = None
    ref_rejected_logps: Floats | None = None
    label: float = 1.0  # probability that chosen is the better response; 0.5 is a tie
    margin: float = 0.0  # score of chosen minus score of rejected; 0 if the data has no scores
    weight: float = 1.0  # in the mean loss
    # Of an unpaired row: +1 if its answer `chosen` is desirable, -1 if not; `rejected` is an answer to another prompt.
    sign: float = 0.0

    def __len__(self) -> int:
        """Number of tokens in a row: the shared prefix counts once."""
        return len(self.prompt_ids) + len(self.chosen_ids) + len(self.rejected_ids) - self.shared_prefix

    @cached_property
    def shared_prefix(self) -> int:
        """Length of the prefix that both responses share; the last token of a response is never part of it."""
        longest = max(0, min(len(self.chosen_ids), len(self.rejected_ids)) - 1)
        differ = np.flatnonzero(np.asarray(self.chosen_ids)[:longest] != np.asarray(self.rejected_ids)[:longest])
        return int(differ[0]) if len(differ) else longest

    @property
    def target_count(self) -> int:
        """Number of response tokens to predict; the shared prefix counts once."""
        return len(self) - len(self.prompt_ids)


def pack(costs: Sequence[float], lengths: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Distribute items over rows of similar cost and at most `budget` tokens; a longer item gets a row of its own.

    Returns the items of each row. The number of rows is a multiple of `multiple` (the world size), and the smallest
    that the costliest-first rule can fill. A row is empty only if there are fewer items than rows.
    """
    fewest = max(1, math.ceil(sum(min(length, budget) for length in lengths) / budget))
    order = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    count = math.ceil(fewest / multiple) * multiple
    while (rows := _distribute(order, costs, lengths, budget, count)) is None:
        count += multiple
    return rows


def _distribute(
    order: Sequence[int], costs: Sequence[float], lengths: Sequence[int], budget: int, count: int
) -> list[list[int]] | None:
    rows: list[list[int]] = [[] for _ in range(count)]
    cost, tokens = [0.0] * count, [0] * count
    for item in order:
        open_rows = [r for r in range(count) if not rows[r] or tokens[r] + lengths[item] <= budget]
        if not open_rows:
            return None
        cheapest = min(open_rows, key=lambda r: (cost[r], r))
        rows[cheapest].append(item)
        cost[cheapest] += costs[item]
        tokens[cheapest] += lengths[item]
    return rows
