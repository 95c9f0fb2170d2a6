"""Unpaired rows: how they are read, stored and reported, and which data is refused."""

import csv
from pathlib import Path

import numpy as np
import pytest

from tasks.artifacts import demo
from tasks.artifacts.pairs import pairs_file, read_pairs, read_rows
from tasks.artifacts.training_data import TrainingData
from tasks.config.prepare import Layout
from tasks.errors import UserError
from tasks.prepare.card.preview import describe
from tasks.prepare.rows.layouts import decode, find_layout
from tasks.prepare.rows.preference import RowLayout
from tasks.prepare.stage import prepare
from tasks.prepare.templates import PLAIN
from tasks.prepare.unpaired import next_with_other_prompt
from tasks.source.stage import source
from tests.prepare.test_prepare import change, go, quarantined, report, rows, workspace  # noqa: F401
from tests.prepare.test_row_shapes import EXAMPLES
from tests.prepare.test_tokenization import make as template
from tests.support.workspaces import write_data

KTO = {"train__loss": {"kto": 1.0}}


def thumbs(count: int) -> list[dict]:
    """The demo's answers with thumbs: kind ones up, rude ones down; every third prompt has both."""
    made: list[dict] = []
    for n, row in enumerate(demo.rows(0)[:count]):
        labels = (True, False) if n % 3 == 0 else (n % 2 == 0,)
        made += [
            {"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": label}
            for label in labels
        ]
    return made


def layout(rows: list[dict], **wanted) -> RowLayout:
    return find_layout(rows, "a.jsonl", Layout(**{"format": "auto", "columns": {}, **wanted}))


@pytest.mark.parametrize("up_down", [(True, False), (1, 0), ("1", "-1"), ("up", "down"), (1.0, 0.0)])
def test_trl_rows_need_no_settings(up_down):
    given = [{"prompt": f"Q {n}?", "completion": f"A {n}", "label": up_down[n % 2]} for n in range(4)]
    found = layout(given)
    assert found.shape == "unpaired"
    made = decode(given, found)
    assert [one.sign for one in made] == [1, -1, 1, -1]
    lines = list(describe(template(PLAIN), made[:2]))
    assert lines == [
        *("<s>User: Q 0? Assistant:", "  + « A 0<|im_end|>»"),
        *("<s>User: Q 1? Assistant:", "  - « A 1<|im_end|>»"),
    ]


def test_messages_other_columns_and_other_labels():
    asked = [{"role": "user", "content": "Q?"}]
    given = [{"turns": asked, "reply": [{"role": "assistant", "content": "A"}], "vote": v} for v in ("good", "bad")]
    columns = {"prompt": "turns", "completion": "reply", "label": "vote"}
    with pytest.raises(
        UserError, match=r"`vote` holds good \(1 times\), bad .*prepare.values to \{label: \{bad: desir"
    ):
        layout(given, columns=columns)
    values = {"label": {"good": "desirable", "bad": "undesirable"}}
    made = decode(given, layout(given, columns=columns, values=values))
    assert [(one.prompt, one.chosen[0]["content"], one.sign) for one in made] == [(asked, "A", 1), (asked, "A", -1)]
    with pytest.raises(UserError, match=r"read as unpaired, which has no winner"):
        layout(given, columns=columns, values={"winner": {"good": "first"}})


@pytest.mark.parametrize("given", [[row] for shape, row in EXAMPLES])
def test_pairs_become_two_rows_where_the_format_asks_for_it(given):
    made = decode(given, layout(given, format="unpaired"))
    assert [(one.chosen[0]["content"], one.sign) for one in made] == [("good", 1), ("bad", -1)]


def test_the_second_answer_is_that_of_the_next_row_with_another_prompt():
    assert next_with_other_prompt(["a", "a", "b", "c", "a"]) == [2, 2, 3, 4, 2]
    assert next_with_other_prompt(["a", "b", "a", "a"]) == [1, 2, 1, 1]
    assert next_with_other_prompt(["a", "a"]) == [1, 0]


