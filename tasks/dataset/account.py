"""Where every row of the data went: kept, left out, or quarantined, with examples; and whether that is good enough."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tasks.dataset.chunks import EXAMPLES, Outcome
from tasks.dataset.violations import BAD, VIOLATIONS
from tasks.errors import UserError
from tasks.params import Prepare


@dataclass
class Account:
    """Counts over all chunks; by source, under the source's name."""

    rows: Counter = field(default_factory=Counter)
    candidates: Counter = field(default_factory=Counter)
    left_out: dict[str, Counter] = field(default_factory=dict)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, outcome: Outcome, source: str) -> None:
        self.rows[source] += outcome.rows
        self.candidates[source] += outcome.candidates
        self.left_out.setdefault(source, Counter()).update(outcome.counts)
        for name, examples in outcome.examples.items():
            self.add_examples(name, examples)

    def add_examples(self, name: str, examples: Iterable[dict[str, Any]]) -> None:
        known = self.examples.setdefault(name, [])
        known.extend(list(examples)[: EXAMPLES - len(known)])

    def by_violation(self) -> Counter:
        return sum(self.left_out.values(), Counter())

    def bad(self) -> Counter:
        return Counter({name: count for name, count in self.by_violation().items() if name in BAD})


def check(account: Account, kept: dict[str, int], params: Prepare, name: str) -> None:
    """Stop when too much is amiss, or a side is empty."""
    every = account.candidates.total()
    counts = account.by_violation()
    for violation, most in params.thresholds.items():
        if counts[violation] > most * every:
            _refuse(account, Counter({violation: counts[violation]}), name, f"prepare.thresholds.{violation}", most)
    bad = Counter({n: count for n, count in account.bad().items() if n not in params.thresholds})
    if bad.total() > params.max_bad_fraction * every:
        _refuse(account, bad, name, "prepare.max_bad_fraction", params.max_bad_fraction)
    for split, count in kept.items():
        if not count:
            raise UserError(
                f"{name}: no pair is left for {split} ({every} pairs came in; left out: {dict(counts)}). "
                "Give more rows, or change prepare.eval_fraction, max_tokens or max_pairs."
            )


def _refuse(account: Account, bad: Counter, name: str, key: str, most: float) -> None:
    every = account.candidates.total()
    examples = [example for violation in bad for example in account.examples[violation]]
    first = min(examples, key=lambda example: example["row"])
    reasons = "; ".join(f"{violation}: {VIOLATIONS[violation]} ({count})" for violation, count in bad.most_common())
    raise UserError(
        f"{name}: {bad.total()} of {every} rows cannot be used, first row {first['row']} of {first['file']}: "
        f"{first['reason']}: {first['content'][:160]}. By violation: {reasons}. Mend them, or raise {key} (now {most}) "
        f"to at least {_rounded_up(bad.total() / every)} to set such rows aside in data/card/quarantine.jsonl."
    )


def _rounded_up(share: float) -> float:
    return min(1.0, int(share * 1000 + 1) / 1000)
