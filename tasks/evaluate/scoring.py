"""Score pairs on the workers: pairs become tasks for the workers of the group `inference`.

The tasks do not depend on the number of workers: each packed row is the same, and so are the results, bit for bit on
a CPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts.models import base_folder
from tasks.cluster.worker_pool import WorkerPool
from tasks.config.cluster import Cluster
from tasks.config.params import Params
from tasks.config.paths import POLICY
from tasks.evaluate.drawing import Report
from tasks.evaluate.evaluator import Evaluator
from tasks.evaluate.sampler import Weights
from training.evaluation.samples import PairValues
from training.pairs.pair import Pair, pack

if TYPE_CHECKING:  # it loads torch
    from training.objectives.objective import Objective

PACKED_TOGETHER = 512  # pairs
ROWS = 4  # packed rows per task


def evaluator_pool(cluster: Cluster, stage: str) -> WorkerPool:
    return WorkerPool(cluster, cluster.inference, Evaluator, stage)


def base_and_policy(workers: WorkerPool, params: Params) -> tuple[Weights, Weights]:
    """This workspace's models. The base model is loaded as in training, where it computed the reference."""
    folder = workers.shared_path(base_folder(params.source.model))
    trained = workers.shared_path(Path.cwd(), POLICY) / POLICY
    base = Weights(folder, folder, params.evaluate.dtype, params.train.quantization)
    return base, replace(base, adapter=trained) if params.train.adapter else Weights(trained, folder, base.dtype)


def token_values(
    workers: WorkerPool, weights: Weights, pairs: Sequence[Pair], report: Report = lambda count: None
) -> list[Any]:
    """Log-probability, entropy and collision of each pair's response tokens, chosen before rejected."""
    if not pairs:
        return []
    order = sorted(pairs, key=len)
    probes = [order[0], pairs[len(pairs) // 2], order[-1]]  # each worker checks the parity of its packed path on these
    batches, tasks = [], []
    for rows in _rows(pairs, workers.cluster.inference.row_tokens):
        batch = [number for row in rows for number in row]
        index = {number: position for position, number in enumerate(batch)}
        batches.append(batch)
        task_rows = [[index[number] for number in row] for row in rows]
        tasks.append((weights, [pairs[number] for number in batch], task_rows, probes))
    values: dict[int, Any] = {}
    results = workers.map("score", tasks, lambda task: report(len(batches[task])))
    for batch, (scored, _) in zip(batches, results, strict=True):
        values |= zip(batch, scored, strict=True)
    if note := next((note for _, note in results if note), None):
        print(f"{workers.stage}: {note}", flush=True)
    return [values[number] for number in range(len(pairs))]


def _rows(pairs: Sequence[Pair], row_tokens: int) -> list[list[list[int]]]:
    """The packed rows of each task; a row is a list of pair numbers."""
    rows: list[list[int]] = []
    for start in range(0, len(pairs), PACKED_TOGETHER):
        lengths = [len(pair) for pair in pairs[start : start + PACKED_TOGETHER]]
        rows += [[start + item for item in row] for row in pack(lengths, lengths, row_tokens)]
    return [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]


def split_logps(values: Sequence[Any], pairs: Sequence[Pair]) -> list[tuple[list[float], list[float]]]:
    """The log-probabilities of each pair's chosen and rejected tokens."""
    lists = [(tokens[0].tolist(), len(pair.chosen_ids)) for tokens, pair in zip(values, pairs, strict=True)]
    return [(logps[:chosen], logps[chosen:]) for logps, chosen in lists]


def pair_values(
    workers: WorkerPool, objective: "Objective", pairs: Sequence[Pair], values: Sequence[Any]
) -> tuple[dict[str, float], list[PairValues]]:
    """The training metrics over all pairs, and the values of each pair."""
    task = (objective, pairs, values, workers.cluster.inference.row_tokens)
    (result,) = workers.map("pair_values", [task])
    return result


def answer_log_ratios(
    workers: WorkerPool,
    policy: Weights,
    reference: Weights,
    answers: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
) -> list[float]:
    """log policy(y|x) - log reference(y|x) of the policy's answers; their mean estimates KL(policy, reference).

    An item is (prompt, the policy's answer, the reference's answer): a pair, so that its prompt is computed once.
    """
    pairs = [
        Pair(str(number), prompt, own, other, [1] * len(own), [1] * len(other))
        for number, (prompt, own, other) in enumerate(answers)
    ]
    live, stored = (split_logps(token_values(workers, weights, pairs), pairs) for weights in (policy, reference))
    return [sum(new[0]) - sum(old[0]) for new, old in zip(live, stored, strict=True)]
