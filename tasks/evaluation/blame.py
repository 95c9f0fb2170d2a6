"""`dpo blame [RUN]`: which training pairs work against the held-out pairs, or pushed a regression against a version.

Two signs add up. Influence: a step that raises the margins of the held-out pairs lowers the pair's own
(training/evaluation/influence.py). And the pair stays contradictory: its margin is low at the end of training.
docs/evaluation.md compares this score with others.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.cluster.worker_pool import WorkerPool
from tasks.config.params import Params, load_cluster, load_params
from tasks.config.paths import METRICS, POLICY, home
from tasks.dataset.origins import Origin, pair_origins
from tasks.dataset.pairs import PairTable, pairs_file, read_pairs, with_reference
from tasks.errors import UserError
from tasks.evaluation.compare import Evaluated, find_model, read_results, results_here
from tasks.evaluation.evaluator import Evaluator, Weights
from tasks.evaluation.sharding import pair_values, token_values
from tasks.models import base_folder
from tasks.reports.markup import printable
from tasks.runs.open_run import open_run
from tasks.runs.records import text_table
from tasks.system.files import write_text
from tasks.system.progress import Bar
from training.objectives.objective import Objective
from training.objectives.packing import Pair, pack

PAIRS_PER_TASK, PAIRS_AT_ONCE = 128, 4096  # the second bounds memory
TARGETS = 256  # held-out pairs in the gradient at most
DEVIATIONS = 5.0  # a pair above this score is flagged: robust standard deviations from the median
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
    """A worker that also computes the influence of training pairs. It keeps the gradient for all its tasks."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.along: Any = None  # the trained parameters, and the gradient of the target

    def influence(
        self, weights: Weights, base: str | None, target: Target, pairs: Sequence[Pair], rows: Sequence[Sequence[int]]
    ) -> list[float]:
        """The change of each pair's margin along the target's gradient."""
        from training.evaluation.influence import margin_changes, margin_gradient, move_halfway
        from training.models.loading import best_device

        with self._loaded(weights) as model:
            if self.along is None:
                parameters = move_halfway(model, Path(base) if base else None)
                self._start_scoring(weights, target.pairs[:3])
                gradient = margin_gradient(
                    self.scorer, target.objective, target.pairs, target.weights, parameters, best_device()
                )
                self.along = parameters, gradient
            return margin_changes(self.scorer, target.objective, pairs, rows, *self.along, best_device())


def blame(run: str | None, against: str | None, count: int) -> None:
    """Print the most harmful pairs, and write the scores of all."""
    other = find_model(against) if against else None
    if run:
        os.environ["DPO_HOME"] = str(home())
        os.chdir(open_run(run))
    if not (POLICY.exists() and pairs_file("train").exists()):
        raise UserError(f"There is no trained policy in {Path.cwd() / POLICY}. Name a finished run: `dpo blame RUN`.")
    params, cluster = load_params(), load_cluster()
    if cluster.evaluate.zero_stage == 3:
        raise UserError(
            "`dpo blame` needs a whole model per worker: set evaluate.zero_stage to 0 in infra/cluster.yaml."
        )
    train, held_out = (_pairs(params, split) for split in ("train", "eval"))
    with WorkerPool(cluster, cluster.evaluate, Blamer, "blame") as workers:
        target = _target(params, held_out, _regressions(workers, held_out, other) if other else None)
        policy, base = _policy(workers, params)
        margins = _margins(workers, policy, target.objective, train)
        changes = _influences(workers, policy, base, target, train)
        lines = rank(train, margins, changes, pair_origins(params.prepare))
        shown = [line for line in lines if line["flagged"]] or lines[:count]
        _add_texts(workers, params, train, shown)
    folder = home() / ".scratch" / "blame" / (run or "checkout").replace("/", "-")
    _write(folder, lines)
    _print(lines, shown[:count], folder, len(target.pairs), against)


def _pairs(params: Params, split: str) -> PairTable:
    pairs = read_pairs(split)
    return with_reference(pairs, split) if params.train.needs_reference else pairs


