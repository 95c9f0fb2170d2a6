"""Files of rows: JSON, JSONL, CSV, Parquet and Arrow, plain or compressed, read in chunks of bounded size.

The reader only cuts a file into chunks; worker processes parse them. The cuts depend on the content alone. A damaged
file is a UserError; a row that cannot be read is a RejectedRow in its place. The readers of `datasets` refuse a whole
file for one bad line, change values of CSV, and limit neither size nor memory (docs/decisions/2026-11-19-libraries.md).
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from tasks.errors import UserError
from tasks.source import read_limits as limits
from tasks.source import tables
from tasks.source.reject_reasons import FIXES, RawRow, RejectedRow

BUFFER = 1 << 20
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
COMPRESSED = (".gz", ".zst", ".zstd")
SEPARATOR = re.compile(r"\s*,?\s*")  # between the elements of a JSON list
csv.field_size_limit(limits.ROW_BYTES)


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file, not yet parsed where possible: JSON lines, rows, or an Arrow batch."""

    start: int  # number of the first line or row, from 1
    content: bytes | list[RawRow] | pa.RecordBatch


def suffix_of(name: str | Path) -> str:
    """The suffix that names the format, without that of the compression."""
    path = Path(name)
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def read_chunks(path: Path, name: str) -> Iterator[Chunk]:
    """The file's chunks. `name` is the file's name in messages."""
    reader = _READERS[suffix_of(path)]
    try:
        yield from reader(path, name)
    except MemoryError:
        raise limits.bomb(name) from None
    except (EOFError, OSError, zlib.error, pa.ArrowException) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"{name} is damaged or was cut off ({reason}). Fetch or write it again.") from None
    except UnicodeDecodeError as error:
        reason = f"byte {error.start}: {error.reason}"
        raise UserError(f"{name} is not {error.encoding.upper()} ({reason}). {FIXES['invalid_utf8']}") from None


def rows_in(chunk: Chunk) -> Iterator[tuple[int, RawRow | RejectedRow]]:
    """(line or row number, row or the reason why it cannot be read)."""
    if isinstance(chunk.content, bytes):
        for number, line in enumerate(chunk.content.split(b"\n"), start=chunk.start):
            if line and not line.isspace():
                yield number, _parse(line)
    else:
        rows = chunk.content if isinstance(chunk.content, list) else tables.to_rows(chunk.content)
        for number, row in enumerate(rows, start=chunk.start):
            yield number, row if isinstance(row, dict | RejectedRow) else _not_an_object(row)


def read_rows(path: Path, name: str) -> Iterator[tuple[int, RawRow | RejectedRow]]:
    """The rows of a whole file with their numbers."""
    return chain.from_iterable(map(rows_in, read_chunks(path, name)))


def count_rows(chunk: Chunk) -> int:
    if isinstance(chunk.content, bytes):
        return sum(1 for line in chunk.content.split(b"\n") if line and not line.isspace())
    return len(chunk.content)


def first_rows(path: Path, name: str) -> list[RawRow]:
    """The readable rows of the first chunk that has any, to detect the row shape; UserError if none has."""
    first: RejectedRow | None = None
    for chunk in read_chunks(path, name):
        rows = [row for _, row in rows_in(chunk)]
        if readable := [row for row in rows if isinstance(row, dict)]:
            return readable
        first = first or next((row for row in rows if isinstance(row, RejectedRow)), None)
    reason = f"{first}. {FIXES.get(first.name, '')}" if first else "it has no rows."
    raise UserError(f"{name} has no row that can be read: {reason}".rstrip())


def _parse(line: bytes) -> RawRow | RejectedRow:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return RejectedRow("invalid_utf8", f"byte {error.start} of the line", _length(line))
    except (ValueError, RecursionError) as error:
        return RejectedRow("invalid_json", str(error), _length(line))
    if line.count(b"[") + line.count(b"{") > limits.NESTING and _is_too_nested(row):
        return RejectedRow("invalid_json", f"nested deeper than {limits.NESTING} levels", _length(line))
    return row if isinstance(row, dict) else _not_an_object(row)


