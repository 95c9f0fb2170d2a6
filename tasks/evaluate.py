"""Stage `evaluate`: the policy on held-out pairs, and its answers beside the base model's on held-out prompts.

Writes data/metrics/evaluate.json (the training metrics' names, and `samples`) and data/metrics/samples.jsonl.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from tasks import stage
from tasks.files import write_json
from tasks.judges import JUDGES
from tasks.models import base_folder
from tasks.pairs import read_pairs, read_rows, with_reference
from tasks.params import Evaluate, load_cluster, load_params
from tasks.paths import METRICS, PAIRS, POLICY
from tasks.progress import Bar
from tasks.tracking import Run, evaluation
from training.objective import Objective


def evaluate(run: Run) -> None:
    params = load_params()
    from training import adapters, loop
    from training.model import best_device, load_model, load_tokenizer
    from training.proof import make_scorer

    device, folder = best_device(), base_folder(params.source.model)
    tokenizer = load_tokenizer(folder)
    prompts = _prompts(params.evaluate.prompts)
    base = load_model(folder, params.evaluate.dtype, device)
    with Bar("evaluate", 2 * len(prompts), "answers") as bar:
        before = _sample(base, tokenizer, prompts, params.evaluate, bar, 0)
        policy: Any
        if params.train.adapter:
            policy = adapters.load_adapter(base, POLICY)
        else:
            policy = load_model(POLICY, params.evaluate.dtype, device)
        after = _sample(policy, tokenizer, prompts, params.evaluate, bar, len(prompts))
    pairs = read_pairs("eval")
    objective = Objective(params.train.loss, params.train.loss_options())
    pairs = with_reference(pairs, "eval") if objective.needs_reference else pairs
    scorer = make_scorer(policy, pairs, device)
    metrics: dict[str, Any] = loop.evaluate(scorer, objective, pairs, load_cluster().reference.row_tokens, device)
    del metrics["tokens"]
    if prompts:
        metrics["samples"] = {"base": _summary(before), "policy": _summary(after)}
    _publish(run, metrics, prompts, before, after)


def _prompts(count: int) -> list[dict[str, Any]]:
    """The first held-out prompts, each once."""
    rows = {row["prompt"]: row for row in reversed(read_rows(PAIRS / "eval.parquet"))}
    return list(reversed(rows.values()))[:count]


def _sample(
    model: Any, tokenizer: Any, prompts: list[dict[str, Any]], params: Evaluate, bar: Bar, done: int
) -> list[dict[str, Any]]:
    from training.sampling import sample

    answers = sample(
        model,
        tokenizer,
        [row["prompt_ids"] for row in prompts],
        params.max_new_tokens,
        params.temperature,
        params.top_p,
        params.seed,
        report=lambda count: bar.update(done + count),
    )
    judge = JUDGES[params.judge]
    return [
        {
            "text": answer.text,
            "tokens": answer.tokens,
            "finished": answer.finished,
            "words": len(answer.text.split()),
            **judge(row["prompt"], answer.text),
        }
        for row, answer in zip(prompts, answers, strict=True)
    ]


def _summary(answers: list[dict[str, Any]]) -> dict[str, float]:
    names = [name for name in answers[0] if name != "text"]
    return {name: round(mean(float(answer[name]) for answer in answers), 4) for name in names}


def _publish(
    run: Run,
    metrics: dict[str, Any],
    prompts: list[dict[str, Any]],
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
) -> None:
    samples: Path = METRICS / "samples.jsonl"
    write_json(METRICS / "evaluate.json", metrics)
    lines = [
        {"prompt": row["prompt"], "base": old, "policy": new}
        for row, old, new in zip(prompts, before, after, strict=True)
    ]
    samples.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    run.summary(evaluation(metrics))
    run.artifact(METRICS / "evaluate.json")
    run.artifact(samples)
    print(f"evaluate: held-out reward accuracy {metrics['rewards/accuracies']:.3f} on {int(metrics['pairs'])} pairs")


if __name__ == "__main__":
    stage.main(evaluate)
