"""Rows for training from feedback: pairs with soft labels, edits, unpaired rows, and what an address selects."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import UserError
from tasks.feedback.rows import Query, parse, rows
from tasks.prepare.rows.layouts import decode, find_layout
from tests.support.feedback import NOW, answer, feedback, vote

A, B = answer(id="a" * 32, text="good"), answer(id="b" * 32, text="bad", version="4", role="challenger")
C = answer(id="c" * 32, text="fine", messages=[{"role": "user", "content": "other"}], user="")


def made(*events: Any, **query: Any) -> list[dict[str, Any]]:
    return rows([A, B, C, *events], Query(model="m", **query))


def preferences(*events: Any, **query: Any) -> list[tuple[str, str, float]]:
    """As `prepare` reads the rows: (chosen, rejected, label)."""
    found = json.loads(json.dumps(made(*events, **query)))
    layout = find_layout(found, "feedback.jsonl")
    assert layout.shape == "votes"
    return [(one.chosen[0]["content"], one.rejected[0]["content"], one.label) for one in decode(found, layout)]


def test_votes_of_several_raters_become_one_pair_with_a_soft_label():
    votes = [vote(A, B, "r1", "first"), vote(B, A, "r2", "second"), vote(A, B, "r3", "second"), vote(A, B, "r4", "tie")]
    assert preferences(*votes) == [("good", "bad", 2.5 / 4)]
    assert preferences(*votes, vote(A, B, "r5", "both_bad")) == [("good", "bad", 2.5 / 4)]
    (row,) = made(*votes)
    assert row["prompt"] == A.messages
    assert row["user"] == "ann"
    assert row["traces"] == f"{A.id} {B.id}"


def test_the_second_answer_can_win_and_the_last_vote_of_a_rater_counts():
    votes = [vote(A, B, "r1", "first"), vote(A, B, "r1", "second", time=NOW + 9)]
    assert preferences(*votes) == [("bad", "good", 1.0)]


def test_a_withdrawn_vote_does_not_count():
    assert made(vote(A, B, "r1", "first"), vote(B, A, "r1", "withdrawn", time=NOW + 9)) == []


def test_equal_answers_to_equal_prompts_are_one_and_the_row_names_everybody_who_took_part():
    again = answer(id="d" * 32, text="good", user="zoe")
    events = [again, vote(A, B, "r1", "first"), vote(again, B, "r2 b", "second"), vote(A, again, "r1", "first")]
    (row,) = made(*events)
    assert preferences(*events) == []  # a tie
    assert (row["traces"], row["user"], row["raters"].split("\n")) == (f"{A.id} {B.id}", "ann", ["r1", "r2 b", "zoe"])


def test_two_bad_answers_different_prompts_and_unknown_answers_make_no_pair():
    assert made(vote(A, B, "r1", "both_bad"), vote(A, B, "r2", "first"), vote(A, C, "r1", "first")) == []
    assert made(vote(A, answer(), "r1", "first"), feedback(answer(), kind="edit", value="x")) == []
    assert made(vote(A, same := answer(text=" good "), "r1", "first"), same) == []


def test_a_corrected_answer_is_chosen_against_the_original():
    edits = [feedback(A, kind="edit", value="better"), feedback(A, kind="edit", value="best", time=NOW + 3)]
    assert preferences(*edits) == [("best", "good", 1.0)]
    assert made(feedback(A, kind="edit", value="good ")) == []  # nothing was changed
    assert made(feedback(A)) == []  # a thumb makes no pair


def test_thumbs_become_unpaired_rows():
    thumbs = [feedback(A, rater="r1"), feedback(A, rater="r2"), feedback(A, rater="r3", value="down")]
    thumbs += [feedback(B, value="down"), feedback(C), feedback(C, rater="r2", value="down")]  # C: an even split
    found = made(*thumbs, kind="thumbs")
    assert [(row["completion"][0]["content"], row["label"]) for row in found] == [("good", True), ("bad", False)]
    assert found[0]["prompt"] == A.messages
    assert found[0]["user"] == "ann"
    assert len(made(*thumbs, kind="thumbs", min_raters=2)) == 1
    assert len(made(*thumbs, kind="thumbs", min_agreement=0.7)) == 1


@pytest.mark.parametrize(
    ("query", "pairs"),
    [
        ({}, 1),
        ({"min_raters": 3}, 1),
        ({"min_raters": 4}, 0),
        ({"min_agreement": 0.6}, 1),
        ({"min_agreement": 0.7}, 0),
        ({"rater": frozenset({"r1", "r2"}), "min_agreement": 1.0}, 1),
        ({"version": frozenset({"4"})}, 1),
        ({"version": frozenset({"5"})}, 0),
        ({"since": NOW + 1}, 1),
        ({"since": NOW + 2}, 0),
        ({"until": NOW + 1}, 0),
    ],
)
def test_an_address_selects_by_raters_agreement_version_and_time(query: dict[str, Any], pairs: int):
    votes = [vote(A, B, "r1", "first"), vote(A, B, "r2", "first"), vote(A, B, "r3", "second")]
    assert len(made(*votes, **query)) == pairs


def test_a_contradicting_rater_is_left_out_unless_asked_for():
    events: list[Any] = []
    for number in range(20):
        two = [answer(text=f"good {number}"), answer(text=f"bad {number}")]
        events += [*two, *(vote(*two, name, "first") for name in ("ann", "ben")), vote(*two, "eve", "second")]
    labels = {label for _, _, label in preferences(*events)}
    assert labels == {1.0}
    assert {round(label, 2) for _, _, label in preferences(*events, exclude_contradicting=False)} == {0.67}


def test_the_same_feedback_gives_the_same_bytes_in_any_order():
    events = [A, B, C, vote(A, B, "r1", "first"), vote(A, B, "r2", "second"), feedback(C, kind="edit", value="x")]
    events += [feedback(A, kind="edit", value="y", rater=name) for name in ("r1", "r2")]
    texts = set()
    for seed in range(10):
        random.Random(seed).shuffle(events)
        texts.add(json.dumps(rows(events, Query(model="m"))))
    assert len(texts) == 1
    assert len(json.loads(texts.pop())) == 3


def test_an_address_is_parsed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert parse("source.data", "feedback:") == Query(model="dpo-model")
    text = "feedback:bot?since=2026-11-01&until=2026-11-02T12:00&version=3,4&rater=anna&min_agreement=0.7&min_raters=2"
    found = parse("source.data", f"{text}&kind=thumbs&exclude_contradicting=false")
    assert (found.model, found.since, found.until) == ("bot", 1793491200.0, 1793620800.0)
    assert (found.version, found.rater) == ({"3", "4"}, {"anna"})
    assert (found.min_agreement, found.min_raters, found.kind, found.exclude_contradicting) == (0.7, 2, "thumbs", False)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("sinse=2026-11-01", "`sinse` in feedback:m.* is an unknown option. Use since, until"),
        ("since=yesterday", "`since=yesterday` in .* cannot be read: .*Invalid isoformat"),
        ("min_agreement=70", "`min_agreement=70` in .* less than or equal to 1"),
        ("kind=stars", "`kind=stars` in .* should be 'pairs' or 'thumbs'"),
        ("min_raters=0", "`min_raters=0` in .* greater than or equal to 1"),
    ],
)
def test_a_wrong_option_is_one_sentence(query: str, message: str):
    with pytest.raises(UserError, match=message):
        parse("source.data", f"feedback:m?{query}")
