"""Parquet and Arrow files, read in batches within limits of memory and size."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from tasks.source import read_limits as limits
from tasks.source.reject_reasons import RawRow, RejectedRow
from training.models.limits import bounded


def read_parquet(path: Path, name: str) -> Iterator[pa.RecordBatch]:
    with _bounded_memory(path):
        file = pyarrow.parquet.ParquetFile(path)
    with file:
        metadata = file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        columns = [group.column(number) for group in groups for number in range(group.num_columns)]
        limits.check_columns(metadata.num_columns, name)
        # A repeated value takes eight bytes when it is read.
        if 8 * sum(column.num_values for column in columns) > limits.max_expanded(path):
            raise limits.bomb(name)
        row_bytes = sum(column.total_uncompressed_size for column in columns) // max(metadata.num_rows, 1)
        size = max(1, min(limits.CHUNK_ROWS, limits.BATCH_BYTES // max(row_bytes, 1)))
        # No threads: under a memory limit a thread that cannot start would end the process.
        yield from _within_limits(file.iter_batches(batch_size=size, use_threads=False), path, name)


def read_arrow(path: Path, name: str) -> Iterator[pa.RecordBatch]:
    """Arrow's file format, or its stream format, which `datasets` writes."""
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.memory_map(str(path)) as file:
        if file.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file, options=options)
            batches: Iterable[pa.RecordBatch] = (reader.get_batch(n) for n in range(reader.num_record_batches))
        else:
            file.seek(0)
            reader = batches = pa.ipc.open_stream(file, options=options)
        limits.check_columns(len(reader.schema), name)
        yield from _within_limits(batches, path, name, trusted=False)


def to_rows(batch: pa.RecordBatch) -> list[RawRow | RejectedRow]:
    """Rows of a batch. If a value has no Python equivalent, the rows are converted one by one."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        return [_to_row(batch.slice(index, 1)) for index in range(len(batch))]


def _to_row(row: pa.RecordBatch) -> RawRow | RejectedRow:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return RejectedRow("invalid_utf8", f"byte {error.start} of a column")
    except (ValueError, OverflowError, pa.ArrowException) as error:  # such as a date beyond the year 9999
        return RejectedRow("unreadable_value", str(error).splitlines()[0])


def _bounded_memory(path: Path) -> AbstractContextManager[None]:
    """MemoryError beyond READ_BYTES and twice the file's size: a reader may hold a whole column of a row group."""
    # Arrow's allocator reserves 1 GiB of address space with its first allocation. Without this line that reservation
    # would count against the limit, and the first table that a process reads would be refused.
    pa.allocate_buffer(1)
    return bounded(memory=limits.READ_BYTES + 2 * path.stat().st_size)


def _within_limits(
    batches: Iterable[pa.RecordBatch], path: Path, name: str, trusted: bool = True
) -> Iterator[pa.RecordBatch]:
    """The batches in slices of at most CHUNK_ROWS rows and ROW_BYTES bytes."""
    row, remaining = 1, limits.max_expanded(path)
    batches = iter(batches)
    while True:
        with _bounded_memory(path):
            if (batch := next(batches, None)) is None:
                return
            if not trusted:  # offsets that point outside a memory map would end the process
                batch.validate(full=True)
        remaining -= batch.nbytes
        if remaining < 0:
            raise limits.bomb(name)
        for start in range(0, len(batch), limits.CHUNK_ROWS):
            yield from _split(batch.slice(start, limits.CHUNK_ROWS), row + start, name)
        row += len(batch)


def _split(batch: pa.RecordBatch, row: int, name: str) -> Iterator[pa.RecordBatch]:
    """Halves of halves, until each is small enough for a worker."""
    if batch.nbytes <= limits.ROW_BYTES:
        yield batch
        return
    if len(batch) == 1:
        raise limits.row_too_long(name, row)
    half = len(batch) // 2
    yield from _split(batch.slice(0, half), row, name)
    yield from _split(batch.slice(half), row + half, name)
