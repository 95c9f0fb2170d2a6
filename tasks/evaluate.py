"""Stage `evaluate`: the policy on held-out pairs, and its answers beside the base model's on held-out prompts.

Ray actors of the worker group `evaluate` hold the models; this process holds none. Where one worker on this machine is
configured, the worker is this process itself (tasks/machines/pool.py).

Writes data/metrics: evaluate.json (the training metrics' names, intervals, win rate, health), samples.jsonl (answers
side by side), pairs.jsonl (every pair, worst disagreement first), calibration.csv and margins.csv (DVC plots).
"""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks import stage
from tasks.dataset.pairs import read_pairs, read_rows, with_reference
from tasks.evaluation.answers import Record, Row, held_out_prompts, records, side_by_side
from tasks.evaluation.bootstrap import mean_interval
from tasks.evaluation.evaluator import Weights
from tasks.evaluation.held_out import calibration, disagreements, held_out, histogram
from tasks.evaluation.sharding import answer_ratios, evaluators, pair_values, sampled, token_values
from tasks.files import write_json
from tasks.machines.cluster import warn_of_slow_dtype
from tasks.machines.pool import Workers
from tasks.models import base_folder, local_path
from tasks.params import Evaluate, Params, load_cluster, load_params
from tasks.paths import METRICS, PAIRS, POLICY
from tasks.progress import Bar
from tasks.reports import plots
from tasks.tracking.journal import Run, curves, evaluation
from training.objective import Objective
from training.outputs import Answer, PairValues
from training.packing import Pair


def evaluate(run: Run) -> None:
    params, cluster = load_params(), load_cluster()
    rows, pairs = read_rows(PAIRS / "eval.parquet"), _pairs(params)
    prompts = held_out_prompts(rows, params.evaluate.prompts)
    ids, total = [row["prompt_ids"] for row in prompts], 2 * len(prompts) + len(pairs)
    with evaluators(cluster, "evaluate") as workers:
        base, policy = _models(params, workers)
        with Bar("evaluate", total, "answers and pairs") as bar:
            before, after = (sampled(workers, params.evaluate, model, ids, bar.more) for model in (base, policy))
            values = token_values(workers, policy, pairs, bar.more)
        metrics, found = _on_pairs(params, workers, pairs, values, rows)
        listed = disagreements(found, rows, lambda ids: workers.map("texts", [(base.tokenizer, ids)])[0])
        drifted = _kl(params, workers, (base, policy), prompts, before, after) if prompts else None
        able = _harness(params.evaluate, workers, base, policy) if params.evaluate.harness else None
        said = [records(workers, params.evaluate, prompts, answers) for answers in (before, after)] if prompts else None
    lines: list[dict[str, Any]] = []
    if drifted and said:  # a judge behind an endpoint may take hours, which no GPU waits for
        judged, lines = _judge(params.evaluate, prompts, *said)
        metrics = _joined(metrics, judged, drifted)
    metrics |= {"harness": able} if able else {}
    _publish(run, metrics, lines, listed)
    _plots(run, calibration(found), histogram(found))
    _tell(metrics)


def _pairs(params: Params) -> list[Pair]:
    pairs = read_pairs("eval")
    return with_reference(pairs, "eval") if params.train.needs_reference else pairs


def _models(params: Params, workers: Workers) -> tuple[Weights, Weights]:
    """Base and policy. The base is as training had it: the adapter was trained on it, the reference values are its."""
    warn_of_slow_dtype("evaluate", params.evaluate.dtype, workers.cluster.evaluate.gpus_per_worker)
    folder = str(workers.folder(base_folder(params.source.model)))
    base = Weights(folder, folder, params.evaluate.dtype, params.train.quantization)
    trained = str(workers.folder(Path.cwd(), POLICY) / POLICY)
    if params.train.adapter:
        return base, replace(base, adapter=trained)
    return base, Weights(trained, folder, params.evaluate.dtype)


