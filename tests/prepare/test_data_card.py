"""The data contract, deduplication, shortcuts, and the data card's pages."""

from datetime import datetime
from decimal import Decimal
from itertools import product

import numpy as np
import pytest

from tasks.artifacts.markup import shortened
from tasks.prepare.card import data_card, pages
from tasks.prepare.card.notes import SENTENCES, count_notes
from tasks.prepare.card.preview import WIDTH, describe
from tasks.prepare.card.shortcuts import probe_accuracy, warnings
from tasks.prepare.dedup import find_duplicates, minhash, near_duplicates
from tasks.prepare.rows.contract import check_pair
from tasks.prepare.rows.preference import Preference, row_id_hash
from tasks.prepare.sides import Note
from tasks.source.reject_reasons import QUARANTINED, REJECT_REASONS
from tests.prepare.test_tokenization import make as make_template

FACTS = {"chosen_longer": 0.5, "chosen_ends": 1.0, "rejected_ends": 1.0, "probe_accuracy": 0.5}


def pair(prompt: str = "Q?", chosen: str = "good", rejected: str = "bad") -> Preference:
    turns = [{"role": "assistant", "content": text} for text in (chosen, rejected)]
    return Preference([{"role": "user", "content": prompt}], [turns[0]], [turns[1]])


def test_texts_are_checked():
    pairs = [
        pair(),
        pair(prompt=" \n"),
        pair(chosen="\u2003"),
        pair(rejected="good"),
        pair(chosen="ä" * 11),
        pair(chosen="half \ud800"),
        pair(chosen="ä" * 10),
        Preference(pair().prompt, [*pair(chosen="").chosen, *pair().prompt, *pair().chosen], pair().rejected),
    ]
    violations = [check_pair(pair, max_characters=10) for pair in pairs]
    reasons = [violation and violation.name for violation in violations]
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
    assert reasons == expected


def columns(pair_id, swapped_id=None, row=None, row_id=None, prompt=None, held_out=None) -> dict[str, np.ndarray]:
    n = len(pair_id)
    values = {
        "pair_id": pair_id,
        "swapped_id": swapped_id or [100 + i for i in range(n)],
        "row": row or list(range(n)),
        "row_id": row_id or [0] * n,
        "prompt": prompt or pair_id,
    }
    made = {name: np.array(numbers, dtype=np.uint64) for name, numbers in values.items()}
    return {**made, "held_out": np.array(held_out or [False] * n)}


def test_pairs_that_clash_with_other_pairs_are_found():
    assert find_duplicates(columns([1, 2, 1, 1]), None)["duplicate"].tolist() == [False, False, True, True]
    assert find_duplicates(columns([1, 2, 3], swapped_id=[2, 1, 9]), None)["contradiction"].tolist() == [
        True,
        True,
        False,
    ]
    # Row 0 gave two pairs with its id 7; row 1 has the same id.
    masks = find_duplicates(columns([1, 2, 3, 4], row=[0, 0, 1, 2], row_id=[7, 7, 7, 8]), None)
    assert masks["id_not_unique"].tolist() == [False, False, True, False]
    masks = find_duplicates(columns([1, 2, 3], prompt=[5, 5, 6], held_out=[True, False, False]), None)
    assert masks["prompt_in_eval"].tolist() == [False, True, False]


def test_an_id_may_be_a_date_or_a_decimal_of_a_table():
    ids = [row_id_hash(value) for value in (datetime(2026, 1, 2), Decimal("1.5"), b"x", 0)]
    assert len(set(ids)) == 4


def test_signatures_estimate_the_similarity_of_texts():
    """Two sets of 20 word triples of which 10 are shared: Jaccard 10/30, and 64 values estimate it within 0.2."""
    words = [f"w{n}" for n in range(32)]
    first, second = " ".join(words[:22]), " ".join(words[10:])
    assert (minhash(first) == minhash(second)).mean() == pytest.approx(10 / 30, abs=0.2)
    assert (minhash(first) == minhash(first.upper())).all()
    stack = np.stack([minhash(text) for text in (first, second, first, " ".join([*words[:21], "x"]))])
    assert near_duplicates(stack, 0.7).tolist() == [False, False, True, True]  # the last shares 19 of 21 triples


def test_the_probe_finds_telling_words_and_no_noise():
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


def test_shortcuts_give_warnings():
    assert warnings(FACTS) == []
    assert "single words. Expected if it is about tone" in warnings({**FACTS, "probe_accuracy": 0.9})[0]
    assert "length" in warnings({**FACTS, "chosen_longer": 0.8})[0]
    assert "end token" in warnings({**FACTS, "rejected_ends": 0.7})[0]


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # three people joined to one picture
FLAG, WAVE, ACCENT = "\U0001f1f3\U0001f1f4", "\U0001f44b\U0001f3fd", "e\u0301"


