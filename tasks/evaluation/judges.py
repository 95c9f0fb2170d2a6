"""Who says whether an answer is good: a program, a reward model, or a language model behind an endpoint.

A judge gives each answer verdicts of its own (`kind: true`, `reward: 1.3`), or says which of two answers is better, or
both. An outcome is 1 where the second answer is better, 0 where the first is, 0.5 for a tie, None where it refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tasks.dataset import demo
from tasks.errors import UserError
from tasks.evaluation import sharding
from tasks.evaluation.endpoint import Judge
from tasks.machines.pool import Workers
from tasks.models import HUB, hub_address, hub_snapshot, local_path
from tasks.params import Evaluate

Verdicts = dict[str, Any]
Outcome = float | None
Report = Callable[[int], None]


def verdicts(workers: Workers, params: Evaluate, prompts: Sequence[str], answers: Sequence[str]) -> list[Verdicts]:
    """What the judge says of each answer alone."""
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
    report: Report = lambda done: None,
) -> list[Outcome] | None:
    """Of each prompt's two answers, given with their text and verdicts; None where the judge compares nothing."""
    if params.judge == "none":
        return None
    if params.endpoint:
        texts = list(zip(prompts, _texts(first), _texts(second), strict=True))
        return Judge(params.endpoint).compare(texts, report)
    return [_better(one, other) for one, other in zip(first, second, strict=True)]


def _better(first: Verdicts, second: Verdicts) -> float:
    """By the reward, or by how many of the program's verdicts hold."""
    one, other = _score(first), _score(second)
    return 0.5 if one == other else float(other > one)


def _score(answer: Verdicts) -> float:
    return float(answer["reward"]) if "reward" in answer else float(sum(answer[name] for name in ("kind", "correct")))


def _texts(answers: Sequence[Verdicts]) -> list[str]:
    return [answer["text"] for answer in answers]


def _rewards(workers: Workers, params: Evaluate, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
    assert params.reward_model is not None
    address, label = params.reward_model.model, params.reward_model.label
    folder = hub_snapshot(*hub_address(address)) if address.startswith(HUB) else local_path(address)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"evaluate.reward_model.model: there is no model in {address} (no config.json). Give the folder of a "
            "sequence-classification model, or `hub:owner/name@revision`."
        )
    try:
        exchanges = list(zip(prompts, answers, strict=True))
        return sharding.rewards(workers, str(workers.folder(folder)), label, exchanges, params.dtype)
    except ValueError as error:
        raise UserError(f"evaluate.reward_model: {address}: {error}.") from error
