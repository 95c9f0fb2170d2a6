"""What concerns pairs together: duplicates, contradictions, leaks, limits. Decided on a few numbers for each pair."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.dataset.account import Account
from tasks.dataset.chunks import COLUMNS, Origin, Outcome
from tasks.dataset.contract import Mask, check_all
from tasks.params import Prepare

Columns = dict[str, NDArray[Any]]


def together(outcomes: Sequence[Outcome]) -> Columns:
    """The columns of all pairs end to end, with the chunk and source that each came from."""
    columns = {name: np.concatenate([one.columns[name] for one in outcomes]) for name in (*COLUMNS, "signature")}
    sizes = [len(one.columns["row"]) for one in outcomes]
    columns["chunk"] = np.repeat(np.arange(len(outcomes)), sizes)
    columns["origin"] = np.repeat(np.array([one.origin for one in outcomes], dtype=np.int64), sizes)
    columns["row"] = columns["chunk"] << 32 | columns["row"]  # a row number is one of its file's
    return columns


def judge(
    columns: Columns, origins: Sequence[Origin], account: Account, params: Prepare
) -> tuple[Mask, dict[str, Mask]]:
    """Which pairs are kept, and which are not for what the others are; the latter go into the account."""
    found = check_all(columns, params.near_duplicates)
    for name, mask in found.items():
        for origin, count in Counter(columns["origin"][mask].tolist()).items():
            account.left_out[origins[origin].name][name] += count
    kept = ~np.logical_or.reduce([*found.values()])
    return _within(kept, columns["origin"], quota(params.max_pairs, len(origins))), found


def quota(max_pairs: int | None, sources: int) -> int | None:
    """Of a mixture, every source gives the same number at most."""
    return None if max_pairs is None else max(1, max_pairs // sources)


def _within(kept: Mask, origin: NDArray[Any], most: int | None) -> Mask:
    if most is None:
        return kept
    for number in np.unique(origin):
        places = np.flatnonzero(kept & (origin == number))
        kept[places[most:]] = False
    return kept


class Quota:
    """Whether a source has given enough, so that the rest of it need not be read."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.seen: dict[int, set[int]] = {}

    def add(self, outcome: Outcome) -> None:
        if self.most is not None:
            self.seen.setdefault(outcome.origin, set()).update(outcome.columns["identity"].tolist())

    def full(self, origin: int) -> bool:
        return self.most is not None and len(self.seen.get(origin, ())) >= self.most
