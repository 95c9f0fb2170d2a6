"""Demonstrations: rows with a prompt and one answer, the data of the stage `sft`.

They are stored as pairs whose two answers are equal. A prefix that both answers share is computed once, so the second
one costs a single token, and everything that reads pairs reads demonstrations too.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tasks.artifacts.pairs import SFT_PREFIX
from tasks.config.prepare import Prepare
from tasks.errors import UserError
from tasks.prepare.chunks import pair_row
from tasks.prepare.rows import messages
from tasks.prepare.rows.contract import check_unicode
from tasks.prepare.rows.preference import Preference, is_held_out, prompt_hash
from tasks.prepare.rows.row_shapes import parse_tools
from tasks.prepare.shards import count_splits, write_shard, write_splits
from tasks.prepare.templates import ChatTemplate
from tasks.prepare.tokenization import TokenizedPair, tokenize
from tasks.source.readers import Chunk, rows_in
from tasks.source.reject_reasons import RawRow, RejectedRow

ANSWERS = ("chosen", "response", "completion", "output", "answer")
PROMPTS = ("instruction", "prompt", "question", "input")
EVAL_FRACTION = 0.05  # if prepare.eval_fraction is null


def prepare_demonstrations(
    chunks: Iterable[Chunk], template: ChatTemplate, params: Prepare, folder: Path
) -> tuple[dict[str, int], Counter[str], dict[str, str]]:
    """Write the files of both splits.

    Returns their numbers of rows, the numbers of rejected rows by reason, and what was wrong with the first of each.
    """
    rejected: Counter[str] = Counter()
    first: dict[str, str] = {}
    shards, held_out = [], []
    fraction = params.eval_fraction or EVAL_FRACTION
    for number, chunk in enumerate(chunks):
        rows = []
        for row in _tokenized(chunk, template, params):
            if isinstance(row, RejectedRow):
                rejected[row.name] += 1
                first.setdefault(row.name, str(row))
            else:
                rows.append(row)
        shards.append(folder / f"sft-{number:06d}.shard")
        write_shard(shards[-1], rows)
        held_out.append(np.array([is_held_out(prompt_hash(row["prompt"]), fraction) for row in rows], dtype=bool))
    if sum(map(len, held_out)) > 1 and not any(map(np.any, held_out)):
        next(mask for mask in held_out if len(mask))[0] = True  # something must be held out
    write_splits(folder, shards, [np.ones_like(mask) for mask in held_out], held_out, SFT_PREFIX)
    for shard in shards:
        shard.unlink()
    return count_splits(np.concatenate(held_out)), rejected, first


def check_demonstrations(
    counts: dict[str, int], rejected: Counter[str], first: dict[str, str], params: Prepare
) -> None:
    """UserError if too few rows can be used."""
    bad = sum(rejected.values()) - rejected["over_length"]
    total = sum(counts.values()) + sum(rejected.values())
    reasons = ", ".join(f"{number} {name}" for name, number in rejected.most_common(3))
    if bad > params.max_bad_fraction * total:
        most = next(name for name, _ in rejected.most_common() if name != "over_length")
        needed = (
            f"A row needs `messages` that end with the assistant, or a prompt ({', '.join(PROMPTS)}) and an answer "
            f"({', '.join(ANSWERS)})"
        )
        advice = f"The first {most}: {first[most]}" if most.startswith("template_") else needed
        raise UserError(
            f"source.sft: {bad} of {total} rows cannot be used ({reasons}). {advice}. Correct the data, or raise "
            "prepare.max_bad_fraction."
        )
    if not all(counts.values()):
        raise UserError(
            f"source.sft: of {total} rows, {counts['train']} are left to train on and {counts['eval']} to hold out"
            f"{f' ({reasons})' if reasons else ''}. Add rows, or raise prepare.max_tokens."
        )


def read_demonstration(row: RawRow, loss_on: str = "last") -> Preference:
    """The conversation of a row; RejectedRow if it has none. The answer is its last turn, or all after the question."""
    messages.reject_media(row, "the row")
    if "messages" in row or "conversations" in row:
        turns = messages.to_messages(row.get("messages", row.get("conversations")), "messages", "user")
        first = next((n for n, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
        at = first if loss_on == "all" else len(turns) - 1
        prompt, answer = turns[:at], turns[at:]
    else:
        answer_column = next((name for name in ANSWERS if name in row), None)
        if answer_column is None or not row.keys() & {*PROMPTS}:
            raise RejectedRow("missing_field", "a prompt and an answer, or messages")
        prompt = messages.prompt_messages(row, *PROMPTS)
        answer = messages.answer_turns(row[answer_column], prompt, answer_column)
    if system := row.get("system"):
        prompt = [{"role": "system", "content": messages.require_text(system, "system")}, *prompt]
    messages.check_turns(prompt, answer)
    if not all(turn["content"].strip() or turn.get("tool_calls") for turn in answer if turn["role"] == "assistant"):
        raise RejectedRow("empty_answer")
    check_unicode(messages.to_text(prompt), messages.to_text(answer))
    return Preference(prompt, answer, answer, tools=parse_tools(row["tools"]) if row.get("tools") else None)


def _tokenized(chunk: Chunk, template: ChatTemplate, params: Prepare) -> Iterator[dict[str, Any] | RejectedRow]:
    """Rows of data/pairs, or why a row is none."""
    demonstrations: list[Preference] = []
    for _, row in rows_in(chunk):
        try:
            if isinstance(row, RejectedRow):
                raise row
            demonstrations.append(read_demonstration(row, params.loss_on))
        except RejectedRow as reason:
            yield reason
    for demonstration, tokens in zip(demonstrations, tokenize(template, demonstrations), strict=True):
        if isinstance(tokens, TokenizedPair) and tokens.length > params.max_tokens:
            tokens = RejectedRow("over_length")
        yield tokens if isinstance(tokens, RejectedRow) else pair_row(demonstration, tokens, "sft", 1.0)
