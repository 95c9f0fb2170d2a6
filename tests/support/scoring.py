"""Log-probabilities of all pairs in this process, as the workers of the reference stage compute them."""

from collections.abc import Sequence

import torch
from torch import nn

from training.rows.pair import Pair
from training.scoring.logps import Scores, score_rank_share


def score_pairs(scorer: nn.Module, pairs: Sequence[Pair], row_tokens: int, device: torch.device) -> list[Scores]:
    """Log-probabilities of each pair's chosen and rejected tokens, in the order of the pairs."""
    scores = score_rank_share(scorer, pairs, row_tokens, device, rank=0, world=1)
    return [scores[index] for index in range(len(pairs))]
