"""`dpo compare MODEL [OTHER]`: two models, paired on the same prompts and pairs, sampled in the same way.

One model alone is compared with this workspace's. The intervals are those of the difference, so prompts that are hard
for both models cancel out. Results that were made with other settings or pairs are not paired: the second model is
evaluated again.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy

from tasks.checkout import kept_checkout
from tasks.cluster.worker_pool import WorkerPool
from tasks.compare.reevaluate import ModelResults, add_reference, current_held_out, reevaluate, require_same_tokens
from tasks.config.cluster import load_cluster
from tasks.config.evaluate import Evaluate
from tasks.config.params import load_params
from tasks.config.paths import METRICS, MODEL
from tasks.errors import UserError
from tasks.evaluate.answers import judged_metrics
from tasks.evaluate.intervals import mean_interval
from tasks.evaluate.judges import outcomes
from tasks.evaluate.scoring import evaluator_pool
from tasks.runs.named_model import HERE, NamedModel, manifest_of, named_model, workspace_of
from tasks.runs.open_run import open_run, weights_of
from tasks.system.files import read_json, read_json_lines
from tasks.tracking.model_names import BASE_MODEL, FOLDER, HUB_MODEL, registered_version
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
    """An evaluated model: its manifest, the folder of its samples.jsonl and pairs.jsonl, and where its weights are.

    Or the base model that a trained one was compared with there: `answers_of` says whose answers count.
    """

    name: str
    manifest: dict[str, Any]
    results: Path
    weights: Callable[[], Path]
    run: str = ""  # that made it
    answers_of: Literal["policy", "base"] = "policy"


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
    """The model of this workspace, of a run, a registered version, or the base model of one of them."""
    if name == "base":
        return replace(find_model(None), name=name, answers_of="base")
    found = named_model(name)
    if found.kind == HUB_MODEL or (found.kind == FOLDER and not _is_export(found.folder)):
        raise UserError(
            f"'{name}' is {found.kind} without an evaluation, so there is nothing to compare. Name the run or the "
            "registered version of a model that was evaluated; `dpo chat` and `dpo generate` take any model."
        )
    if found.version:
        with registered_version(f"{found.model}/{found.version}") as (_, models, version):
            model = replace(evaluated_version(models, version), name=found.name)
    elif found.run:
        root, run = workspace_of(found.run) or Path(), found.run
        model = Evaluated(found.name, manifest_of(found), root / METRICS, lambda: open_run(run) / MODEL, run)
    else:
        model = _in_workspace(found)
    return replace(model, answers_of="base") if found.kind == BASE_MODEL else model


def _is_export(folder: Path) -> bool:
    """Whether it is the data/model of a workspace, which has its evaluation."""
    root = _workspace(folder)
    return folder.resolve() == root / MODEL and (root / METRICS / "pairs.jsonl").exists()


def _workspace(folder: Path) -> Path:
    """Whose data/model this folder would be."""
    return folder.resolve().parent.parent


def _in_workspace(found: NamedModel) -> Evaluated:
    """The export of this workspace, or the one in the folder of another."""
    folder = found.folder
    if not (folder / "manifest.json").exists():
        raise UserError(f"There is no model in {folder}. Name two models, as in `dpo compare RUN champion`.")
    results = METRICS if found.kind == HERE else _workspace(folder) / METRICS
    return Evaluated(found.name, read_json(folder / "manifest.json"), results, lambda: folder)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise UserError(f"{path} does not exist. Run `dvc repro evaluate`, or `dvc checkout` in that workspace.")
    return read_json_lines(path)


def print_comparison(name: str, first: str | None = None) -> None:
    """Compare this workspace's model, or the model `first`, with the model `name`. `base` is the other one's."""
    if name == "base":
        ours = find_model(first)
        theirs = replace(ours, name=name, answers_of="base")
    else:
        theirs = find_model(name)
        ours = replace(theirs, name="base", answers_of="base") if first == "base" else find_model(first)
    ours, theirs = _beside(ours, theirs), _beside(theirs, ours)
    compared = read_results(ours.results, ours.answers_of), _results_for(ours, theirs)
    params = load_params().evaluate.model_copy(update=ours.manifest["params"]["evaluate"])
    comparison = summarize(pair_up(params, *compared))
    if not comparison:
        with_base = "base" in (ours.answers_of, theirs.answers_of)
        needs = "A comparison with base needs sampled answers: `evaluate.prompts` above 0." if with_base else ""
        raise UserError(f"{ours.name} and {name} have neither held-out pairs nor answers in common. {needs}".rstrip())
    print(comparison_table(comparison, ours.name, name))


def comparison_table(comparison: Comparison, ours: str, theirs: str) -> str:
    """As wide as the names of both models: those of a sweep's runs differ at their ends."""
    width, first, second = max(map(len, comparison)), max(14, len(ours)), max(14, len(theirs))
    lines = [f"{'':{width}} {ours:>{first}} {theirs:>{second}}  difference (95% interval)"]
    for metric, row in comparison.items():
        change = f"{row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f}), n = {row['count']:.0f}"
        lines.append(f"{metric:{width}} {row['ours']:{first}.4f} {row['theirs']:{second}.4f}  {change}")
    return "\n".join(lines)


def _beside(model: Evaluated, other: Evaluated) -> Evaluated:
    """A base model by the answers that the evaluation of the other model has of it, if it is that one's base too."""
    bases = {side.manifest["base"]["sha256"] for side in (model, other)}
    if model.answers_of == "policy" or len(bases) > 1:
        return model
    return replace(model, manifest=other.manifest, results=other.results)


def _results_for(ours: Evaluated, theirs: Evaluated) -> ModelResults:
    if not (difference := _difference(ours.manifest, theirs.manifest)):
        return read_results(theirs.results, theirs.answers_of)
    if "base" in (ours.answers_of, theirs.answers_of):
        raise UserError(
            f"{ours.name} and {theirs.name} cannot be compared: they were evaluated apart ({difference}), and a base "
            "model is not evaluated again. Compare a base model with a model that was trained from it."
        )
    folder = open_run(ours.run) if ours.run else Path()  # with our pairs, reference values and base model
    with kept_checkout(), chdir(folder), evaluator_pool(load_cluster(), "compare") as workers:
        return results_here(workers, theirs)
