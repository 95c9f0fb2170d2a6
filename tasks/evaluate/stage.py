"""Stage `evaluate`: score held-out pairs with the policy, and compare its sampled answers with the base model's.

Ray actors of the worker group `inference` hold the models, and this process holds none. With a single worker on this
machine the worker is this process itself (tasks/cluster/worker_pool.py).

Writes data/metrics: evaluate.json (metrics under their training names, intervals, win rate, health), samples.jsonl (the
answers of both models), pairs.jsonl (every pair, strongest disagreement first), calibration.csv and margins.csv (DVC
plots).
"""

import csv
from dataclasses import replace
from typing import Any

from tasks.artifacts.pairs import pairs_file, read_pairs, read_rows
from tasks.cluster.ray_cluster import warn_of_slow_dtype
from tasks.cluster.worker_pool import WorkerPool
from tasks.config.addresses import local_path
from tasks.config.cluster import load_cluster
from tasks.config.evaluate import Evaluate
from tasks.config.params import Params, load_params
from tasks.config.paths import METRICS
from tasks.evaluate.answers import compare_answers, held_out_prompts, judge_answers
from tasks.evaluate.drawing import sample_answers
from tasks.evaluate.held_out import PairRow, calibration, disagreements, held_out, histogram
from tasks.evaluate.intervals import mean_interval
from tasks.evaluate.sampler import Weights
from tasks.evaluate.scoring import answer_log_ratios, base_and_policy, evaluator_pool, pair_values, token_values
from tasks.system.files import json_lines, write_json, write_text
from tasks.system.progress import Bar
from tasks.tracking import plots
from tasks.tracking.journal import StageJournal
from tasks.tracking.results import curves, evaluation
from training.evaluation.samples import PairValues
from training.objectives.objective import Objective
from training.pairs.pair import Pair


def evaluate(run: StageJournal) -> None:
    params, cluster = load_params(), load_cluster()
    pairs, rows = list(read_pairs("eval", params.train.needs_reference)), read_rows(pairs_file("eval"))
    prompts = held_out_prompts(rows, params.evaluate.prompts)
    prompt_ids = [row["prompt_ids"] for row in prompts]
    warn_of_slow_dtype("evaluate", params.evaluate.dtype, cluster.inference.gpus_per_worker)
    with evaluator_pool(cluster, "evaluate") as workers:
        models = base, policy = base_and_policy(workers, params)
        with Bar("evaluate", 2 * len(prompts), "answers") as bar:
            answers = [sample_answers(workers, params.evaluate, model, prompt_ids, bar.more) for model in models]
        with Bar("evaluate", len(pairs), "pairs") as bar:
            tokens = token_values(workers, policy, pairs, bar.more)
        metrics, values = _pair_metrics(params, workers, pairs, tokens, rows)
        pair_lines = disagreements(values, rows, lambda ids: workers.map("decode", [(base, ids)])[0])
        if prompts:
            ids = [(row["prompt_ids"], new.ids, old.ids) for row, old, new in zip(prompts, *answers, strict=True)]
            log_ratios = answer_log_ratios(workers, policy, base, ids)  # on the policy's own answers
            records = [judge_answers(workers, params.evaluate, prompts, texts) for texts in answers]
        harness = _harness(params.evaluate, workers, base, policy) if params.evaluate.harness else None
    samples: list[dict[str, Any]] = []
    if prompts:  # after the workers ended: a judge behind an endpoint may take hours, and no GPU should wait for it
        answer_metrics, samples = compare_answers(params.evaluate, prompts, *records)
        kl = mean_interval(log_ratios, [row["prompt"] for row in prompts])
        intervals = {**metrics["intervals"], **answer_metrics["intervals"], "kl/answers": kl.bounds()}
        metrics = {**metrics, **answer_metrics, "kl/answers": kl.mean, "intervals": intervals}
    metrics |= {"harness": harness} if harness else {}
    _write_results(run, metrics, samples, pair_lines)
    _write_plots(run, calibration(values), histogram(values))
    _print_headlines(metrics)


def _pair_metrics(
    params: Params, workers: WorkerPool, pairs: list[Pair], tokens: list[Any], rows: list[PairRow]
) -> tuple[dict[str, Any], list[PairValues]]:
    """The training metrics on held-out pairs, and the values of each pair."""
    objective = Objective(params.train.loss, params.train.loss_options())
    means, values = pair_values(workers, objective, pairs, tokens)
    values = [
        replace(
            value,  # without the prompt's tokens, which may count in the loss too
            chosen_tokens=sum(row["chosen_mask"]),
            # The rejected answer of an unpaired row belongs to another row.
            rejected_tokens=sum(row["chosen_mask" if value.sign else "rejected_mask"]),
        )
        for value, row in zip(values, rows, strict=True)
    ]
    del means["tokens"]
    return {**means, **held_out(values, rows)}, values


def _harness(params: Evaluate, workers: WorkerPool, base: Weights, policy: Weights) -> dict[str, dict[str, float]]:
    """Scores of both models by lm-evaluation-harness; each of its tasks is a task of the worker pool."""
    assert params.harness is not None
    folder = workers.shared_path(local_path(params.harness.folder)) if params.harness.folder else None
    options = (params.harness.limit, folder, params.seed)
    names = params.harness.task_names()
    tasks = [(model, [name], *options) for model in (base, policy) for name in names]
    scores, count = workers.map("harness", tasks), len(names)
    halves = {"base": scores[:count], "policy": scores[count:]}
    return {name: {key: score for part in half for key, score in part.items()} for name, half in halves.items()}


def _write_results(run: StageJournal, metrics: dict[str, Any], samples: list[Any], pairs: list[Any]) -> None:
    write_json(METRICS / "evaluate.json", metrics)
    write_text(METRICS / "samples.jsonl", json_lines(samples))
    write_text(METRICS / "pairs.jsonl", json_lines(pairs))
    run.summary(evaluation(metrics), max(curves(), default=0))
    for name in ("evaluate.json", "samples.jsonl", "pairs.jsonl"):
        run.artifact(METRICS / name)


def _write_plots(run: StageJournal, bins: list[dict[str, float]], margins: list[dict[str, float]]) -> None:
    for name, rows in (("calibration", bins), ("margins", margins)):
        with (METRICS / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    plots.held_out(bins, margins, run.folder / "held-out.png")
    run.artifact(run.folder / "held-out.png")


def _print_headlines(metrics: dict[str, Any]) -> None:
    bounds = metrics["intervals"]["rewards/accuracies"]
    print(
        f"evaluate: held-out reward accuracy {metrics['rewards/accuracies']:.3f} ({bounds['low']:.3f} to "
        f"{bounds['high']:.3f}) on {int(metrics['pairs'])} {'unpaired rows' if 'rewards/auc' in metrics else 'pairs'}"
    )
    if "rate" in metrics.get("win_rate", {}):
        wins = metrics["win_rate"]
        print(
            f"evaluate: win rate vs. base model {wins['rate']:.1%} ({wins['low']:.1%} to {wins['high']:.1%}; "
            f"{wins['wins']} wins, {wins['ties']} ties, {wins['losses']} losses, {wins['refused']} refused)"
        )
