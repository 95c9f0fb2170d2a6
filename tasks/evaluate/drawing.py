"""Draw answers on the workers: prompts become tasks that do not depend on the number of workers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tasks.cluster.worker_pool import WorkerPool
from tasks.config.cluster import Cluster
from tasks.config.evaluate import Evaluate
from tasks.errors import UserError
from tasks.evaluate.sampler import Sampler, Sampling, Weights
from training.evaluation.samples import Answer

BATCH = 50  # prompts per task

Report = Callable[[int], None]


def sampler_pool(cluster: Cluster, stage: str) -> WorkerPool:
    return WorkerPool(cluster, cluster.inference, Sampler, stage)


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
    tasks = [(*task, workers.cluster.inference.gpu_memory_utilization) for task in tasks]
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
            "evaluate.engine is vllm, but inference.zero_stage in infra/cluster.yaml is 3, which shards the model with "
            "DeepSpeed. Set evaluate.engine to auto, or inference.zero_stage to 0."
        )
    ((installed, loads_adapter),) = workers.map("has_vllm", [(weights,)])
    if params.engine == "vllm" and not installed:
        raise UserError("evaluate.engine is vllm, which is not installed. Install it, or set evaluate.engine to auto.")
    return installed and loads_adapter and not weights.quantization
