"""The different prompts of the training data, for the stage `sample`. A held-out prompt is never among them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tasks.config.prepare import Prepare
from tasks.config.source import RUN
from tasks.prepare.raw_rows import layout_of, raw_sources, rows_of
from tasks.prepare.rows.layouts import decode
from tasks.prepare.rows.messages import Message
from tasks.prepare.rows.preference import Preference, is_held_out, sample_rank
from tasks.prepare.templates import ChatTemplate
from tasks.prepare.tokenization import TokenizedPair, tokenize
from tasks.source.reject_reasons import RawRow


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


def read_prompts(template: ChatTemplate, params: Prepare, count: int | None, seed: int) -> list[Prompt]:
    """The prompts of data/raw outside the held-out set; `count` of them are drawn by a hash of seed and prompt."""
    held_out = {preference.hashed_prompt for preference in _read("source.eval", params)}
    prompts: dict[tuple[int, str], Preference] = {}  # by hash and tools
    for preference in _read("source.data", params):
        tools = json.dumps(preference.tools, default=str) if preference.tools else ""
        prompts.setdefault((preference.hashed_prompt, tools), preference)
    fraction = params.eval_fraction or 0.0
    keys = [key for key in prompts if key[0] not in held_out and not is_held_out(key[0], fraction)]
    drawn = {*sorted(keys, key=lambda key: sample_rank(f"{key[0]}{key[1]}", seed))[:count]}
    chosen = [prompts[key] for key in keys if key in drawn]
    return [
        Prompt(preference.prompt, preference.prompt_text, tokens.prompt_ids, preference.tools)
        for preference, tokens in zip(chosen, tokenize(template, chosen), strict=True)
        if isinstance(tokens, TokenizedPair) and len(tokens.prompt_ids) < params.max_tokens
    ]


def _read(key: str, params: Prepare) -> Iterator[Preference]:
    """The valid preferences of the sources of a key whose answers are the assistant's next turn."""
    for source in raw_sources():
        if source["key"] == key and not source["address"].startswith(RUN):
            # A tie has a prompt, too, and so has a pair with a small margin.
            layout = replace(layout_of(source, params), expand="best_rest", min_margin=0.0, ties="soft")
            for _, _, row in rows_of(source):
                yield from (pair for pair in decode([row], layout) if pair.chosen[0]["role"] == "assistant")