def _regressions(workers: WorkerPool, held_out: PairTable, other: Evaluated) -> list[float]:
    """By how much each held-out pair's margin is lower than under the other model."""
    theirs, ours = results_here(workers, other).pairs, read_results(METRICS).pairs
    both = [(theirs.get(pair.id, {}), ours.get(pair.id, {})) for pair in held_out]
    drops = [max(0.0, before["margin"] - now["margin"]) if before and now else 0.0 for before, now in both]
    if not any(drops):
        raise UserError(f"No held-out pair has a lower margin than under {other.name}: there is nothing to blame.")
    return drops


def _target(params: Params, held_out: PairTable, drops: list[float] | None) -> Target:
    """The held-out pairs that lost most; without a comparison, a sample of all: ids are hashes."""
    drops = drops or [1.0] * len(held_out)
    ids = held_out.table["id"].to_pylist()
    numbers = sorted((n for n in range(len(drops)) if drops[n]), key=lambda n: (-drops[n], ids[n]))[:TARGETS]
    objective = Objective(params.train.loss, params.train.loss_options())
    return Target(objective, [held_out[n] for n in numbers], [drops[n] for n in numbers])


def _policy(workers: WorkerPool, params: Params) -> tuple[Weights, str | None]:
    """The policy, and after full fine-tuning the folder of the base model that it started from."""
    base = str(workers.shared_path(base_folder(params.source.model)))
    trained = str(workers.shared_path(Path.cwd(), POLICY) / POLICY)
    if params.train.adapter:
        return Weights(base, base, params.evaluate.dtype, params.train.quantization, trained), None
    return Weights(trained, base, params.evaluate.dtype), base


def _margins(workers: WorkerPool, policy: Weights, objective: Objective, train: PairTable) -> list[float]:
    """Of each training pair under the policy."""
    margins: list[float] = []
    with Bar("blame", len(train), "margins") as bar:
        for first in range(0, len(train), PAIRS_AT_ONCE):
            pairs = train[first : first + PAIRS_AT_ONCE]
            tokens = token_values(workers, policy, pairs, bar.more)
            margins += [value.margin for value in pair_values(workers, objective, pairs, tokens)[1]]
    return margins


def _influences(
    workers: WorkerPool, policy: Weights, base: str | None, target: Target, train: PairTable
) -> list[float]:
    """How much each training pair's margin rises with those of the target."""
    changes: list[float] = []
    with Bar("blame", len(train), "influences") as bar:
        for first in range(0, len(train), PAIRS_AT_ONCE):
            parts = _parts(train[first : first + PAIRS_AT_ONCE], workers.cluster.evaluate.row_tokens)
            tasks = [(policy, base, target, *part) for part in parts]
            for part in workers.map("influence", tasks, lambda number, tasks=tasks: bar.more(len(tasks[number][3]))):
                changes += part
    return changes


def _parts(pairs: Sequence[Pair], row_tokens: int) -> Iterator[tuple[Sequence[Pair], list[list[int]]]]:
    """Some pairs, and the rows to compute them in."""
    for first in range(0, len(pairs), PAIRS_PER_TASK):
        some = pairs[first : first + PAIRS_PER_TASK]
        lengths = [len(pair) for pair in some]
        yield some, pack(lengths, lengths, row_tokens)


def _deviations(values: np.ndarray) -> np.ndarray:
    """Robust standard deviations from the median."""
    distance = values - np.median(values)
    return distance / (1.4826 * np.median(np.abs(distance)) or 1.0)


def rank(
    train: PairTable, margins: Sequence[float], changes: Sequence[float], origins: dict[str, Origin]
) -> list[Line]:
    """A line for each training pair, the most harmful first."""
    scores = _deviations(_deviations(-np.array(changes)) + _deviations(-np.array(margins)))
    lines = []
    for n in np.argsort(-scores, kind="stable").tolist():
        name = train.table["id"][n].as_py()
        origin = origins.get(name, Origin("", 0, ""))
        numbers = {"score": scores[n], "influence": changes[n], "margin": margins[n]}
        lines.append(
            {
                "id": name,
                **{key: round(float(value), 6) for key, value in numbers.items()},
                "flagged": bool(scores[n] > DEVIATIONS),
                "source": train.table["source"][n].as_py() or "",
                **vars(origin),
                "number": n,
            }
        )
    return lines


