"""The judges of `evaluate.judge`: the demo's program, a reward model, or a language model behind an endpoint.

A judge gives verdicts on single answers (`kind: true`, `reward: 1.3`), or decides which of two answers is better, or
both. An outcome is 1 if the second answer is better, 0 if the first is, 0.5 for a tie, None if the judge refused.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.artifacts import demo
from tasks.artifacts.models import HUB, hub_address, hub_snapshot, plain_folder
from tasks.cluster.worker_pool import WorkerPool
from tasks.config.addresses import local_path
from tasks.config.evaluate import Evaluate
from tasks.errors import UserError
from tasks.evaluate.endpoint import EndpointJudge

EXCHANGES = 64  # per task of a reward model

Verdicts = dict[str, Any]
Outcome = float | None


def verdicts(workers: WorkerPool, params: Evaluate, prompts: Sequence[str], answers: Sequence[str]) -> list[Verdicts]:
    """The judge's verdicts on each single answer."""
    if params.judge == "demo":
        return [dict(demo.judge(prompt, answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    if params.judge == "reward":
        return [{"reward": round(score, 4)} for score in _rewards(workers, params, prompts, answers)]
    return [{} for _ in answers]


def outcomes(
    params: Evaluate,
    prompts: Sequence[str],
    first: Sequence[Verdicts],
    second: Sequence[Verdicts],
    stage: str = "evaluate",
) -> list[Outcome] | None:
    """The outcome for each prompt's two answers, which have their text and verdicts; None without a judge."""
    if params.judge == "none":
        return None
    if params.endpoint:
        texts = [(p, a["text"], b["text"]) for p, a, b in zip(prompts, first, second, strict=True)]
        return EndpointJudge(params.endpoint).compare(texts, stage)
    scores = [(score(a), score(b)) for a, b in zip(first, second, strict=True)]
    return [0.5 if a == b else float(b > a) for a, b in scores]


def score(answer: Verdicts) -> float:
    """The reward, or the number of the program's verdicts that are true."""
    return float(answer["reward"]) if "reward" in answer else float(sum(answer[name] for name in ("kind", "correct")))


def _rewards(workers: WorkerPool, params: Evaluate, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
    assert params.reward_model is not None
    folder, exchanges = workers.shared_path(reward_folder(params)), list(zip(prompts, answers, strict=True))
    parts = [exchanges[start : start + EXCHANGES] for start in range(0, len(exchanges), EXCHANGES)]
    tasks = [(folder, params.reward_model.label, part, params.dtype) for part in parts]
    try:
        scores = workers.map("reward_scores", tasks)
    except ValueError as error:
        raise UserError(f"evaluate.reward_model: {params.reward_model.model}: {error}.") from error
    return [score for part in scores for score in part]


def reward_folder(params: Evaluate) -> Path:
    assert params.reward_model is not None
    address = params.reward_model.model
    folder = hub_snapshot(*hub_address(address)) if address.startswith(HUB) else local_path(address)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"evaluate.reward_model.model: {address} contains no model (no config.json). Set it to the folder of a "
            "sequence-classification model, or to `hub:owner/name@revision`."
        )
    return plain_folder(folder)