def test_rows_are_stored_with_their_label_and_a_mismatched_answer(workspace, capsys):  # noqa: F811
    given = thumbs(90)
    clash = [{**given[1], "label": True}, given[0], {**given[5], "label": "perhaps"}, {**given[5], "completion": ""}]
    write_data(Path("pairs.jsonl"), given + clash)
    change(**KTO)
    go(source, prepare)
    # Both rows of the contradiction, the duplicate, the unknown label and the empty answer.
    assert report()["left_out"] == {"bad_number": 1, "empty_answer": 1, "duplicate": 1, "contradiction": 2}
    assert {entry["violation"] for entry in quarantined()} == {"bad_number", "empty_answer", "contradiction"}
    assert report()["unpaired"] == {"desirable": 60, "undesirable": 59}
    for split in ("train", "eval"):
        stored = read_rows(pairs_file(split))
        for row, pair in zip(stored, read_pairs(split), strict=True):
            assert pair.sign == row["sign"] != 0
            other = next(n for n in stored if n["chosen_ids"] == row["rejected_ids"] and n["prompt"] != row["prompt"])
            assert other["chosen_mask"] == row["rejected_mask"]
            assert row["shared_prefix"] == pair.shared_prefix
        table = read_pairs(split)
        np.testing.assert_array_equal(table.columns.shared_prefix, [pair.shared_prefix for pair in table])
        assert len({row["id"] for row in stored}) == len(stored)
    # Kind and rude endings share no word: the probe compares desirable with undesirable answers.
    assert report()["shortcuts"]["probe_accuracy"] > 0.95
    assert "chosen means desirable" in Path("data/card/card.md").read_text()
    answers = TrainingData(preferences=False).read("train")
    desirable = [row for row in read_rows(pairs_file("train")) if row["sign"] > 0]
    assert {pair.id for pair in answers} == {row["id"] for row in desirable}
    assert {pair.sign for pair in answers} == {0.0}


def test_the_mismatched_answer_is_cut_to_max_tokens(workspace):  # noqa: F811
    long = {"prompt": "Hurry up. " * 12, "completion": "Yes.", "label": True}
    many = [{"prompt": f"Q {n}?", "completion": "The cup is there. " * 12, "label": n % 2 == 0} for n in range(30)]
    write_data(
        Path("pairs.jsonl"), [row for one in many for row in (one, {**long, "prompt": long["prompt"] + str(one)})]
    )
    change(**KTO, prepare__max_tokens=120, prepare__max_bad_fraction=1.0)
    go(source, prepare)
    lengths = [len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in read_pairs("train")]
    assert max(lengths) <= 120


def test_a_pair_file_as_unpaired_rows_and_the_refusals(workspace):  # noqa: F811
    go(source)
    change(prepare__format="unpaired")
    with pytest.raises(UserError, match=r"rows are unpaired .* set train.loss to \{kto: 1.0\}"):
        go(prepare)
    change(**KTO, prepare__format="auto")
    with pytest.raises(UserError, match=r"the data has pairs: set prepare.format to unpaired"):
        go(prepare)
    change(prepare__format="unpaired")
    go(prepare)
    assert sum(report()["pairs"].values()) == 240
    write_data(Path("pairs.jsonl"), [row for row in thumbs(60) if row["label"]])
    change(prepare__format="auto")
    with pytest.raises(UserError, match=r"training rows are desirable, and KTO needs both kinds"):
        go(source, prepare)
    write_data(Path("pairs.jsonl"), rows(20))
    write_data(Path("thumbs.jsonl"), thumbs(30))
    mixture = [{"name": n, "data": f"{n}.jsonl", "weight": 1.0, "share": 1.0} for n in ("pairs", "thumbs")]
    change(source__data=mixture)
    with pytest.raises(UserError, match=r"rows of thumbs are unpaired, and those of pairs \(pairs\) are pairs"):
        go(source, prepare)


def test_ranked_answers_as_unpaired_rows(workspace):  # noqa: F811
    answers = [f"It is {word}." for word in ("plain and good", "half right", "wrong")]
    write_data(Path("pairs.jsonl"), [{"prompt": row["prompt"], "completions": answers} for row in rows(20)])
    change(**KTO, prepare__format="unpaired", prepare__expand="best_rest")
    go(source, prepare)
    assert sum(report()["pairs"].values()) == 3 * 20
    change(prepare__expand="all")
    with pytest.raises(UserError, match=r"Reasons: contradiction: .* \(40\)"):  # the middle answer
        go(prepare)


def test_votes_are_no_unpaired_rows(workspace):  # noqa: F811
    votes = [
        {"prompt": row["prompt"], "response1": row["chosen"], "response2": row["rejected"], "winner": "model_a"}
        for row in rows(20)
    ]
    write_data(Path("pairs.jsonl"), votes)
    change(**KTO, prepare__format="unpaired")
    with pytest.raises(UserError, match=r"a field is missing \('completion'\)"):
        go(source, prepare)


def test_a_row_with_a_label_is_read_by_it_whatever_else_it_has():
    row = {"prompt": "Q?", "completion": "A", "label": True, "chosen": "good", "rejected": "bad"}
    given = [row, {**row, "label": False}]
    assert [(one.chosen[0]["content"], one.sign) for one in decode(given, layout(given, format="unpaired"))] == [
        ("A", 1),
        ("A", -1),
    ]


def test_csv_labels(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion", "label"])
        writer.writeheader()
        writer.writerows(thumbs(4))
    with path.open() as file:
        given = list(csv.DictReader(file))
    assert layout(given).shape == "unpaired"
    assert [one.sign for one in decode(given, layout(given))] == [1, -1, -1, 1, 1, -1]
