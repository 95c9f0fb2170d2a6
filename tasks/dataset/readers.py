"""Files of rows: JSON, JSONL, CSV, Parquet and Arrow, plain or compressed, read in chunks of bounded size.

The reader cuts a file into chunks and does little more, so that other processes can take the chunks apart. The cuts
depend on the content alone. What is wrong with a whole file is an error here; what is wrong with a row is a BadRow in
its place.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet

from tasks.dataset.violations import BadRow
from tasks.errors import UserError
from training.limits import bounded

Row = dict[str, Any]
CHUNK_BYTES = 1 << 20
CHUNK_ROWS = 1000
BUFFER = 1 << 20
ROW_BYTES = 16 << 20  # of one row; longer ones are no text that a person or a model wrote
NESTED = 100  # levels of lists and objects in a row
COLUMNS = 1000  # of a table
# A file may expand to so many times its size, or to so many bytes if that is more. Text compresses 3 to 20 times.
EXPANSION = 250
EXPANDED_BYTES = 256 << 20
BATCH_BYTES = 64 << 20  # of one batch of a table, as its metadata have it
READ_BYTES = 1 << 30  # of memory for one batch, besides a multiple of the file's size
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
COMPRESSED = (".gz", ".zst", ".zstd")
BETWEEN = re.compile(r"\s*,?\s*")  # the elements of a list
csv.field_size_limit(ROW_BYTES)


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file, as cheap to make as can be: lines of JSON, rows, or a batch of Arrow's."""

    start: int  # the number of the first line or row, from 1
    content: bytes | list[Row] | pa.RecordBatch


def suffix_of(name: str | Path) -> str:
    """What a file holds by its name, compression aside."""
    path = Path(name)
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def read_chunks(path: Path, name: str) -> Iterator[Chunk]:
    """The file's chunks. `name` is what the user calls the file."""
    reader = _READERS[suffix_of(path)]
    try:
        yield from reader(path, name)
    except MemoryError:
        raise UserError(_bomb(name)) from None
    except (EOFError, OSError, zlib.error, pa.ArrowException) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"{name} is damaged or was cut off ({reason}). Fetch or write it again.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (byte {error.start}: {error.reason}). Save it as UTF-8.") from None


def rows_in(chunk: Chunk) -> Iterator[tuple[int, Row | BadRow]]:
    """(line or row number, row), or what is wrong with it."""
    if isinstance(chunk.content, bytes):
        for number, line in enumerate(chunk.content.split(b"\n"), start=chunk.start):
            if line and not line.isspace():
                yield number, _parse(line)
    else:
        rows = chunk.content if isinstance(chunk.content, list) else _values(chunk.content)
        for number, row in enumerate(rows, start=chunk.start):
            yield number, row if isinstance(row, dict | BadRow) else BadRow("not_an_object", type(row).__name__, row)


def count_rows(chunk: Chunk) -> int:
    if isinstance(chunk.content, bytes):
        return sum(1 for line in chunk.content.split(b"\n") if line and not line.isspace())
    return len(chunk.content)


