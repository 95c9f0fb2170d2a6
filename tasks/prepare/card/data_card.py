"""The data card: statistics of the prepared data, rejected rows and warnings.

report.json is for programs, card.md and card.html (one page with plots) are for people.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.artifacts.pairs import SPLITS, read_rows
from tasks.config.paths import main_checkout
from tasks.config.prepare import Prepare
from tasks.prepare.card import pages, row_stats, shortcuts
from tasks.prepare.card.histograms import histogram
from tasks.prepare.card.notes import count_notes
from tasks.prepare.card.preview import decode_pair
from tasks.prepare.card.row_stats import RowStats
from tasks.prepare.chunks import RowSource
from tasks.prepare.dedup import Columns
from tasks.prepare.selection import Processed
from tasks.prepare.shards import count_splits
from tasks.prepare.templates import ChatTemplate
from tasks.prepare.unpaired import as_pairs, compared_rows
from tasks.source.reject_reasons import QUARANTINED
from tasks.system.files import fingerprint, read_json, read_json_or_empty, sha256, write_json

PROBE_PAIRS = {"train": 4000, "eval": 2000}  # the most that the probe reads of each split
PREVIEW_PAIRS = 3


def make_report(done: Processed, params: Prepare, template: ChatTemplate, address: str, pairs: Path) -> dict[str, Any]:
    stats, rejected = done.stats, done.stats.by_reason()
    kept = {name: values[done.kept] for name, values in done.columns.items() if name != "signature"}
    splits, facts = count_splits(kept["held_out"]), _shortcuts(kept, pairs)
    return {
        "source": address,
        "sha256": {split: sha256(pairs / f"{split}.arrow") for split in SPLITS},
        "format": {source.name: source.layout.shape for source in done.sources},
        "template": template.name,
        "chat_template": template.tokenizer.chat_template,
        "rows": stats.rows.total(),
        "pairs": splits,
        "by_source": _by_source(stats, kept, done.sources),
        "left_out": dict(rejected),
        "quarantined": sum(count for name, count in rejected.items() if name in QUARANTINED),
        "examples": stats.examples,
        "truncated": int(kept["truncated"].sum()),
        "tokenizer_merged_across_the_border": int(kept["merged"].sum()),
        "notes": count_notes(kept["notes"]),
        "unread_keys": dict(stats.unread.most_common()),
        "unpaired": _count_labels(kept["sign"]),
        "tokens": {part: _spread(_tokens(kept, part)) for part in ("prompt", "chosen", "rejected")},
        "shortcuts": facts,
        "warnings": [*row_stats.warnings(stats, splits["eval"], params), *shortcuts.warnings(facts)],
    }


def write_card(folder: Path, report: dict[str, Any], pairs: Path, tokenizer: Any) -> None:
    write_json(folder / "report.json", report)
    previews = [decode_pair(tokenizer, pair) for pair in read_rows(pairs / "train.arrow", PREVIEW_PAIRS)]
    write_json(folder / "preview.json", previews)
    write_pages(folder, report, previews, [])


def write_pages(folder: Path, report: dict[str, Any], previews: list[Any], changes: list[list[str]]) -> None:
    (folder / "card.md").write_text(pages.render_markdown(report, previews, changes))
    (folder / "card.html").write_text(pages.render_html(report, previews, changes))


def compare(report: dict[str, Any], card: Path) -> tuple[list[list[str]], list[Path]]:
    """The changes since the previous version of this data, and the paths of the card's pages that show them.

    Those pages lie outside data/card: an artifact of a stage depends on the stage's inputs alone.
    """
    folder = main_checkout() / ".scratch" / "cards" / fingerprint(report["source"])
    folder.mkdir(parents=True, exist_ok=True)
    versions = read_json_or_empty(folder / "versions.json")
    if versions.get("current", {}).get("sha256") != report["sha256"]:
        versions = {"previous": versions.get("current"), "current": report}
        write_json(folder / "versions.json", versions)
    if not versions.get("previous"):
        return [], [card / "card.md", card / "card.html"]
    changes = differences(versions["previous"], report)
    write_pages(folder, report, read_json(card / "preview.json"), changes)
    return changes, [folder / "card.md", folder / "card.html"]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[list[str]]:
    """[statistic, before, now] for each statistic that changed."""
    before, now = _statistics(old), _statistics(new)
    names = [*now, *(name for name in before if name not in now)]
    return [[n, before.get(n, "-"), now.get(n, "-")] for n in names if before.get(n) != now.get(n)]


def _statistics(report: dict[str, Any]) -> dict[str, str]:
    facts = report["shortcuts"]
    return {
        "rows": str(report["rows"]),
        **{f"pairs, {split}": str(count) for split, count in report["pairs"].items()},
        **{f"rejected, {name}": str(count) for name, count in report["left_out"].items()},
        **{f"tokens of the {part}, mean": str(spread["mean"]) for part, spread in report["tokens"].items()},
        "truncated": str(report["truncated"]),
        "chosen longer": f"{facts['chosen_longer']:.1%}",
        "bag-of-words probe": f"{facts['probe_accuracy']:.1%}",
        "template": report["template"],
    }


def _by_source(stats: RowStats, kept: Columns, sources: Sequence[RowSource]) -> dict[str, Any]:
    return {
        source.name: {
            "format": source.layout.shape,
            "rows": stats.rows[source.name],
            **count_splits(kept["held_out"][kept["source"] == number]),
            "left_out": dict(stats.rejected.get(source.name, {})),
        }
        for number, source in enumerate(sources)
    }


def _count_labels(signs: NDArray[Any]) -> dict[str, int]:
    """Of unpaired rows; empty for pairs."""
    counts = {"desirable": int((signs > 0).sum()), "undesirable": int((signs < 0).sum())}
    return counts if any(counts.values()) else {}


def _tokens(kept: Columns, part: str) -> NDArray[Any]:
    """Numbers of tokens. Of unpaired rows, the desirable answers are chosen and the undesirable ones rejected."""
    sign = {"chosen": 1, "rejected": -1}.get(part)
    tokens = kept[f"{part}_tokens"]
    return tokens[kept["sign"] == sign] if sign and kept["sign"].any() else tokens


def _shortcuts(kept: Columns, pairs: Path) -> dict[str, Any]:
    first, second = compared_rows(kept["sign"])
    chosen, rejected = kept["chosen_tokens"][first].astype(np.int64), kept["rejected_tokens"][second].astype(np.int64)
    difference = chosen - rejected
    reach = max(1.0, float(np.percentile(np.abs(difference), 99)))
    probed = {split: as_pairs(read_rows(pairs / f"{split}.arrow", count)) for split, count in PROBE_PAIRS.items()}
    return {
        "chosen_longer": round(float(((difference > 0) + 0.5 * (difference == 0)).mean()), 4),
        "chosen_ends": round(float(kept["chosen_ends"][first].mean()), 4),
        "rejected_ends": round(float(kept["rejected_ends"][second].mean()), 4),
        "probe_accuracy": round(shortcuts.probe_accuracy(probed["train"], probed["eval"]), 4),
        "probe_pairs": {split: len(rows) for split, rows in probed.items()},
        "length_difference": histogram(difference, -reach, reach),
    }


def _spread(lengths: NDArray[Any]) -> dict[str, Any]:
    percentiles = {f"p{share}": int(np.percentile(lengths, share, method="lower")) for share in (5, 50, 95)}
    summary = {"mean": round(float(lengths.mean()), 2), **percentiles, "max": int(lengths.max())}
    return {**summary, "histogram": histogram(lengths, 0, float(np.percentile(lengths, 99)))}
