"""The training metrics on held-out pairs, for the evaluations during training and for the evaluate stage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from training.distributed.data_parallel import data_rank
from training.objectives import global_batch
from training.objectives.metrics import MetricWindow, combine_kinds, kind_of, row_loss
from training.objectives.objective import Objective
from training.pairs import batches
from training.pairs.packing import PackedRow, build_row
from training.pairs.pair import Pair
from training.pairs.pair_columns import PairColumns, columns_of

HeldOut = Mapping[str, Sequence[Pair]]  # held-out pairs by their source


def evaluate_sets(
    policy: nn.Module,
    objective: Objective,
    held_out: HeldOut,
    row_tokens: int,
    device: torch.device,
    reward_mean: Tensor | float,
) -> dict[str, float]:
    """`eval/METRIC` over all held-out pairs, and `eval/SOURCE/METRIC` if there are several sources. A collective."""
    by_source = {
        source: evaluate_pairs(policy, objective, pairs, row_tokens, device, reward_mean=reward_mean)
        for source, pairs in held_out.items()
    }
    values = {f"eval/{name}": value for name, value in _mean_of_sets(by_source, held_out).items()}
    if len(by_source) > 1:
        for source, means in by_source.items():
            values |= {f"eval/{source}/{name}": v for name, v in means.items() if name not in ("pairs", "tokens")}
    return values


def _mean_of_sets(by_source: Mapping[str, Mapping[str, float]], held_out: HeldOut) -> dict[str, float]:
    """Means over the pairs of all sets, as if they were one: losses by the pairs' weights, the rest by their number."""
    columns = {source: columns_of(pairs) for source, pairs in held_out.items()}
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for values in by_source.values() for name in values):
        measured = {source: values[name] for source, values in by_source.items() if name in values}
        shares = {source: _share(name, columns[source]) for source in measured}
        if name not in ("pairs", "tokens"):
            means[name] = sum(measured[source] * share for source, share in shares.items()) / sum(shares.values())
    return combine_kinds(means)


def _share(name: str, columns: PairColumns) -> float:
    """The share of a set in the mean of a metric."""
    if name.startswith("loss"):
        return sum(columns.weight.tolist())
    kind = kind_of(name) if columns.sign.any() else None
    return float(len(columns.sign) if kind is None else (columns.sign == {"chosen": 1, "rejected": -1}[kind]).sum())


@torch.no_grad()
def evaluate_pairs(
    policy: nn.Module,
    objective: Objective,
    pairs: Sequence[Pair],
    row_tokens: int,
    device: torch.device,
    *,
    reward_mean: Tensor | float = 0.0,
    on_row: Callable[[PackedRow, dict[str, Tensor]], None] | None = None,
) -> dict[str, float]:
    """Means over all pairs, as one global batch; `on_row` gets the values of each row's pairs. A collective."""
    groups = list(batches.rank_rows_of_all(columns_of(pairs).lengths, row_tokens, *data_rank()))
    training = policy.training
    policy.eval()

    def rows() -> Iterator[PackedRow]:
        for indices, is_filler in chain.from_iterable(groups):
            yield build_row(pairs, indices, is_filler).to(device)

    contexts = global_batch.global_batch_values(policy, objective, rows(), range(len(pairs)), device)
    shared: dict[str, Any] = {}
    if objective.reads_kl and (columns_of(pairs).sign != 0).any():
        shared = global_batch.batch_kl(policy, objective, rows(), range(len(pairs)), device)
    window = MetricWindow(device)
    for number, row in enumerate(rows()):
        _, values, _ = row_loss(policy, objective, row, reward_mean=reward_mean, **contexts.get(number, {}), **shared)
        window.add(values, row.weight, len(row.input_ids), row.is_filler)
        if on_row and not row.is_filler:
            on_row(row, values)
    window.end_step()
    policy.train(training)
    return window.means()
