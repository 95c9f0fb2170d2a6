"""Stage `prepare`: raw rows to tokenized pairs, split by prompt. Every row is counted as kept or rejected.

Writes data/pairs (train.arrow, eval.arrow) and data/card: the data card (report.json, card.md, card.html) and
quarantine.jsonl with the rows that cannot be used. Worker processes read the rows in chunks, in bounded memory;
duplicates are found by hashes when all chunks are done.
"""

import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tasks.artifacts.pairs import HASHES, SPLITS, pairs_file
from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.config.paths import CARD, PAIRS, RAW, SAMPLE
from tasks.config.prepare import Layout, Prepare
from tasks.config.source import RUN
from tasks.config.strict import to_yaml
from tasks.config.train import Train
from tasks.errors import UserError
from tasks.prepare import unpaired
from tasks.prepare.card import data_card
from tasks.prepare.card.notes import sentences
from tasks.prepare.card.preview import describe
from tasks.prepare.card.row_stats import RowStats, check_limits
from tasks.prepare.chunks import EXAMPLES, ChunkResult, ChunkTask, ChunkWorker, RawFile, RowSource
from tasks.prepare.dedup import Columns, Mask
from tasks.prepare.demonstrations import check_demonstrations, prepare_demonstrations
from tasks.prepare.raw_rows import SAMPLED, files_of
from tasks.prepare.rows.layouts import better_shape, decided_by, decode, section_of, source_layout
from tasks.prepare.selection import Processed, first_samples, gather_columns, larger_samples, select_pairs
from tasks.prepare.shards import count_splits, write_splits
from tasks.prepare.templates import ChatTemplate, load_template
from tasks.source.readers import first_rows, read_chunks, rows_in
from tasks.source.reject_reasons import QUARANTINED, REJECT_REASONS, RejectedRow
from tasks.system.files import hash_files, publish, read_json, read_json_or_empty, sha256, write_json
from tasks.system.process_pool import available_cpus, map_in_order
from tasks.system.progress import Bar
from tasks.tracking.journal import StageJournal

SAMPLED_LAYOUT = Layout(format="pairs", columns={})
EXAMPLE_ROWS = 20  # to find three pairs in
ROWS_PER_PROCESS = 2000  # another process is not worth its start for fewer rows


def prepare(run: StageJournal) -> None:
    params, raw = load_params(), _with_sampled_pairs(read_json(RAW / "manifest.json"))
    template = load_template(params)
    with publish(PAIRS) as pairs, publish(CARD) as card:
        shards = pairs / "shards"
        done = process(raw, template, params.prepare, shards, card / "quarantine.jsonl", params.train)
        _write_pairs(shards, pairs, done, params.prepare.max_tokens)
        if demonstrations := [entry for entry in raw["sources"] if entry["key"] == "source.sft"]:
            _write_demonstrations(demonstrations, template, params.prepare, pairs)
        write_json(pairs / HASHES, {"files": hash_files(pairs)})
        report = data_card.make_report(done, params.prepare, template, raw["source"], pairs)
        data_card.write_card(card, report, pairs, template.tokenizer)
    _log(run, report)


def _with_sampled_pairs(raw: dict[str, Any]) -> dict[str, Any]:
    """The manifest of data/raw with the pairs of the stage `sample`, which take the place of the source's or join them.

    Held-out pairs always are those of the source, so that the models of all rounds are compared on the same pairs.
    """
    sampled = read_json_or_empty(SAMPLE / "manifest.json")
    if not sampled:
        return raw
    entries = raw["sources"]
    if not sampled["settings"]["keep_source"]:
        entries = [
            {**entry, "replaced": entry["key"] == "source.data" and not entry["address"].startswith(RUN)}
            for entry in entries
        ]
    entry = {"key": SAMPLED, "name": SAMPLED, "weight": 1.0, "share": 1.0, "files": [sampled["file"]]}
    rows = raw["rows"] + sampled["file"]["rows"]
    return {**raw, "source": f"{raw['source']} + sampled answers", "rows": rows, "sources": [*entries, entry]}