def test_first_rows_are_shown_as_their_tokens_with_the_loss_marked():
    asked = [{"role": "user", "content": f"Hello \x1b[31m {FAMILY}\nthere"}]
    answers = [[{"role": "assistant", "content": text}] for text in (FAMILY * 60, "bad")]
    prompt, chosen, rejected = describe(make_template(), [Preference(asked, *answers)])
    assert prompt == f"<|im_start|>user Hello [31m {FAMILY} there<|im_end|> <|im_start|>assistant"
    assert rejected == "  - «bad<|im_end|>»"
    assert chosen.startswith(f"  + «{FAMILY}{FAMILY}")
    assert chosen.endswith(f"{FAMILY}<|im_end|>»")
    assert len(chosen) <= WIDTH + 4
    assert set(chosen.removeprefix("  + «").removesuffix("<|im_end|>»").replace("...", "").split(FAMILY)) == {""}


def test_a_row_that_the_template_drops_says_so_where_it_is_shown():
    turns = [{"role": "user", "content": "Q?", "name": "Alice"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("good", "bad")]
    shown = list(describe(make_template(), [Preference(turns, *answers)]))
    assert shown[0] == "Q?"
    assert "rejected: the chat template does not write a part of the conversation (`name` of turn 1 (user)" in shown[1]


@pytest.mark.parametrize("joined", [FAMILY, FLAG, WAVE, ACCENT])
def test_a_text_is_never_cut_inside_an_emoji_or_a_letter(joined):
    for before, width in product(range(6), range(20, 40)):
        text = "x" * before + joined * 20
        short = shortened(text, width)
        assert len(short) <= width
        assert set(short.lstrip("x").replace("...", "").split(joined)) == {""}


def test_the_card_says_what_was_done_between_rows_and_tokens(report):
    notes = np.array([Note.END_ADDED | Note.REASONING_KEPT, Note.END_ADDED, 0], dtype=np.uint8)
    report |= {"notes": count_notes(notes), "unread_keys": {"id": 5}}
    text = pages.render_markdown(report, [], [])
    assert "2 pairs: the chat template writes no end of an answer" in text
    assert "1 pairs: an answer has reasoning" in text
    assert "Keys of messages that are not read: id (5)" in text
    assert set(Note) == SENTENCES.keys()


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
        "tokens": {part: data_card._spread(lengths) for part in ("prompt", "chosen", "rejected")},
        "shortcuts": {**FACTS, "length_difference": data_card.histogram(lengths, -9, 9)},
        "warnings": ["chosen is longer"],
    }


def test_the_pages_escape_text_from_the_data(report):
    preview = [{"prompt": [("<img src=x>", False)], "chosen": [("yes", True)], "rejected": [("no", True)]}]
    page = pages.render_html(report, preview, [])
    assert "<script>" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert '<span class="chosen">yes</span>' in page
    assert page.count("<svg") == 2
    assert "//" not in page.replace("http://www.w3.org", "")  # nothing is loaded from elsewhere
    text = pages.render_markdown(report, preview, [["rows", "4", "5"]])
    assert "| a \\| \\`b\\` \\<script\\> |" in text
    assert "## Since the previous version\n\n|  | before | now |\n| --- | --- | --- |\n| rows | 4 | 5 |" in text
    assert "    chosen:\n    «yes»" in text
    assert pages.render_html(report, preview, []) == page


def test_a_card_is_compared_with_the_previous_version(report, tmp_path, monkeypatch):
    monkeypatch.setenv("DPO_HOME", str(tmp_path))
    (tmp_path / "preview.json").write_text("[]")
    assert data_card.compare(report, tmp_path)[0] == []
    newer = {**report, "rows": 6, "sha256": {"train": "3", "eval": "2"}, "left_out": {"duplicate": 1}}
    changes = [["rows", "5", "6"], ["rejected, duplicate", "-", "1"], ["rejected, tie", "2", "-"]]
    for _ in range(2):  # the same version again is compared with the same one
        differences, (markdown, page) = data_card.compare(newer, tmp_path)
        assert differences == changes
    assert "Since the previous version" in markdown.read_text()
    assert page.read_text().startswith("<!doctype html>")


def test_every_reject_reason_is_documented():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    assert [name for name in REJECT_REASONS if f"`{name}`" not in text] == []
    assert set(QUARANTINED) < set(REJECT_REASONS)
