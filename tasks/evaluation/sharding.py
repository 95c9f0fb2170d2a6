"""A model's work on many prompts or pairs, split into tasks for the workers of the group `evaluate`.

The tasks depend on the work alone. However many workers there are, each batch of prompts and each packed row is the
same, and so are the results, bit for bit on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tasks.errors import UserError
from tasks.evaluation.evaluator import Evaluator, Sampling, Weights
from tasks.machines.pool import Workers
from tasks.params import Cluster, Evaluate
from training.objective import Objective
from training.outputs import Answer, PairValues
from training.packing import Pair, pack

BATCH = 50  # prompts
AT_ONCE = 512  # pairs that are packed into rows together
ROWS = 4  # of a task
EXCHANGES = 64  # of a task for a reward model

Report = Callable[[int], None]


def evaluators(cluster: Cluster, stage: str) -> Workers:
    return Workers(cluster, cluster.evaluate, Evaluator, stage)


def sampled(
    workers: Workers, params: Evaluate, weights: Weights, prompts: Sequence[Sequence[int]], report: Report
) -> list[Answer]:
    """One answer per prompt by the chosen engine; `report` gets how many more are there.

    vLLM would load a quantized base in 16 bits: the answers would not be those of the policy that was trained.
    """
    how = Sampling(params.max_new_tokens, params.temperature, params.top_p, params.seed)
    if prompts and _by_vllm(workers, params, weights):
        return _sampled_by_vllm(workers, weights, prompts, how, report)
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))  # little padding
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    tasks = [(weights, [prompts[number] for number in batch], how) for batch in batches]
    return _in_order(batches, workers.map("sample", tasks, lambda task: report(len(batches[task]))))


def _by_vllm(workers: Workers, params: Evaluate, weights: Weights) -> bool:
    if params.engine == "transformers" or (params.engine == "auto" and workers.split):
        return False
    if workers.split:
        raise UserError(
            "evaluate.engine is vllm, and infra/cluster.yaml: evaluate.zero_stage is 3, which splits the model by "
            "DeepSpeed. Set evaluate.engine to auto, or evaluate.zero_stage to 0."
        )
    (there,) = workers.map("has_vllm", [()])
    if params.engine == "vllm" and not there:
        raise UserError("evaluate.engine is vllm, which is not installed. Install it, or set evaluate.engine to auto.")
    return there and not weights.quantization


def _sampled_by_vllm(
    workers: Workers, weights: Weights, prompts: Sequence[Sequence[int]], how: Sampling, report: Report
) -> list[Answer]:
    """One task for each worker: vLLM makes its own batches, and takes a minute to start."""
    count = min(workers.count, len(prompts))
    batches = [list(range(number, len(prompts), count)) for number in range(count)]
    memory = workers.cluster.evaluate.gpu_memory_utilization
    tasks = [(weights, [prompts[number] for number in batch], how, memory) for batch in batches]
    found = workers.map("sample_by_vllm", tasks, lambda task: report(len(batches[task])))
    if (held := max(gib for _, gib in found)) > 0.1:
        print(f"{workers.stage}: while vLLM sampled, the worker itself held {held:.1f} GiB of its GPU", flush=True)
    return _in_order(batches, [answers for answers, _ in found])


def token_values(
    workers: Workers, weights: Weights, pairs: Sequence[Pair], report: Report = lambda count: None
) -> list[Any]:
    """Log-probability, entropy and collision of each pair's response tokens, chosen before rejected."""
    if not pairs:
        return []
    order = sorted(pairs, key=len)
    probes = [order[0], pairs[len(pairs) // 2], order[-1]]  # on which each worker proves its packed path
    batches, tasks = [], []
    for rows in _rows(pairs, workers.cluster.evaluate.row_tokens):
        batch = [number for row in rows for number in row]
        place = {number: at for at, number in enumerate(batch)}
        batches.append(batch)
        own = [[place[number] for number in row] for row in rows]
        tasks.append((weights, [pairs[number] for number in batch], own, probes))
    found = workers.map("score", tasks, lambda task: report(len(batches[task])))
    if note := next((said for _, said in found if said), None):
        print(f"{workers.stage}: {note}", flush=True)
    return _in_order(batches, [values for values, _ in found])


def _rows(pairs: Sequence[Pair], row_tokens: int) -> list[list[list[int]]]:
    """Pair numbers by row, and so many rows by task."""
    rows: list[list[int]] = []
    for start in range(0, len(pairs), AT_ONCE):
        lengths = [len(pair) for pair in pairs[start : start + AT_ONCE]]
        rows += [[start + item for item in row] for row in pack(lengths, lengths, row_tokens)]
    return [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]


def logps(values: Sequence[Any], pairs: Sequence[Pair]) -> list[tuple[list[float], list[float]]]:
    """Of each pair's chosen and rejected tokens."""
    lists = [(found[0].tolist(), len(pair.chosen)) for found, pair in zip(values, pairs, strict=True)]
    return [(tokens[:chosen], tokens[chosen:]) for tokens, chosen in lists]


def pair_values(
    workers: Workers, objective: Objective, pairs: Sequence[Pair], values: Sequence[Any]
) -> tuple[dict[str, float], list[PairValues]]:
    """The training metrics over all pairs, and the values of each."""
    task = (objective, pairs, values, workers.cluster.evaluate.row_tokens)
    (found,) = workers.map("values", [task])
    return found


def answer_ratios(
    workers: Workers,
    policy: Weights,
    reference: Weights,
    answers: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
) -> list[float]:
    """log policy(y|x) - log reference(y|x) of each prompt's own answer; their mean estimates KL(policy, reference).

    An item is (prompt, the policy's answer, the reference's): a pair, so that its prompt is computed once for both.
    """
    pairs = [
        Pair(str(number), prompt, own, other, [1] * len(own), [1] * len(other))
        for number, (prompt, own, other) in enumerate(answers)
    ]
    live, stored = (logps(token_values(workers, weights, pairs), pairs) for weights in (policy, reference))
    return [sum(new[0]) - sum(old[0]) for new, old in zip(live, stored, strict=True)]


def rewards(
    workers: Workers, folder: str, label: str | None, exchanges: Sequence[tuple[str, str]], dtype: str
) -> list[float]:
    """A reward model's score of each (prompt, answer)."""
    parts = [exchanges[start : start + EXCHANGES] for start in range(0, len(exchanges), EXCHANGES)]
    found = workers.map("rewards", [(folder, label, part, dtype) for part in parts])
    return [score for part in found for score in part]


def _in_order(batches: Sequence[Sequence[int]], results: Sequence[Sequence[Any]]) -> list[Any]:
    """The results by their number, of batches of numbers."""
    numbered = {
        number: result
        for batch, some in zip(batches, results, strict=True)
        for number, result in zip(batch, some, strict=True)
    }
    return [numbered[number] for number in range(len(numbered))]
