"""Row shapes: an example of each, and the reasons why a row is rejected."""

import json
from dataclasses import replace

import pytest

from tasks.config.names import COLUMNS
from tasks.config.paths import ROOT
from tasks.prepare.rows import messages
from tasks.prepare.rows.contract import check_pair
from tasks.prepare.rows.messages import check_turns
from tasks.prepare.rows.preference import Preference, RowLayout
from tasks.prepare.rows.row_shapes import SHAPES, detect_shape, rename_columns, to_preferences
from tasks.source.reject_reasons import RejectedRow

PAIR = {"prompt": "Q?", "chosen": "good", "rejected": "bad"}
FIRST, BEST, MIDDLE, WORST = "Q?", "best", "middle", "worst"


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def reply(role: str, text: str, *replies: dict, **fields: object) -> dict:
    """A message of OpenAssistant's trees."""
    return {"role": role, "text": text, "replies": [*replies], **fields}


def parts(message: dict[str, str]) -> dict:
    """The message with LLaMA-Factory's content parts."""
    return {"role": message["role"], "content": [{"type": "text", "value": message["content"]}], "loss_weight": 1.0}


PROMPT = [turn("user", "Q?")]
GOOD, BAD = [turn("assistant", "good")], [turn("assistant", "bad")]
SIDES = {"chosen": [*PROMPT, *GOOD], "rejected": [*PROMPT, *BAD]}


def read(row, columns=None, **options):
    """The preferences of a row, as `prepare` reads it."""
    shape = detect_shape(rename_columns(row, columns or {}))
    return to_preferences(row, RowLayout(shape, columns or {}, **options))


def reject_reason(row, columns=None) -> str:
    (rejected,) = read(row, columns)
    assert isinstance(rejected, RejectedRow), rejected
    return rejected.name


