"""Run the gate through years of nights: how often luck promotes, how much is lost unseen, how soon a gain passes.

    python -m tests.benchmarks.gate_simulation --years 1000 --prompts 1500
    python -m tests.benchmarks.gate_simulation --prompts 4000 --world "5 points" --rule "error budget"

Each night a challenger meets the champion on `--prompts` held-out pairs, and the product's own functions decide. They
see the number of prompts that the challenger wins and loses, so their answers are computed once for each such pair of
numbers. One prompt in five is uncertain: a model is right on it half of the time, so two equal models differ on a tenth
of all prompts. The rest is easy or hard for every model.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy

from tasks.compare.compare import Paired, summarize
from tasks.config.params import load_params
from tasks.config.promote import ErrorBudget, Promote
from tasks.promote.error_budget import lost_too_much, not_better
from tasks.promote.gate import regressions
from tests.benchmarks.table import markdown
from tests.support.workspaces import PROJECT

NIGHTS = 365
METRIC = "rewards/accuracies"
SHARES = (0.6, 0.2, 0.2)  # of prompts that are easy, uncertain and hard
RIGHT = numpy.array([1.0, 0.5, 0.0])  # how often a model is right on them
ACCURACY = float(numpy.dot(SHARES, RIGHT))
FLOOR = -0.2  # a champion that lost this much is at 0.5, where promote.require of params.yaml stops the fall
Counts = tuple[int, int]  # prompts that the challenger wins and loses
Rule = Callable[[Counts, Counts], bool]  # against the champion, against the anchor: promote?


@dataclass(frozen=True)
class World:
    name: str
    step: float = 0.0  # how much better each challenger is than the champion
    gain: float = 0.0  # how much better than at first every challenger is from the night `since` on
    since: int = 30
    fresh: bool = False  # new held-out prompts every night, instead of the same ones all year
    flipped: float = 0.0  # share of prompts whose votes are reversed
    biased: float = 0.0  # share of prompts whose rater votes for the challenger wherever the two models differ


WORLDS = [
    World("nothing is better"),
    World("nothing is better, fresh prompts", fresh=True),
    World("each night 1 point worse", step=-0.01),
    World("each night 1 point worse, fresh prompts", step=-0.01, fresh=True),
    World("5 points better from night 30", gain=0.05),
    World("5 points better, fresh prompts", gain=0.05, fresh=True),
]


VOTES = [
    World("nothing is better, 20% of the votes reversed", flipped=0.2),
    World("nothing is better, 20% reversed, fresh prompts", flipped=0.2, fresh=True),
    World("5 points better, 20% of the votes reversed", gain=0.05, flipped=0.2),
    World("5 points better, 20% reversed, fresh prompts", gain=0.05, flipped=0.2, fresh=True),
    World("nothing is better, 20% of the votes for every challenger", biased=0.2),
]


@dataclass(frozen=True)
class Result:
    promoted: numpy.ndarray  # (years, nights): whether the challenger became champion
    levels: numpy.ndarray  # (years,): the last champion's true accuracy minus the anchor's
    since: int

    @property
    def any_promotion(self) -> float:
        return float(self.promoted.any(axis=1).mean())

    @property
    def before_gain(self) -> float:
        """Share of years that promote while nothing is better."""
        return float(self.promoted[:, : self.since].any(axis=1).mean())

    def within(self, nights: int) -> float:
        """Share of years that promote within so many nights after the gain."""
        return float(self.promoted[:, self.since : self.since + nights].any(axis=1).mean())


def todays_rule(promote: Promote, prompts: int) -> Rule:
    """promote.max_regression alone: refuse what is shown to be worse than the champion."""

    @cache
    def decide(champion: Counts) -> bool:
        comparison = summarize(paired(champion, prompts))
        return not regressions(promote, comparison, "1")

    return lambda champion, anchor: decide(champion)


def budget_rule(budget: ErrorBudget, prompts: int) -> Rule:
    """promote.error_budget: shown to be better than the champion, and shown not to lose too much against the anchor."""

    @cache
    def is_better(champion: Counts) -> bool:
        return not not_better(budget, paired(champion, prompts), "1")

    @cache
    def is_close(anchor: Counts) -> bool:
        return not lost_too_much(budget, paired(anchor, prompts), "1")

    return lambda champion, anchor: is_better(champion) and is_close(anchor)


def rules_of(prompts: int) -> dict[str, tuple[Rule, list[World]]]:
    """Each rule with its worlds."""
    params = load_params(PROJECT / "params.yaml")
    today = todays_rule(params.promote, prompts)
    improvement = budget_rule(ErrorBudget(metric=METRIC), prompts)
    close = budget_rule(ErrorBudget(metric=METRIC, improvement=False), prompts)
    careful = budget_rule(ErrorBudget(metric=METRIC, biased_votes=0.2), prompts)
    return {
        "today": (today, WORLDS),
        "error budget": (improvement, WORLDS + VOTES),
        "error budget, `improvement: false`": (lambda *counts: close(*counts) and today(*counts), WORLDS[2:4]),
        "error budget, `biased_votes: 0.2`": (careful, [VOTES[-1], *WORLDS[4:6]]),
    }


def paired(counts: Counts, prompts: int) -> dict[str, Paired]:
    """Two models of which the first is right on `counts[0]` prompts alone and the second on `counts[1]`."""
    (wins, losses), numbers = counts, numpy.arange(prompts)
    ours, theirs = (numbers >= losses), (numbers < losses) | (numbers >= losses + wins)
    names = [str(number) for number in range(prompts)]
    return {METRIC: Paired(ours.astype(float).tolist(), theirs.astype(float).tolist(), names, 1.0)}


def simulate(rule: Rule, world: World, years: int, prompts: int, seed: int = 0) -> Result:
    """Prompts of one kind on which the same models are right are interchangeable, so only their number is drawn."""
    generator, nights = numpy.random.default_rng(seed), world.since + 3 if world.gain else NIGHTS
    levels, start, is_first = numpy.zeros(years), numpy.zeros(years), numpy.ones(years, bool)
    promoted = numpy.zeros((years, nights), bool)
    for night in range(nights):
        if night == 0 or world.fresh:
            cells = _held_out(generator, world, years, prompts, levels, is_first)
        level = numpy.maximum(levels + world.step, FLOOR) if world.step else start + world.gain * (night >= world.since)
        right = generator.binomial(cells, _chances(level))
        wrong = cells - right
        champion, anchor = (_votes(world, right, wrong, axis) for axis in (4, 3))
        now = numpy.array([rule(*counts) for counts in zip(champion, anchor, strict=True)])
        after = numpy.stack([wrong.sum(axis=4), right.sum(axis=4)], axis=4)  # the challenger in the champion's place
        cells = numpy.where(now[:, None, None, None, None], after, cells)
        levels, is_first, promoted[:, night] = numpy.where(now, level, levels), is_first & ~now, now
    return Result(promoted, levels, world.since)


def _held_out(
    generator: numpy.random.Generator,
    world: World,
    years: int,
    prompts: int,
    levels: numpy.ndarray,
    is_first: numpy.ndarray,
) -> numpy.ndarray:
    """Numbers of prompts: (years, wrong votes, kinds, the anchor is right, the champion is right)."""
    kinds = generator.multinomial(prompts, SHARES, years)
    bad = generator.binomial(kinds, max(world.flipped, world.biased))
    cells = numpy.stack([kinds - bad, bad], axis=1)  # (years, wrong votes, kinds)
    right = generator.binomial(cells, RIGHT)
    cells = numpy.stack([cells - right, right], axis=3)
    right = generator.binomial(cells, _chances(levels)[..., 0])
    same = is_first[:, None, None, None]  # the champion is the anchor
    right = numpy.where(same, cells * [0, 1], right)
    return numpy.stack([cells - right, right], axis=4)


def _chances(levels: numpy.ndarray) -> numpy.ndarray:
    """How often models of these levels are right, by kind of prompt."""
    more = RIGHT + (1 - RIGHT) * numpy.maximum(levels, 0)[:, None] / (1 - ACCURACY)
    right = more * (1 + numpy.minimum(levels, 0)[:, None] / ACCURACY)
    return right[:, None, :, None, None]


def _votes(world: World, right: numpy.ndarray, wrong: numpy.ndarray, axis: int) -> list[Counts]:
    """How many prompts of each year the challenger wins and loses against the model of that axis, by people's votes."""
    wins = right.take(0, axis).sum(axis=(2, 3))  # (years, wrong votes)
    losses = wrong.take(1, axis).sum(axis=(2, 3))
    won, lost = wins.sum(axis=1), losses.sum(axis=1)
    if world.flipped:
        won, lost = wins[:, 0] + losses[:, 1], losses[:, 0] + wins[:, 1]
    if world.biased:
        won, lost = won + losses[:, 1], losses[:, 0]
    return list(zip(won.tolist(), lost.tolist(), strict=True))


def row(world: World, result: Result) -> list[str]:
    if world.gain:
        return [f"{result.before_gain:.1%} before", "", f"{result.within(1):.1%} / {result.within(3):.1%}"]
    lost = f"{100 * abs(result.levels.mean()):.2g} / {100 * abs(result.levels.min()):.2g}" if world.step else ""
    return [f"{result.any_promotion:.1%}", lost, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--years", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=1500)
    parser.add_argument("--rule", default="", help="only rules whose name starts with this")
    parser.add_argument("--world", default="", help="only worlds whose name contains this")
    arguments = parser.parse_args()
    rows = []
    for name, (rule, worlds) in rules_of(arguments.prompts).items():
        for world in worlds if name.startswith(arguments.rule) else []:
            if arguments.world not in world.name:
                continue
            rows.append([name, world.name, *row(world, simulate(rule, world, arguments.years, arguments.prompts))])
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    header = ["rule", "world", "years with a promotion", "points lost, mean / most", "gain promoted, night 1 / 3"]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