def _on_pairs(
    params: Params, workers: Workers, pairs: list[Pair], tokens: list[Any], rows: list[Row]
) -> tuple[dict[str, Any], list[PairValues]]:
    """The training metrics on held-out pairs, and what each pair adds to them."""
    objective = Objective(params.train.loss, params.train.loss_options())
    means, values = pair_values(workers, objective, pairs, tokens)
    values = [
        replace(value, chosen_tokens=sum(row["chosen_mask"]), rejected_tokens=sum(row["rejected_mask"]))
        for value, row in zip(values, rows, strict=True)  # of the responses alone, where the prompt counts too
    ]
    del means["tokens"]
    return {**means, **held_out(values, rows, params.evaluate.seed)}, values


def _harness(params: Evaluate, workers: Workers, base: Weights, policy: Weights) -> dict[str, dict[str, float]]:
    """What both can do besides, by lm-evaluation-harness: a task of the harness is one of ours."""
    assert params.harness is not None
    folder = str(workers.folder(local_path(params.harness.folder))) if params.harness.folder else None
    more = (params.harness.limit, folder, params.seed)
    models = {"base": base, "policy": policy}
    tasks = [(name, task) for name in models for task in params.harness.tasks]
    found: dict[str, dict[str, float]] = {name: {} for name in models}
    for (name, _), scores in zip(
        tasks, workers.map("harness", [(models[name], [task], *more) for name, task in tasks]), strict=True
    ):
        found[name] |= scores
    return found


def _judge(
    params: Evaluate, prompts: list[Row], before: list[Record], after: list[Record]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if params.judge != "endpoint":
        return side_by_side(params, prompts, before, after)
    with Bar("evaluate", len(prompts), "judgements") as bar:
        return side_by_side(params, prompts, before, after, bar.update)


def _kl(
    params: Params,
    workers: Workers,
    models: tuple[Weights, Weights],
    prompts: list[Row],
    before: list[Answer],
    after: list[Answer],
) -> dict[str, Any]:
    """KL(policy, base) per answer, on what the policy really says."""
    base, policy = models
    asked = [(row["prompt_ids"], new.ids, old.ids) for row, new, old in zip(prompts, after, before, strict=True)]
    ratios = answer_ratios(workers, policy, base, asked)
    found = mean_interval(ratios, [row["prompt"] for row in prompts], params.evaluate.seed)
    return {"kl/answers": found.mean, "intervals": {"kl/answers": found.bounds()}}


def _joined(*parts: dict[str, Any]) -> dict[str, Any]:
    intervals = {name: bounds for part in parts for name, bounds in part["intervals"].items()}
    return {**{name: value for part in parts for name, value in part.items()}, "intervals": intervals}


def _publish(run: Run, metrics: dict[str, Any], lines: list[Any], pairs: list[Any]) -> None:
    write_json(METRICS / "evaluate.json", metrics)
    _write_lines(METRICS / "samples.jsonl", lines)
    _write_lines(METRICS / "pairs.jsonl", pairs)
    run.summary(evaluation(metrics), max(curves(), default=0))
    for name in ("evaluate.json", "samples.jsonl", "pairs.jsonl"):
        run.artifact(METRICS / name)


def _plots(run: Run, bins: list[dict[str, float]], margins: list[dict[str, float]]) -> None:
    for name, content in (("calibration", bins), ("margins", margins)):
        with (METRICS / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(content[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(content)
    plots.held_out(bins, margins, run.folder / "held-out.png")
    run.artifact(run.folder / "held-out.png")


def _write_lines(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _tell(metrics: dict[str, Any]) -> None:
    bounds = metrics["intervals"]["rewards/accuracies"]
    print(
        f"evaluate: held-out reward accuracy {metrics['rewards/accuracies']:.3f} ({bounds['low']:.3f} to "
        f"{bounds['high']:.3f}) on {int(metrics['pairs'])} pairs"
    )
    if "rate" in metrics.get("win_rate", {}):
        won = metrics["win_rate"]
        print(
            f"evaluate: wins {won['rate']:.1%} against the base model ({won['low']:.1%} to {won['high']:.1%}; "
            f"{won['wins']} won, {won['ties']} tied, {won['losses']} lost, {won['refused']} not judged)"
        )


if __name__ == "__main__":
    stage.main(evaluate)
