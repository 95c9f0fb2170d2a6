"""Sequence parallelism: the ranks of a group compute the same row, each of them a part of its tokens (Ulysses).

Rank r of N has the tokens r, r + N, r + 2N and so on. So each rank gets its share of every response, and with it of the
vocabulary head. Only attention reads other tokens: before it, an all-to-all exchanges all heads of a rank's tokens for
a rank's heads of all tokens, and another one after it reverses this. All ranks get the log-probabilities of the whole
row and compute the same loss. A gradient flows only to the rank that computed a value, so the sum of the ranks'
gradients is that of the row.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives  # torch can compile them
from torch.distributed.distributed_c10d import GroupName
from torch.nn.functional import pad

from training.distributed.data_parallel import set_group_size


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share the tokens of a row, and this rank's number among them."""

    name: GroupName  # of the process group
    rank: int
    size: int

    def own(self, values: Tensor) -> Tensor:
        """This rank's part of (tokens,), padded by 0 so that all ranks have equally many."""
        return pad(values, (0, -len(values) % self.size))[self.rank :: self.size]

    def own_index(self, positions: Tensor) -> Tensor:
        """Which of these token positions are this rank's. Waits for the device."""
        return (positions % self.size == self.rank).nonzero()[:, 0]

    def collect(self, values: Tensor, index: Tensor, count: int) -> Tensor:
        """(count, ...) of all ranks, from this rank's values at `index`. A collective."""
        own = values.new_zeros(count, *values.shape[1:]).index_copy(0, index, values)
        total = collectives.all_reduce(own.detach(), "sum", self.name)
        is_own = torch.zeros(count, *[1] * (values.dim() - 1), dtype=torch.bool, device=own.device)
        return torch.where(is_own.index_fill(0, index, True), own, total)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor, tokens: int) -> list[Tensor]:
        """(1, heads, own tokens, size) each to (1, own heads, tokens, size), without padding. A collective."""
        repeats = 1  # of the key heads, so that the ranks have equally many; torch cannot compile math.gcd
        while repeats * key.shape[1] % self.size:
            repeats += 1
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        parts = [part[0].unflatten(0, (self.size, -1)).transpose(1, 2) for part in (query, key, value)]
        received = self._exchange(torch.cat([part.flatten(2) for part in parts], 2))  # (ranks, own tokens, values)
        columns = received.transpose(0, 1).flatten(0, 1)[:tokens].split([part[0, 0].numel() for part in parts], 1)
        both = zip(columns, parts, strict=True)
        return [column.unflatten(1, part.shape[2:]).transpose(0, 1)[None] for column, part in both]

    def to_tokens(self, out: Tensor) -> Tensor:
        """(1, tokens, own heads, size) to (1, own tokens, heads, size). A collective."""
        padded = pad(out[0], (0, 0, 0, 0, 0, -out.shape[1] % self.size))
        received = self._exchange(padded.unflatten(0, (-1, self.size)).transpose(0, 1))
        return received.transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send parts[n] to rank n; the parts from each rank. Its gradient takes the same way back."""
        return collectives.all_to_all_single_autograd(parts.contiguous(), None, None, self.name)


_group: SequenceGroup | None = None


def start_sequence_groups(size: int) -> None:
    """Let every `size` consecutive ranks share rows from now on. A collective."""
    global _group
    _group = None
    set_group_size("sequence_parallel", size)
    if size > 1:
        group, _ = dist.new_subgroups(size)
        _group = SequenceGroup(group.group_name, dist.get_rank() % size, size)


def sequence_group() -> SequenceGroup | None:
    """This rank's group; None if each rank computes whole rows."""
    return _group
