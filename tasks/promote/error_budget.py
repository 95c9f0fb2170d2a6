"""The error budget of a registered model: at most `alpha` of its years promote by luck, and its champions together lose
at most `max_loss` against a fixed version, the anchor.

Each test of a new model spends alpha / tests. The registered model has one tag for each test of the last 365 days: all
machines see it, it outlives deleted versions, and it is written under the model's lock. The tag's name is a hash of the
test, so repeating a promotion spends nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from math import isinf, log
from typing import Any

from tasks.compare.compare import Paired
from tasks.config.promote import ErrorBudget
from tasks.errors import UserError
from tasks.promote.evidence import betting_test, prompts_for_lead, sign_test
from tasks.tracking.lease import Lease
from tasks.tracking.registry import Registry, Version

ANCHOR = "anchor"  # the alias, which also keeps `dpo gc` from deleting the version
PINNED = "dpo.anchor"  # tag of the registered model: the number of the first accepted version
TEST = "dpo.test."  # prefix of a tag of the registered model: day and level of a test
WINDOW = timedelta(days=365)
EXAMPLE_LEAD = 0.05


@dataclass(frozen=True)
class Test:
    """What a promotion spends, the anchor, and the reasons against the model."""

    tag: str = ""  # empty: nothing was compared, so nothing is spent
    level: float = 0.0
    anchor: Version | None = None
    reasons: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """For promote.json."""
        return {"test": self.tag, "level": self.level, "anchor": self.anchor.number if self.anchor else None}


def plan_test(
    budget: ErrorBudget, models: Registry, version: Version, champion: Version | None, paired: Mapping[str, Paired]
) -> Test:
    """The test of a version against the champion; writes nothing."""
    try:
        anchor = find_anchor(budget, models, champion) or (version if budget.anchor else None)
    except UserError as error:
        return Test(reasons=[str(error)])
    if champion is None:
        return Test(anchor=anchor)
    reasons = not_better(budget, paired, champion.number)
    if budget.metric not in paired:
        return Test(anchor=anchor, reasons=reasons)
    what = (budget.metric, *map(models.digest, (version, champion)))
    tag, level = TEST + sha256(" ".join(what).encode()).hexdigest()[:16], budget.alpha / budget.tests
    if spent := exhausted(budget, models.model_tags(), tag, level):
        return Test(anchor=anchor, reasons=reasons + spent)
    return Test(tag, level, anchor, reasons)


def not_better(budget: ErrorBudget, paired: Mapping[str, Paired], champion: str) -> list[str]:
    """A reason unless the model is shown to be better than the champion."""
    if not budget.improvement:
        return []
    if budget.metric not in paired:
        return [f"{budget.metric} was not compared with version {champion}"]
    differences, level = paired[budget.metric].by_prompt(), budget.alpha / budget.tests
    count, wins, losses = len(differences), int((differences > 0).sum()), int((differences < 0).sum())
    chance = (1 + budget.biased_votes) / 2  # the biased votes are won, and of the others half
    p = sign_test(wins, losses, chance)
    if p <= level:
        return []
    return [
        f"{budget.metric} is not shown to be better than that of version {champion}: the model wins {wins} and loses "
        f"{losses} of {count} prompts, p = {p:.2g}, and {_level(budget)} is needed"
        + _prompts_needed((wins - losses) / count, (wins + losses) / count, level, chance)
    ]


def _prompts_needed(lead: float, decided: float, level: float, chance: float) -> str:
    shown = lead if lead > 0 else EXAMPLE_LEAD
    needed = prompts_for_lead(shown, max(decided, shown), level, chance)
    return "" if isinf(needed) else f". A lead of {shown:.1%} of the prompts needs about {needed:,.0f} prompts"


def lost_too_much(budget: ErrorBudget, paired: Mapping[str, Paired], anchor: str) -> list[str]:
    """A reason unless the model is shown to lose less than `max_loss` against the anchor."""
    values = paired.get(budget.metric)
    if values is None or values.reach is None:
        return [f"{budget.metric} was not compared with the anchor, version {anchor}"]
    differences, level = values.by_prompt(), budget.alpha / budget.tests
    p = betting_test(differences, budget.max_loss, values.reach)
    if p <= level:
        return []
    count = len(differences)
    more = f". If the difference stays, about {count * log(level) / log(p):,.0f} prompts show it" if p < 1 else ""
    return [
        f"{budget.metric} is not shown to be less than {budget.max_loss:g} below that of the anchor, version "
        f"{anchor}: {differences.mean():+.4g} on {count} prompts, p = {p:.2g}, and {_level(budget)} is needed" + more
    ]


def _level(budget: ErrorBudget) -> str:
    return f"{budget.alpha / budget.tests:.2g} (alpha {budget.alpha:g} for {budget.tests} tests a year)"


def find_anchor(budget: ErrorBudget, models: Registry, champion: Version | None) -> Version | None:
    """The version that all champions are compared with; None where no version was accepted yet."""
    if budget.anchor is None:
        return None
    accepted = [v.number for v in models.versions() if "promoted_over" in v.tags and not v.tags.get("rolled_back")]
    first = models.model_tags().get(PINNED) or next(iter(accepted), champion.number if champion else None)
    number = first if budget.anchor == "first" else budget.anchor
    anchor = models.version(number) if number else None
    if number and anchor is None:
        known = ", ".join(version.number for version in models.versions())
        raise UserError(
            f"the anchor, version {number} of {models.name}, is not in the registry. Name another one in params.yaml, "
            f"as in `promote.error_budget.anchor: '3'`. The registry has: {known}"
        )
    return anchor


def exhausted(budget: ErrorBudget, notes: Mapping[str, str], tag: str, level: float) -> list[str]:
    """A reason if the last 365 days have spent what this test needs."""
    spent = _spent(notes)
    others = sum(level for other, (_, level) in spent.items() if other != tag)
    if (tag in spent and level <= spent[tag][1]) or others + level <= budget.alpha * (1 + 1e-9):
        return []
    free = min((day for day, _ in spent.values()), default=_today()) + WINDOW
    return [
        f"the error budget is spent: {len(spent)} tests in the last 365 days. The next one is possible on {free}; "
        'until then a person decides (`dpo approve VERSION NAME --reason "..."`), or raise promote.error_budget.alpha'
    ]


def spend(budget: ErrorBudget | None, models: Registry, decision: Mapping[str, Any], lease: Lease) -> bool:
    """Record the test of a decision before the aliases move; False if another promotion has spent what it needs."""
    if budget is None:
        return True
    notes, tag, level = models.model_tags(), decision["test"], decision["level"]
    spent = _spent(notes)
    if tag and exhausted(budget, notes, tag, level):
        return False
    for old in (name for name in notes if name.startswith(TEST) and name not in spent):
        models.set_model_tag(old, None, lease)
    if tag and level > spent.get(tag, (None, 0.0))[1]:
        models.set_model_tag(tag, f"{_today()} {level!r}", lease)
    if budget.anchor == "first" and PINNED not in notes and (aliases := anchor_alias(decision)):
        models.set_model_tag(PINNED, aliases[ANCHOR], lease)
    return True


def anchor_alias(decision: Mapping[str, Any]) -> dict[str, str]:
    """The alias of the anchor, once a version was accepted."""
    accepted = decision["promoted"] or decision["champion_before"]
    return {ANCHOR: decision["anchor"]} if accepted and decision.get("anchor") else {}


def _spent(notes: Mapping[str, str]) -> dict[str, tuple[date, float]]:
    """Day and level of each test of the last 365 days, by its tag."""
    values = {tag: value.split() for tag, value in notes.items() if tag.startswith(TEST)}
    try:
        tests = {tag: (date.fromisoformat(day), float(level)) for tag, (day, level) in values.items()}
    except ValueError as error:
        raise UserError(
            f"A tag {TEST}* of the registered model is not a day and a level ({error}): somebody edited it in MLflow. "
            "Restore or delete the tag there, then run this again."
        ) from error
    return {tag: test for tag, test in tests.items() if _today() - test[0] < WINDOW}


def _today() -> date:
    return datetime.now(UTC).date()
