"""The contract in bulk, the shortcuts' figures, and the data card's pages."""

import numpy as np
import pytest

from tasks.dataset import cardpage, datacard
from tasks.dataset.contract import check_all, check_pairs
from tasks.dataset.conversations import Conversation
from tasks.dataset.minhash import near_duplicates, signature
from tasks.dataset.shortcuts import probe_accuracy, warnings
from tasks.dataset.violations import BAD, VIOLATIONS

FACTS = {"chosen_longer": 0.5, "chosen_ends": 1.0, "rejected_ends": 1.0, "probe_accuracy": 0.5}


def pair(prompt: str = "Q?", chosen: str = "good", rejected: str = "bad") -> Conversation:
    turns = [{"role": "assistant", "content": text} for text in (chosen, rejected)]
    return Conversation([{"role": "user", "content": prompt}], [turns[0]], [turns[1]])


def test_texts_are_checked_in_bulk():
    pairs = [
        pair(),
        pair(prompt=" \n"),
        pair(chosen="\u2003"),
        pair(rejected="good"),
        pair(chosen="ä" * 11),
        pair(chosen="half \ud800"),
        pair(chosen="ä" * 10),
        Conversation(pair().prompt, [*pair(chosen="").chosen, *pair().prompt, *pair().chosen], pair().rejected),
    ]
    found = [bad and bad.name for bad in check_pairs(pairs, max_characters=10)]
    expected = [
        None,
        "empty_prompt",
        "empty_answer",
        "equal_answers",
        "absurd_length",
        "invalid_utf8",
        None,
        "empty_answer",
    ]
    assert found == expected


def columns(identity, mirror=None, row=None, key=None, prompt=None, held=None) -> dict[str, np.ndarray]:
    n = len(identity)
    given = {
        "identity": identity,
        "mirror": mirror or [100 + i for i in range(n)],
        "row": row or list(range(n)),
        "key": key or [0] * n,
        "prompt": prompt or identity,
    }
    made = {name: np.array(values, dtype=np.uint64) for name, values in given.items()}
    return {**made, "held": np.array(held or [False] * n)}


def test_rows_are_checked_against_each_other():
    assert check_all(columns([1, 2, 1, 1]), None)["duplicate"].tolist() == [False, False, True, True]
    assert check_all(columns([1, 2, 3], mirror=[2, 1, 9]), None)["contradiction"].tolist() == [True, True, False]
    # Row 0 gave two pairs with its id 7; row 1 has the same id.
    found = check_all(columns([1, 2, 3, 4], row=[0, 0, 1, 2], key=[7, 7, 7, 8]), None)
    assert found["id_not_unique"].tolist() == [False, False, True, False]
    found = check_all(columns([1, 2, 3], prompt=[5, 5, 6], held=[True, False, False]), None)
    assert found["prompt_in_eval"].tolist() == [False, True, False]


def test_signatures_estimate_the_similarity_of_texts():
    """Two sets of 20 word triples of which 10 are shared: Jaccard 10/30, and 64 values estimate it within 0.2."""
    words = [f"w{n}" for n in range(32)]
    one, other = " ".join(words[:22]), " ".join(words[10:])
    assert (signature(one) == signature(other)).mean() == pytest.approx(10 / 30, abs=0.2)
    assert (signature(one) == signature(one.upper())).all()
    stack = np.stack([signature(text) for text in (one, other, one, " ".join([*words[:21], "x"]))])
    assert near_duplicates(stack, 0.7).tolist() == [False, False, True, True]  # the last shares 19 of 21 triples


def test_the_probe_finds_what_single_words_tell_and_nothing_else():
    rng = np.random.default_rng(0)

    def made(count, tell):
        rows = []
        for _ in range(count):
            chosen, rejected = rng.integers(10, 500, (2, 20)).tolist()
            rows.append({"chosen_ids": [*chosen, 3] if tell else chosen, "rejected_ids": [*rejected, 4]})
        return rows

    assert probe_accuracy(made(300, True), made(100, True)) > 0.95
    for row in (noise := made(600, False)):
        row["rejected_ids"].pop()
    assert probe_accuracy(noise[:400], noise[400:]) == pytest.approx(0.5, abs=0.12)


def test_wide_shortcuts_are_said():
    assert warnings(FACTS) == []
    assert "single words" in warnings({**FACTS, "probe_accuracy": 0.9})[0]
    assert "length" in warnings({**FACTS, "chosen_longer": 0.8})[0]
    assert "endings" in warnings({**FACTS, "rejected_ends": 0.7})[0]


@pytest.fixture
def report():
    lengths = np.array([3, 4, 9])
    example = {"file": "a.jsonl", "row": 7, "violation": "tie", "reason": "<b>why</b>", "content": "a | `b` <script>"}
    return {
        "source": "a.jsonl",
        "sha256": {"train": "1", "eval": "2"},
        "template": "plain",
        "rows": 5,
        "pairs": {"train": 2, "eval": 1},
        "by_source": {"a": {"format": "pairs", "rows": 5, "train": 2, "eval": 1, "left_out": {"tie": 2}}},
        "left_out": {"tie": 2},
        "examples": {"tie": [example]},
        "truncated": 0,
        "tokenizer_merged_across_the_border": 0,
        "tokens": {part: datacard._spread(lengths) for part in ("prompt", "chosen", "rejected")},
        "shortcuts": {**FACTS, "length_difference": datacard.histogram(lengths, -9, 9)},
        "warnings": ["chosen is longer"],
    }


def test_the_pages_show_the_data_and_never_run_it(report):
    preview = [{"prompt": [("<img src=x>", False)], "chosen": [("yes", True)], "rejected": [("no", True)]}]
    page = cardpage.page(report, preview, [])
    assert "<script>" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert '<span class="chosen">yes</span>' in page
    assert page.count("<svg") == 2
    assert "//" not in page.replace("http://www.w3.org", "")  # nothing is loaded from elsewhere
    text = cardpage.markdown(report, preview, [["rows", "4", "5"]])
    assert "| a \\| \\`b\\` \\<script\\> |" in text
    assert "## Since the previous version\n\n|  | before | now |\n| --- | --- | --- |\n| rows | 4 | 5 |" in text
    assert "    chosen:\n    «yes»" in text
    assert cardpage.page(report, preview, []) == page


def test_a_card_is_compared_with_the_version_before(report, tmp_path, monkeypatch):
    monkeypatch.setenv("DPO_HOME", str(tmp_path))
    (tmp_path / "preview.json").write_text("[]")
    assert datacard.compare(report, tmp_path)[0] == []
    newer = {**report, "rows": 6, "sha256": {"train": "3", "eval": "2"}, "left_out": {"duplicate": 1}}
    changes = [["rows", "5", "6"], ["left out, duplicate", "-", "1"], ["left out, tie", "2", "-"]]
    for _ in range(2):  # the same version again is compared with the same one
        found, (markdown, page) = datacard.compare(newer, tmp_path)
        assert found == changes
    assert "Since the previous version" in markdown.read_text()
    assert page.read_text().startswith("<!doctype html>")


def test_every_violation_is_documented():
    from pathlib import Path

    text = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    assert [name for name in VIOLATIONS if f"`{name}`" not in text] == []
    assert set(BAD) < set(VIOLATIONS)
