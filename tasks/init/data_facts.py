"""What the data is like under the model's tokenizer: the stages `source` and `prepare` on a sample, without a limit."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks import prepare, source
from tasks.config.params import Params, Source
from tasks.config.paths import RAW, ROOT
from tasks.dataset.shards import read_shard
from tasks.dataset.templates import ChatTemplate
from tasks.init.languages import languages

SAMPLE = 20_000  # pairs to examine at most
TEXTS = 300  # whose language is looked at
NO_LIMIT = 10**9


@dataclass(frozen=True)
class DataFacts:
    rows: int
    pairs: int  # usable ones
    shape: str
    rejected: Counter[str]  # rows by reason
    prompts: NDArray[Any]  # tokens of each examined pair
    chosen: NDArray[Any]
    others: NDArray[Any]  # of the rejected answers
    languages: dict[str, float]

    @property
    def lengths(self) -> NDArray[Any]:
        """What `prepare.max_tokens` limits."""
        return self.prompts + np.maximum(self.chosen, self.others)

    def share_within(self, max_tokens: int) -> float:
        return float((self.lengths <= max_tokens).mean())

    def tokens_within(self, max_tokens: int) -> float:
        """Mean tokens of a pair, whose prompt is computed once, among the pairs that the limit keeps."""
        kept = self.lengths <= max_tokens
        total = self.prompts + self.chosen + self.others
        return float(total[kept].mean()) if kept.any() else 0.0


def examine_data(params: Params, template: ChatTemplate) -> DataFacts:
    unlimited = {"max_tokens": NO_LIMIT, "over_length": "drop", "max_pairs": SAMPLE}
    held_out = {"eval_fraction": 0.2} if params.prepare.eval_fraction else {}  # few rows need a large share
    options = params.prepare.model_copy(update=unlimited | held_out)
    shards = Path("shards")
    with _scratch_workspace():
        raw = _fetch(params.source)
        done = prepare.process(raw, template, options, shards, Path("quarantine.jsonl"))
        sample = next(rows for result in done.results if (rows := _prompts(shards, result.number)))
    columns, kept = done.columns, done.kept
    return DataFacts(
        rows=raw["rows"],
        pairs=int(kept.sum() + done.stats.by_reason()["not_sampled"]),
        shape=done.sources[0].layout.shape,
        rejected=done.stats.by_reason(),
        prompts=columns["prompt_tokens"][kept],
        chosen=columns["chosen_tokens"][kept],
        others=columns["rejected_tokens"][kept],
        languages=languages(sample),
    )


@contextmanager
def _scratch_workspace() -> Iterator[None]:
    """An empty folder for the stages' files; addresses of the user are looked up in the checkout, as in a worktree."""
    (ROOT / ".scratch").mkdir(exist_ok=True)
    before = os.environ.get("DPO_HOME")
    with TemporaryDirectory(prefix="init-", dir=ROOT / ".scratch") as folder, chdir(folder):
        Path("infra").mkdir()
        Path("infra/cluster.yaml").write_text("{}\n")
        os.environ["DPO_HOME"] = str(ROOT)
        try:
            yield
        finally:
            del os.environ["DPO_HOME"]
            os.environ |= {"DPO_HOME": before} if before is not None else {}


def _fetch(params: Source) -> dict[str, Any]:
    RAW.mkdir(parents=True)
    return source.fetch_data(params, RAW)


def _prompts(shards: Path, number: int) -> list[str]:
    return read_shard(shards / f"{number:06d}.arrow").slice(0, TEXTS).column("prompt").to_pylist()
