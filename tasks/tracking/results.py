"""Facts about a run from the files of its workspace: lineage tags, data sets, training curves, evaluation metrics."""

import csv
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.config.paths import BASE, CARD, METRICS, RAW, REFERENCE
from tasks.system.files import fingerprint, known_sha256, read_json
from tasks.tracking.journal import flatten_metrics


def git_output(root: Path, *arguments: str) -> str | None:
    """The output of a git command; None without git or outside a checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def lineage(root: Path = Path()) -> dict[str, str]:
    """Tags with the hashes of a run's data, base model and reference log-probabilities, as far as they exist."""
    tags: dict[str, str] = {}
    for folder, kind, name in ((RAW, "data", "source"), (BASE, "base", "model")):
        if (file := root / folder / "manifest.json").exists():
            manifest = read_json(file)
            tags |= {kind: manifest[name], f"{kind}_sha256": manifest["sha256"]}
    if (file := root / REFERENCE / "manifest.json").exists():
        tags["reference"] = fingerprint(read_json(file))
    return tags


def datasets(*folders: Path) -> Iterator[dict[str, Any]]:
    """The data sets in these folders, for MLflow's inputs: data/raw by its manifest, pairs by their files."""
    for folder in folders:
        if (file := folder / "manifest.json").exists():
            raw = read_json(file)
            yield {"name": "raw", "digest": raw["sha256"], "source": raw["source"], "rows": raw.get("rows")}
        card = folder.parent / CARD.name / "report.json"
        report = read_json(card) if card.exists() else {}
        for split in ("train", "eval"):
            if (file := folder / f"{split}.arrow").exists():
                rows = report.get("pairs", {}).get(split)
                about = {"source": report.get("source", str(file)), "rows": rows}
                yield {"name": split, "digest": known_sha256(file), **about}


def curves(root: Path = Path()) -> dict[int, dict[str, float]]:
    """data/metrics/train.csv: the values of each logged training step."""
    return {int(row.pop("step")): row for row in read_csv(root / METRICS / "train.csv")}


def read_csv(file: Path) -> list[dict[str, float]]:
    """The rows of a file of metrics, without empty cells; none where there is no file."""
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(lines)]


def evaluation(metrics: Mapping[str, Any]) -> dict[str, float]:
    """data/metrics/evaluate.json under the names that MLflow shows: `eval/...` and `samples/...`; tables stay there."""
    shown = {name: value for name, value in metrics.items() if name != "tables"}
    flat = flatten_metrics(shown).items()
    return {name if name.startswith("samples/") else f"eval/{name}": value for name, value in flat}