EXAMPLES = [
    ("pairs", PAIR),
    ("pairs", {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD}),
    ("pairs", {"system": "", "question": "Q?", "chosen": "good", "rejected": "bad"}),
    ("pairs", {"system": None, "input": "Q?", "chosen": "good", "rejected": "bad"}),
    ("pairs", {"prompt": "Q?", "chosen": [*PROMPT, *GOOD], "rejected": [*PROMPT, *BAD]}),
    ("instruction", {"instruction": "Q?", "input": "", "output": "x", "chosen": "good", "rejected": "bad"}),
    ("transcript", {"chosen": "\n\nHuman: Q?\n\nAssistant: good", "rejected": "\n\nHuman: Q?\n\nAssistant: bad"}),
    ("transcript", {"chosen": [*PROMPT, *GOOD], "rejected": [*PROMPT, *BAD]}),
    (
        "messages",
        {
            "conversations": [{"from": "human", "value": "Q?"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
    ),
    ("messages", {"messages": PROMPT, "chosen": GOOD, "rejected": BAD}),
    ("openai", {"input": {"messages": PROMPT}, "preferred_output": GOOD, "non_preferred_output": BAD}),
    ("ranked", {"prompt": "Q?", "completions": ["good", "bad"]}),
    ("scored", {"prompt": "Q?", "completions": ["bad", "good"], "scores": [1, 2]}),
    ("alpaca", {"instruction": "Q?", "input": None, "output": ["good", "bad"]}),
    (
        "tree",
        {"prompt": reply("prompter", "Q?", reply("assistant", "bad", rank=1), reply("assistant", "good", rank=0))},
    ),
    ("transcript", {f"{side}_messages": [parts(turn) for turn in turns] for side, turns in SIDES.items()}),
    ("pairs", {"prompt": "Q?", "chosen": ["good"], "rejected": ["bad"]}),
    ("transcript", {side: [turns] for side, turns in SIDES.items()}),
]


@pytest.mark.parametrize(("shape", "row"), EXAMPLES)
def test_every_shape_gives_the_same_preference(shape, row):
    assert detect_shape(rename_columns(row, {})) == shape
    (pair,) = read(row)
    assert replace(pair, margin=0.0) == Preference(PROMPT, GOOD, BAD)
    if "scores" not in row:
        (scored,) = read({**row, "score_chosen": 5, "score_rejected": 1})
        assert scored.margin == (0.0 if shape in ("ranked", "alpaca", "tree") else 4.0)


def test_every_shape_has_an_example_a_line_of_the_documentation_and_columns_that_can_be_named():
    assert {shape for shape, _ in EXAMPLES} == SHAPES.keys() - {"votes", "unpaired"}  # which have tests of their own
    page = (ROOT / "docs" / "data.md").read_text()
    assert [shape for shape in SHAPES if f"| `{shape}` |" not in page] == []
    columns = {column for shape, row in EXAMPLES if shape != "openai" for column in rename_columns(row, {})}
    assert columns <= {*COLUMNS}


def test_the_input_of_an_instruction_is_part_of_the_prompt():
    row = {"instruction": "Translate.", "input": "chat", "chosen": "good", "rejected": "bad"}
    assert read(row)[0].prompt == [turn("user", "Translate.\n\nchat")]


def test_the_shared_turns_of_two_transcripts_are_the_prompt():
    start = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Q?\n\nAssistant:"
    (one,) = read({"chosen": f"{start} good", "rejected": f"{start} bad"})
    assert one == Preference([turn("user", "Hi"), turn("assistant", "Hello!"), *PROMPT], GOOD, BAD)
    (early,) = read({"chosen": [*PROMPT, *GOOD, turn("user", "and?"), *GOOD], "rejected": [*PROMPT, *BAD]})
    assert early.prompt == PROMPT
    assert early.chosen == [*GOOD, turn("user", "and?"), *GOOD]


def test_successive_turns_of_one_speaker_are_joined():
    text = "\n\nHuman: Q?\n\nAssistant: one\n\nAssistant: two"
    (one,) = read({"chosen": text, "rejected": "\n\nHuman: Q?\n\nAssistant: bad"})
    assert one.chosen == [turn("assistant", "one\n\ntwo")]


def test_system_prompts_and_tools_belong_to_the_prompt():
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert read({**PAIR, "tools": json.dumps(tools)})[0].tools == tools
    for strange in ("look", ["look"], [None], '{"name": "look"}'):
        assert reject_reason({**PAIR, "tools": strange}) == "not_text"
    (one,) = read({**PAIR, "system": "Be brief.", "tools": tools})
    assert one.prompt == [turn("system", "Be brief."), *PROMPT]
    assert one.tools == tools
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    (one,) = read({**PAIR, "chosen": [call, turn("tool", "seen"), *GOOD]})
    assert [turn["role"] for turn in one.chosen] == ["assistant", "tool", "assistant"]
    assert one.chosen[0]["tool_calls"] == call["tool_calls"]
    check_turns(one.prompt, one.chosen)


def test_reasoning_and_calls_are_read_under_each_of_their_names():
    for name in ("reasoning_content", "reasoning", "thinking"):
        (one,) = read({**PAIR, "chosen": [{**GOOD[0], name: "so"}]})
        assert one.chosen == [{**GOOD[0], "reasoning_content": "so"}]
    function = {"name": "look", "arguments": '{"at": "x"}'}
    calls = [{"type": "function", "function": function}]
    old = {"role": "assistant", "content": None, "function_call": function}
    stored = {"role": "assistant", "content": None, "tool_calls": json.dumps(calls)}
    short = {"role": "assistant", "tool_calls": calls}  # OpenAI's own files leave the content out
    for call in (old, stored, short, {"role": "assistant", "function_call": function}):
        assert read({**PAIR, "chosen": [call]})[0].chosen == [{"role": "assistant", "content": "", "tool_calls": calls}]
    for strange in ("look", ["look"], [{"function": "look"}]):
        assert reject_reason({**PAIR, "chosen": [{**GOOD[0], "tool_calls": strange}]}) == "not_text"
    assert reject_reason({**PAIR, "chosen": [{**GOOD[0], "thinking": ["so"]}]}) == "not_text"


def test_answers_that_differ_in_reasoning_alone_are_a_pair():
    (one,) = read({**PAIR, "chosen": [{**GOOD[0], "reasoning": "so"}], "rejected": GOOD})
    assert check_pair(one, 100) is None


def with_parts(part: dict) -> dict:
    """A row whose question has this part too."""
    return {**PAIR, "prompt": [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({**PAIR, "images": ["x.png"]}, "`images` of the row"),
        ({**PAIR, "chosen": [{**GOOD[0], "audio": {"id": "x"}}]}, "`audio` of a message of chosen"),
        ({**PAIR, "prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "'image_url'"),
        ({**PAIR, "prompt": [{**PROMPT[0], "content": [{"type": "text", "text": ""}, {"type": "image"}]}]}, "'image'"),
        (with_parts({"type": "image", "image": "x.png", "text": ""}), "'image'"),
        (with_parts({"type": "audio", "text": ""}), "'audio'"),
        (with_parts({"type": "text", "text": "hi", "image_url": {"url": "x.png"}}), "`image_url` of a part"),
        (with_parts({"type": None, "text": "hi", "video": "x.mp4"}), "`video` of a part"),
    ],
)  # fmt: skip
def test_what_is_not_text_is_rejected_by_name(row, named):
    (rejected,) = read(row)
    assert rejected.name == "unsupported_part"
    assert named in str(rejected)
    assert isinstance(read({**PAIR, "images": None, "audio": []})[0], Preference)
    (one,) = read(with_parts({"type": "text", "text": "", "image": None, "image_url": {"url": None}}))
    assert one.prompt == [turn("user", "What is this?")]


def test_keys_of_messages_that_nothing_reads_are_known():
    sides = {"chosen": [{**GOOD[0], "id": 7, "language": "en"}], "rejected": BAD}
    assert list(messages.unread_keys({"prompt": [{**PROMPT[0], "id": 6, "toxic": False}], **sides})) == [
        *("id", "id", "language")
    ]
    assert list(messages.unread_keys({"input": {"messages": [{**PROMPT[0], "state": "x"}]}, "n": 1})) == ["state"]
    assert list(messages.unread_keys(PAIR)) == []


def test_tools_belong_to_the_identity_of_a_pair():
    plain, one, other = (
        read({**PAIR, **tools})[0] for tools in ({}, {"tools": [{"name": "a"}]}, {"tools": [{"name": "b"}]})
    )
    assert len({plain.id, one.id, other.id}) == 3
    assert plain.id == replace(one, tools=None).id == "c93e612930801ba1"
    assert one.swapped_id == replace(one, chosen=one.rejected, rejected=one.chosen).id


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


@pytest.mark.parametrize(
    ("how", "pairs"),
    [
        ("all", [(BEST, MIDDLE), (BEST, WORST), (MIDDLE, WORST)]),
        ("adjacent", [(BEST, MIDDLE), (MIDDLE, WORST)]),
        ("best_rest", [(BEST, MIDDLE), (BEST, WORST)]),
    ],
)
def test_each_message_of_a_tree_with_ranked_replies_is_a_ranking(how, pairs):
    more = reply("prompter", "more?", reply("assistant", "no", rank=1), reply("assistant", "yes", rank=0))
    answers = [reply("assistant", WORST, more, rank=2.0)]
    answers += [reply("assistant", text, rank=n) for n, text in enumerate((BEST, MIDDLE))]
    others = [reply("assistant", "gone", rank=3, deleted=True), reply("assistant", "not ranked")]
    made = read({"prompt": reply("prompter", "Q?", *answers, *others)}, expand=how)
    assert [(one.chosen[0]["content"], one.rejected[0]["content"]) for one in made] == [*pairs, ("yes", "no")]
    assert made[-1].prompt == [*PROMPT, turn("assistant", WORST), turn("user", "more?")]
    assert reject_reason({"prompt": reply("prompter", "Q?", reply("assistant", "alone", rank=0))}) == "no_comparison"


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("Q?", "not_text"),
        ({"text": "Q?", "replies": []}, "wrong_role"),
        (reply("prompter", "Q?", reply("narrator", "x", rank=0), reply("assistant", "y", rank=1)), "wrong_role"),
        (reply("prompter", "Q?", *(reply("assistant", None, rank=n) for n in (0, 1))), "missing_field"),
        (reply("prompter", "Q?", *(reply("assistant", "x", rank="best") for _ in (0, 1))), "bad_number"),
        ({**reply("prompter", "Q?"), "replies": [{**reply("assistant", "x"), "replies": 3}, 4]}, "no_comparison"),
    ],
)
def test_a_broken_tree_names_its_reason(prompt, name):
    (rejected,) = to_preferences({"prompt": prompt}, RowLayout("tree"))
    assert rejected.name == name


def test_several_chosen_and_rejected_answers_become_pairs():
    row = {"prompt": "Q?", "chosen": ["a", "b"], "rejected": ["x", "y"]}

    def pairs(row, **options):
        return [(one.chosen[0]["content"], one.rejected[0]["content"]) for one in read(row, **options)]

    assert pairs(row) == pairs(row, expand="adjacent") == [("a", "x"), ("b", "y")]  # the same style, in RM-Bench
    assert pairs(row, expand="all") == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
    assert pairs({**row, "rejected": ["x", "y", "z"]}) == [("a", "x"), ("b", "y"), ("a", "z")]  # every answer is used
    assert pairs({**row, "chosen": "a"}) == [("a", "x"), ("a", "y")]
    assert pairs({**row, "chosen": [GOOD, GOOD], "rejected": [{"response": "bad"}]}) == [("good", "bad")] * 2


def test_scored_answers_are_ranked_by_score_with_their_margins():
    row = {"prompt": "Q?", "completions": [WORST, BEST, MIDDLE], "scores": [1.0, 4.0, 3.5]}
    made = read(row, expand="all", min_margin=1.0)
    assert [one.margin for one in made if isinstance(one, Preference)] == [3.0, 2.5]  # 4 - 1 and 3.5 - 1
    assert [one.name for one in made if isinstance(one, RejectedRow)] == ["small_margin"]  # 4 - 3.5
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
    assert read({**row, "annotator3": 2}) == [Preference(PROMPT, GOOD, BAD, label=1.0)]
    (one,) = read({**row, "annotator3": 0})
    assert one.label == pytest.approx((1 + 1 + 0.5) / 3)
    (one,) = read({**row, "annotator3": 1})
    assert one.label == pytest.approx(2 / 3)
    assert reject_reason({**row, "annotator2": 1}) == "tie"
    assert reject_reason({**row, "annotator2": 7}) == "bad_number"


def test_ratings_with_a_sign_have_a_margin_and_fractions_a_soft_label():
    row = {"prompt": "Q?", "response1": "good", "response2": "bad"}
    ratings = {"<0": "first", "0": "tie", ">0": "second"}

    def compared(winner, votes, **options):
        (one,) = read({**row, "winner": winner}, votes=votes, **options)
        return one.name if isinstance(one, RejectedRow) else (one.chosen[0]["content"], one.label, one.margin)

    assert [compared(rating, ratings) for rating in (-3, 1, "-2")] == [("good", 1, 3), ("bad", 1, 1), ("good", 1, 2)]
    assert compared(0, ratings) == "tie"
    assert compared(-1, ratings, min_margin=2.0) == "small_margin"
    assert compared(3, {"<0": "second", ">0": "first"}) == ("good", 1.0, 3.0)  # as prepare.values may say
    ends = {"1": "first", "2": "second"}
    assert compared(1.25, ends) == ("good", 0.75, 0.0)
    assert compared("1.75", ends) == ("bad", 0.75, 0.0)
    assert (compared(1.5, ends), compared(1.5, ends, ties="soft")) == ("tie", ("good", 0.5, 0.0))
    assert {compared(vote, ends) for vote in (0, 2.5, 3, "x", "nan", True)} == {"bad_number"}
    assert compared(2, {"1": "first", "3": "second"}) == "bad_number"  # a whole number may be a vote that nobody named


def test_columns_are_renamed_and_may_hold_numbers():
    row = {"question": "Q?", "yes": "good", "no": "bad", "sure": "0.75", "weight": 9.0}
    columns = {"prompt": "question", "chosen": "yes", "rejected": "no", "label": "sure"}
    (one,) = read(row, columns)
    assert one == Preference(PROMPT, GOOD, BAD, label=0.75)  # a weight that prepare.columns does not name is ignored
    assert reject_reason({**row, "sure": 1.5}, columns) == "bad_number"
    assert reject_reason({**row, "sure": "very"}, columns) == "bad_number"


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({**PAIR, "chosen": None}, "missing_field"),
        ({**PAIR, "chosen": 3}, "not_text"),
        ({**PAIR, "chosen": []}, "not_text"),
        ({**PAIR, "chosen": [{"role": "assistant"}]}, "missing_field"),
        ({**PAIR, "chosen": [turn("narrator", "hm")]}, "wrong_role"),
        ({**PAIR, "chosen": [{"role": ["assistant"], "content": "hm"}]}, "wrong_role"),
        ({**PAIR, "chosen": [{"role": "assistant", "content": [{"type": "image"}]}]}, "unsupported_part"),
        ({"chosen": "hello", "rejected": "\n\nHuman: x\n\nAssistant: c"}, "not_text"),
        ({"chosen": [*PROMPT, *GOOD], "rejected": [turn("user", "other"), *BAD]}, "no_shared_prompt"),
        ({"chosen": [*PROMPT, *GOOD], "rejected": [*PROMPT, *GOOD]}, "equal_answers"),
        ({"prompt": "Q?", "completions": ["alone"]}, "not_text"),
        ({"prompt": "Q?", "completions": ["a", "b"], "scores": [1]}, "bad_number"),
        ({**PAIR, "score_chosen": 1, "score_rejected": 2}, "bad_number"),
    ],
)
def test_a_rejected_row_names_its_reason(row, name):
    assert reject_reason(row) == name


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ([turn("assistant", "hm")], GOOD),
        (PROMPT, [turn("user", "hm")]),
        (PROMPT, [*GOOD, *GOOD]),
        ([*PROMPT, *PROMPT], GOOD),
        ([*PROMPT, turn("system", "late")], GOOD),
        (PROMPT, []),
    ],
)
def test_turns_in_a_wrong_order_are_rejected(prompt, answer):
    with pytest.raises(RejectedRow) as bad:
        check_turns(prompt, answer)
    assert bad.value.name == "turn_order"
