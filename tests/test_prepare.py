"""Source and prepare: every row accounted for, stable bytes, and a sentence for everything that can be wrong."""

import json
from pathlib import Path

import pytest

from tasks.errors import UserError
from tasks.files import read_json
from tasks.pairs import read_pairs, read_rows
from tasks.params import load_params
from tasks.prepare import prepare, split_of
from tasks.source import source
from tasks.tracking import Run
from tests.workspaces import make_workspace, write_data

ROW = {"prompt": "Where is the cup?", "chosen": "On the table.", "rejected": "Find it yourself."}


def rows(count: int) -> list[dict[str, str]]:
    return [{**ROW, "prompt": f"Where is cup {number}?"} for number in range(count)]


@pytest.fixture
def workspace(tmp_path, tiny_base, monkeypatch) -> Path:
    root = make_workspace(tmp_path / "workspace", tiny_base)
    monkeypatch.chdir(root)
    return root


def go(*stages) -> None:
    Path("journals").mkdir(exist_ok=True)
    for stage in stages:
        stage(Run(Path("journals"), stage.__name__))


def change(old: str, new: str) -> None:
    text = Path("params.yaml").read_text()
    assert old in text
    Path("params.yaml").write_text(text.replace(old, new))


def test_pairs_have_masks_and_a_report_that_accounts_for_every_row(workspace):
    broken = {**ROW, "rejected": ROW["chosen"]}
    write_data(Path("pairs.jsonl"), [*rows(50), rows(1)[0], broken, {"prompt": "x", "chosen": "y"}])
    change("max_bad_fraction: 0.0", "max_bad_fraction: 0.1")
    go(source, prepare)
    report = read_json("data/pairs/report.json")
    assert report["rows"] == 53
    assert sum(report["pairs"].values()) == 50
    assert report["dropped"] == {"an exact duplicate": 1}
    assert report["quarantined"] == {
        "chosen and rejected are the same": 1,
        "the column 'rejected' is missing": 1,
    }
    quarantine = [json.loads(line) for line in Path("data/pairs/quarantine.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in quarantine] == [52, 53]
    for pair in read_pairs("train"):
        assert len(pair.chosen) == len(pair.chosen_mask) == sum(pair.chosen_mask)


def test_the_same_rows_give_the_same_bytes(workspace):
    write_data(Path("pairs.jsonl"), rows(40))
    go(source, prepare)
    first = {path: path.read_bytes() for path in Path("data/pairs").iterdir()}
    go(source, prepare)
    assert first == {path: path.read_bytes() for path in Path("data/pairs").iterdir()}


def test_a_prompt_never_crosses_the_split_and_new_rows_move_none(workspace):
    write_data(Path("pairs.jsonl"), rows(60))
    go(source, prepare)
    before = {
        split: {row["prompt"] for row in read_rows(Path(f"data/pairs/{split}.parquet"))} for split in ("train", "eval")
    }
    more = [{**row, "chosen": "Near the window."} for row in rows(90)]
    write_data(Path("pairs.jsonl"), [*rows(60), *more])
    go(source, prepare)
    after = {
        split: {row["prompt"] for row in read_rows(Path(f"data/pairs/{split}.parquet"))} for split in ("train", "eval")
    }
    assert not after["train"] & after["eval"]
    assert before["train"] <= after["train"]
    assert before["eval"] <= after["eval"]
    assert split_of("  Where IS\nit? ", 0.5) == split_of("where is it?", 0.5)


def test_without_the_loss_mask_every_token_but_the_first_counts(workspace):
    write_data(Path("pairs.jsonl"), rows(30))
    go(source, prepare)
    masked = read_pairs("train")[0]
    change("apply_loss_mask: true", "apply_loss_mask: false")
    go(prepare)
    whole = read_pairs("train")[0]
    assert list(whole.prompt) == list(masked.prompt)[:1]
    assert list(whole.chosen) == list(masked.prompt)[1:] + list(masked.chosen)
    assert sum(whole.chosen_mask) == len(whole.chosen)


@pytest.mark.parametrize("policy", ["drop", "truncate_prompt", "fail"])
def test_pairs_above_max_tokens(workspace, policy):
    write_data(Path("pairs.jsonl"), [*rows(30), {**ROW, "prompt": "Where? " * 200}])
    change("max_tokens: 512", "max_tokens: 64")
    change("over_length: drop", f"over_length: {policy}")
    go(source)
    if policy == "fail":
        with pytest.raises(UserError, match=r"Row 31 has .* tokens, above prepare\.max_tokens 64"):
            go(prepare)
        assert not Path("data/pairs").exists()
        return
    go(prepare)
    report = read_json("data/pairs/report.json")
    assert report["dropped"] == ({"longer than max_tokens": 1} if policy == "drop" else {})
    assert report["prompts_truncated"] == (0 if policy == "drop" else 1)
    longest = max(len(p.prompt) + max(len(p.chosen), len(p.rejected)) for s in ("train", "eval") for p in read_pairs(s))
    assert longest <= 64


def test_max_pairs_stops_there(workspace):
    write_data(Path("pairs.jsonl"), rows(60))
    change("max_pairs: null", "max_pairs: 20")
    go(source, prepare)
    assert sum(read_json("data/pairs/report.json")["pairs"].values()) == 20


def test_two_equal_answers_name_the_row_and_what_to_do(workspace):
    write_data(Path("pairs.jsonl"), [*rows(9), {**ROW, "rejected": ROW["chosen"]}])
    go(source)
    with pytest.raises(UserError) as error:
        go(prepare)
    for part in (
        "1 of 10 rows",
        "first row 10",
        "chosen and rejected are the same",
        "at least 0.101",
        "quarantine.jsonl",
    ):
        assert part in str(error.value)
    assert not Path("data/pairs").exists()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("data: pairs.jsonl", "data: nothing.jsonl", "source.data: there is no file nothing.jsonl. Give a file"),
        ("data: pairs.jsonl", "data: params.yaml", "must end in one of .jsonl, .json, .csv, .parquet"),
        ("model: /", "model: /nowhere/", r"source.model: there is no model in /nowhere/.*\(no config.json\)"),
    ],
)
def test_what_is_not_there_is_said_before_anything_is_written(workspace, old, new, sentence):
    change(old, new)
    with pytest.raises(UserError, match=sentence):
        go(source)
    assert not Path("data").exists()


def test_an_empty_file_and_a_broken_line_leave_nothing_half_written(workspace):
    for content, sentence in (("", "has no rows"), ('{"prompt": \n', "pairs.jsonl, line 1: not valid JSON")):
        Path("pairs.jsonl").write_text(content)
        with pytest.raises(UserError, match=sentence):
            go(source)
        assert not list(Path("data").glob("*"))


def test_a_base_model_that_changed_since_source_is_noticed(workspace, tiny_base, tmp_path):
    import shutil

    copy = Path(shutil.copytree(tiny_base, tmp_path / "copy"))
    change(f"model: {tiny_base}", f"model: {copy}")
    go(source)
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    with pytest.raises(UserError, match=r"config\.json is not the file that the source stage saw"):
        go(prepare)


def test_the_params_of_the_workspace_are_read(workspace):
    assert load_params().source.data == "pairs.jsonl"
