"""Which token sees which in a packed row."""

import torch
from torch import Tensor

from training.packing import PROMPT, Row


def row_mask(row: Row) -> Tensor:
    """Dense mask, (1, 1, queries, keys): earlier tokens of the own pair, of its prompt or of the own response."""
    earlier = torch.ones(len(row.pair), len(row.pair), dtype=torch.bool, device=row.pair.device).tril()
    same_pair = row.pair[:, None] == row.pair[None, :]
    visible_part = (row.part[None, :] == PROMPT) | (row.part[:, None] == row.part[None, :])
    return (earlier & same_pair & visible_part)[None, None]
