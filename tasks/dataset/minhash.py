"""Near-duplicates by MinHash: texts whose sets of word triples overlap much have signatures that agree in many places.

A signature has 64 values; the share in which two agree estimates the Jaccard similarity of the texts. Texts that agree
in all 4 values of one of 16 bands are compared: at similarity 0.8 that happens in 99.98% of the cases, at 0.3 in 12%.
"""

import re
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

VALUES, BANDS = 64, 16
WORDS = 3
_WORD = re.compile(r"\w+")
_rng = np.random.default_rng(20)
_FACTORS = _rng.integers(1 << 63, 1 << 64, VALUES, dtype=np.uint64) | np.uint64(1)
_OFFSETS = _rng.integers(0, 1 << 64, VALUES, dtype=np.uint64)


def signature(text: str) -> NDArray[np.uint32]:
    """64 minima of hash functions over the text's word triples."""
    words = _WORD.findall(text.lower())
    triples = {" ".join(words[n : n + WORDS]) for n in range(max(1, len(words) - WORDS + 1))}
    hashes = np.fromiter((crc32(triple.encode()) for triple in triples), dtype=np.uint64, count=len(triples))
    mixed = (hashes[:, None] * _FACTORS + _OFFSETS) >> np.uint64(32)  # multiply-shift: the overflow is meant
    return mixed.min(axis=0).astype(np.uint32)


def near_duplicates(signatures: NDArray[np.uint32], least: float) -> NDArray[np.bool_]:
    """True for each row that is at least so similar to an earlier one, (rows,) from (rows, 64)."""
    near = np.zeros(len(signatures), dtype=bool)
    width = VALUES // BANDS
    for band in range(BANDS):
        halves = np.ascontiguousarray(signatures[:, band * width : (band + 1) * width]).view(np.uint64)  # (rows, 2)
        keys = halves[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ halves[:, 1]
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        earliest = first[group]  # the first row with the same key
        rows = np.flatnonzero(earliest < np.arange(len(signatures)))
        alike = (signatures[rows] == signatures[earliest[rows]]).mean(axis=1)
        near[rows[alike >= least]] = True
    return near
