"""Row shapes: a small one of each, and each way a row can be bad."""

import json

import pytest

from tasks.dataset.conversations import Choices, Conversation
from tasks.dataset.formats import detect, rename, to_conversations
from tasks.dataset.messages import check_turns
from tasks.dataset.violations import BadRow
from tasks.errors import UserError

PAIR = {"prompt": "Q?", "chosen": "good", "rejected": "bad"}
FIRST, BEST, MIDDLE, WORST = "Q?", "best", "middle", "worst"


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED = [say("user", "Q?")]
GOOD, BAD = [say("assistant", "good")], [say("assistant", "bad")]


def read(row, columns=None, **choices):
    """The pairs of a row by the way that `prepare` takes."""
    ours = rename(row, columns or {})
    return to_conversations(ours, detect(ours), columns or {}, Choices(**choices))


def violation(row, columns=None) -> str:
    (bad,) = read(row, columns)
    assert isinstance(bad, BadRow), bad
    return bad.name


@pytest.mark.parametrize(
    ("shape", "row"),
    [
        ("pairs", PAIR),
        ("pairs", {"prompt": ASKED, "chosen": GOOD, "rejected": BAD}),
        ("pairs", {"system": "", "question": "Q?", "chosen": "good", "rejected": "bad"}),
        ("pairs", {"system": None, "input": "Q?", "chosen": "good", "rejected": "bad"}),
        ("pairs", {"prompt": "Q?", "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]}),
        ("instruction", {"instruction": "Q?", "input": "", "output": "x", "chosen": "good", "rejected": "bad"}),
        ("transcript", {"chosen": "\n\nHuman: Q?\n\nAssistant: good", "rejected": "\n\nHuman: Q?\n\nAssistant: bad"}),
        ("transcript", {"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]}),
        (
            "messages",
            {
                "conversations": [{"from": "human", "value": "Q?"}],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
        ),
        ("messages", {"messages": ASKED, "chosen": GOOD, "rejected": BAD}),
        ("openai", {"input": {"messages": ASKED}, "preferred_output": GOOD, "non_preferred_output": BAD}),
        ("ranked", {"prompt": "Q?", "completions": ["good", "bad"]}),
        ("alpaca", {"instruction": "Q?", "input": None, "output": ["good", "bad"]}),
    ],
)
def test_every_shape_says_the_same(shape, row):
    assert detect(rename(row, {})) == shape
    assert read(row) == [Conversation(ASKED, GOOD, BAD)]


def test_the_input_of_an_instruction_counts():
    row = {"instruction": "Translate.", "input": "chat", "chosen": "good", "rejected": "bad"}
    assert read(row)[0].prompt == [say("user", "Translate.\n\nchat")]


def test_a_transcript_parts_where_the_two_sides_do():
    start = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Q?\n\nAssistant:"
    (one,) = read({"chosen": f"{start} good", "rejected": f"{start} bad"})
    assert one == Conversation([say("user", "Hi"), say("assistant", "Hello!"), *ASKED], GOOD, BAD)
    (early,) = read({"chosen": [*ASKED, *GOOD, say("user", "and?"), *GOOD], "rejected": [*ASKED, *BAD]})
    assert early.prompt == ASKED
    assert early.chosen == [*GOOD, say("user", "and?"), *GOOD]


def test_a_speaker_of_a_transcript_who_goes_on_is_one_turn():
    said = "\n\nHuman: Q?\n\nAssistant: one\n\nAssistant: two"
    (one,) = read({"chosen": said, "rejected": "\n\nHuman: Q?\n\nAssistant: bad"})
    assert one.chosen == [say("assistant", "one\n\ntwo")]


def test_system_prompts_and_tools_belong_to_the_prompt():
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert read({**PAIR, "tools": json.dumps(tools)})[0].tools == tools
    assert violation({**PAIR, "tools": "look"}) == "not_text"
    (one,) = read({**PAIR, "system": "Be brief.", "tools": tools})
    assert one.prompt == [say("system", "Be brief."), *ASKED]
    assert one.tools == tools
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    (one,) = read({**PAIR, "chosen": [call, say("tool", "seen"), *GOOD]})
    assert [turn["role"] for turn in one.chosen] == ["assistant", "tool", "assistant"]
    assert one.chosen[0]["tool_calls"] == call["tool_calls"]
    check_turns(one.prompt, one.chosen)


@pytest.mark.parametrize(
    ("how", "pairs"),
    [
        ("all", [(BEST, MIDDLE), (BEST, WORST), (MIDDLE, WORST)]),
        ("adjacent", [(BEST, MIDDLE), (MIDDLE, WORST)]),
        ("best_rest", [(BEST, MIDDLE), (BEST, WORST)]),
    ],
)
def test_ranked_answers_become_pairs(how, pairs):
    row = {"prompt": "Q?", "responses": [BEST, MIDDLE, WORST]}
    assert [(one.chosen[0]["content"], one.rejected[0]["content"]) for one in read(row, expand=how)] == pairs


def test_scored_answers_are_ranked_by_score_with_their_margins():
    row = {"prompt": "Q?", "completions": [WORST, BEST, MIDDLE], "scores": [1.0, 4.0, 3.5]}
    made = read(row, expand="all", min_margin=1.0)
    assert [one.margin for one in made if isinstance(one, Conversation)] == [3.0, 2.5]  # 4 - 1 and 3.5 - 1
    assert [one.name for one in made if isinstance(one, BadRow)] == ["small_margin"]  # 4 - 3.5
    objects = [{"response": BEST, "overall_score": 5}, {"response": WORST, "overall_score": 2}]
    (one,) = read({"instruction": "Q?", "completions": objects})
    assert (one.chosen[0]["content"], one.margin) == (BEST, 3.0)


def test_ties_are_dropped_or_kept_as_soft_labels():
    row = {"prompt": "Q?", "completions": ["one", "other"], "scores": [3, 3]}
    assert [bad.name for bad in read(row)] == ["tie"]
    assert [one.label for one in read(row, ties="soft")] == [0.5]
    scored = {**PAIR, "score_chosen": 8.0, "score_rejected": 8.0}
    assert [bad.name for bad in read(scored)] == ["tie"]
    assert read({**scored, "score_rejected": 6.5})[0].margin == 1.5


def test_votes_of_annotators_become_soft_labels():
    row = {"instruction": "Q?", "response1": "bad", "response2": "good", "annotator1": 2, "annotator2": 2}
    assert read({**row, "annotator3": 2}) == [Conversation(ASKED, GOOD, BAD, label=1.0)]
    (one,) = read({**row, "annotator3": 0})
    assert one.label == pytest.approx((1 + 1 + 0.5) / 3)
    (one,) = read({**row, "annotator3": 1})
    assert one.label == pytest.approx(2 / 3)
    assert violation({**row, "annotator2": 1}) == "tie"
    assert violation({**row, "annotator2": 7}) == "bad_number"


def test_columns_are_renamed_to_ours_and_may_carry_numbers():
    row = {"question": "Q?", "yes": "good", "no": "bad", "sure": "0.75", "weight": 9.0}
    columns = {"prompt": "question", "chosen": "yes", "rejected": "no", "label": "sure"}
    (one,) = read(row, columns)
    assert one == Conversation(ASKED, GOOD, BAD, label=0.75)  # a weight that nobody named is another thing
    assert violation({**row, "sure": 1.5}, columns) == "bad_number"
    assert violation({**row, "sure": "very"}, columns) == "bad_number"


def test_unknown_columns_and_binary_feedback_are_told_what_would_do():
    with pytest.raises(UserError, match=r"the columns text, label.*prepare\.columns"):
        detect({"text": "a", "label": 1})
    with pytest.raises(UserError, match=r"binary feedback.*two answers to one prompt"):
        detect({"prompt": "Q?", "completion": "good", "label": True})


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({**PAIR, "chosen": None}, "missing_field"),
        ({**PAIR, "chosen": 3}, "not_text"),
        ({**PAIR, "chosen": []}, "not_text"),
        ({**PAIR, "chosen": [{"role": "assistant"}]}, "missing_field"),
        ({**PAIR, "chosen": [say("narrator", "hm")]}, "wrong_role"),
        ({**PAIR, "chosen": [{"role": "assistant", "content": [{"type": "image"}]}]}, "not_text"),
        ({"chosen": "hello", "rejected": "\n\nHuman: x\n\nAssistant: c"}, "not_text"),
        ({"chosen": [*ASKED, *GOOD], "rejected": [say("user", "other"), *BAD]}, "no_shared_prompt"),
        ({"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *GOOD]}, "equal_answers"),
        ({"prompt": "Q?", "completions": ["alone"]}, "not_text"),
        ({"prompt": "Q?", "completions": ["a", "b"], "scores": [1]}, "bad_number"),
        ({**PAIR, "score_chosen": 1, "score_rejected": 2}, "bad_number"),
    ],
)
def test_a_bad_row_has_the_name_of_its_violation(row, name):
    assert violation(row) == name


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ([say("assistant", "hm")], GOOD),
        (ASKED, [say("user", "hm")]),
        (ASKED, [*GOOD, *GOOD]),
        ([*ASKED, *ASKED], GOOD),
        ([*ASKED, say("system", "late")], GOOD),
        (ASKED, []),
    ],
)
def test_turns_have_an_order(prompt, answer):
    with pytest.raises(BadRow) as bad:
        check_turns(prompt, answer)
    assert bad.value.name == "turn_order"
