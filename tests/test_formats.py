"""Files and row shapes: a small one of each, and each way a row can be bad."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from tasks.errors import UserError
from tasks.formats import BadRow, Conversation, detect, read_rows, rename, to_conversation

PAIR = {"prompt": "Q?", "chosen": "good", "rejected": "bad"}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED = [message("user", "Q?")]


def test_text_pairs():
    assert to_conversation(PAIR, detect(PAIR)) == Conversation(ASKED, "good", "bad")


def test_message_pairs_with_and_without_the_prompt_repeated():
    system = [message("system", "Be brief."), *ASKED]
    row = {"prompt": system, "chosen": [message("assistant", "good")], "rejected": [message("assistant", "bad")]}
    whole = {**row, "chosen": [*system, *row["chosen"]], "rejected": [*system, *row["rejected"]]}
    assert to_conversation(row, detect(row)) == to_conversation(whole, "pairs") == Conversation(system, "good", "bad")


def test_hh_transcripts_share_all_but_the_last_answer():
    start = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Q?\n\nAssistant:"
    row = {"chosen": f"{start} good", "rejected": f"{start} bad"}
    assert detect(row) == "transcript"
    expected = [message("user", "Hi"), message("assistant", "Hello!"), message("user", "Q?")]
    assert to_conversation(row, "transcript") == Conversation(expected, "good", "bad")


def test_instructions_count_their_input():
    row = {"instruction": "Translate.", "input": "chat", "output": "x", "chosen": "good", "rejected": "bad"}
    assert detect(row) == "instruction"
    assert to_conversation(row, "instruction").prompt == [message("user", "Translate.\n\nchat")]
    assert to_conversation({**row, "input": ""}, "instruction").prompt == [message("user", "Translate.")]


def test_columns_are_renamed_to_ours():
    row = rename(
        {"question": "Q?", "yes": "good", "no": "bad"}, {"prompt": "question", "chosen": "yes", "rejected": "no"}
    )
    assert row == PAIR


def test_unknown_columns_are_told_with_what_would_do():
    with pytest.raises(UserError, match=r"the columns text, label.*prepare\.columns"):
        detect({"text": "a", "label": 1})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**PAIR, "rejected": "good"}, "chosen and rejected are the same"),
        ({**PAIR, "chosen": "  "}, "an answer is empty"),
        ({**PAIR, "prompt": ""}, "the prompt is empty"),
        ({**PAIR, "chosen": None}, "chosen is neither text nor a list of messages"),
        ({**PAIR, "chosen": 3}, "chosen is neither text nor a list of messages"),
        ({**PAIR, "prompt": [message("assistant", "hm")]}, "the prompt does not end with a user's turn"),
        ({**PAIR, "chosen": [{"role": "assistant"}]}, "a message of chosen lacks role or content"),
        ({**PAIR, "chosen": [message("user", "hm")]}, "chosen is not one assistant message after the prompt"),
    ],
)
def test_a_bad_row_has_a_reason(row, reason):
    with pytest.raises(BadRow, match=reason):
        to_conversation(row, "pairs")


def test_transcripts_that_part_early_are_bad_rows():
    row = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: x\n\nAssistant: c"}
    with pytest.raises(BadRow, match="part before the last answer"):
        to_conversation(row, "transcript")
    with pytest.raises(BadRow, match="is not a transcript"):
        to_conversation({"chosen": "hello", "rejected": "\n\nHuman: x\n\nAssistant: c"}, "transcript")


def test_every_file_format_gives_the_same_rows(tmp_path):
    rows = [PAIR, {**PAIR, "prompt": "Wie heißt du?"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\nQ?,good,bad\nWie heißt du?,good,bad\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for suffix in ("jsonl", "json", "csv", "parquet"):
        read = list(read_rows(tmp_path / f"a.{suffix}", "a"))
        assert read == [(1, rows[0]), (2, rows[1])], suffix


def test_a_broken_line_is_named_with_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(PAIR) + '\n{"prompt": "cut off\n')
    with pytest.raises(UserError, match=r"mine\.jsonl, line 2: not valid JSON.*cut off.*Mend or delete"):
        list(read_rows(path, "mine.jsonl"))
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(UserError, match=r"line 1: not valid JSON \(not UTF-8\)"):
        list(read_rows(path, "mine.jsonl"))
    path.write_text("[1, 2]\n")
    with pytest.raises(UserError, match="row 1: must be an object"):
        list(read_rows(path, "mine.jsonl"))
