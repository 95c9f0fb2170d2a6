"""Input that tries to exhaust the machine is refused or quarantined, in bounded time and memory."""

import faulthandler
import gzip
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from tasks.artifacts.models import model_links
from tasks.config.params import load_params
from tasks.errors import UserError
from tasks.prepare import templates
from tasks.prepare.chunks import to_json
from tasks.prepare.rows.preference import Preference, RowLayout
from tasks.prepare.rows.row_shapes import to_preferences
from tasks.prepare.templates import choose_template
from tasks.prepare.tokenization import tokenize
from tasks.source.readers import Chunk, count_rows, read_chunks, rows_in
from tasks.source.reject_reasons import RejectedRow
from tasks.source.stage import check_addresses
from tasks.system import limited_child
from tests.support.workspaces import PROJECT
from training.evaluation.reward_model import scores
from training.models.limits import bounded
from training.models.loading import load_model
from training.models.tokenizer import load_tokenizer

MIB = 1 << 20
GOOD = {"prompt": "p", "chosen": "c", "rejected": "r"}


def compressed(path: Path, start: bytes, repeated: bytes, mebibytes: int) -> None:
    member = gzip.compress(repeated * (4 * MIB // len(repeated)))
    path.write_bytes(gzip.compress(start) + member * (mebibytes // 4))


def dictionary(path: Path, length: int, rows: int) -> None:
    """Every row refers to one value of `length` bytes; the file has a few kilobytes."""
    column = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array(["x" * length]))
    options = {"compression": "zstd", "store_schema": False, "write_statistics": False}  # which take seconds
    pa.parquet.write_table(pa.table({"prompt": column}), path, **options)


def long_list(path: Path) -> None:
    table = pa.table({"prompt": pa.ListArray.from_arrays([0, 40_000_000], np.zeros(40_000_000, np.int8))})
    pa.parquet.write_table(table, path, compression="zstd")


BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "line.jsonl.gz": (lambda path: compressed(path, b'{"a": "', b"x", 40), "row 1 is longer than 16 MiB"),
    "newlines.jsonl.gz": (lambda path: compressed(path, b"", b"\n", 300), "a decompression bomb"),
    "line.json.gz": (lambda path: compressed(path, b'[{"a": "', b"x", 40), "row 1: .*longer than 16 MiB"),
    "line.csv.gz": (lambda path: compressed(path, b"a,b\n", b"x", 40), "row 2 is longer than 16 MiB"),
    "quoted.csv.gz": (lambda path: compressed(path, b'a,b\n"', b"x" * 1023 + b"\n", 40), "not valid CSV.*field limit"),
    "columns.csv": (lambda path: path.write_text("a," * 2000 + "\n1\n"), "has 2001 columns"),
    "nested.json": (lambda path: path.write_text("[" * 100_000), "row 1 is nested deeper than 100 levels"),
    "digits.json": (lambda path: path.write_text('[{"a": ' + "9" * 5000 + "}]"), "row 1: not valid JSON.*4300"),
    "dictionary.parquet": (lambda path: dictionary(path, MIB // 4, 3000), "a decompression bomb"),
    "list.parquet": (long_list, "a decompression bomb"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_decompression_bomb_is_refused_with_a_message(tmp_path, name):
    make, sentence = BOMBS[name]
    make(tmp_path / name)
    with pytest.raises(UserError, match=sentence):
        sum(count_rows(chunk) for chunk in read_chunks(tmp_path / name, name))


CHILD = """
import resource, sys, time
from pathlib import Path
from tasks.source.readers import count_rows, read_chunks
from tasks.errors import UserError
began = time.process_time()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(sum(count_rows(chunk) for chunk in read_chunks(Path(sys.argv[1]), "file")), "rows")
except UserError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.process_time() - began)
"""


@pytest.mark.parametrize(
    ("name", "make", "message", "mebibytes"),
    [
        ("a.jsonl.gz", lambda path: compressed(path, b'{"a": "', b"x", 5120), "row 1 is longer than 16 MiB", 200),
        ("a.jsonl", lambda path: newlines(path), "1 rows", 100),
        ("small.parquet", lambda path: pa.parquet.write_table(pa.table({"prompt": ["p"]}), path), "1 rows", 100),
        ("small.feather", lambda path: pa.feather.write_feather(pa.table({"prompt": ["p"]}), path), "1 rows", 100),
        ("a.parquet", lambda path: dictionary(path, 10 * MIB, 1_000_000), "a decompression bomb", 1200),
    ],
)
def test_the_reader_needs_little_memory_and_time_at_full_scale(tmp_path, name, make, message, mebibytes):
    """5 GB in one line, 200 MB of newlines, 10 TB from a Parquet dictionary of some kilobytes; small files are read.

    The reader runs in a new process, as the stage does: Arrow's allocator reserves memory with its first allocation.
    """
    make(tmp_path / name)
    command = [sys.executable, "-c", CHILD, str(tmp_path / name)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=900)
    assert message in done.stdout, done.stdout + done.stderr
    grown, seconds = done.stdout.splitlines()[-1].split()
    assert int(grown) / 1024 < mebibytes
    assert float(seconds) < 60


def newlines(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"a": 1}')
        for _ in range(200):
            file.write(b"\n" * MIB)


def rows(path: Path) -> list:
    return [row for chunk in read_chunks(path, path.name) for _, row in rows_in(pickle.loads(pickle.dumps(chunk)))]


def test_table_values_without_a_python_equivalent_are_rejected(tmp_path):
    text = pa.array([b"good", b"\xff\xfe", b"good"], pa.binary()).view(pa.string())
    dates = pa.array([0, 0, 2**62], pa.timestamp("us"))
    pa.parquet.write_table(pa.table({"prompt": text, "when": dates}), tmp_path / "a.parquet")
    first, second, third = rows(tmp_path / "a.parquet")
    assert first == {"prompt": "good", "when": datetime(1970, 1, 1)}
    assert (second.name, third.name) == ("invalid_utf8", "unreadable_value")


def test_an_arrow_file_with_offsets_outside_the_file_is_damaged(tmp_path):
    table = pa.table({"prompt": ["one", "two"]})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    content = (tmp_path / "a.arrow").read_bytes()
    offsets = b"".join(n.to_bytes(4, "little") for n in (0, 3, 6))
    assert content.count(offsets) == 1
    (tmp_path / "a.arrow").write_bytes(content.replace(offsets, offsets[:4] + b"\xff\xff\xff\x6f" + offsets[8:]))
    with pytest.raises(UserError, match=r"a\.arrow is damaged"):
        rows(tmp_path / "a.arrow")


def test_rows_nested_too_deeply_or_with_too_many_digits_are_rejected_alone(tmp_path):
    deep, digits = '{"a": ' + "[" * 200 + "]" * 200 + "}", '{"a": ' + "9" * 5000 + "}"
    lines = [json.dumps(GOOD), deep, '{"a": ' + "[" * 50_000 + "}", digits, "[1]", json.dumps(GOOD)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.json").write_text(f"[{json.dumps(GOOD)}, {deep}, [1], {json.dumps(GOOD)}]")
    names = [row.name if isinstance(row, RejectedRow) else row for row in rows(tmp_path / "a.jsonl")]
    assert names == [GOOD, "invalid_json", "invalid_json", "invalid_json", "not_an_object", GOOD]
    assert [isinstance(row, RejectedRow) for row in rows(tmp_path / "a.json")] == [False, True, True, False]
    ((_, deepest),) = rows_in(Chunk(1, ('{"a": ' + "[" * 99 + "]" * 99 + "}").encode()))
    assert to_json(deepest).count("[") == 99


def test_a_score_of_thousands_of_digits_is_rejected():
    row = {"prompt": "p", "completions": ["a", "b"], "scores": [10**4000, 1]}
    (rejected,) = to_preferences(row, RowLayout("scored", expand="all"))
    assert isinstance(rejected, RejectedRow)
    assert rejected.name == "bad_number"


HOSTILE = {
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 10) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_never_finishes_is_refused_with_a_message(tiny_base, monkeypatch, name):
    monkeypatch.setattr(templates, "RENDER_SECONDS", 0.5)
    template = choose_template(load_tokenizer(tiny_base), HOSTILE[name])
    one = Preference(*([{"role": role, "content": text}] for role, text in (("user", "p"), *ANSWERS)))
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"prepare.template: the text in prepare.template did not render .* within 0.5 s"
    ):
        tokenize(template, [one] * 10)
    assert time.monotonic() - began < 20


ANSWERS = (("assistant", "c"), ("assistant", "r"))


def test_a_template_that_exhausts_memory_rejects_the_row(tiny_base):
    template = choose_template(load_tokenizer(tiny_base), "{{ messages[0]['content'] * 10 ** 12 }}")
    one = Preference(*([{"role": role, "content": text}] for role, text in (("user", "p"), *ANSWERS)))
    (rejected,) = tokenize(template, [one])
    assert isinstance(rejected, RejectedRow)
    assert rejected.name == "template_refused"


def test_limits_are_removed_afterwards():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), bounded(memory=MIB):
        bytearray(100 * MIB)
    with pytest.raises(TimeoutError), bounded(seconds=0.05):
        time.sleep(5)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    time.sleep(0.1)  # the timer does not fire


def spend(what: str) -> str:
    if what == "time":
        time.sleep(60)
    elif what == "memory":
        hoard = []
        while True:
            hoard.append(bytearray(b"x" * MIB))
    elif what == "life":
        faulthandler.disable()  # pytest's would write its trace among the dots
        os.kill(os.getpid(), signal.SIGABRT)
    elif what == "patience":
        raise ValueError("no patience")
    return "nothing spent"


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("time", "takes more than 2 s"),
        ("memory", "takes more than 0.25 GiB of memory"),
        ("life", r"ended the process that tried \(exit status -6\)"),
        ("patience", "^no patience$"),
    ],
)
def test_work_in_a_child_that_exceeds_a_limit_or_dies_is_one_sentence(what, sentence):
    with pytest.raises(ValueError, match=sentence):
        limited_child.call(spend, what, seconds=2.0 if what == "time" else 60.0, memory=MIB << 8)
    assert limited_child.call(spend, "nothing", seconds=60.0, memory=MIB << 8) == "nothing spent"


@pytest.mark.parametrize(
    "named",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "evil/kernel@main:run"},
        {"text_config": {"experts_implementation": "evil/kernel"}},
        {"attn_implementation": {"text_config": "evil/kernel"}},
    ],
)
def test_a_configuration_that_names_a_hub_kernel_is_refused(tiny_base, tmp_path, named):
    (tmp_path / "model").mkdir()
    for path in tiny_base.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    config = json.loads((tiny_base / "config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, **named}))
    source = load_params(PROJECT / "params.yaml").source.model_copy(update={"model": str(tmp_path / "model")})
    with pytest.raises(UserError, match=r"source.model: .*config.json: `.*_implementation.*` names the kernel evil/"):
        check_addresses(source)
    with pytest.raises(ValueError, match="names the kernel"):
        load_model(tmp_path / "model", "float32")
    with pytest.raises(ValueError, match="names the kernel"):
        scores(tmp_path / "model", None, [("p", "a")], "float32", None)
    with pytest.raises(UserError, match="names the kernel"), model_links(tmp_path / "model"):  # for `dpo serve`
        pass
