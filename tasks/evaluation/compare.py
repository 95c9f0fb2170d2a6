"""This workspace's policy against another: the base, an alias or version of the registry, or a named run.

`python -m tasks.evaluation.compare champion` (or `base`, `3`, the name of a run). Paired: on the same prompts and
pairs, so that what is hard for both cancels out.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.evaluation.answers import Record, judged
from tasks.evaluation.asked import ask, ready_for, refuse_other_tokens, todays
from tasks.evaluation.bootstrap import mean_interval
from tasks.evaluation.judges import outcomes
from tasks.evaluation.sharding import evaluators
from tasks.files import home, read_json
from tasks.machines.pool import Workers
from tasks.params import Evaluate, load_cluster, load_params
from tasks.paths import METRICS, MODEL
from tasks.tracking.registry import Registry, Version, registry

Comparison = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Side:
    """What a model did: its answer by prompt, and the pairs that it was asked about, with its margin, by their id."""

    answers: dict[str, Record]
    pairs: dict[str, dict[str, Any]]


def compare(params: Evaluate, ours: Side, theirs: Side) -> Comparison:
    """By metric: both means over what both were asked, the difference (ours less theirs) and its interval."""
    found: Comparison = {}
    prompts = [prompt for prompt in ours.answers if prompt in theirs.answers]
    pairs = [pair for pair in ours.pairs if pair in theirs.pairs]
    if pairs:
        new, old = ([float(side.pairs[pair]["margin"] > 0) for pair in pairs] for side in (ours, theirs))
        asked = [ours.pairs[pair]["prompt"] for pair in pairs]
        found["rewards/accuracies"] = _paired(new, old, asked, params.seed, (-1.0, 1.0))
    if prompts:
        first, second = ([side.answers[prompt] for prompt in prompts] for side in (theirs, ours))
        names = [name for name in judged(second) if name in first[0]]  # another judge may have said other things
        for name in names:
            new, old = ([float(answer[name]) for answer in side] for side in (second, first))
            limits = (-1.0, 1.0) if isinstance(first[0][name], bool) else None
            found[f"samples/policy/{name}"] = _paired(new, old, prompts, params.seed, limits)
        said = outcomes(params, prompts, first, second) if names == judged(second) else None
        if said and (wins := [(p, o) for p, o in zip(prompts, said, strict=True) if o is not None]):
            chances = [outcome for _, outcome in wins]
            even, asked = [0.5] * len(wins), [prompt for prompt, _ in wins]
            found["win_rate"] = _paired(chances, even, asked, params.seed, (-0.5, 0.5))
    return found


def _paired(
    ours: list[float], theirs: list[float], prompts: list[str], seed: int, limits: tuple[float, float] | None
) -> dict[str, float]:
    count = len(ours)
    found = mean_interval([a - b for a, b in zip(ours, theirs, strict=True)], prompts, seed, limits)
    means = {"ours": round(sum(ours) / count, 6), "theirs": round(sum(theirs) / count, 6)}
    return {**means, "difference": found.mean, **found.bounds(), "count": count}


def read_side(folder: Path, which: str = "policy") -> Side:
    """From samples.jsonl and pairs.jsonl, as evaluate wrote them."""
    samples, pairs = (_lines(folder / name) for name in ("samples.jsonl", "pairs.jsonl"))
    known = {line["id"]: line for line in pairs} if which == "policy" else {}
    return Side({line["prompt"]: line[which] for line in samples}, known)


def version_side(workers: Workers, found: Registry, version: Version) -> Side:
    """What a version of the registry did; asked anew where it was evaluated on other prompts or in another way."""
    theirs, ours = manifest_of(found, version), read_json(MODEL / "manifest.json")
    same_pairs = eval_hash(theirs) == eval_hash(ours)
    if same_pairs and theirs["params"]["evaluate"] == ours["params"]["evaluate"]:
        return read_side(found.fetch(version, "evaluation"))
    params, folder = load_params(), weights_of(found, version)
    refuse_other_tokens(ours, theirs)
    print(f"compare: version {version.number} answers the held-out prompts of today", flush=True)
    held = ready_for(workers, params, todays(params), theirs)
    return Side(*ask(workers, params, folder, held, theirs))


def eval_hash(manifest: dict[str, Any]) -> str:
    return str(manifest["data"]["pairs"]["eval.parquet"])


def manifest_of(found: Registry, version: Version) -> dict[str, Any]:
    return read_json(found.fetch(version, "model", "manifest.json"))


def weights_of(found: Registry, version: Version) -> Path:
    folder = found.fetch(version, "model")
    if not list(folder.glob("*.safetensors")):
        raise UserError(
            f"Version {version.number} of {found.name} was evaluated on other prompts, and its weights are not in the "
            "registry, so it cannot be asked again."
        )
    return folder


def side_named(name: str) -> Side:
    """`base`, an alias or number of a version, or a run's name."""
    if name == "base":
        return read_side(METRICS, "base")
    for kept in (home() / load_cluster().logging_dir / name / "results", home() / ".scratch" / "worktrees" / name):
        if (kept / METRICS / "samples.jsonl").exists():
            return read_side(kept / METRICS)
    params, cluster = load_params(), load_cluster()
    with registry(cluster, params.promote.model_name) as found, evaluators(cluster, "compare") as workers:
        version = found.version(name) if name.isdecimal() else found.at(name) or found.of_run(name)
        if version is not None:
            return version_side(workers, found, version)
        known = [f"{v.number} (run {v.tags.get('run')})" for v in found.versions()]
    raise UserError(
        f"There is nothing named '{name}' to compare with: give base, champion, previous, a run that `make runs` "
        f"lists, or a version of {params.promote.model_name}: {', '.join(known)}."
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise UserError(f"{path} is not there. Run `dvc repro evaluate`, or `dvc checkout` in that workspace.")
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    try:
        name = sys.argv[1] if len(sys.argv) > 1 else "champion"
        found = compare(load_params().evaluate, read_side(METRICS), side_named(name))
    except UserError as error:
        sys.exit(f"error: {error}")
    if not found:
        sys.exit(f"error: {name} shares neither prompts nor pairs with this workspace.")
    width = max(map(len, found))
    print(f"{'':{width}}     ours  {name[:8]:>8}  difference (95% interval)")
    for metric, row in found.items():
        change = f"{row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f}), n = {row['count']:.0f}"
        print(f"{metric:{width}} {row['ours']:8.4f}  {row['theirs']:8.4f}  {change}")


if __name__ == "__main__":
    main()
