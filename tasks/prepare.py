"""Stage `prepare`: raw rows to tokenised pairs, split by prompt, with every row accounted for.

Writes data/pairs (train.parquet, eval.parquet) and data/card: the data card (report.json, card.md, card.html) and
quarantine.jsonl with the rows that could not be used. Rows go through in chunks, over processes, in bounded memory;
what concerns rows together is decided on hashes when all chunks are done.
"""

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tasks import stage
from tasks.dataset import datacard, verdicts
from tasks.dataset.account import Account, check
from tasks.dataset.chunks import EXAMPLES, Origin, Outcome, Task, Worker
from tasks.dataset.contract import Mask
from tasks.dataset.formats import detect, rename
from tasks.dataset.pairs import HASHES, SPLITS
from tasks.dataset.readers import first_rows, read_chunks, rows_in
from tasks.dataset.shards import write_splits
from tasks.dataset.templates import Template, choose_template
from tasks.dataset.violations import BAD, VIOLATIONS, BadRow
from tasks.errors import UserError
from tasks.files import hash_files, publish, read_json, sha256, write_json
from tasks.machines.workers import cores, in_order
from tasks.models import base_folder
from tasks.params import Params, Prepare, load_cluster, load_params
from tasks.paths import CARD, PAIRS, RAW
from tasks.progress import Bar
from tasks.tracking.journal import Run

ROWS_PER_PROCESS = 2000  # fewer are not worth one more


def prepare(run: Run) -> None:
    params, raw = load_params(), read_json(RAW / "manifest.json")
    template = load_template(params)
    sources = sorted(raw["sources"], key=lambda source: source["key"] != "source.eval")  # held-out data has precedence
    origins = [_origin(source, params.prepare) for source in sources]
    _check_names(params.prepare, origins)
    for leftover in (*PAIRS.parent.glob(f".{PAIRS.name}.*"), *CARD.parent.glob(f".{CARD.name}.*")):
        shutil.rmtree(leftover)  # of a run that was killed
    with publish(PAIRS) as pairs, publish(CARD) as card:
        worker = Worker(template, origins, params.prepare, pairs / "shards")
        account, outcomes = _work(worker, sources, raw["rows"], card / "quarantine.jsonl")
        columns = verdicts.together(outcomes)
        kept, found = verdicts.judge(columns, origins, account, params.prepare)
        _quarantine(found, columns, outcomes, _files(sources), account, card / "quarantine.jsonl")
        sizes = {split: int((kept & (columns["held"] == (split == "eval"))).sum()) for split in SPLITS}
        check(account, sizes, params.prepare, raw["source"])
        _write(worker.folder, pairs, outcomes, columns, kept)
        report = datacard.make_report(account, columns, kept, origins, template, raw["source"], pairs)
        datacard.write_card(card, report, pairs, template.tokenizer)
    _tell(run, report)


def load_template(params: Params) -> Template:
    from training.model import load_tokenizer

    # Processes share the work, not threads: those of the tokenizer would not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(base_folder(params.source.model))
    wanted = params.prepare
    return choose_template(tokenizer, wanted.template, wanted.chat_template_kwargs, wanted.loss_on)


def _origin(source: dict[str, Any], params: Prepare) -> Origin:
    """A source with its shape, which its first row tells unless it is configured."""
    layout = params.by_source.get(source["name"], params)
    _, path, called = _files([source])[0]
    example = {name: value for row in reversed(first_rows(path, called)) for name, value in row.items()}
    if not example:
        raise UserError(f"{called}: there is no row that can be read. Is it the right file?")
    for ours, theirs in layout.columns.items():
        if theirs not in example:
            raise UserError(
                f"prepare.columns: {ours} is to be read from `{theirs}`, and {called} has no such column. "
                f"It has: {', '.join(map(str, example))}."
            )
    shape = detect(rename(example, layout.columns)) if layout.format == "auto" else layout.format
    held_out = source["key"] == "source.eval"
    return Origin(source["name"], shape, layout.columns, source["weight"], source["share"], held_out)


def _check_names(params: Prepare, origins: list[Origin]) -> None:
    names = [origin.name for origin in origins]
    for name in params.by_source:
        if name not in names:
            raise UserError(f"prepare.by_source: there is no source `{name}`. There are: {', '.join(names)}.")


def _files(sources: list[dict[str, Any]]) -> list[tuple[int, Path, str]]:
    """(number of the source, path, what the user calls it) of every file, in order."""
    return [
        (number, RAW / source["name"] / file["file"], file["called"])
        for number, source in enumerate(sources)
        for file in source["files"]
    ]


