"""The data card: what the prepared data is, where every row went, and what to beware of.

report.json holds it for programs, card.md and card.html (one page with plots that needs nothing else) for people.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.dataset import cardpage, shortcuts
from tasks.dataset.account import Account
from tasks.dataset.chunks import Origin
from tasks.dataset.contract import Mask
from tasks.dataset.histograms import histogram
from tasks.dataset.pairs import SPLITS
from tasks.dataset.preview import parts
from tasks.dataset.shards import first_pairs
from tasks.dataset.templates import Template
from tasks.dataset.verdicts import Columns
from tasks.dataset.violations import BAD
from tasks.files import fingerprint, home, read_json, sha256, write_json

PROBED = {"train": 4000, "eval": 2000}  # pairs of each side that the probe sees
PREVIEWED = 3


def make_report(
    account: Account,
    columns: Columns,
    kept: Mask,
    origins: Sequence[Origin],
    template: Template,
    source: str,
    pairs: Path,
) -> dict[str, Any]:
    left_out = account.by_violation()
    kept_columns = {name: values[kept] for name, values in columns.items() if name != "signature"}
    facts = _shortcuts(kept_columns, pairs)
    return {
        "source": source,
        "sha256": {split: sha256(pairs / f"{split}.parquet") for split in SPLITS},
        "format": {origin.name: origin.shape for origin in origins},
        "template": template.name,
        "chat_template": template.tokenizer.chat_template,
        "rows": account.rows.total(),
        "pairs": {split: int((kept_columns["held"] == (split == "eval")).sum()) for split in SPLITS},
        "by_source": _by_source(account, kept_columns, origins),
        "left_out": dict(left_out),
        "quarantined": sum(count for name, count in left_out.items() if name in BAD),
        "examples": account.examples,
        "truncated": int(kept_columns["truncated"].sum()),
        "tokenizer_merged_across_the_border": int(kept_columns["merged"].sum()),
        "tokens": {part: _spread(kept_columns[f"{part}_tokens"]) for part in ("prompt", "chosen", "rejected")},
        "shortcuts": facts,
        "warnings": shortcuts.warnings(facts),
    }


def write_card(folder: Path, report: dict[str, Any], pairs: Path, tokenizer: Any) -> None:
    write_json(folder / "report.json", report)
    previews = [parts(tokenizer, pair) for pair in first_pairs(pairs / "train.parquet", PREVIEWED)]
    write_json(folder / "preview.json", previews)
    write_pages(folder, report, previews, [])


def write_pages(folder: Path, report: dict[str, Any], previews: list[Any], changes: list[list[str]]) -> None:
    (folder / "card.md").write_text(cardpage.markdown(report, previews, changes))
    (folder / "card.html").write_text(cardpage.page(report, previews, changes))


def compare(report: dict[str, Any], card: Path) -> tuple[list[list[str]], list[Path]]:
    """What changed since the last other version of these data, and the card's pages with it.

    They lie outside data/card: an artefact is made from its inputs alone, and has no past.
    """
    folder = home() / ".scratch" / "cards" / fingerprint(report["source"])
    folder.mkdir(parents=True, exist_ok=True)
    memory = read_json(folder / "versions.json") if (folder / "versions.json").exists() else {}
    if memory.get("current", {}).get("sha256") != report["sha256"]:
        memory = {"previous": memory.get("current"), "current": report}
        write_json(folder / "versions.json", memory)
    if not memory.get("previous"):
        return [], [card / "card.md", card / "card.html"]
    changes = differences(memory["previous"], report)
    write_pages(folder, report, read_json(card / "preview.json"), changes)
    return changes, [folder / "card.md", folder / "card.html"]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[list[str]]:
    """[what, before, now] for each figure that is another."""
    before, now = _figures(old), _figures(new)
    names = [*now, *(name for name in before if name not in now)]
    return [[n, before.get(n, "-"), now.get(n, "-")] for n in names if before.get(n) != now.get(n)]


def _figures(report: dict[str, Any]) -> dict[str, str]:
    facts = report["shortcuts"]
    return {
        "rows": str(report["rows"]),
        **{f"pairs, {split}": str(count) for split, count in report["pairs"].items()},
        **{f"left out, {name}": str(count) for name, count in report["left_out"].items()},
        **{f"tokens of the {part}, mean": str(spread["mean"]) for part, spread in report["tokens"].items()},
        "truncated": str(report["truncated"]),
        "chosen longer": f"{facts['chosen_longer']:.1%}",
        "bag-of-words probe": f"{facts['probe_accuracy']:.1%}",
        "template": report["template"],
    }


def _by_source(account: Account, kept: Columns, origins: Sequence[Origin]) -> dict[str, Any]:
    return {
        origin.name: {
            "format": origin.shape,
            "rows": account.rows[origin.name],
            **{
                split: int(((kept["origin"] == number) & (kept["held"] == (split == "eval"))).sum()) for split in SPLITS
            },
            "left_out": dict(account.left_out.get(origin.name, {})),
        }
        for number, origin in enumerate(origins)
    }


def _shortcuts(kept: Columns, pairs: Path) -> dict[str, Any]:
    chosen, rejected = kept["chosen_tokens"].astype(np.int64), kept["rejected_tokens"].astype(np.int64)
    difference = chosen - rejected
    reach = max(1.0, float(np.percentile(np.abs(difference), 99)))
    probed = {split: first_pairs(pairs / f"{split}.parquet", count) for split, count in PROBED.items()}
    return {
        "chosen_longer": round(float(((difference > 0) + 0.5 * (difference == 0)).mean()), 4),
        "chosen_ends": round(float(kept["chosen_ends"].mean()), 4),
        "rejected_ends": round(float(kept["rejected_ends"].mean()), 4),
        "probe_accuracy": round(shortcuts.probe_accuracy(probed["train"], probed["eval"]), 4),
        "probe_pairs": {split: len(some) for split, some in probed.items()},
        "length_difference": histogram(difference, -reach, reach),
    }


def _spread(lengths: NDArray[Any]) -> dict[str, Any]:
    at = {f"p{share}": int(np.percentile(lengths, share, method="lower")) for share in (5, 50, 95)}
    whole = {"mean": round(float(lengths.mean()), 2), **at, "max": int(lengths.max())}
    return {**whole, "histogram": histogram(lengths, 0, float(np.percentile(lengths, 99)))}
