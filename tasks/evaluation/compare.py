"""`dpo compare MODEL [OTHER]`: two models, paired on the same prompts and pairs, sampled in the same way.

One model alone is compared with this workspace's. The intervals are those of the difference, so prompts that are hard
for both models cancel out. Results that were made with other settings or pairs are not paired: the second model is
evaluated again.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy

from tasks.cluster.worker_pool import WorkerPool
from tasks.config.params import Evaluate, load_cluster, load_params
from tasks.config.paths import METRICS, MODEL, home
from tasks.errors import UserError
from tasks.evaluation.answers import judged_metrics
from tasks.evaluation.intervals import mean_interval
from tasks.evaluation.judges import outcomes
from tasks.evaluation.reevaluate import ModelResults, add_reference, current_held_out, reevaluate, require_same_tokens
from tasks.evaluation.sharding import evaluator_pool
from tasks.runs.open_run import open_run, weights_of
from tasks.system.files import read_json, read_json_lines
from tasks.tracking.model_names import registered_version
from tasks.tracking.registry import Registry, Version

Comparison = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Paired:
    """The values of one metric for two models on the same prompts or pairs."""

    ours: list[float]
    theirs: list[float]
    prompts: list[str]
    reach: float | None  # the largest possible difference to either side, if the metric is bounded

    def by_prompt(self) -> numpy.ndarray:
        """The mean difference (ours - theirs) of each prompt."""
        _, group = numpy.unique(numpy.asarray(self.prompts), return_inverse=True)
        sums = numpy.bincount(group, weights=numpy.asarray(self.ours) - numpy.asarray(self.theirs))
        return numpy.asarray(sums / numpy.bincount(group))


def summarize(paired: dict[str, Paired]) -> Comparison:
    """By metric: both means over the shared prompts or pairs, the difference (ours - theirs) and its interval."""
    return {name: _summary(values) for name, values in paired.items()}


def pair_up(params: Evaluate, ours: ModelResults, theirs: ModelResults) -> dict[str, Paired]:
    """By metric: the values of both models on the prompts or pairs that they share."""
    paired: dict[str, Paired] = {}
    ids = [pair for pair in ours.pairs if pair in theirs.pairs]
    if ids:
        weights = _balance([ours.pairs[pair].get("sign", 0) for pair in ids])
        new, old = (
            [weight * float(side.pairs[pair]["margin"] > 0) for pair, weight in zip(ids, weights, strict=True)]
            for side in (ours, theirs)
        )
        prompts = [ours.pairs[pair]["prompt"] for pair in ids]
        paired["rewards/accuracies"] = Paired(new, old, prompts, max(weights))
    prompts = [prompt for prompt in ours.answers if prompt in theirs.answers]
    return paired | (_pair_up_answers(params, ours, theirs, prompts) if prompts else {})


def _balance(signs: list[int]) -> list[float]:
    """Weights with mean 1 that make both labels of unpaired rows count the same."""
    counts = Counter(signs)
    return [len(signs) / (len(counts) * counts[sign]) for sign in signs]


def _pair_up_answers(
    params: Evaluate, ours: ModelResults, theirs: ModelResults, prompts: list[str]
) -> dict[str, Paired]:
    first, second = ([side.answers[prompt] for prompt in prompts] for side in (theirs, ours))
    paired: dict[str, Paired] = {}
    names = [name for name in judged_metrics(second) if name in first[0]]  # another judge gives other metrics
    for name in names:
        new, old = ([float(answer[name]) for answer in side] for side in (second, first))
        reach = 1.0 if isinstance(first[0][name], bool) else None
        paired[f"samples/policy/{name}"] = Paired(new, old, prompts, reach)
    results = outcomes(params, prompts, first, second, "compare") if names == judged_metrics(second) else None
    if wins := {prompt: win for prompt, win in zip(prompts, results or (), strict=bool(results)) if win is not None}:
        paired["win_rate"] = Paired(list(wins.values()), [0.5] * len(wins), list(wins), 0.5)
    return paired


def _summary(paired: Paired) -> dict[str, float]:
    limits = None if paired.reach is None else (-paired.reach, paired.reach)
    differences = [ours - theirs for ours, theirs in zip(paired.ours, paired.theirs, strict=True)]
    interval = mean_interval(differences, paired.prompts, limits)
    means = {"ours": round(fmean(paired.ours), 6), "theirs": round(fmean(paired.theirs), 6)}
    counts = {"count": len(differences), "prompts": len(set(paired.prompts))}
    return {**means, "difference": interval.mean, **interval.bounds(), **counts}


def read_results(folder: Path, model: str = "policy") -> ModelResults:
    """From the samples.jsonl and pairs.jsonl of the stage evaluate; pairs.jsonl has the policy's margins alone."""
    samples, pairs = (_read_lines(folder / name) for name in ("samples.jsonl", "pairs.jsonl"))
    margins = {line["id"]: line for line in pairs} if model == "policy" else {}
    return ModelResults({line["prompt"]: line[model] for line in samples}, margins)