def _work(worker: Worker, sources: list[dict[str, Any]], rows: int, quarantine: Path) -> tuple[Account, list[Outcome]]:
    """Send every chunk through a worker; what it says of bad rows is written as it comes."""
    worker.folder.mkdir()
    account, outcomes = Account(), []
    quota = verdicts.Quota(verdicts.quota(worker.params.max_pairs, len(sources)))
    wanted = load_cluster().prepare.num_workers or cores()
    processes = min(wanted, -(-rows // ROWS_PER_PROCESS))
    with quarantine.open("w") as file, Bar("prepare", rows, "rows") as bar:
        for outcome in in_order(worker, _tasks(sources, quota), processes):
            if quota.full(outcome.origin):
                continue  # begun before it was known
            quota.add(outcome)
            account.add(outcome, worker.origins[outcome.origin].name)
            file.writelines(line + "\n" for line in outcome.quarantine)
            outcome.quarantine.clear()
            outcomes.append(outcome)
            bar.update(account.rows.total())
    return account, outcomes


def _tasks(sources: list[dict[str, Any]], quota: verdicts.Quota) -> Iterator[Task]:
    numbers = count()
    for file, (origin, path, called) in enumerate(_files(sources)):
        for chunk in read_chunks(path, called):
            if quota.full(origin):
                break
            yield Task(next(numbers), origin, file, called, chunk)


def _quarantine(
    found: dict[str, Mask],
    columns: verdicts.Columns,
    outcomes: list[Outcome],
    files: list[tuple[int, Path, str]],
    account: Account,
    path: Path,
) -> None:
    """Rows that are bad for what others are, read once more: by themselves they were good."""
    wanted: dict[tuple[int, int], dict[int, str]] = {}
    for name, mask in found.items():
        for row in columns["row"][mask][: None if name in BAD else EXAMPLES].tolist():
            wanted.setdefault(outcomes[row >> 32].place, {})[row & 0xFFFFFFFF] = name
    with path.open("a") as lines:
        for file in sorted({file for file, _ in wanted}):
            origin, place, called = files[file]
            for chunk in read_chunks(place, called):
                rows = wanted.get((file, chunk.start), {})
                entry = Outcome(0, origin, called)
                for number, row in rows_in(chunk) if rows else ():
                    if number in rows:
                        entry.leave_out(number, BadRow(rows[number]), row)
                lines.writelines(line + "\n" for line in entry.quarantine)
                for name, examples in entry.examples.items():
                    account.add_examples(name, examples)


def _write(shards: Path, pairs: Path, outcomes: list[Outcome], columns: verdicts.Columns, kept: Mask) -> None:
    """train.parquet and eval.parquet; the shards have served."""
    ends = np.cumsum([len(outcome.columns["row"]) for outcome in outcomes])[:-1]
    paths = [shards / f"{outcome.number:06d}.arrow" for outcome in outcomes]
    write_splits(pairs, paths, np.split(kept, ends), np.split(columns["held"], ends))
    shutil.rmtree(shards)
    write_json(pairs / HASHES, {"files": hash_files(pairs)})


def _tell(run: Run, report: dict[str, Any]) -> None:
    pairs, tokens = report["pairs"], report["tokens"]
    shapes = ", ".join(sorted(set(report["format"].values())))
    print(
        f"prepare: {pairs['train']} pairs to train on, {pairs['eval']} held out (rows: {shapes}; "
        f"{report['template']}); tokens: prompt {tokens['prompt']['mean']}, chosen {tokens['chosen']['mean']}, "
        f"rejected {tokens['rejected']['mean']}"
    )
    for name, number in report["left_out"].items():
        print(f"prepare: left out {number}: {name}, {VIOLATIONS[name]}")
    for warning in report["warnings"]:
        print(f"prepare: note: {warning}")
    for split in SPLITS:
        run.dataset(split, digest=sha256(PAIRS / f"{split}.parquet"), source=report["source"])
    changes, pages = datacard.compare(report, CARD)
    if changes:
        print(f"prepare: since the previous version: {'; '.join(f'{w} {b} -> {n}' for w, b, n in changes)}")
    for path in (CARD / "report.json", *pages):
        run.artifact(path)
    run.summary({f"pairs_{split}": number for split, number in pairs.items()})


if __name__ == "__main__":
    stage.main(prepare)