def process(
    raw: dict[str, Any],
    template: ChatTemplate,
    params: Prepare,
    shards: Path,
    quarantine: Path,
    train: Train | None = None,
) -> Processed:
    """Read, check and tokenize the rows of data/raw. UserError if too many cannot be used, or not for this training."""
    entries = [entry for entry in raw["sources"] if entry["key"] != "source.sft"]
    entries.sort(key=lambda entry: entry["key"] != "source.eval")  # held-out data comes first
    names = [entry["name"] for entry in entries]
    if unknown := [name for name in params.by_source if name not in names]:
        raise UserError(f"prepare.by_source: there is no source `{unknown[0]}`. There are: {', '.join(names)}.")
    files = _raw_files(entries)
    sources = [_row_source(entry, params, template, others=len(entries) > 1) for entry in entries]
    counts = [sum(file["rows"] for file in entry["files"]) for entry in entries]
    unpaired.check_sources(sources, train)
    more: list[RowSource] | None = first_samples(sources, counts, params.max_pairs)
    while more:  # once, unless prepare.max_pairs needs a larger sample
        sources = more
        worker = ChunkWorker(template, sources, params, shards, frozenset(raw.get("excluded", ())))
        stats, results = _process_chunks(worker, files, raw["rows"], quarantine)
        columns = gather_columns(results)
        kept, duplicates = select_pairs(columns, sources, stats, params)
        more = larger_samples(sources, columns, kept, params.max_pairs)
    _quarantine_duplicates(duplicates, columns, results, files, stats, quarantine)
    splits = count_splits(columns["held_out"][kept])
    check_limits(stats, splits, params, raw["source"], partial(_other_shape, entries, sources, params))
    unpaired.check_labels(columns, kept)
    return Processed(sources, stats, results, columns, kept)


def _raw_files(entries: list[dict[str, Any]]) -> list[RawFile]:
    return [RawFile(number, *file) for number, entry in enumerate(entries) for file in files_of(entry)]


def _row_source(entry: dict[str, Any], params: Prepare, template: ChatTemplate, others: bool) -> RowSource:
    """A source with its layout, as the first rows show it, and three of them as they are understood."""
    path, file = files_of(entry)[0]
    rows = first_rows(path, file)
    if entry["key"] == SAMPLED:
        params = params.model_copy(update={"by_source": {SAMPLED: SAMPLED_LAYOUT}})
    layout = source_layout(entry["name"], rows, file, params, others)
    if examples := list(describe(template, decode(rows[:EXAMPLE_ROWS], layout)[:EXAMPLES])):
        how = ", ".join(filter(None, (layout.shape, decided_by(rows, layout))))
        signs = (
            "rows (+ desirable, - undesirable)" if layout.shape == unpaired.SHAPE else "pairs (+ chosen, - rejected)"
        )
        print(f"prepare: {entry['name']} is read as {how}. Check three {signs}, the loss in «»:")
        print("\n".join(f"  {line}" for line in examples))
    held_out, replaced = entry["key"] == "source.eval", entry.get("replaced", False)
    return RowSource(entry["name"], layout, entry["weight"], entry["share"], held_out, replaced)


