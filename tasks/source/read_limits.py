"""Limits for files of rows, so that a hostile or broken file cannot exhaust the machine. docs/sources.md names them."""

from pathlib import Path

from tasks.errors import UserError

CHUNK_BYTES = 1 << 20
CHUNK_ROWS = 1000
ROW_BYTES = 16 << 20  # longer rows are rejected as malformed
NESTING = 100  # levels of lists and objects in a row
COLUMNS = 1000  # of a table
# A file may expand to EXPANSION times its size, or to EXPANDED_BYTES if that is more. Text compresses 3 to 20 times.
EXPANSION = 250
EXPANDED_BYTES = 256 << 20
BATCH_BYTES = 64 << 20  # of one batch of a table, by its metadata
READ_BYTES = 1 << 30  # of memory for one batch, besides twice the file's size


def max_expanded(path: Path) -> int:
    """Bytes that a file may expand to."""
    return max(EXPANDED_BYTES, EXPANSION * path.stat().st_size)


def bomb(name: str) -> UserError:
    return UserError(
        f"{name} expands to more than {EXPANSION} times its size and to more than {EXPANDED_BYTES >> 20} MiB, or needs "
        f"more than {READ_BYTES >> 20} MiB for a few rows: a decompression bomb. If the rows are real, write them "
        "again in smaller pieces and without compression."
    )


def row_too_long(name: str, row: int) -> UserError:
    return UserError(f"{name}: row {row} is longer than {ROW_BYTES >> 20} MiB. Delete or split it.")


def check_columns(count: int, name: str) -> None:
    if count > COLUMNS:
        raise UserError(f"{name} has {count} columns, and the limit is {COLUMNS}. Keep those that prepare reads.")
