"""Which pairs are kept, decided over all chunks: no duplicates, and of the rest a random sample.

`prepare.max_pairs` is shared among the sources. The pairs that come first by `sample_rank` are taken, so the sample
depends on the seed and the pairs alone. Pairs that come late need not even be tokenized.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tasks.config.prepare import Prepare
from tasks.prepare.card.row_stats import RowStats
from tasks.prepare.chunks import COLUMNS, ChunkResult, RowSource
from tasks.prepare.dedup import Columns, Mask, find_duplicates


class Processed(NamedTuple):
    """All rows after the checks. The tokens of the pairs are in the shards."""

    sources: list[RowSource]
    stats: RowStats
    results: list[ChunkResult]
    columns: Columns
    kept: Mask  # of the pairs in `columns`


def gather_columns(results: Sequence[ChunkResult]) -> Columns:
    """The columns of all chunks end to end, with the index of each pair's chunk and source."""
    columns = {name: np.concatenate([result.columns[name] for result in results]) for name in (*COLUMNS, "signature")}
    sizes = [len(result.columns["row"]) for result in results]
    columns["chunk"] = np.repeat(np.arange(len(results)), sizes)
    columns["source"] = np.repeat(np.array([result.file.source for result in results], dtype=np.int64), sizes)
    columns["row"] = columns["chunk"] << 32 | columns["row"]  # row numbers are unique within a file only
    return columns


def select_pairs(
    columns: Columns, sources: Sequence[RowSource], stats: RowStats, params: Prepare
) -> tuple[Mask, dict[str, Mask]]:
    """A mask of the pairs to keep, and by reason those that clash with other pairs. `stats` counts the latter."""
    duplicates = find_duplicates(columns, params.near_duplicates)
    for name, mask in duplicates.items():
        for source, count in Counter(columns["source"][mask].tolist()).items():
            stats.rejected[sources[source].name][name] += count
    kept = ~np.logical_or.reduce([*duplicates.values()])
    limit = pairs_per_source(params.max_pairs, len(sources))
    for number, source in enumerate(sources if limit is not None else ()):
        own = np.flatnonzero(kept & (columns["source"] == number))
        rest = own[np.argsort(columns["rank"][own], kind="stable")[limit:]]
        kept[rest] = False
        if len(rest):
            stats.rejected[source.name]["not_sampled"] += len(rest)
    return kept, duplicates


def pairs_per_source(max_pairs: int | None, sources: int) -> int | None:
    """Every source of a mixture gives the same number of pairs at most."""
    return None if max_pairs is None else max(1, max_pairs // sources)


def first_samples(sources: Sequence[RowSource], rows: Sequence[int], max_pairs: int | None) -> list[RowSource]:
    """The sources with the share of their pairs that is probably twice what `max_pairs` takes."""
    limit = pairs_per_source(max_pairs, len(sources))
    if limit is None:
        return list(sources)
    shares = [2.0 * limit / (source.share * count) for source, count in zip(sources, rows, strict=True)]
    return [replace(source, sampled=min(1.0, share)) for source, share in zip(sources, shares, strict=True)]


def larger_samples(
    sources: Sequence[RowSource], columns: Columns, kept: Mask, max_pairs: int | None
) -> list[RowSource] | None:
    """The sources with larger samples where too few pairs were valid; None if no source needs more."""
    counts, limit = Counter(columns["source"][kept].tolist()), pairs_per_source(max_pairs, len(sources)) or 0
    short = [source.sampled < 1.0 and counts[number] < limit for number, source in enumerate(sources)]
    if not any(short):
        return None
    return [
        replace(s, sampled=min(1.0, 4.0 * s.sampled)) if more else s for s, more in zip(sources, short, strict=True)
    ]
