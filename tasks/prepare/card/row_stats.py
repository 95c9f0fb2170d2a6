"""How many rows were read, kept and rejected, with examples; the limits on rejected rows, and warnings."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tasks.config.prepare import Prepare
from tasks.errors import UserError
from tasks.prepare.chunks import EXAMPLES, ChunkResult
from tasks.source.reject_reasons import FIXES, QUARANTINED, REJECT_REASONS

MANY = 0.05  # share of pairs that may be left out without a warning
MOST = 0.5  # above it, the layout is probably wrong: the advice is to check it, not to accept the loss
WIDE = 0.1  # half-width of an accuracy's interval from which a warning is given
Z = 1.96  # of a 95% interval


@dataclass
class RowStats:
    """Counts over all chunks, by the name of the source."""

    rows: Counter = field(default_factory=Counter)
    candidates: Counter = field(default_factory=Counter)
    rejected: dict[str, Counter] = field(default_factory=dict)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    too_long: Counter = field(default_factory=Counter)  # see ChunkResult
    unread: Counter = field(default_factory=Counter)

    def add(self, result: ChunkResult, source: str) -> None:
        self.rows[source] += result.rows
        self.candidates[source] += result.candidates
        self.rejected.setdefault(source, Counter()).update(result.rejected)
        self.too_long.update(result.too_long)
        self.unread.update(result.unread)
        for name, examples in result.examples.items():
            self.add_examples(name, examples)

    def add_examples(self, name: str, examples: Iterable[dict[str, Any]]) -> None:
        known = self.examples.setdefault(name, [])
        known.extend(list(examples)[: EXAMPLES - len(known)])

    def by_reason(self) -> Counter:
        return sum(self.rejected.values(), Counter())


def check_limits(
    stats: RowStats, pairs: dict[str, int], params: Prepare, source: str, other_shape: Callable[[], str]
) -> None:
    """UserError if too many rows were rejected, or a split has no pairs. `other_shape` gives advice for most rows."""
    total, counts = stats.candidates.total(), stats.by_reason()
    for name, limit in params.thresholds.items():
        if counts[name] > limit * total:
            raise _too_many(stats, Counter({name: counts[name]}), source, f"prepare.thresholds.{name}", limit)
    others = QUARANTINED.keys() - params.thresholds.keys()
    bad = Counter({name: count for name, count in counts.items() if name in others})
    if bad.total() > params.max_bad_fraction * total:
        most = bad.total() > MOST * total
        advice = other_shape() or FIXES.get(bad.most_common(1)[0][0], "") if most else ""
        raise _too_many(stats, bad, source, "prepare.max_bad_fraction", params.max_bad_fraction, advice)
    for split, count in pairs.items():
        if not count:
            raise UserError(
                f"{source}: the {split} split is empty ({total} pairs were read; rejected: {dict(counts)}). "
                "Add rows, or change prepare.eval_fraction, max_tokens or max_pairs."
            )


def _too_many(stats: RowStats, bad: Counter, source: str, key: str, limit: float, advice: str = "") -> UserError:
    total = stats.candidates.total()
    first = min((example for name in bad for example in stats.examples[name]), key=lambda example: example["row"])
    reasons = "; ".join(f"{name}: {REJECT_REASONS[name]} ({count})" for name, count in bad.most_common())
    if not advice and bad.total() > MOST * total:
        advice = "Check prepare.format and prepare.columns against docs/data.md, or correct the rows."
    enough = int(bad.total() / total * 1000 + 1) / 1000  # rounded up
    advice = advice or (
        f"Correct the rows, or raise {key} (now {limit}) to at least {enough} to move such rows to "
        "data/card/quarantine.jsonl."
    )
    return UserError(
        f"{source}: {bad.total()} of {total} rows cannot be used. The first is row {first['row']} of {first['file']}: "
        f"{first['reason']}: {first['content'][:160]}. Reasons: {reasons}. {advice}"
    )


def warnings(stats: RowStats, held_out: int, params: Prepare) -> list[str]:
    """A sentence for each reason that leaves out many rows, and one for a held-out set that is too small."""
    counts = stats.by_reason()
    total = stats.candidates.total() - counts["not_sampled"]
    advice = {
        "over_length": _longer(stats.too_long, params),
        "tie": "prepare.ties: soft keeps them with the label 0.5, which teaches that the answers are equally good",
        "small_margin": f"a prepare.min_margin below {params.min_margin:g} keeps them, and they prefer more weakly",
        "near_duplicate": f"a prepare.near_duplicates above {params.near_duplicates} keeps more of them",
    }
    many = {name: count for name, count in counts.items() if count > MANY * total}
    sentences = [
        f"{count} of {total} pairs ({count / total:.1%}) are left out: {REJECT_REASONS[name]}; {advice[name]}"
        for name, count in many.items()
        if name in advice
    ]
    bad = sum(count for name, count in counts.items() if name in QUARANTINED)
    if bad > MANY * total:
        sentences.append(f"{bad} of {total} rows ({bad / total:.1%}) cannot be used: see data/card/quarantine.jsonl")
    half = Z / 2 / math.sqrt(held_out + Z * Z)  # Wilson's interval around one half
    if half > WIDE:
        sentences.append(
            f"{held_out} held-out pairs say little: an accuracy has a 95% interval of about +-{100 * half:.0f} points "
            "(100 pairs: +-10, 400 pairs: +-5). Add rows, or raise prepare.eval_fraction"
        )
    return sentences


def _longer(too_long: Counter, params: Prepare) -> str:
    """What the next values of prepare.max_tokens would keep."""
    limits = sorted(too_long)[:3]
    kept = accumulate(too_long[limit] for limit in limits)
    parts = (f"{limit} keeps {count} of them" for limit, count in zip(limits, kept, strict=True))
    return (
        f"prepare.max_tokens {', '.join(parts)}, and memory and time of a pair grow with its length; "
        "prepare.over_length: truncate_prompt or truncate_response shortens them"
    )
