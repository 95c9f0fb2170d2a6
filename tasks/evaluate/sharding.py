"""Split the prompts and pairs of an evaluation into tasks for the workers of the group `evaluate`.

The tasks do not depend on the number of workers: each batch of prompts and each packed row is the same, and so are the
results, bit for bit on a CPU.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts.models import base_folder
from tasks.cluster.worker_pool import WorkerPool
from tasks.config.params import Cluster, Evaluate, Params
from tasks.config.paths import POLICY
from tasks.errors import UserError
from tasks.evaluate.evaluator import Evaluator, Sampling, Weights
from training.evaluation.samples import Answer, PairValues
from training.pairs.pair import Pair, pack

if TYPE_CHECKING:  # it loads torch
    from training.objectives.objective import Objective

BATCH = 50  # prompts per task
PACKED_TOGETHER = 512  # pairs
ROWS = 4  # packed rows per task

Report = Callable[[int], None]


def evaluator_pool(cluster: Cluster, stage: str) -> WorkerPool:
    return WorkerPool(cluster, cluster.evaluate, Evaluator, stage)


def base_and_policy(workers: WorkerPool, params: Params) -> tuple[Weights, Weights]:
    """This workspace's models. The base model is loaded as in training, where it computed the reference."""
    folder = workers.shared_path(base_folder(params.source.model))
    trained = workers.shared_path(Path.cwd(), POLICY) / POLICY
    base = Weights(folder, folder, params.evaluate.dtype, params.train.quantization)
    return base, replace(base, adapter=trained) if params.train.adapter else Weights(trained, folder, base.dtype)


def sample_answers(
    workers: WorkerPool, params: Evaluate, weights: Weights, prompts: Sequence[Sequence[int]], report: Report
) -> list[Answer]:
    """One answer per prompt by the configured engine; `report` gets the number of new answers."""
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))  # for little padding
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    if prompts and uses_vllm(workers, params, weights):  # it makes its own batches, and takes a minute to start
        count = min(workers.num_workers, len(prompts))
        batches = [list(range(number, len(prompts), count)) for number in range(count)]
    requests = [([prompts[number] for number in batch], params.seed) for batch in batches]
    answers: dict[int, Answer] = {}
    for task, drawn in draw_batches(workers, params, weights, requests):
        answers |= zip(batches[task], drawn, strict=True)
        report(len(drawn))
    return [answers[number] for number in range(len(prompts))]


def draw_batches(
    workers: WorkerPool, params: Evaluate, weights: Weights, batches: Sequence[tuple[Sequence[Sequence[int]], int]]
) -> Iterator[tuple[int, list[Answer]]]:
    """The answers to each batch of prompts, drawn with the batch's seed: (number of the batch, answers), as they come.

    A batch is one task. One for vLLM should be large, because each starts an engine.
    """
    settings = (params.max_new_tokens, params.temperature, params.top_p)
    tasks: list[Any] = [(weights, prompts, Sampling(*settings, seed)) for prompts, seed in batches]
    if not tasks or not uses_vllm(workers, params, weights):
        yield from ((number, answers) for number, (answers, *_) in workers.results("sample", tasks))
        return
    tasks = [(*task, workers.cluster.evaluate.gpu_memory_utilization) for task in tasks]
    for number, ((answers, held), *_) in workers.results("sample_by_vllm", tasks):
        if held > 0.1:
            print(f"{workers.stage}: the worker held {held:.1f} GiB of GPU memory while vLLM sampled", flush=True)
        yield number, answers


def uses_vllm(workers: WorkerPool, params: Evaluate, weights: Weights) -> bool:
    """Whether vLLM samples: never on a quantized base model, which it would load in 16 bits (the answers would be
    another policy's), and not with an adapter's `modules_to_save`, which it does not load.
    """
    if params.engine == "transformers" or (params.engine == "auto" and workers.zero3):
        return False
    if workers.zero3:
        raise UserError(
            "evaluate.engine is vllm, but evaluate.zero_stage in infra/cluster.yaml is 3, which shards the model with "
            "DeepSpeed. Set evaluate.engine to auto, or evaluate.zero_stage to 0."
        )
    ((installed, loads_adapter),) = workers.map("has_vllm", [(weights,)])
    if params.engine == "vllm" and not installed:
        raise UserError("evaluate.engine is vllm, which is not installed. Install it, or set evaluate.engine to auto.")
    return installed and loads_adapter and not weights.quantization


def token_values(
    workers: WorkerPool, weights: Weights, pairs: Sequence[Pair], report: Report = lambda count: None
) -> list[Any]:
    """Log-probability, entropy and collision of each pair's response tokens, chosen before rejected."""
    if not pairs:
        return []
    order = sorted(pairs, key=len)
    probes = [order[0], pairs[len(pairs) // 2], order[-1]]  # each worker checks the parity of its packed path on these
    batches, tasks = [], []
    for rows in _rows(pairs, workers.cluster.evaluate.row_tokens):
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
    task = (objective, pairs, values, workers.cluster.evaluate.row_tokens)
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
