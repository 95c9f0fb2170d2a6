"""Where every row of the data went: kept, dropped with a reason, or quarantined; and whether that is good enough."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tasks.errors import UserError
from tasks.pairs import SPLITS
from tasks.params import Prepare


@dataclass
class Account:
    """Where every row went."""

    rows: int = 0
    kept: Counter = field(default_factory=Counter)
    dropped: Counter = field(default_factory=Counter)
    bad: list[dict[str, Any]] = field(default_factory=list)
    merged: int = 0
    truncated: int = 0

    def quarantine(self, number: int, reason: str, row: Any) -> None:
        self.bad.append({"row": number, "reason": reason, "content": row})


def check(account: Account, params: Prepare, name: str) -> None:
    """Stop when too many rows are bad or a side is empty."""
    share = len(account.bad) / account.rows
    if share > params.max_bad_fraction:
        first = account.bad[0]
        reasons = Counter(entry["reason"] for entry in account.bad)
        raise UserError(
            f"{name}: {len(account.bad)} of {account.rows} rows cannot be used, first row {first['row']}: "
            f"{first['reason']}: {json.dumps(first['content'], ensure_ascii=False, default=str)[:160]}. "
            f"By reason: {'; '.join(f'{reason} ({count})' for reason, count in reasons.most_common())}. "
            f"Mend them, or raise prepare.max_bad_fraction (now {params.max_bad_fraction}) to at least "
            f"{_rounded_up(share)} to set such rows aside in data/pairs/quarantine.jsonl."
        )
    for split in SPLITS:
        if not account.kept[split]:
            raise UserError(
                f"{name}: no pair is left for {split} ({account.rows} rows, dropped: {dict(account.dropped)}). "
                "Give more rows, or change prepare.eval_fraction, max_tokens or max_pairs."
            )


def _rounded_up(share: float) -> float:
    return min(1.0, int(share * 1000 + 1) / 1000)


def make_report(
    account: Account, splits: dict[str, list[dict[str, Any]]], name: str, shape: str, template: str
) -> dict[str, Any]:
    pairs = [pair for split in SPLITS for pair in splits[split]]
    longer = sum(len(pair["chosen_ids"]) > len(pair["rejected_ids"]) for pair in pairs) / len(pairs)
    return {
        "source": name,
        "format": shape,
        "template": template,
        "rows": account.rows,
        "pairs": dict(account.kept),
        "dropped": dict(account.dropped),
        "quarantined": dict(Counter(entry["reason"] for entry in account.bad)),
        "tokenizer_merged_across_the_border": account.merged,
        "prompts_truncated": account.truncated,
        "chosen_longer_than_rejected": round(longer, 4),
        "tokens": {
            part: _spread([len(pair[f"{part}_ids"]) for pair in pairs]) for part in ("prompt", "chosen", "rejected")
        },
    }


def _spread(lengths: list[int]) -> dict[str, float]:
    ordered = sorted(lengths)
    at = {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 95)}
    return {"mean": round(sum(ordered) / len(ordered), 2), **at, "max": ordered[-1]}
