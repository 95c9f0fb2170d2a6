"""A run as people read of it: stages, data, results, decision, samples and links, from its workspace and its journals.

The terminal, the page, Prefect's artifacts, MLflow's description and the tables of runs, rounds and sweeps are made of
a RunSummary. The model card is part of the export and has the headline metrics alone (tasks/artifacts/evaluation.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tasks.artifacts.evaluation import Headline, headlines
from tasks.checkout import this_run
from tasks.config.cluster import Cluster, load_cluster
from tasks.config.paths import CARD, METRICS, MODEL, SAMPLE, main_checkout
from tasks.reports.headline import verdict
from tasks.runs.records import RunRecord, stage_states
from tasks.system.files import read_json_lines, read_json_or_empty, sha256
from tasks.tracking.journal import flatten_metrics
from tasks.tracking.journal_reader import read_journal, read_lines
from tasks.tracking.results import curves

Content = dict[str, Any]  # of a JSON file or line


def _json(file: Path) -> "cached_property[Content]":
    return cached_property(lambda run: read_json_or_empty(run.root / file))


def _json_lines(file: Path) -> "cached_property[list[Content]]":
    return cached_property(lambda run: read_json_lines(run.root / file) if (run.root / file).exists() else [])


@dataclass(frozen=True)
class RunSummary:
    """Each file is read when it is first needed, and once; what does not exist is empty."""

    name: str
    root: Path  # the run's workspace, or the folder of its small results
    folder: Path | None = None  # of its journals and ids; None of a result that is no flow's
    states: Sequence[Mapping[str, Any]] = ()  # of its stages

    data = _json(CARD / "report.json")  # the data card's figures
    sampled = _json(SAMPLE / "manifest.json")  # what the stage `sample` made
    manifest = _json(MODEL / "manifest.json")
    evaluation = _json(METRICS / "evaluate.json")
    samples = _json_lines(METRICS / "samples.jsonl")  # prompts with the answers of base model and policy
    pairs = _json_lines(METRICS / "pairs.jsonl")  # held out, strongest disagreement first

    @classmethod
    def of(cls, record: RunRecord) -> "RunSummary":
        return cls(record.name, record.results(), record.folder, stage_states(record))

    @classmethod
    def here(cls) -> "RunSummary":
        """The result in this workspace, with the journals of the flow that calls this process, if one does."""
        run = this_run()
        folder = main_checkout() / load_cluster().logging_dir / run if run else None
        return cls(run or Path.cwd().name, Path(), folder)

    @cached_property
    def cluster(self) -> Cluster:
        return load_cluster(self.root)

    @cached_property
    def curves(self) -> dict[int, dict[str, float]]:
        return curves(self.root)

    @cached_property
    def values(self) -> dict[str, float]:
        """The evaluation by flat name."""
        return {name: value for name, value in flatten_metrics(self.evaluation).items() if not isinstance(value, dict)}

    @property
    def headlines(self) -> list[Headline]:
        return headlines(self.values)

    @property
    def examples(self) -> list[Content]:
        """The samples, those first whose answers differ in a verdict, then those in text: they show the change."""
        return sorted(self.samples, key=_change)

    @cached_property
    def decision(self) -> Content:
        """The registry's decision about this export; empty where it was about another one."""
        decision = read_json_or_empty(self.root / METRICS / "promote.json")
        export = self.root / MODEL / "manifest.json"
        return {} if export.exists() and decision.get("manifest_sha256") != sha256(export) else decision

    @property
    def verdict(self) -> str:
        return verdict(self.values, self.decision)

    @cached_property
    def journals(self) -> dict[str, list[Content]]:
        """The lines of each journal: one per stage, and the flow's."""
        files = sorted(self.folder.glob("*.jsonl")) if self.folder else []
        return {file.stem: read_lines(file)[0] for file in files}

    def steps(self, stage: str) -> list[Content]:
        """The lines with the values of a step, also of an included training. Speeds are here alone: no results."""
        lines = read_journal(self.folder / f"{stage}.jsonl")[0] if self.folder else []
        return [line for line in lines if line["kind"] == "metrics"]

    @property
    def metrics(self) -> dict[str, float]:
        """The final values under the names that MLflow shows."""
        lines = [line for journal in self.journals.values() for line in journal if line["kind"] == "summary"]
        return {name: float(value) for line in lines for name, value in line["values"].items()}

    @cached_property
    def ids(self) -> Content:
        """Of the run in MLflow; empty until MLflow has given them."""
        return read_json_or_empty(self.folder / "run.json") if self.folder else {}


def _change(sample: Content) -> int:
    base, policy = sample["base"], sample["policy"]
    if _verdicts(base) != _verdicts(policy):
        return 0
    return 1 if base["text"] != policy["text"] else 2


def _verdicts(answer: Content) -> list[bool]:
    return [value for value in answer.values() if isinstance(value, bool)]