def _process_chunks(
    worker: ChunkWorker, files: list[RawFile], rows: int, quarantine: Path
) -> tuple[RowStats, list[ChunkResult]]:
    """Send every chunk through a worker; quarantined rows are written as they come."""
    shutil.rmtree(worker.shards, ignore_errors=True)  # of a sample that was too small
    worker.shards.mkdir()
    stats, results = RowStats(), []
    workers = load_cluster().prepare.num_workers or available_cpus()
    processes = min(workers, -(-rows // ROWS_PER_PROCESS))
    with quarantine.open("w") as file, Bar("prepare", rows, "rows") as bar:
        for result in map_in_order(worker, _chunk_tasks(files), processes):
            stats.add(result, worker.sources[result.file.source].name)
            file.writelines(line + "\n" for line in result.quarantine)
            result.quarantine.clear()
            results.append(result)
            bar.update(stats.rows.total())
    return stats, results


def _chunk_tasks(files: Iterable[RawFile]) -> Iterator[ChunkTask]:
    chunks = ((file, chunk) for file in files for chunk in read_chunks(file.path, file.name))
    return (ChunkTask(number, file, chunk) for number, (file, chunk) in enumerate(chunks))


def _other_shape(entries: list[dict[str, Any]], sources: list[RowSource], params: Prepare) -> str:
    """Advice for a source whose rows can be read as another shape; empty if there is none."""
    for entry, source in zip(entries, sources, strict=True):
        if shape := better_shape(first_rows(*files_of(entry)[0]), source.layout):
            key, own = section_of(source.name, params, others=len(sources) > 1)
            wanted = {"format": shape, "columns": params.columns}
            setting = f"{own} to {to_yaml(wanted)}" if own else f"{key}.format to {shape}"
            return f"The rows of {source.name} were read as {source.layout.shape}. Set {setting}."
    return ""


def _quarantine_duplicates(
    duplicates: dict[str, Mask],
    columns: Columns,
    results: list[ChunkResult],
    files: list[RawFile],
    stats: RowStats,
    quarantine: Path,
) -> None:
    """Read again the rows that clash with other rows, for the quarantine and the examples."""
    rejected: dict[tuple[RawFile, int], dict[int, str]] = {}  # reasons by file and chunk, then by row
    for name, mask in duplicates.items():
        for row in columns["row"][mask][: None if name in QUARANTINED else EXAMPLES].tolist():
            result = results[row >> 32]
            rejected.setdefault((result.file, result.start), {})[row & 0xFFFFFFFF] = name
    affected = {file for file, _ in rejected}
    with quarantine.open("a") as lines:
        for _, file, chunk in _chunk_tasks(file for file in files if file in affected):
            if reasons := rejected.get((file, chunk.start)):
                result = ChunkResult(0, file, chunk.start)
                for number, row in rows_in(chunk):
                    if number in reasons:
                        result.reject(number, RejectedRow(reasons[number]), row)
                lines.writelines(line + "\n" for line in result.quarantine)
                for reason, examples in result.examples.items():
                    stats.add_examples(reason, examples)


def _write_pairs(shards: Path, pairs: Path, done: Processed, max_tokens: int) -> None:
    """train.arrow and eval.arrow from the shards, which are then deleted."""
    ends = np.cumsum([len(result.columns["row"]) for result in done.results])[:-1]
    paths = [shards / f"{result.number:06d}.arrow" for result in done.results]
    write_splits(pairs, paths, np.split(done.kept, ends), np.split(done.columns["held_out"], ends))
    shutil.rmtree(shards)
    for split in SPLITS if done.columns["sign"].any() else ():
        unpaired.add_mismatched(pairs / f"{split}.arrow", max_tokens)


def _write_demonstrations(entries: list[dict[str, Any]], template: ChatTemplate, params: Prepare, folder: Path) -> None:
    """The data of `source.sft`, in files of its own."""
    chunks = (chunk for _, _, chunk in _chunk_tasks(_raw_files(entries)))
    counts, rejected, first = prepare_demonstrations(chunks, template, params, folder)
    check_demonstrations(counts, rejected, first, params)
    print(f"prepare: {counts['train']} answers for sft, {counts['eval']} held out")
    for name, number in rejected.items():
        print(f"prepare: sft: rejected {number}: {name}, {REJECT_REASONS[name]}")


def _log(run: StageJournal, report: dict[str, Any]) -> None:
    pairs, tokens = report["pairs"], report["tokens"]
    shapes = ", ".join(sorted(set(report["format"].values())))
    print(
        f"prepare: {pairs['train']} training pairs, {pairs['eval']} held-out pairs (row shape: {shapes}; "
        f"{report['template']}); mean tokens: prompt {tokens['prompt']['mean']}, chosen {tokens['chosen']['mean']}, "
        f"rejected {tokens['rejected']['mean']}"
    )
    if counts := report["unpaired"]:
        print(f"prepare: unpaired rows: {counts['desirable']} desirable (chosen), {counts['undesirable']} undesirable")
    for sentence in sentences(report["notes"], report["unread_keys"]):
        print(f"prepare: {sentence}")
    for name, number in report["left_out"].items():
        print(f"prepare: rejected {number}: {name}, {REJECT_REASONS[name]}")
    for warning in report["warnings"]:
        print(f"prepare: warning: {warning}")
    for split in SPLITS:
        run.dataset(split, digest=sha256(pairs_file(split)), source=report["source"])
    changes, pages = data_card.compare(report, CARD)
    if changes:
        listed = "; ".join(f"{name} {before} -> {now}" for name, before, now in changes)
        print(f"prepare: changes since the previous version: {listed}")
    for path in (CARD / "report.json", *pages):
        run.artifact(path)
    run.summary({f"pairs_{split}": number for split, number in pairs.items()})
