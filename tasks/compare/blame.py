"""`dpo blame [RUN]`: which training pairs work against the held-out pairs, or pushed a regression against a version.

A training pair is harmful if a step that raises the margins of the held-out pairs lowers its own
(training/evaluation/influence.py). docs/decisions/2026-11-17-blame.md compares this score with others.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import hypergeom

from tasks.artifacts.markup import printable
from tasks.artifacts.pairs import PairTable, pairs_file, read_pairs
from tasks.checkout import kept_checkout
from tasks.cluster.worker_pool import WorkerPool
from tasks.compare.compare import Evaluated, find_model, read_results, results_here
from tasks.config.cluster import load_cluster
from tasks.config.params import Params, load_params
from tasks.config.paths import METRICS, MODEL, POLICY, main_checkout
from tasks.errors import UserError
from tasks.evaluate.evaluator import Evaluator
from tasks.evaluate.sampler import Weights
from tasks.evaluate.scoring import base_and_policy
from tasks.prepare.raw_rows import Origin, pair_origins
from tasks.runs.open_run import open_run
from tasks.runs.records import text_table
from tasks.system.files import json_lines, write_text
from tasks.system.progress import Bar
from training.objectives.objective import Objective
from training.pairs.pair import Pair, pack

PAIRS_PER_TASK, PAIRS_AT_ONCE = 128, 4096  # the second bounds memory
TARGETS = 256  # held-out pairs in the gradient at most
HARMFUL, MOST = 0.1, 0.05  # pairs above this score are flagged, but no more than this share of all
SIGNIFICANT = 0.01
TEXT = 36  # characters in the table
Line = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """Held-out pairs whose margins should rise, and how much each counts."""

    objective: Objective
    pairs: list[Pair]
    weights: list[float]


class Blamer(Evaluator):
    """A worker that also computes influences. It keeps the held-out gradient for all its tasks."""

    derivatives: Any = None
    gradient: Any = None

    def influence(
        self, weights: Weights, base: Path | None, target: Target, pairs: Sequence[Pair], row_tokens: int
    ) -> list[float]:
        """How much each pair's margin rises with those of the target."""
        from training.evaluation.influence import MarginDerivatives, move_halfway
        from training.models.loading import best_device

        with self._loaded(weights) as model:
            if self.derivatives is None:
                parameters = move_halfway(model, base)
                self._start_scoring(weights, target.pairs[:3])
                self.derivatives = MarginDerivatives(self.scorer, target.objective, parameters, best_device())
                self.gradient = self.derivatives.gradient(target.pairs, target.weights)
            lengths = [len(pair) for pair in pairs]
            return self.derivatives.along(self.gradient, pairs, pack(lengths, lengths, row_tokens))


def blame(run: str | None, against: str | None, count: int) -> None:
    """Print the most harmful pairs, and write the scores of all."""
    other = find_model(against) if against else None
    if other and other.answers_of == "base":
        raise UserError(f"--against {against}: a base model has no margins. Name a trained model, such as champion.")
    with kept_checkout(), chdir(open_run(run) if run else Path()):
        _blame_here(run, other, count)


def _blame_here(run: str | None, other: Evaluated | None, count: int) -> None:
    """In the workspace of the run."""
    if not (POLICY.exists() and pairs_file("train").exists()):
        raise UserError(f"There is no trained policy in {Path.cwd() / POLICY}. Name a finished run: `dpo blame RUN`.")
    if other and not (MODEL / "manifest.json").exists():
        raise UserError(f"There is no export in {Path.cwd() / MODEL}, which --against needs. Run `dvc repro export`.")
    params, cluster = load_params(), load_cluster()
    if cluster.inference.zero_stage == 3:
        raise UserError("`dpo blame` needs whole models: set inference.zero_stage to 0 in infra/cluster.yaml.")
    train, held_out = (read_pairs(split, params.train.needs_reference) for split in ("train", "eval"))
    with WorkerPool(cluster, cluster.inference, Blamer, "blame") as workers:
        target = _target(params, held_out, _regressions(workers, held_out, other) if other else [1.0] * len(held_out))
        lines = rank(train, _influences(workers, params, target, train), pair_origins(params.prepare))
        _add_texts(workers, params, train, shown := _flagged(lines) or lines[:count])
    folder = main_checkout() / ".scratch" / "blame" / (run or "checkout").replace("/", "-")
    write_text(folder / "scores.jsonl", json_lines(lines))
    write_text(folder / "flagged.jsonl", json_lines(_flagged(lines)))
    print(f"\nTraining pairs that work against {len(target.pairs)} held-out pairs, the most harmful first (* flagged):")
    _print(lines, shown[:count], folder)


def _regressions(workers: WorkerPool, held_out: PairTable, other: Evaluated) -> list[float]:
    """By how much each held-out pair's margin is lower than under the other model."""
    theirs, ours = results_here(workers, other).pairs, read_results(METRICS).pairs
    both = [(theirs.get(pair.id, {}), ours.get(pair.id, {})) for pair in held_out]
    drops = [max(0.0, before["margin"] - now["margin"]) if before and now else 0.0 for before, now in both]
    if not any(drops):
        raise UserError(f"No held-out pair has a lower margin than under {other.name}: there is nothing to blame.")
    return drops


