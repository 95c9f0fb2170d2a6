"""Benchmarks of lm-evaluation-harness, if it is installed: a model's abilities before and after alignment."""

import io
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


@cache
def task_index(folder: Path | None, has_defaults: bool = True) -> Any:
    """The tasks in a folder, and the harness's own: thousands of files, which take it fifteen seconds of a core."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder) if folder else None, include_defaults=has_defaults)


def scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[str],
    limit: int | None,
    folder: Path | None,
    seed: int,
) -> dict[str, float]:
    """Scores by `task/metric`; ValueError for an unknown task. `folder` holds tasks besides the harness's own."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    own = task_index(folder, has_defaults=False) if folder else None
    manager = own if own and set(tasks) <= set(own.all_tasks) else task_index(folder)
    if missing := [task for task in tasks if task not in manager.all_tasks]:
        raise ValueError(f"lm-evaluation-harness has no task {', '.join(missing)}")
    seeds: Any = {f"{name}_seed": seed for name in ("random", "numpy_random", "torch_random", "fewshot_random")}
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # its own progress bars
        output = simple_evaluate(
            model=HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=8),
            tasks=list(tasks),
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            **seeds,
        )
    return {
        f"{task}/{name.partition(',')[0]}": round(float(value), 6)
        for task, row in output["results"].items()
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "stderr" not in name and "," in name
    }
