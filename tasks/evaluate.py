"""Stage `evaluate`: the policy on held-out pairs, and its answers beside the base model's on held-out prompts.

Writes data/metrics: evaluate.json (the training metrics' names, intervals, win rate, health), samples.jsonl (answers
side by side), pairs.jsonl (every pair, worst disagreement first), calibration.csv and margins.csv (DVC plots).
"""

import csv
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasks import stage
from tasks.dataset.pairs import read_pairs, read_rows, with_reference
from tasks.errors import UserError
from tasks.evaluation.answers import Record, Row, held_out_prompts, records, sampled, side_by_side
from tasks.evaluation.bootstrap import mean_interval
from tasks.evaluation.held_out import calibration, disagreements, held_out, histogram
from tasks.files import write_json
from tasks.models import base_folder, local_path
from tasks.params import Evaluate, Params, load_cluster, load_params
from tasks.paths import METRICS, PAIRS, POLICY
from tasks.progress import Bar
from tasks.reports import plots
from tasks.tracking.journal import Run, curves, evaluation
from training.objective import Objective


def evaluate(run: Run) -> None:
    params = load_params()
    from training.model import best_device, load_tokenizer

    device, folder = best_device(), base_folder(params.source.model)
    tokenizer = load_tokenizer(folder)
    rows = read_rows(PAIRS / "eval.parquet")
    prompts = held_out_prompts(rows, params.evaluate.prompts)
    base = load_base(params, device)
    able = {"base": _harness(params.evaluate, base, tokenizer)}
    with Bar("evaluate", 2 * len(prompts), "answers") as bar:
        before = sampled(params.evaluate, base, _where(params, folder, None), tokenizer, prompts, bar, 0)
        policy = _policy(params, base, device)
        where = _where(params, folder, POLICY) if params.train.adapter else (POLICY, None)
        after = sampled(params.evaluate, policy, where, tokenizer, prompts, bar, len(prompts))
    metrics, values = _on_pairs(params, policy, rows, device)
    lines: list[dict[str, Any]] = []
    if prompts:
        first, second = (records(params.evaluate, prompts, answers) for answers in (before, after))
        judged, lines = _judge(params.evaluate, prompts, first, second)
        drifted = _kl(params, base, policy, prompts, before, after, device)
        metrics = _joined(metrics, judged, drifted)
    if params.evaluate.harness:
        metrics["harness"] = {**able, "policy": _harness(params.evaluate, policy, tokenizer)}
    _publish(run, metrics, lines, disagreements(values, rows, lambda ids: str(tokenizer.decode(ids))))
    _plots(run, calibration(values), histogram(values))
    _tell(metrics)


def load_base(params: Params, device: Any) -> Any:
    """The base as training had it: the adapter was trained on it, and the reference values are its own."""
    from training.model import load_model

    try:
        return load_model(base_folder(params.source.model), params.evaluate.dtype, device, params.train.quantization)
    except ValueError as error:
        raise UserError(f"source.model: {error}.") from error


def _where(params: Params, folder: Path, adapter: Path | None) -> tuple[Path, Path | None] | None:
    return None if params.train.quantization else (folder, adapter)


def _policy(params: Params, base: Any, device: Any) -> Any:
    from training import adapters
    from training.model import load_model

    return (
        adapters.load_adapter(base, POLICY)
        if params.train.adapter
        else load_model(POLICY, params.evaluate.dtype, device)
    )


def _on_pairs(params: Params, policy: Any, rows: list[Row], device: Any) -> tuple[dict[str, Any], list[Any]]:
    """The training metrics on held-out pairs, and what each pair adds to them."""
    from training.evaluation import pair_values
    from training.proof import scoring

    pairs, row_tokens = read_pairs("eval"), load_cluster().reference.row_tokens
    objective = Objective(params.train.loss, params.train.loss_options())
    pairs = with_reference(pairs, "eval") if objective.needs_reference else pairs
    with scoring(policy, pairs, device) as scorer:
        means, values = pair_values(scorer, objective, pairs, row_tokens, device)
    values = [
        replace(value, chosen_tokens=sum(row["chosen_mask"]), rejected_tokens=sum(row["rejected_mask"]))
        for value, row in zip(values, rows, strict=True)  # of the responses alone, where the prompt counts too
    ]
    del means["tokens"]
    return {**means, **held_out(values, rows, params.evaluate.seed)}, values


def _harness(params: Evaluate, model: Any, tokenizer: Any) -> dict[str, float]:
    """What the model can do besides, by lm-evaluation-harness; nothing where params ask for nothing."""
    if params.harness is None:
        return {}
    if find_spec("lm_eval") is None:
        raise UserError(
            "evaluate.harness needs lm-evaluation-harness, which is not installed. Run `.venv/bin/pip install "
            "lm_eval`, or set evaluate.harness to null."
        )
    from training.harness import scores

    folder = local_path(params.harness.folder) if params.harness.folder else None
    try:
        return scores(model, tokenizer, params.harness.tasks, params.harness.limit, folder, params.seed)
    except ValueError as error:
        raise UserError(f"evaluate.harness: {error}. Mend evaluate.harness.") from error


def _judge(
    params: Evaluate, prompts: list[Row], before: list[Record], after: list[Record]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if params.judge != "endpoint":
        return side_by_side(params, prompts, before, after)
    with Bar("evaluate", len(prompts), "judgements") as bar:
        return side_by_side(params, prompts, before, after, bar.update)


def _kl(
    params: Params, base: Any, policy: Any, prompts: list[Row], before: list[Any], after: list[Any], device: Any
) -> dict[str, Any]:
    """KL(policy, base) per answer, on what the policy really says."""
    from training import adapters
    from training.evaluation import answer_ratios

    asked = [(row["prompt_ids"], new.ids, old.ids) for row, new, old in zip(prompts, after, before, strict=True)]
    row_tokens = load_cluster().reference.row_tokens
    reference = adapters.switched_off(policy) if params.train.adapter else base
    ratios = answer_ratios(policy, reference, asked, row_tokens, device)
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