def _target(params: Params, held_out: PairTable, weights: list[float]) -> Target:
    """The held-out pairs that count most; among equals a random sample, since ids are hashes."""
    ids = held_out.table["id"].to_pylist()
    numbers = sorted((n for n in range(len(ids)) if weights[n]), key=lambda n: (-weights[n], ids[n]))[:TARGETS]
    objective = Objective(params.train.loss, params.train.loss_options())
    return Target(objective, [held_out[n] for n in numbers], [weights[n] for n in numbers])


def _influences(workers: WorkerPool, params: Params, target: Target, train: PairTable) -> list[float]:
    """How much each training pair's margin rises with those of the target."""
    base, policy = base_and_policy(workers, params)
    start = None if params.train.adapter else base.folder
    size, row_tokens = PAIRS_PER_TASK, workers.cluster.inference.row_tokens
    changes: list[float] = []
    with Bar("blame", len(train), "training pairs") as bar:
        for first in range(0, len(train), PAIRS_AT_ONCE):
            parts = range(first, min(first + PAIRS_AT_ONCE, len(train)), size)
            tasks = [(policy, start, target, train[at : at + size], row_tokens) for at in parts]
            for part in workers.map("influence", tasks, lambda _: bar.update(min(bar.done + size, len(train)))):
                changes += part
    return changes


def rank(train: PairTable, changes: Sequence[float], origins: dict[str, Origin]) -> list[Line]:
    """A line for each training pair, the most harmful first. The median pair has the score 1 or -1."""
    scores = -np.array(changes) / (np.median(np.abs(changes)) or 1.0)
    limit = max(HARMFUL, float(np.quantile(scores, 1 - MOST)))
    lines = []
    for n in np.argsort(-scores, kind="stable").tolist():
        name, source = (train.table[column][n].as_py() or "" for column in ("id", "source"))
        score = round(float(scores[n]), 4)
        origin = asdict(origins.get(name, Origin("", 0, "")))
        lines.append({"id": name, "score": score, "flagged": score > limit, "source": source, **origin, "pair": n})
    return lines


def concentration(lines: Sequence[Line], column: str) -> str:
    """A sentence if the flagged pairs come from one source or user more often than chance explains; else empty.

    The hypergeometric tail: the chance that a random choice of as many pairs has as many from there, times the number
    of sources or users that were looked at (Bonferroni).
    """
    pairs, flagged = (Counter(line[column] for line in part if line[column]) for part in (lines, _flagged(lines)))
    total, chosen = pairs.total(), flagged.total()
    chances = {name: hypergeom.sf(count - 1, total, pairs[name], chosen) for name, count in flagged.items()}
    name = min(chances, key=chances.__getitem__, default="")
    if len(pairs) < 2 or not name or (p := chances[name] * len(pairs)) > SIGNIFICANT:
        return ""
    share = f"{flagged[name]} of {chosen} flagged pairs, but {pairs[name]} of all {total}"
    return f"The {column} {printable(name)} stands out: {share} (p = {p:.1g})."


def _flagged(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["flagged"]]


def _add_texts(workers: WorkerPool, params: Params, train: PairTable, lines: Sequence[Line]) -> None:
    """The prompt, and both answers from where they differ."""
    base, _ = base_and_policy(workers, params)
    pairs = [train[line["pair"]] for line in lines]
    ids = [list(answer[p.shared_prefix :]) for p in pairs for answer in (p.chosen_ids, p.rejected_ids)]
    (texts,) = workers.map("decode", [(base, ids)])
    for n, line in enumerate(lines):
        line["prompt"] = train.table["prompt"][line["pair"]].as_py()
        line["chosen"], line["rejected"] = texts[2 * n : 2 * n + 2]


def _print(lines: list[Line], shown: Sequence[Line], folder: Path) -> None:
    rows = []
    for line in shown:
        texts = (printable(" ".join(line[name].split()))[:TEXT] for name in ("prompt", "chosen", "rejected"))
        score, location = f"{line['score']:.2f}" + "*" * line["flagged"], f"{line['file']}:{line['row']}"
        rows.append((line["id"], score, location, printable(line["user"] or "-"), *texts))
    print(text_table(rows, ("id", "score", "row", "user", "prompt ...", "chosen ...", "rejected ...")))
    print("\n".join(filter(None, (concentration(lines, column) for column in ("source", "user")))))
    print(f"The scores of all {len(lines)} pairs are in {folder / 'scores.jsonl'}.")
    if flagged := _flagged(lines):
        path = folder / "flagged.jsonl"
        print(f"{len(flagged)} pairs are flagged in {path}. Read them. Then train without those that the file names:")
        print(f"  dpo run --set source.exclude={path}")
    else:
        print(f"No pair is flagged: none has a score above {HARMFUL:g} of the median pair's size.")
