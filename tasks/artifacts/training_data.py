"""What a training reads from data/pairs: preference pairs with their reference values, or demonstrations."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from tasks.artifacts.pairs import SFT_PREFIX, PairTable, open_table, pairs_file, reference_file, replace_columns
from tasks.config.paths import PAIRS, REFERENCE


@dataclass(frozen=True)
class TrainingData:
    """Which rows of data/pairs a stage trains on."""

    preferences: bool = True  # False: demonstrations, one answer per prompt
    own_file: bool = False  # of `source.sft`; otherwise the demonstrations are the chosen answers

    @property
    def folders(self) -> tuple[Path, ...]:
        return (PAIRS, REFERENCE) if self.preferences else (PAIRS,)

    def file(self, split: str, root: Path = Path()) -> Path:
        return pairs_file(f"{SFT_PREFIX}{split}" if self.own_file else split, root)

    def read(self, split: str, root: Path = Path(), reference: bool = False) -> PairTable:
        """The rows of a split, whose files the driver has checked; with `reference`, also their reference values."""
        table = open_table(self.file(split, root))
        if not (self.preferences or self.own_file):
            return chosen_answers(table)
        pairs = PairTable(table)
        return pairs.with_reference(open_table(reference_file(split, root))) if reference else pairs


PREFERENCES = TrainingData()


def chosen_answers(table: pa.Table) -> PairTable:
    """The chosen answers of pairs as demonstrations, each once: a prompt may have several worse answers.

    Of unpaired rows the desirable answers.
    """
    if compute.min(table["sign"]).as_py() == -1:
        table = table.filter(compute.greater(table["sign"], 0))
    count = len(table)
    columns = {
        "rejected_ids": table["chosen_ids"],
        "rejected_mask": table["chosen_mask"],
        "label": np.ones(count, np.float32),
        "margin": np.zeros(count, np.float32),
        "sign": np.zeros(count, np.int8),
        "shared_prefix": compute.subtract(compute.list_value_length(table["chosen_ids"]), 1),
    }
    answers = PairTable(replace_columns(table, columns))
    return answers.select(_first_of_each(answers))


def _first_of_each(answers: PairTable) -> np.ndarray:
    seen: set[tuple[str, bytes]] = set()
    rows = []
    for number, prompt in enumerate(answers.table["prompt"].to_pylist()):
        key = prompt, answers.lists["chosen_ids"][number].tobytes()
        if key not in seen:
            seen.add(key)
            rows.append(number)
    return np.array(rows, dtype=np.int64)
