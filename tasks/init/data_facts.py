"""Facts about the data: the stages `source` and `prepare` run on a sample, without a limit on tokens."""

import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.checkout import kept_checkout
from tasks.config.params import Params
from tasks.config.paths import RAW, ROOT
from tasks.prepare import stage as prepare
from tasks.prepare.card.notes import count_notes, sentences
from tasks.prepare.shards import read_shard
from tasks.prepare.templates import ChatTemplate
from tasks.source import stage as source

SAMPLE = 20_000  # pairs to examine at most
TEXTS = 300  # prompts whose language is detected
NO_LIMIT = 10**9
LETTERS = 400  # at the start of a text, which decide its script
MINIMUM_SHARE = 0.02  # of the texts; rarer languages are not listed
WORDS = {
    "English": "the and of is that you for with this are what have",
    "German": "der die und ist nicht das ein sie mit für auf wie",
    "French": "les des est une pour dans que vous avec pas qui sur",
    "Spanish": "el los que una por para con las como es del más",
    "Italian": "il che di per una sono non gli della con più come",
    "Portuguese": "que não uma para com os do da em você são mais",
    "Dutch": "het een van niet dat voor met zijn op aan ook maar",
}
SCRIPTS = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean", "DEVANAGARI": "Hindi"}


@dataclass(frozen=True)
class DataFacts:
    rows: int
    pairs: int  # usable ones
    shape: str
    reject_reasons: Counter[str]  # number of rejected rows by reason
    prompts: NDArray[Any]  # tokens of each examined pair
    chosen: NDArray[Any]
    rejected: NDArray[Any]
    languages: dict[str, float]
    notes: list[str] = field(default_factory=list)  # what was done between rows and tokens

    @property
    def lengths(self) -> NDArray[Any]:
        """What `prepare.max_tokens` limits."""
        return self.prompts + np.maximum(self.chosen, self.rejected)

    def share_within(self, max_tokens: int) -> float:
        return float((self.lengths <= max_tokens).mean())

    def longest_within(self, max_tokens: int) -> int:
        """Tokens of the longest pair that the limit keeps."""
        kept = self.lengths <= max_tokens
        return int((self.prompts + self.chosen + self.rejected)[kept].max(initial=0))

    def tokens_within(self, max_tokens: int) -> float:
        """Mean tokens of a pair, whose prompt is computed once, among the pairs that the limit keeps."""
        kept = self.lengths <= max_tokens
        total = self.prompts + self.chosen + self.rejected
        return float(total[kept].mean()) if kept.any() else 0.0


def examine_data(params: Params, template: ChatTemplate, called: Mapping[str, str]) -> DataFacts:
    unlimited = {"max_tokens": NO_LIMIT, "over_length": "drop", "max_pairs": SAMPLE}
    held_out = {"eval_fraction": 0.2} if params.prepare.eval_fraction else {}  # few rows need a large share
    options = params.prepare.model_copy(update=unlimited | held_out)
    shards = Path("shards")
    with _scratch_workspace():
        RAW.mkdir(parents=True)
        raw = source.fetch_data(params.source, RAW, called)
        done = prepare.process(raw, template, options, shards, Path("quarantine.jsonl"))
        sample = next(rows for result in done.results if (rows := _prompts(shards, result.number)))
    columns, kept = done.columns, done.kept
    return DataFacts(
        rows=raw["rows"],
        pairs=int(kept.sum() + done.stats.by_reason()["not_sampled"]),
        shape=done.sources[0].layout.shape,
        reject_reasons=done.stats.by_reason(),
        prompts=columns["prompt_tokens"][kept],
        chosen=columns["chosen_tokens"][kept],
        rejected=columns["rejected_tokens"][kept],
        languages=languages(sample),
        notes=sentences(count_notes(columns["notes"][kept]), dict(done.stats.unread.most_common())),
    )


@contextmanager
def _scratch_workspace() -> Iterator[None]:
    """An empty folder for the stages' files; addresses of the user are looked up in the checkout, as in a worktree."""
    (ROOT / ".scratch").mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="init-", dir=ROOT / ".scratch") as folder, kept_checkout(ROOT), chdir(folder):
        Path("infra").mkdir()
        Path("infra/cluster.yaml").write_text("{}\n")
        shutil.copyfile(ROOT / "params.yaml", "params.yaml")  # which names the registered model of `run:champion`
        yield


def _prompts(shards: Path, number: int) -> list[str]:
    return read_shard(shards / f"{number:06d}.arrow").slice(0, TEXTS).column("prompt").to_pylist()


def languages(texts: Iterable[str]) -> dict[str, float]:
    """The share of texts in each recognized language, the most frequent first."""
    counts = Counter(filter(None, map(language, texts)))
    return {name: share for name, n in counts.most_common() if (share := n / counts.total()) >= MINIMUM_SHARE}


def language(text: str) -> str | None:
    """By the script of its letters, and for Latin letters by a few frequent words."""
    scripts = Counter(unicodedata.name(letter, "").split(" ")[0] for letter in text[:LETTERS] if letter.isalpha())
    if not scripts:
        return None
    script = scripts.most_common(1)[0][0]
    if script == "CJK" and (scripts["HIRAGANA"] or scripts["KATAKANA"]):
        return "Japanese"
    if script != "LATIN":
        return SCRIPTS.get(script, script.capitalize())
    words = Counter(re.findall(r"\w+", text.lower()))
    hits = {name: sum(words[word] for word in frequent.split()) for name, frequent in WORDS.items()}
    best = max(hits, key=lambda name: hits[name])
    return best if hits[best] else None
