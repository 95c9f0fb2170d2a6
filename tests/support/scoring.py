"""Scorers and log-probabilities in this process, as the workers of the stages make them."""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

from training.pairs.pair import Pair
from training.scoring.logps import Scorer, Scores, score_rank_share
from training.scoring.parity import select_scoring_path


def _to_stderr(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def make_scorer(
    model: nn.Module, pairs: Sequence[Pair], device: torch.device, notify: Callable[[str], None] = _to_stderr
) -> Scorer:
    """A scorer of the model on its fastest correct path; a fallback is passed to `notify`."""
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    if note := select_scoring_path(scorer, pairs, device):
        notify(note)
    return scorer


def score_pairs(scorer: nn.Module, pairs: Sequence[Pair], row_tokens: int, device: torch.device) -> list[Scores]:
    """Log-probabilities of each pair's chosen and rejected tokens, in the order of the pairs."""
    scores = score_rank_share(scorer, pairs, row_tokens, device, rank=0, world=1)
    return [scores[index] for index in range(len(pairs))]
