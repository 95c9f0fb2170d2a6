"""Stage `prepare`: raw rows to tokenised pairs, split by prompt, with every row accounted for.

Writes data/pairs: train.parquet, eval.parquet, report.json, and quarantine.jsonl with the rows that could not be used.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tasks import stage
from tasks.account import Account, check, make_report
from tasks.errors import UserError
from tasks.files import publish, read_json, sha256, write_json
from tasks.formats import BadRow, Conversation, detect, read_rows, rename, to_conversation
from tasks.models import base_folder
from tasks.pairs import PAIR_SCHEMA, SPLITS, write_rows
from tasks.params import Prepare, load_params
from tasks.paths import PAIRS, RAW
from tasks.progress import Bar
from tasks.templates import Tokens, choose_template, tokenise
from tasks.tracking import Run

CHUNK = 2000


def prepare(run: Run) -> None:
    params = load_params()
    from training.model import load_tokenizer

    tokenizer = load_tokenizer(base_folder(params.source.model))
    template = choose_template(tokenizer, params.prepare.template)
    raw = read_json(RAW / "manifest.json")
    account = Account()
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    with Bar("prepare", raw["rows"], "rows") as bar:
        shape, rows = _shaped(RAW / raw["file"], raw["source"], params.prepare)
        for chunk in _chunks(rows, CHUNK):
            for split, pair in _pairs(chunk, shape, tokenizer, params.prepare, account, seen):
                if not params.prepare.max_pairs or account.kept.total() < params.prepare.max_pairs:
                    splits[split].append(pair)
                    account.kept[split] += 1
            bar.update(account.rows)
    check(account, params.prepare, raw["source"])
    report = make_report(account, splits, raw["source"], shape, template)
    with publish(PAIRS) as folder:
        for split, pairs in splits.items():
            write_rows(folder / f"{split}.parquet", PAIR_SCHEMA, pairs)
        (folder / "quarantine.jsonl").write_text(
            "".join(json.dumps(entry, ensure_ascii=False, default=str) + "\n" for entry in account.bad)
        )
        write_json(folder / "report.json", report)
    _tell(run, report)


def _shaped(path: Path, name: str, params: Prepare) -> tuple[str, Iterator[tuple[int, dict[str, Any]]]]:
    """The rows under our column names, and their shape, which the first row tells unless it is configured."""
    rows = ((number, rename(row, params.columns)) for number, row in read_rows(path, name))
    first = next(rows)
    shape = detect(first[1]) if params.format == "auto" else params.format

    def all_rows() -> Iterator[tuple[int, dict[str, Any]]]:
        yield first
        yield from rows

    return shape, all_rows()


def _pairs(
    chunk: Sequence[tuple[int, dict[str, Any]]],
    shape: str,
    tokenizer: Any,
    params: Prepare,
    account: Account,
    seen: set[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(split, pair) of each row that can be used; the others are accounted for."""
    good: list[tuple[int, dict[str, Any], Conversation]] = []
    for number, row in chunk:
        account.rows += 1
        try:
            good.append((number, row, to_conversation(row, shape)))
        except (BadRow, KeyError) as error:
            reason = f"the column {error} is missing" if isinstance(error, KeyError) else str(error)
            account.quarantine(number, reason, row)
    for (number, row, conversation), tokens in zip(
        good, tokenise(tokenizer, [conversation for _, _, conversation in good]), strict=True
    ):
        if isinstance(tokens, BadRow):
            account.quarantine(number, str(tokens), row)
            continue
        identity = _identity(conversation)
        if identity in seen:
            account.dropped["an exact duplicate"] += 1
            continue
        fitted = _fit(tokens, params, account, number)
        if fitted is not None:
            seen.add(identity)
            account.merged += tokens.merged
            text = _prompt_text(conversation)
            yield split_of(text, params.eval_fraction), _pair(identity, text, fitted, params.apply_loss_mask)


def _fit(tokens: Tokens, params: Prepare, account: Account, number: int) -> Tokens | None:
    """Within max_tokens by the configured way; both responses always keep the same prompt."""
    excess = len(tokens.prompt) + max(len(tokens.chosen), len(tokens.rejected)) - params.max_tokens
    if excess <= 0:
        return tokens
    if params.over_length == "fail":
        raise UserError(
            f"Row {number} has {params.max_tokens + excess} tokens, above prepare.max_tokens {params.max_tokens}. "
            "Raise it, or set prepare.over_length to drop or truncate_prompt."
        )
    if params.over_length == "truncate_prompt" and excess < len(tokens.prompt):
        account.truncated += 1
        return Tokens(tokens.prompt[excess:], tokens.chosen, tokens.rejected, tokens.merged)
    account.dropped["longer than max_tokens"] += 1
    return None


def _pair(identity: str, text: str, tokens: Tokens, apply_loss_mask: bool) -> dict[str, Any]:
    prompt, chosen, rejected = tokens.prompt, tokens.chosen, tokens.rejected
    if not apply_loss_mask:  # every token counts: the first is the prompt, and all others are predicted
        prompt, chosen, rejected = prompt[:1], prompt[1:] + chosen, prompt[1:] + rejected
    return {
        "id": identity,
        "prompt": text,
        "prompt_ids": prompt,
        "chosen_ids": chosen,
        "chosen_mask": [1] * len(chosen),
        "rejected_ids": rejected,
        "rejected_mask": [1] * len(rejected),
    }


def split_of(prompt: str, eval_fraction: float) -> str:
    """By a hash of the normalised prompt: a prompt never crosses sides, and new rows move none."""
    normalised = " ".join(prompt.lower().split())
    place = int(hashlib.sha256(normalised.encode()).hexdigest()[:12], 16) / 16**12
    return "eval" if place < eval_fraction else "train"


def _identity(conversation: Conversation) -> str:
    content = json.dumps([conversation.prompt, conversation.chosen, conversation.rejected])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _prompt_text(conversation: Conversation) -> str:
    if len(conversation.prompt) == 1:
        return conversation.prompt[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in conversation.prompt)


def _tell(run: Run, report: dict[str, Any]) -> None:
    pairs, tokens = report["pairs"], report["tokens"]
    print(
        f"prepare: {pairs['train']} pairs to train on, {pairs['eval']} held out ({report['format']}, "
        f"{report['template']}); tokens: prompt {tokens['prompt']['mean']}, chosen {tokens['chosen']['mean']}, "
        f"rejected {tokens['rejected']['mean']}"
    )
    for reason, count in {**report["dropped"], **report["quarantined"]}.items():
        print(f"prepare: left out {count}: {reason}")
    for split in SPLITS:
        run.dataset(split, sha256(PAIRS / f"{split}.parquet"), report["source"])
    run.artifact(PAIRS / "report.json")
    run.summary({f"pairs_{split}": count for split, count in pairs.items()})


def _chunks(rows: Iterator[Any], size: int) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


if __name__ == "__main__":
    stage.main(prepare)
