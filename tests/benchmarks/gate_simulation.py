"""Run the gate through years of nights: how often luck promotes, how much is lost unseen, how soon a gain passes.

    python -m tests.benchmarks.gate_simulation --years 1000 --prompts 1500
    python -m tests.benchmarks.gate_simulation --prompts 6000 --world "5 points" --rule "error budget"

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

from tasks.config.params import ErrorBudget, Evaluate, Promote, load_params
from tasks.evaluation.compare import compare, pair_up
from tasks.evaluation.reevaluate import ModelResults
from tasks.release.error_budget import lost_too_much, not_better
from tasks.release.gate import regressions
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


def todays_rule(evaluate: Evaluate, promote: Promote, prompts: int) -> Rule:
    """promote.max_regression alone: refuse what is shown to be worse than the champion."""

    @cache
    def decide(champion: Counts) -> bool:
        comparison = compare(evaluate, *results(champion, prompts))
        return not regressions(promote, comparison, "1")

    return lambda champion, anchor: decide(champion)


def budget_rule(evaluate: Evaluate, budget: ErrorBudget, prompts: int) -> Rule:
    """promote.error_budget: shown to be better than the champion, and shown not to lose too much against the anchor."""

    @cache
    def is_better(champion: Counts) -> bool:
        return not not_better(budget, pair_up(evaluate, *results(champion, prompts)), "1")

    @cache
    def is_close(anchor: Counts) -> bool:
        return not lost_too_much(budget, pair_up(evaluate, *results(anchor, prompts)), "1")

    return lambda champion, anchor: is_better(champion) and is_close(anchor)


def rules_of(prompts: int) -> dict[str, tuple[Rule, list[World]]]:
    """Each rule with its worlds."""
    params = load_params(PROJECT / "params.yaml")
    today = todays_rule(params.evaluate, params.promote, prompts)
    improvement = budget_rule(params.evaluate, ErrorBudget(metric=METRIC), prompts)
    close = budget_rule(params.evaluate, ErrorBudget(metric=METRIC, improvement=False), prompts)
    careful = budget_rule(params.evaluate, ErrorBudget(metric=METRIC, biased_votes=0.2), prompts)
    return {
        "today": (today, WORLDS),
        "error budget": (improvement, WORLDS + VOTES),
        "error budget, `improvement: false`": (lambda *counts: close(*counts) and today(*counts), WORLDS[2:4]),
        "error budget, `biased_votes: 0.2`": (careful, [VOTES[-1], *WORLDS[4:6]]),
    }


def results(counts: Counts, prompts: int) -> tuple[ModelResults, ModelResults]:
    """Two models of which the first is right on `counts[0]` prompts alone and the second on `counts[1]`."""
    wins, losses = counts
    ours = [number >= losses for number in range(prompts)]
    theirs = [not losses <= number < losses + wins for number in range(prompts)]
    sides = [{str(i): {"prompt": str(i), "margin": 1.0 if right else -1.0} for i, right in enumerate(side)}
             for side in (ours, theirs)]  # fmt: skip
    return ModelResults({}, sides[0]), ModelResults({}, sides[1])


class HeldOut:
    """The prompts of each year, in the order easy, uncertain, hard; draws on which of them a model is right."""

    def __init__(self, generator: numpy.random.Generator, years: int, prompts: int) -> None:
        self.generator = generator
        ends = generator.multinomial(prompts, SHARES, years).cumsum(axis=1)
        numbers = numpy.arange(prompts)
        self.is_easy, self.is_known = numbers < ends[:, [0]], numbers < ends[:, [1]]
        self.levels: numpy.ndarray | None = None
        self.thresholds = numpy.zeros((years, prompts), numpy.uint16)

    def outcomes(self, levels: numpy.ndarray) -> numpy.ndarray:
        """On which prompts models of these levels are right: (years, prompts)."""
        if self.levels is None or (levels != self.levels).any():
            more = RIGHT + (1 - RIGHT) * numpy.maximum(levels, 0)[:, None] / (1 - ACCURACY)
            right = more * (1 + numpy.minimum(levels, 0)[:, None] / ACCURACY)
            easy, uncertain, hard = (numpy.rint(65535 * right[:, [kind]]).astype(numpy.uint16) for kind in range(3))
            self.thresholds = numpy.where(self.is_easy, easy, numpy.where(self.is_known, uncertain, hard))
            self.levels = levels.copy()
        return self.generator.integers(0, 65535, self.thresholds.shape, numpy.uint16) < self.thresholds


def simulate(rule: Rule, world: World, years: int, prompts: int, seed: int = 0) -> Result:
    generator, nights = numpy.random.default_rng(seed), world.since + 3 if world.gain else NIGHTS
    levels, start, first = numpy.zeros(years), numpy.zeros(years), numpy.ones(years, bool)
    promoted = numpy.zeros((years, nights), bool)
    for night in range(nights):
        if night == 0 or world.fresh:
            held_out = HeldOut(generator, years, prompts)
            anchor = champion = held_out.outcomes(start)
            if not first.all():
                champion = numpy.where(first[:, None], anchor, held_out.outcomes(levels))
        level = numpy.maximum(levels + world.step, FLOOR) if world.step else start + world.gain * (night >= world.since)
        challenger = held_out.outcomes(level)
        counts = _votes(world, challenger, champion)
        against = counts if first.all() else _votes(world, challenger, anchor)
        now = numpy.array([rule(*pair) for pair in zip(counts, against, strict=True)])
        champion = numpy.where(now[:, None], challenger, champion) if now.any() else champion
        levels, first, promoted[:, night] = numpy.where(now, level, levels), first & ~now, now
    return Result(promoted, levels, world.since)


def _votes(world: World, ours: numpy.ndarray, theirs: numpy.ndarray) -> list[Counts]:
    """How many prompts of each year the challenger wins and loses, by the votes of people."""
    wins, losses = ours & ~theirs, theirs & ~ours
    share = max(world.flipped, world.biased)
    bad = numpy.arange(ours.shape[1]) % round(1 / share) == 0 if share else None  # of each kind the same share
    if world.flipped:
        wins, losses = numpy.where(bad, losses, wins), numpy.where(bad, wins, losses)
    if world.biased:
        wins, losses = wins | losses & bad, losses & ~bad
    return list(zip(*(numpy.count_nonzero(side, axis=1).tolist() for side in (wins, losses)), strict=True))


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