@dataclass(frozen=True)
class Evaluated:
    """An evaluated model: its manifest, the folder of its samples.jsonl and pairs.jsonl, and where its weights are."""

    name: str
    manifest: dict[str, Any]
    results: Path
    weights: Callable[[], Path]
    run: str = ""  # that made it


def evaluated_version(models: Registry, version: Version) -> Evaluated:
    manifest = read_json(models.fetch(version, "model", "manifest.json"))
    results = models.fetch(version, "evaluation")
    run = version.tags.get("run", "")
    return Evaluated(f"version {version.number}", manifest, results, lambda: weights_of(models, version), run)


def results_here(workers: WorkerPool, theirs: Evaluated) -> ModelResults:
    """A model's results on this workspace's held-out set. If its settings or pairs differ, it is evaluated again."""
    ours = read_json(MODEL / "manifest.json")
    if not (difference := _difference(ours, theirs.manifest)):
        return read_results(theirs.results)
    require_same_tokens(ours, theirs.manifest)
    params, folder = load_params(), theirs.weights()
    model = f"version {theirs.name}" if theirs.name.isdigit() else theirs.name
    print(f"compare: evaluating {model} again: it was evaluated with {difference}", flush=True)
    held_out = add_reference(workers, params, current_held_out(params), theirs.manifest)
    return reevaluate(workers, params, folder, held_out, theirs.manifest)


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """How another model's evaluation differs, so that the two results cannot be paired; empty if it does not."""
    new, old = (manifest["params"]["evaluate"] for manifest in (ours, theirs))
    settings = [f"{key} {old.get(key)} instead of {new[key]}" for key in new if old.get(key) != new[key]]
    return ", ".join(settings + ["other held-out pairs"] * (eval_hash(ours) != eval_hash(theirs)))


def eval_hash(manifest: dict[str, Any]) -> str:
    return str(manifest["data"]["pairs"][eval_file(manifest)])


def eval_file(manifest: dict[str, Any]) -> str:
    """Name of the file with the held-out pairs: eval.arrow, or eval.parquet of an earlier release."""
    return next(name for name in manifest["data"]["pairs"] if name.startswith("eval."))


def find_model(name: str | None) -> Evaluated:
    """The model of this workspace, of a run, or a registered version."""
    if name is None:
        if not (MODEL / "manifest.json").exists():
            raise UserError(f"There is no model in {MODEL}. Name two models, as in `dpo compare RUN champion`.")
        return Evaluated("this model", read_json(MODEL / "manifest.json"), METRICS, lambda: MODEL)
    for root in (home() / load_cluster().logging_dir / name / "results", home() / ".scratch" / "worktrees" / name):
        if (root / MODEL / "manifest.json").exists():
            manifest = read_json(root / MODEL / "manifest.json")
            return Evaluated(name, manifest, root / METRICS, lambda: open_run(name) / MODEL, name)
    with registered_version(name) as (_, models, version):
        return replace(evaluated_version(models, version), name=name)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise UserError(f"{path} does not exist. Run `dvc repro evaluate`, or `dvc checkout` in that workspace.")
    return read_json_lines(path)


def print_comparison(name: str, first: str | None = None) -> None:
    """Compare this workspace's model, or the model `first`, with the model `name`."""
    ours = find_model(first)
    theirs = read_results(ours.results, "base") if name == "base" else _results_for(ours, find_model(name))
    params = load_params().evaluate.model_copy(update=ours.manifest["params"]["evaluate"])
    comparison = summarize(pair_up(params, read_results(ours.results), theirs))
    if not comparison:
        needs = "A comparison with base needs sampled answers: `evaluate.prompts` above 0." if name == "base" else ""
        raise UserError(f"{ours.name} and {name} have neither held-out pairs nor answers in common. {needs}".rstrip())
    width = max(map(len, comparison))
    print(f"{'':{width}} {ours.name[:14]:>14} {name[:14]:>14}  difference (95% interval)")
    for metric, row in comparison.items():
        change = f"{row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f}), n = {row['count']:.0f}"
        print(f"{metric:{width}} {row['ours']:14.4f} {row['theirs']:14.4f}  {change}")


def _results_for(ours: Evaluated, theirs: Evaluated) -> ModelResults:
    if not _difference(ours.manifest, theirs.manifest):
        return read_results(theirs.results)
    if ours.run:
        os.environ["DPO_HOME"] = str(home())
        os.chdir(open_run(ours.run))  # for its pairs, reference values and base model
    with evaluator_pool(load_cluster(), "compare") as workers:
        return results_here(workers, theirs)