def _parse(line: bytes) -> Row | BadRow:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRow("invalid_utf8", f"byte {error.start} of the line", line.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        return BadRow("invalid_json", str(error), line.decode())
    if line.count(b"[") + line.count(b"{") > NESTED and _nested(row):
        return BadRow("invalid_json", f"nested deeper than {NESTED} levels", line.decode())
    return row if isinstance(row, dict) else BadRow("not_an_object", type(row).__name__, row)


def _nested(row: Any) -> bool:
    """Whether a row is nested too deeply to be written again: how deep that is would depend on the caller."""
    level = [row]
    for _ in range(NESTED):
        if not level:
            return False
        below = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [value for values in below for value in values]
    return any(isinstance(one, dict | list) for one in level)


def _values(batch: pa.RecordBatch) -> list[Row | BadRow]:
    """Rows of a batch; where one holds what Python cannot, each by itself."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        return [_value(batch.slice(place, 1)) for place in range(len(batch))]


def _value(row: pa.RecordBatch) -> Row | BadRow:
    """A column that is not text (a date, a decimal) may hold values that Python's types do not."""
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRow("invalid_utf8", f"byte {error.start} of a column")
    except (ValueError, OverflowError, pa.ArrowException) as error:
        return BadRow("unreadable_value", str(error).splitlines()[0])


def _bomb(name: str) -> str:
    return (
        f"{name} expands to more than {EXPANSION} times its size and to more than {EXPANDED_BYTES >> 20} MiB, or needs "
        f"more than {READ_BYTES >> 20} MiB for a few rows: a decompression bomb. If the rows are real, write them "
        "again in smaller pieces and without compression."
    )


def _too_long(name: str, row: int) -> UserError:
    return UserError(f"{name}: row {row} is longer than {ROW_BYTES >> 20} MiB. Delete or split it.")


class _Measured(io.RawIOBase):
    """What a compressed file gives, up to a bound."""

    def __init__(self, source: Any, path: Path, name: str) -> None:
        self.source, self.name = source, name
        self.left = _most(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.source.read(len(buffer))
        self.left -= len(content)
        if self.left < 0:
            raise UserError(_bomb(self.name))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self.source.close()
        super().close()


def _open(path: Path, name: str) -> IO[bytes]:
    """Decompressed by what the file begins with, whatever it is called."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"\x1f\x8b":
        return io.BufferedReader(_Measured(gzip.open(path, "rb"), path, name), BUFFER)
    if magic == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(_Measured(pa.input_stream(str(path), compression="zstd"), path, name), BUFFER)
    return path.open("rb", buffering=BUFFER)


def _jsonl(path: Path, name: str) -> Iterator[Chunk]:
    number = 1
    with _open(path, name) as file:
        while lines := file.read(CHUNK_BYTES):
            if not lines.endswith(b"\n"):
                lines += file.readline(ROW_BYTES + 1)
                if len(lines) - lines.rfind(b"\n") > ROW_BYTES + 1:
                    raise _too_long(name, number + lines.count(b"\n"))
            if number == 1:
                lines = lines.removeprefix(codecs.BOM_UTF8)
            last, ends = lines.rpartition(b"\n")[2], lines.count(b"\n")
            if last and isinstance(bad := _parse(last), BadRow):
                raise UserError(
                    f"{name} was cut off: its last line, {number + ends}, does not end and is no whole row "
                    f"({bad.detail}). Fetch or write it again, or delete the line."
                )
            if not lines.isspace():
                yield Chunk(number, lines)
            number += ends


def _json(path: Path, name: str) -> Iterator[Chunk]:
    """A list of rows, taken apart without holding it whole; or, as many files are, lines after all."""
    with _open(path, name) as file:
        first, second = file.readline(ROW_BYTES), file.readline(ROW_BYTES)
    if second and isinstance(_parse(first), dict):
        yield from _jsonl(path, name)
        return
    with _open(path, name) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig")
        start = text.read(BUFFER).lstrip()
        if start[:1] == "[":
            yield from _in_chunks(_elements(start[1:], text, name))
            return
    if start:
        raise UserError(f"{name}: a .json file must hold a list of rows. One object per line is fine too.")


def _elements(buffer: str, text: IO[str], name: str) -> Iterator[Any]:
    decode, number, place = json.JSONDecoder().raw_decode, 1, 0
    while True:
        place = BETWEEN.match(buffer, place).end()  # type: ignore[union-attr]
        if buffer[place : place + 1] == "]":
            return
        try:
            row, end = decode(buffer, place)
            if end == len(buffer):  # a number might go on
                raise json.JSONDecodeError("more to come", buffer, end)
        except RecursionError:
            raise UserError(f"{name}: row {number} is nested deeper than {NESTED} levels. Delete it.") from None
        except ValueError as error:  # JSON's own, or an integer of too many digits
            buffer, place = buffer[place:], 0
            more = text.read(max(BUFFER, len(buffer))) if len(buffer) <= ROW_BYTES else ""
            if not more:
                raise UserError(
                    f"{name}, row {number}: not valid JSON ({error}), the file was cut off, or the row is longer than "
                    f"{ROW_BYTES >> 20} MiB."
                ) from None
            buffer += more
            continue
        # As text it is parsed once more, and by the process that needs it: a row can be too deep to be sent to one.
        yield row if isinstance(row, dict) and not _nested(row) else _parse(buffer[place:end].encode())
        place, number = end, number + 1


def _csv(path: Path, name: str) -> Iterator[Chunk]:
    delimiter = "\t" if suffix_of(path) == ".tsv" else ","
    with _open(path, name) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.DictReader(_lines(text, name), delimiter=delimiter, strict=True)
        try:
            _few_columns(len(reader.fieldnames or ()), name)
            yield from _in_chunks(reader)
        except csv.Error as error:
            raise UserError(
                f"{name}, after line {reader.line_num}: not valid CSV ({error}). Mend the quotes."
            ) from None


def _lines(text: IO[str], name: str) -> Iterator[str]:
    number = 1
    while line := text.readline(ROW_BYTES + 1):
        if len(line) > ROW_BYTES:
            raise _too_long(name, number)
        yield line
        number += 1


def _few_columns(number: int, name: str) -> None:
    if number > COLUMNS:
        raise UserError(f"{name} has {number} columns, and {COLUMNS} are the most. Keep those that prepare reads.")


def _parquet(path: Path, name: str) -> Iterator[Chunk]:
    with bounded(memory=_room(path)):
        file = pyarrow.parquet.ParquetFile(path)
    with file:
        data = file.metadata
        groups = [data.row_group(number) for number in range(data.num_row_groups)]
        columns = [group.column(number) for group in groups for number in range(group.num_columns)]
        _few_columns(data.num_columns, name)
        # Eight bytes a value, as a repeated one takes when it is read.
        if 8 * sum(column.num_values for column in columns) > _most(path):
            raise UserError(_bomb(name))
        row = sum(column.total_uncompressed_size for column in columns) // max(data.num_rows, 1)
        size = max(1, min(CHUNK_ROWS, BATCH_BYTES // max(row, 1)))
        # No threads: under a memory limit one that cannot start would end the process.
        yield from _batches(file.iter_batches(batch_size=size, use_threads=False), path, name)


def _arrow(path: Path, name: str) -> Iterator[Chunk]:
    """Arrow's file format, or its stream format, which `datasets` writes."""
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.memory_map(str(path)) as file:
        if file.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file, options=options)
            batches: Iterable[pa.RecordBatch] = (reader.get_batch(n) for n in range(reader.num_record_batches))
        else:
            file.seek(0)
            reader = batches = pa.ipc.open_stream(file, options=options)
        _few_columns(len(reader.schema), name)
        yield from _batches(batches, path, name, trusted=False)


def _most(path: Path) -> int:
    """Bytes that a file may expand to."""
    return max(EXPANDED_BYTES, EXPANSION * path.stat().st_size)


def _room(path: Path) -> int:
    """Bytes of memory for reading one batch: a reader may hold a whole column of a row group."""
    return READ_BYTES + 2 * path.stat().st_size


def _batches(batches: Iterable[pa.RecordBatch], path: Path, name: str, trusted: bool = True) -> Iterator[Chunk]:
    number, left = 1, _most(path)
    batches = iter(batches)
    while True:
        with bounded(memory=_room(path)):
            if (batch := next(batches, None)) is None:
                return
            if not trusted:  # a memory map whose offsets lead elsewhere would end the process
                batch.validate(full=True)
        left -= batch.nbytes
        if left < 0:
            raise UserError(_bomb(name))
        for start in range(0, len(batch), CHUNK_ROWS):
            for piece in _pieces(batch.slice(start, CHUNK_ROWS), number, name):
                yield Chunk(number, piece)
                number += len(piece)


def _pieces(batch: pa.RecordBatch, number: int, name: str) -> Iterator[pa.RecordBatch]:
    """Halves of halves, until each is small enough for a worker."""
    if batch.nbytes <= ROW_BYTES:
        yield batch
        return
    if len(batch) == 1:
        raise _too_long(name, number)
    half = len(batch) // 2
    yield from _pieces(batch.slice(0, half), number, name)
    yield from _pieces(batch.slice(half), number + half, name)


def _in_chunks(rows: Iterable[Any]) -> Iterator[Chunk]:
    rows, number = iter(rows), 1
    for first in rows:
        some = [first, *islice(rows, CHUNK_ROWS - 1)]
        yield Chunk(number, some)
        number += len(some)


_READERS: dict[str, Callable[[Path, str], Iterator[Chunk]]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), _jsonl),
    ".json": _json,
    **dict.fromkeys((".csv", ".tsv"), _csv),
    ".parquet": _parquet,
    **dict.fromkeys((".arrow", ".feather"), _arrow),
}


def first_rows(path: Path, name: str) -> list[Row]:
    """Some rows, to tell the shape by: those of the first chunk that has any."""
    for chunk in read_chunks(path, name):
        if rows := [row for _, row in rows_in(chunk) if isinstance(row, dict)]:
            return rows
    return []
