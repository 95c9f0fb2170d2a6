"""Data parallelism: which rows a rank computes. The ranks of a sequence or tensor parallel group compute the same."""

import math

import torch.distributed as dist
from torch import Tensor

_sizes: dict[str, int] = {}  # by option of actor_train: the consecutive ranks that compute the same rows


def set_group_size(option: str, size: int) -> None:
    """Let every `size` consecutive ranks compute the same rows from now on."""
    _sizes.pop(option, None)
    if dist.get_world_size() % size:
        raise ValueError(f"actor_train.{option} {size} does not divide the number of workers, {dist.get_world_size()}")
    _sizes[option] = size


def data_rank() -> tuple[int, int]:
    """The number of this rank's group, which computes rows of its own, and the number of groups."""
    if not dist.is_initialized():
        return 0, 1
    size = math.prod(_sizes.values())
    return dist.get_rank() // size, dist.get_world_size() // size


def sum_over_groups(values: Tensor) -> None:
    """Sum in place over the groups, whose ranks have equal values. The same on all ranks. A collective."""
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= math.prod(_sizes.values())
