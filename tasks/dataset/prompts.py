"""The different prompts of the training data, for the stage `sample`. A held-out prompt is never among them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.config.params import RUN, Prepare
from tasks.dataset.reading.readers import first_rows, read_chunks, rows_in
from tasks.dataset.rows.layouts import decode, find_layout
from tasks.dataset.rows.messages import Message, to_text
from tasks.dataset.rows.preference import PairingOptions, Preference, is_held_out, prompt_hash, sample_rank
from tasks.dataset.rows.reject_reasons import RawRow
from tasks.dataset.tokenization import ChatTemplate, TokenizedPair, tokenize


@dataclass(frozen=True)
class Prompt:
    messages: list[Message]
    text: str  # as judges read it
    ids: list[int]
    tools: list[Any] | None

    def row(self) -> RawRow:
        """Its columns in a row of pairs; one turn of a user is plain text."""
        plain = len(self.messages) == 1 and self.messages[0]["role"] == "user"
        return {"prompt": self.text if plain else self.messages, **({"tools": self.tools} if self.tools else {})}


def read_prompts(
    folder: Path, raw: dict[str, Any], template: ChatTemplate, params: Prepare, count: int | None, seed: int
) -> list[Prompt]:
    """The prompts of data/raw outside the held-out set; `count` of them are drawn by a hash of seed and prompt."""
    entries = [entry for entry in raw["sources"] if not entry["address"].startswith(RUN)]
    held_out = {prompt_hash(_text(one)) for one in _read(folder, entries, "source.eval", params)}
    found: dict[int, Preference] = {}
    for one in _read(folder, entries, "source.data", params):
        found.setdefault(prompt_hash(_text(one)), one)
    fraction = params.eval_fraction or 0.0
    hashes = [hashed for hashed in found if hashed not in held_out and not is_held_out(hashed, fraction)]
    if count is not None:
        drawn = {*sorted(hashes, key=lambda hashed: sample_rank(str(hashed), seed))[:count]}
        hashes = [hashed for hashed in hashes if hashed in drawn]
    chosen = [found[hashed] for hashed in hashes]
    tokenized = zip(chosen, tokenize(template, chosen), strict=True)
    return [
        Prompt(one.prompt, _text(one), tokens.prompt_ids, one.tools)
        for one, tokens in tokenized
        if isinstance(tokens, TokenizedPair) and len(tokens.prompt_ids) < params.max_tokens
    ]


def _read(folder: Path, entries: list[dict[str, Any]], key: str, params: Prepare) -> Iterator[Preference]:
    """The valid preferences of the sources of a key whose answers are the assistant's next turn."""
    for entry in (entry for entry in entries if entry["key"] == key):
        files = [(folder / entry["name"] / file["file"], file["called"]) for file in entry["files"]]
        layout = find_layout(first_rows(*files[0]), files[0][1], params.by_source.get(entry["name"], params))
        options = PairingOptions("best_rest", 0.0, "soft", layout.votes)  # a tie has a prompt, too
        for path, name in files:
            for chunk in read_chunks(path, name):
                rows = [row for _, row in rows_in(chunk) if isinstance(row, dict)]
                yield from (one for one in decode(rows, layout, options) if one.chosen[0]["role"] == "assistant")


def _text(preference: Preference) -> str:
    return to_text(preference.prompt)