def concentration(lines: Sequence[Line], column: str) -> str:
    """A sentence if the flagged pairs come from one source or user more often than chance explains; else empty.

    The hypergeometric tail: the chance that a random choice of as many pairs has as many from there, times the number
    of sources or users that were looked at (Bonferroni).
    """
    every, flagged = (Counter(line[column] for line in some if line[column]) for some in (lines, _flagged(lines)))
    total, chosen = every.total(), flagged.total()
    found = [(_tail(total, every[name], chosen, count) * len(every), name) for name, count in flagged.items()]
    p, name = min(found, default=(1.0, ""))
    if len(every) < 2 or p > SIGNIFICANT:
        return ""
    share = f"{flagged[name]} of {chosen} flagged pairs, but {every[name]} of all {total}"
    return f"The {column} {printable(name)} stands out: {share} (p = {p:.1g})."


def _tail(total: int, marked: int, drawn: int, least: int) -> float:
    """P(at least `least` marked ones among `drawn` of `total`), hypergeometric."""

    def log_comb(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    terms = range(max(least, drawn - (total - marked)), min(marked, drawn) + 1)
    logs = (log_comb(marked, k) + log_comb(total - marked, drawn - k) - log_comb(total, drawn) for k in terms)
    return min(1.0, sum(map(math.exp, logs)))


def _flagged(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["flagged"]]


def _add_texts(workers: WorkerPool, params: Params, train: PairTable, lines: Sequence[Line]) -> None:
    """The prompt, and both answers from where they differ."""
    base = str(workers.shared_path(base_folder(params.source.model)))
    pairs = [train[line["number"]] for line in lines]
    ids = [list(answer[p.shared_prefix :]) for p in pairs for answer in (p.chosen_ids, p.rejected_ids)]
    (texts,) = workers.map("decode", [(Weights(base, base, params.evaluate.dtype), ids)])
    for n, line in enumerate(lines):
        line["prompt"] = train.table["prompt"][line["number"]].as_py()
        line["chosen"], line["rejected"] = texts[2 * n : 2 * n + 2]


def _write(folder: Path, lines: Sequence[Line]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in (("scores.jsonl", lines), ("flagged.jsonl", _flagged(lines))):
        plain = ({key: value for key, value in line.items() if key != "number"} for line in some)
        write_text(folder / name, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in plain))


def _print(lines: list[Line], shown: Sequence[Line], folder: Path, targets: int, against: str | None) -> None:
    what = f"{targets} held-out pairs" + (f" that lost against {against}" if against else "")
    rows = [
        (
            line["id"],
            f"{line['score']:.1f}" + "*" * line["flagged"],
            f"{line['file']}:{line['row']}",
            printable(line["user"] or "-"),
            *(_start(line[name]) for name in ("prompt", "chosen", "rejected")),
        )
        for line in shown
    ]
    print(f"\nTraining pairs that work against {what}, the most harmful first (* flagged):")
    print(text_table(rows, ("id", "score", "row", "user", "prompt", "chosen ...", "rejected ...")))
    for column in ("source", "user"):
        if sentence := concentration(lines, column):
            print(sentence)
    print(f"\nThe scores of all {len(lines)} pairs are in {folder / 'scores.jsonl'}.")
    if flagged := _flagged(lines):
        path = folder / "flagged.jsonl"
        print(f"{len(flagged)} pairs are flagged in {path}. Read them. Then train without those that the file names:")
        print(f"  dpo run --set source.exclude={path}")
    else:
        print(f"No pair is flagged: none is {DEVIATIONS:g} robust standard deviations worse than the median.")


def _start(text: str) -> str:
    plain = printable(" ".join(text.split()))
    return plain if len(plain) <= TEXT else f"{plain[: TEXT - 3]}..."
