"""Files of rows: every format gives the same rows, and a damaged file is an error with a message."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from tasks.errors import UserError
from tasks.source import read_limits
from tasks.source.readers import count_rows, first_rows, read_chunks, rows_in
from tasks.source.reject_reasons import RejectedRow

ROWS = [{"prompt": f"Wie heißt Nummer {n}?", "chosen": "good", "rejected": "bad"} for n in range(7)]


def write_arrow(path, stream: bool) -> None:
    table = pa.Table.from_pylist(ROWS)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


@pytest.fixture
def files(tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(lines.encode())
    (tmp_path / "lines.json").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "a.csv").write_text(
        "prompt,chosen,rejected\n" + "".join(f"{r['prompt']},good,bad\n" for r in ROWS), encoding="utf-8-sig"
    )
    table = [["prompt", "chosen", "rejected"], *([r["prompt"], "good", "bad"] for r in ROWS)]
    for name, separator in (("semicolon", ";"), ("tab", "\t"), ("bar", "|")):
        (tmp_path / f"{name}.csv").write_text("".join(separator.join(cells) + "\n" for cells in table))
    (tmp_path / "comma.tsv").write_text("".join(",".join(cells) + "\n" for cells in table))
    (tmp_path / "utf16.csv").write_text("".join("\t".join(cells) + "\n" for cells in table), encoding="utf-16")
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        (tmp_path / f"{encoding}.jsonl").write_text(lines, encoding=encoding)
    (tmp_path / "utf-16.jsonl.gz").write_bytes(gzip.compress(lines.encode("utf-16")))
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=2)
    write_arrow(tmp_path / "file.arrow", stream=False)
    write_arrow(tmp_path / "stream.arrow", stream=True)
    return tmp_path


def test_every_file_format_gives_the_same_rows_in_chunks_of_any_size(files, monkeypatch):
    for size in (1, 100, 1 << 20):
        monkeypatch.setattr(read_limits, "CHUNK_BYTES", size)
        monkeypatch.setattr(read_limits, "CHUNK_ROWS", min(size, 4))
        for path in files.iterdir():
            chunks = list(read_chunks(path, path.name))
            assert [row for chunk in chunks for row in rows_in(chunk)] == list(enumerate(ROWS, start=1)), path.name
            assert sum(map(count_rows, chunks)) == 7
            assert len(chunks) == 1 or size < 1 << 20 or path.suffix in (".parquet", ".arrow", ".json", ".csv", ".tsv")


def test_bad_lines_are_rejected_with_their_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"cut": \n{"b": "\xff"}\n[1]\n{"c": 2}')
    rows = [pair for chunk in read_chunks(path, "a") for pair in rows_in(chunk)]
    assert [number for number, _ in rows] == [1, 3, 4, 5, 6]
    names = [row.name if isinstance(row, RejectedRow) else row for _, row in rows]
    assert names == [{"a": 1}, "invalid_json", "invalid_utf8", "not_an_object", {"c": 2}]


def test_a_file_without_a_readable_row_says_why(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"prompt": "Größe?"}\n{"prompt": "Übung?"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"no row that can be read: the text is not valid UTF-8 .*iconv -f WINDOWS"):
        first_rows(path, "a.jsonl")
    path.write_text("prompt,chosen\na,b\n")
    with pytest.raises(UserError, match=r"no row that can be read: the line is not valid JSON .*suffix of its format"):
        first_rows(path, "a.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": "cut o', r"a\.jsonl was cut off: its last line, 2,"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99)[:-12], r"a\.jsonl\.gz is damaged or was cut off"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99)[:20] + b"x" * 30, r"is damaged or was cut off"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd" + b"x" * 30, r"is damaged or was cut off"),
        ("a.json", b'[{"a": 1}, {"b": ', r"a\.json, row 2: not valid JSON"),
        ("a.json", b'{"a": 1}', r"must hold a list of rows"),
        ("a.csv", b'a,b\n"open,1\n', r"a\.csv, after line 1: not valid CSV"),
        ("a.csv", b"a,b\n\xff,1\n", r"a\.csv is not UTF-8 .*iconv -f WINDOWS-1252"),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16")[:-1], r"a\.jsonl is not UTF-16"),
        ("a.parquet", b"PAR1 no", r"a\.parquet is damaged"),
        ("a.arrow", b"ARROW1 no", r"a\.arrow is damaged"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("a.") else "",
)
def test_a_damaged_file_is_an_error_with_a_message(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_chunks(tmp_path / name, name))