def _length(line: bytes) -> str:
    """What reports say about a line that is no row: it may be of any file, also of one with a key."""
    return f"a line of {len(line)} bytes"


def _not_an_object(row: Any) -> RejectedRow:
    return RejectedRow("not_an_object", type(row).__name__, f"a value of the type {type(row).__name__}")


def _is_too_nested(row: Any) -> bool:
    """A fixed limit: how deep a row can be and still be written again depends on the caller's stack."""
    level = [row]
    for _ in range(limits.NESTING):
        if not level:
            return False
        nested = [value.values() if isinstance(value, dict) else value for value in level if _is_nested(value)]
        level = [value for values in nested for value in values]
    return any(map(_is_nested, level))


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list)


class _LimitedStream(io.RawIOBase):
    """The decompressed bytes of a file, up to the limit of its expansion."""

    def __init__(self, source: Any, path: Path, name: str) -> None:
        self.source, self.name = source, name
        self.remaining = limits.max_expanded(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.source.read(len(buffer))
        self.remaining -= len(content)
        if self.remaining < 0:
            raise limits.bomb(self.name)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self.source.close()
        super().close()


def _open(path: Path, name: str) -> io.BufferedReader:
    """The bytes of a file, decompressed according to its first bytes, whatever its name."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"\x1f\x8b":
        return io.BufferedReader(_LimitedStream(gzip.open(path, "rb"), path, name), BUFFER)
    if magic == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(_LimitedStream(pa.input_stream(str(path), compression="zstd"), path, name), BUFFER)
    return io.BufferedReader(path.open("rb", buffering=0), BUFFER)


def _encoding(stream: io.BufferedReader) -> str:
    """UTF-8, or UTF-16 or UTF-32 by the byte order mark or the zero bytes of ASCII characters."""
    encoding = json.detect_encoding(stream.peek(4)[:4])
    return "utf-8-sig" if encoding == "utf-8" else encoding


def _open_text(path: Path, name: str, newline: str | None = None) -> io.TextIOWrapper:
    stream = _open(path, name)
    return io.TextIOWrapper(stream, _encoding(stream), newline=newline)


@contextmanager
def _open_lines(path: Path, name: str) -> Iterator["io.BufferedReader | _Utf8Lines"]:
    """Lines as UTF-8. In a file of UTF-8, a line that is not valid stays as it is."""
    with _open(path, name) as stream:
        encoding = _encoding(stream)
        yield stream if encoding == "utf-8-sig" else _Utf8Lines(io.TextIOWrapper(stream, encoding, newline="\n"))


class _Utf8Lines:
    """Text of another encoding, read as the UTF-8 bytes of JSON lines."""

    def __init__(self, text: IO[str]) -> None:
        self.text = text

    def read(self, size: int) -> bytes:
        return self.text.read(size).encode()

    def readline(self, size: int) -> bytes:
        return self.text.readline(size).encode()


def _jsonl(path: Path, name: str) -> Iterator[Chunk]:
    number = 1
    with _open_lines(path, name) as file:
        while lines := file.read(limits.CHUNK_BYTES):
            if not lines.endswith(b"\n"):
                lines += file.readline(limits.ROW_BYTES + 1)
                if len(lines) - lines.rfind(b"\n") > limits.ROW_BYTES + 1:
                    raise limits.row_too_long(name, number + lines.count(b"\n"))
            if number == 1:
                lines = lines.removeprefix(codecs.BOM_UTF8)
            last, ends = lines.rpartition(b"\n")[2], lines.count(b"\n")
            if last and isinstance(rejected := _parse(last), RejectedRow) and rejected.name != "invalid_utf8":
                raise UserError(
                    f"{name} was cut off: its last line, {number + ends}, has no line end and is not a whole row "
                    f"({rejected.detail}). Fetch or write it again, or delete the line."
                )
            if not lines.isspace():
                yield Chunk(number, lines)
            number += ends


def _json(path: Path, name: str) -> Iterator[Chunk]:
    """A list of rows, read without holding it whole; or JSON lines, which many .json files are."""
    with _open_lines(path, name) as file:
        first, second = file.readline(limits.ROW_BYTES), file.readline(limits.ROW_BYTES)
    if second and isinstance(_parse(first), dict):
        yield from _jsonl(path, name)
        return
    with _open_text(path, name) as text:
        start = text.read(BUFFER).lstrip()
        if start[:1] == "[":
            yield from _in_chunks(_elements(start[1:], text, name))
            return
    if start:
        raise UserError(f"{name}: a .json file must hold a list of rows, or one object per line.")


def _elements(buffer: str, text: IO[str], name: str) -> Iterator[Any]:
    decode, number, position = json.JSONDecoder().raw_decode, 1, 0
    while True:
        position = SEPARATOR.match(buffer, position).end()  # type: ignore[union-attr]
        if buffer[position : position + 1] == "]":
            return
        try:
            row, end = decode(buffer, position)
            if end == len(buffer):  # a number might continue
                raise json.JSONDecodeError("incomplete", buffer, end)
        except RecursionError:
            raise UserError(f"{name}: row {number} is nested deeper than {limits.NESTING} levels. Delete it.") from None
        except ValueError as error:  # a JSON error, or an integer of too many digits
            buffer, position = buffer[position:], 0
            more = text.read(max(BUFFER, len(buffer))) if len(buffer) <= limits.ROW_BYTES else ""
            if not more:
                raise UserError(
                    f"{name}, row {number}: not valid JSON ({error}), the file was cut off, or the row is longer than "
                    f"{limits.ROW_BYTES >> 20} MiB."
                ) from None
            buffer += more
            continue
        # Other values are parsed again to be rejected here: a deeply nested row cannot be pickled for a worker.
        yield row if isinstance(row, dict) and not _is_too_nested(row) else _parse(buffer[position:end].encode())
        position, number = end, number + 1


def _csv(path: Path, name: str) -> Iterator[Chunk]:
    with _open_text(path, name, newline="") as text:
        lines = _lines(text, name)
        header = next(lines, "")
        delimiter = _delimiter(header, "\t" if suffix_of(path) == ".tsv" else ",")
        reader = csv.DictReader(chain([header], lines), delimiter=delimiter, strict=True)
        try:
            limits.check_columns(len(reader.fieldnames or ()), name)
            yield from _in_chunks(reader)
        except csv.Error as error:
            raise UserError(
                f"{name}, after line {reader.line_num}: not valid CSV ({error}). Correct the quotes."
            ) from None


def _delimiter(header: str, usual: str) -> str:
    """The separator that is most often in the header, outside of quotes."""
    names = re.sub(r'"[^"]*"', "", header)
    return max((usual, ",", ";", "\t", "|"), key=names.count)


def _lines(text: IO[str], name: str) -> Iterator[str]:
    number = 1
    while line := text.readline(limits.ROW_BYTES + 1):
        if len(line) > limits.ROW_BYTES:
            raise limits.row_too_long(name, number)
        yield line
        number += 1


def _in_chunks(rows: Iterable[Any]) -> Iterator[Chunk]:
    rows = iter(rows)
    return _numbered([first, *islice(rows, limits.CHUNK_ROWS - 1)] for first in rows)


def _numbered(pieces: Iterable[list[RawRow] | pa.RecordBatch]) -> Iterator[Chunk]:
    number = 1
    for piece in pieces:
        yield Chunk(number, piece)
        number += len(piece)


_READERS: dict[str, Callable[[Path, str], Iterator[Chunk]]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), _jsonl),
    ".json": _json,
    **dict.fromkeys((".csv", ".tsv"), _csv),
    ".parquet": lambda path, name: _numbered(tables.read_parquet(path, name)),
    **dict.fromkeys((".arrow", ".feather"), lambda path, name: _numbered(tables.read_arrow(path, name))),
}
