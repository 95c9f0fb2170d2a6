"""The column layouts of the preference sets that are used most: prepared without settings, or with those of the error.

Names and types of the columns are those of the public cards; the rows are generated here.
"""

import json
import re
from dataclasses import replace

import pytest
import yaml

from tasks.config.paths import ROOT
from tasks.config.prepare import Layout
from tasks.errors import UserError
from tasks.prepare.rows.layouts import better_shape, decode, find_layout

GOOD, BAD = "A good answer", "A bad answer"


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def hh(*texts: str) -> str:
    return "".join(f"\n\n{('Human', 'Assistant')[n % 2]}: {text}" for n, text in enumerate(texts))


def two(n: int) -> tuple[str, str]:
    """The better answer is the first in rows with an even number."""
    return (f"{GOOD} {n}", f"{BAD} {n}") if n % 2 == 0 else (f"{BAD} {n}", f"{GOOD} {n}")


def messages(n: int) -> dict:
    """The prompt with both answers as messages."""
    return {"chosen": chat(f"Q {n}?", f"{GOOD} {n}"), "rejected": chat(f"Q {n}?", f"{BAD} {n}")}


def texts(n: int) -> dict:
    return {"chosen": f"{GOOD} {n}", "rejected": f"{BAD} {n}"}


def compared(n: int, first: str, second: str, made=lambda text, n: text) -> dict:
    return dict(zip((first, second), (made(text, n) for text in two(n)), strict=True))


def message(role: str, text: str, *replies: dict, **fields: int) -> dict:
    """A message of OpenAssistant's trees."""
    return {"message_id": text, "text": text, "role": role, "lang": "en", "replies": [*replies], **fields}


def best_reply(n: int) -> dict:
    return message("assistant", f"{GOOD} {n}", message("prompter", "Thanks"), rank=0)


UNUSED = {"models": ["a", "b"], "correct_answers": ["None"], "incorrect_answers": ["None"]}
LAYOUTS = {
    "Anthropic/hh-rlhf": lambda n: {"chosen": hh(f"Q {n}?", f"{GOOD} {n}"), "rejected": hh(f"Q {n}?", f"{BAD} {n}")},
    "Dahoas/full-hh-rlhf": lambda n: {"prompt": hh(f"Q {n}?", ""), "response": f"{GOOD} {n}", **texts(n)},
    "HuggingFaceH4/ultrafeedback_binarized": lambda n: {
        "prompt": f"Q {n}?",
        "prompt_id": f"{n:064x}",
        **messages(n),
        "messages": messages(n)["chosen"],
        "score_chosen": 8.5,
        "score_rejected": 4.0,
    },
    "trl-lib/ultrafeedback_binarized": lambda n: {**messages(n), "score_chosen": 8.5, "score_rejected": 4.0},
    "argilla/ultrafeedback-binarized-preferences": lambda n: {
        "source": "flan",
        "instruction": f"Q {n}?",
        "chosen_response": f"{GOOD} {n}",
        "rejected_response": f"{BAD} {n}",
        "chosen_avg_rating": 4.5,
        "rejected_avg_rating": 2.0,
        "chosen_model": "m",
    },
    "argilla/ultrafeedback-binarized-preferences-cleaned": lambda n: {
        "source": "flan",
        "prompt": f"Q {n}?",
        **messages(n),
        "chosen-rating": 4.5,
        "chosen-model": "m",
        "rejected-rating": 2.0,
        "rejected-model": "k",
    },
    "openbmb/UltraFeedback": lambda n: {
        "source": "flan",
        "instruction": f"Q {n}?",
        **UNUSED,
        "completions": [
            {
                "annotations": {},
                "custom_system_prompt": "",
                "model": "a",
                "overall_score": 3.0,
                "response": f"{BAD} {n}",
            },
            {
                "annotations": {},
                "custom_system_prompt": "",
                "model": "b",
                "overall_score": 8.0,
                "response": f"{GOOD} {n}",
            },
        ],
    },
    "Intel/orca_dpo_pairs": lambda n: {"system": "", "question": f"Q {n}?", **texts(n)},
    "argilla/distilabel-intel-orca-dpo-pairs": lambda n: {
        "system": "",
        "input": f"Q {n}?",
        **texts(n),
        "generations": [f"{GOOD} {n}", f"{BAD} {n}"],
        "order": ["chosen", "rejected"],
        "rating": [9.0, 7.0],
        "rationale": "",
        "status": "unchanged",
        "original_chosen": f"{GOOD} {n}",
        "original_rejected": f"{BAD} {n}",
        "chosen_score": 9.0,
        "in_gsm8k_train": False,
    },
    "argilla/dpo-mix-7k": lambda n: {"dataset": "d", **messages(n), "chosen_rating": 5.0, "rejected_rating": 3.0},
    "argilla/distilabel-capybara-dpo-7k-binarized": lambda n: {
        "source": "s",
        "conversation": [{"input": "Hi", "output": "Hello"}, {"input": f"Q {n}?", "output": f"{GOOD} {n}"}],
        "original_response": f"{GOOD} {n}",
        "prompt": f"Q {n}?",
        "chosen": chat("Hi", "Hello", f"Q {n}?", f"{GOOD} {n}"),
        "rejected": chat("Hi", "Hello", f"Q {n}?", f"{BAD} {n}"),
        "rating_chosen": 5,
        "rating_rejected": 2,
        "chosen_model": "m",
    },
    "argilla/distilabel-math-preference-dpo": lambda n: {
        "metadata": "",
        "instruction": f"Q {n}?",
        "chosen_response": f"{GOOD} {n}",
        "chosen_rating": 9.0,
        "rejected_response": f"{BAD} {n}",
        "rejected_rating": 6.0,
    },
    "mlabonne/orpo-dpo-mix-40k": lambda n: {"source": "s", **messages(n), "prompt": f"Q {n}?", "question": f"Q {n}?"},
    "snorkelai/Snorkel-Mistral-PairRM-DPO-Dataset": lambda n: {
        "prompt_id": "p",
        "prompt": f"Q {n}?",
        **messages(n),
        "all_generated_responses": [f"{GOOD} {n}", f"{BAD} {n}"],
        "all_rm_scores": [0.9, 0.1],
    },
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": lambda n: {
        "id": f"i{n}",
        "source": "s",
        "prompt": f"Q {n}?",
        **messages(n),
    },
    "allenai/reward-bench": lambda n: {
        "prompt": f"Q {n}?",
        "chosen": f"{GOOD} {n}",
        "chosen_model": "m",
        "rejected": f"{BAD} {n}",
        "rejected_model": "k",
        "subset": "s",
        "id": n,
    },
    "jondurbin/truthy-dpo-v0.1": lambda n: {"id": "i", "source": "s", "system": "", "prompt": f"Q {n}?", **texts(n)},
    "CarperAI/openai_summarize_comparisons": lambda n: {"prompt": f"Q {n}?", **texts(n)},
    "xinlai/Math-Step-DPO-10K": lambda n: {
        "dataset": "d",
        "prompt": f"Q {n}?",
        "initial_reason_steps": "",
        **texts(n),
        "full_chosen": "c",
        "full_rejected": "r",
        "answer": "4",
    },
    "Magpie-Align/Magpie-Llama-3.1-Pro-DPO-100K-v0.1": lambda n: {"uuid": "u", "instruction": f"Q {n}?", **messages(n)},
    "Skywork/Skywork-Reward-Preference-80K-v0.2": lambda n: {**messages(n), "source": "s"},
    "lvwerra/stack-exchange-paired": lambda n: {
        "qid": n,
        "question": f"Q {n}?",
        "date": "2020",
        "metadata": ["url"],
        "response_j": f"{GOOD} {n}",
        "response_k": f"{BAD} {n}",
    },
    "HuggingFaceH4/stack-exchange-preferences": lambda n: {
        "qid": n,
        "question": f"Q {n}?",
        "answers": [
            {"answer_id": 1, "author": "x", "pm_score": 1, "selected": False, "text": f"{BAD} {n}"},
            {"answer_id": 2, "author": "y", "pm_score": 5, "selected": True, "text": f"{GOOD} {n}"},
        ],
        "date": "2020",
        "metadata": ["url"],
    },
    "berkeley-nest/Nectar": lambda n: {
        "prompt": hh(f"Q {n}?", ""),
        "answers": [
            {"answer": f"{BAD} {n}", "model": "a", "rank": 5.0},
            {"answer": f"{GOOD} {n}", "model": "b", "rank": 1.0},
        ],
        "turns": 1,
        "num_responses": 7,
        "source": ["s"],
        "good_natured": True,
    },
    "lmsys/chatbot_arena_conversations": lambda n: {
        "question_id": "q",
        "model_a": "vicuna",
        "model_b": "alpaca",
        "winner": ("model_a", "model_b")[n % 2] if n < 6 else ("tie", "tie (bothbad)")[n % 2],
        "judge": "arena_user_1",
        **compared(n, "conversation_a", "conversation_b", lambda text, n: chat(f"Q {n}?", text)),
        "turn": 1,
        "anony": True,
        "language": "English",
        "tstamp": 1.5,
    },
    "lmsys/lmsys-arena-human-preference-55k": lambda n: {
        "id": n,
        "model_a": "vicuna",
        "model_b": "alpaca",
        "prompt": json.dumps([f"Q {n}?"]),
        **compared(n, "response_a", "response_b", lambda text, n: json.dumps([text])),
        "winner_model_a": int(n % 2 == 0),
        "winner_model_b": n % 2,
        "winner_tie": 0,
    },
    "PKU-Alignment/PKU-SafeRLHF": lambda n: {
        "prompt": f"Q {n}?",
        **compared(n, "response_0", "response_1"),
        "is_response_0_safe": True,
        "is_response_1_safe": False,
        "better_response_id": n % 2,
        "safer_response_id": 0,
    },
    "stanfordnlp/SHP": lambda n: {
        "post_id": "p",
        "domain": "askacademia",
        "upvote_ratio": 0.9,
        "history": f"Q {n}?",
        "score_A": 9 - 5 * (n % 2),
        "score_B": 4 + 5 * (n % 2),
        **compared(n, "human_ref_A", "human_ref_B"),
        "labels": int(n % 2 == 0),
        "seconds_difference": 2.0,
        "score_ratio": 2.0,
    },
    "tatsu-lab/alpaca_farm": lambda n: {
        "instruction": f"Q {n}?",
        "input": "",
        **compared(n, "output_1", "output_2"),
        "preference": 1 + n % 2,
    },
    "princeton-nlp/LLMBar": lambda n: {"input": f"Q {n}?", **compared(n, "output_1", "output_2"), "label": 1 + n % 2},
    "prometheus-eval/Preference-Collection": lambda n: {
        "orig_criteria": "c",
        "orig_instruction": f"Q {n}?",
        **compared(n, "orig_response_A", "orig_response_B"),
        "orig_score_A": 5,
        "orig_score_B": 3,
        "orig_preference": "AB"[n % 2],
        "instruction": "###Task Description: ...",
        "output": "Feedback: ... [RESULT] A",
    },
    "nvidia/HelpSteer2": lambda n: {
        "split": "train",
        "prompt": f"Q {n}?",
        **compared(n, "response_1", "response_2"),
        "preference_strength": (-2, 3)[n % 2] if n < 6 else 0,
        "preference_statement": "Response 1 is better than response 2, since it answers the question.",
    },
    "nvidia/HelpSteer3": lambda n: {
        "domain": "general",
        "language": "english",
        "context": chat(f"Q {n}?"),
        **compared(n, "response1", "response2"),
        "overall_preference": (-1, 2)[n % 2],
        "individual_preference": [{"score": -1}],
    },
    "ScalerLab/JudgeBench": lambda n: {
        "pair_id": "81ec57f2",
        "original_id": "10646",
        "source": "mmlu-pro-math",
        "question": f"Q {n}?",
        "response_model": "gpt-4o",
        **compared(n, "response_A", "response_B"),
        "label": ("A>B", "B>A")[n % 2],
    },
    "AlpacaEval 2 (annotations.json)": lambda n: {
        "instruction": f"Q {n}?",
        **compared(n, "output_1", "output_2"),
        "generator_1": "gpt4_1106_preview",
        "generator_2": "mine",
        "dataset": "koala",
        "annotator": "weighted_alpaca_eval_gpt4_turbo",
        "preference": ((1.0002, 1.9), (1.25, 1.9997))[n % 3 > 0][n % 2],
        "price_per_example": 0.01,
        "raw_completion": {"logprobs": []},
    },
    "THU-KEG/RM-Bench": lambda n: {
        "id": f"i{n}",
        "prompt": f"Q {n}?",
        "chosen": [f"{GOOD} {n}", f"{GOOD} {n}, at length", f"{GOOD} {n}, as a **list**"],
        "rejected": [f"{BAD} {n}", f"{BAD} {n}, at length", f"{BAD} {n}, as a **list**"],
        "domain": "chat",
    },
    "OpenAssistant/oasst1, oasst2 (.trees.jsonl.gz)": lambda n: {
        "message_tree_id": f"t{n}",
        "tree_state": "ready_for_export",
        "prompt": message("prompter", f"Q {n}?", message("assistant", f"{BAD} {n}", rank=1), best_reply(n)),
    },
    "LLaMA-Factory v1 (chosen_messages)": lambda n: {
        f"{side}_messages": [
            {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": float(role != "user")}
            for role, text in (("user", f"Q {n}?"), ("assistant", f"{answer} {n}"))
        ]
        for side, answer in (("chosen", GOOD), ("rejected", BAD))
    },
}
ANSWERS_FOR_KTO = {
    "trl-lib/kto-mix-14k": lambda n: {
        "prompt": chat(f"Q {n}?"),
        "completion": [{"role": "assistant", "content": f"{(GOOD, BAD)[n % 2]} {n}"}],
        "label": n % 2 == 0,
    },
    "LLaMA-Factory KTO (messages, label)": lambda n: {
        "messages": chat(f"Q {n}?", f"{(GOOD, BAD)[n % 2]} {n}"),
        "label": n % 2 == 0,
    },
    "LLaMA-Factory KTO (output, kto_tag)": lambda n: {
        "instruction": f"Q {n}?",
        "input": "",
        "output": f"{(GOOD, BAD)[n % 2]} {n}",
        "kto_tag": n % 2 == 0,
    },
}
TIES = ("GAIR/autoj", "nvidia/HelpSteer2", "lmsys/chatbot_arena_conversations")
# Refused at first: the settings are those that the error names.
SETTINGS = {
    "GAIR/autoj": (
        lambda n: {
            "scenario": "s",
            "label": n % 2 if n < 6 else 2,
            "prompt": f"Q {n}?",
            **compared(n, "response 1", "response 2"),
        },
        "prepare.values to {winner: {0: first|second|tie, 1: first|second|tie, 2: first|second|tie}}",
        {"values": {"winner": {0: "first", 1: "second", 2: "tie"}}},
    ),
    "openai/webgpt_comparisons": (
        lambda n: {
            "question": {"dataset": "eli5", "id": "x", "full_text": f"Q {n}?"},
            "quotes_0": {"title": []},
            **compared(n, "answer_0", "answer_1"),
            "tokens_0": "",
            "score_0": 0.5 - n % 2,
            "score_1": -0.5 + n % 2,
        },
        "prepare.columns to {prompt: question.full_text}",
        {"columns": {"prompt": "question.full_text"}},
    ),
    "openai/summarize_from_feedback": (
        lambda n: {
            "info": {"id": "t3", "post": f"Q {n}?", "title": "t", "subreddit": "r"},
            "split": "train",
            "summaries": [{"text": text, "policy": "sup", "note": None} for text in two(n)],
            "choice": n % 2,
            "worker": "w",
        },
        "prepare.columns to {prompt: info.post, completions: summaries, winner: choice} and prepare.values to {winner: "
        "{0: first|second|tie, 1: first|second|tie}}",
        {
            "columns": {"prompt": "info.post", "completions": "summaries", "winner": "choice"},
            "values": {"winner": {0: "first", 1: "second"}},
        },
    ),
    "prompt in another column": (
        lambda n: {"domain": "d", "context": chat(f"Q {n}?"), **texts(n)},
        "prepare.columns to {prompt: context}",
        {"columns": {"prompt": "context"}},
    ),
    "own columns": (
        lambda n: {"frage": "x", "user_query": f"Q {n}?", "good_reply": f"{GOOD} {n}", "bad_reply": f"{BAD} {n}"},
        "prepare.columns to {prompt: user_query, chosen: good_reply, rejected: bad_reply}",
        {"columns": {"prompt": "user_query", "chosen": "good_reply", "rejected": "bad_reply"}},
    ),
}


def check(rows: list[dict], wanted: Layout, ties: int = 0) -> None:
    """Every row but the ties becomes the preference for the good answer to its question."""
    made = decode(rows, find_layout(rows, "a.jsonl", wanted))
    assert len({one.prompt_text for one in made}) == len(rows) - ties
    for one in made:
        (question,) = [turn["content"] for turn in one.prompt if turn["content"].startswith("Q")]
        number = question.removeprefix("Q ").removesuffix("?")
        assert one.prompt[-1] == {"role": "user", "content": question}
        for (answer,), text in ((one.chosen, GOOD), (one.rejected, BAD)):
            assert answer.keys() == {"role", "content"}
            assert re.fullmatch(rf"{text} {number}(, .*)?", answer["content"])
        assert one.label > 0.5


@pytest.mark.parametrize("name", LAYOUTS)
def test_public_layouts_need_no_settings(name):
    rows = [LAYOUTS[name](n) for n in range(8)]
    check(rows, Layout(format="auto", columns={}), ties=2 if name in TIES else 0)


@pytest.mark.parametrize("name", ANSWERS_FOR_KTO)
def test_public_layouts_of_unpaired_rows_need_no_settings(name):
    rows = [ANSWERS_FOR_KTO[name](n) for n in range(8)]
    made = decode(rows, find_layout(rows, "a.jsonl"))
    assert [(one.prompt, one.chosen[0]["content"], one.sign) for one in made] == [
        (chat(f"Q {n}?"), f"{(GOOD, BAD)[n % 2]} {n}", (1, -1)[n % 2]) for n in range(8)
    ]


def test_the_documentation_lists_the_public_sets_that_need_no_setting():
    page = (ROOT / "docs" / "data.md").read_text()
    table = page.partition("### Public sets that need no setting")[2].partition("\n#")[0]
    listed = re.findall(r"`([^`]+)`", "".join(line for line in table.splitlines() if line.startswith("|")))
    assert sorted(listed) == sorted([*LAYOUTS, *ANSWERS_FOR_KTO])


@pytest.mark.parametrize("name", SETTINGS)
def test_other_layouts_work_with_the_settings_that_the_error_names(name):
    make, message, settings = SETTINGS[name]
    rows = [make(n) for n in range(8)]
    with pytest.raises(UserError) as error:
        find_layout(rows, "a.jsonl")
    assert message in str(error.value)
    again = yaml.safe_load(yaml.safe_dump(settings))  # as params.yaml holds them
    check(
        rows,
        Layout(**{"format": "auto", "columns": {}, **again}),
        ties=2 if name in TIES else 0,
    )


def test_pairs_with_scores_are_not_taken_for_messages():
    rows = [LAYOUTS["HuggingFaceH4/ultrafeedback_binarized"](n) for n in range(8)]
    assert find_layout(rows, "a.jsonl").shape == "pairs"
    assert {one.margin for one in decode(rows, find_layout(rows, "a.jsonl"))} == {4.5}
    wrong = find_layout(rows, "a.jsonl", Layout(format="messages", columns={}))
    assert decode(rows, wrong) == []
    assert better_shape(rows, wrong) == "pairs"
    assert better_shape(rows, find_layout(rows, "a.jsonl")) is None


def test_the_error_of_a_vote_column_shows_its_values_and_both_answers():
    rows = [SETTINGS["GAIR/autoj"][0](n) for n in range(8)]
    with pytest.raises(UserError, match=r"`label` holds 0 \(3 times\), 1 \(3 times\), 2 \(2 times\) in the first 8"):
        find_layout(rows, "a.jsonl")
    mapped = {"response1": "response 1", "response2": "response 2", "annotator1": "label"}  # once read as PandaLM's
    with pytest.raises(UserError, match=r"not evident.*first is `response 1`, second is `response 2`"):
        find_layout(rows, "a.jsonl", Layout(format="votes", columns=mapped))


def test_errors_name_the_columns_of_the_file():
    votes = Layout(format="auto", columns={}, values={"winner": {1: "first"}})
    with pytest.raises(UserError, match=r"prepare\.values has no effect: a\.jsonl is read as pairs"):
        find_layout([{"prompt": "Q?", **texts(0)}], "a.jsonl", votes)
    rows = [{"input": "Q?", "text": "a", "tag": "x"}]
    with pytest.raises(UserError, match=r"a\.jsonl has the columns input, text, tag, which match no known row shape"):
        find_layout(rows, "a.jsonl")


@pytest.mark.parametrize(
    ("values", "columns", "first"),
    [
        (("A", "B", "tie"), ("response1", "response2"), "a"),
        (("model_a", "model_b", "tie (bothbad)"), ("conversation_a", "conversation_b"), "model_a"),
        (("1", 2), ("output_1", "output_2"), "1"),
        ((0, 1.0), ("response_0", "response_1"), "0"),
        (("response_2", "response_1"), ("response_1", "response_2"), "response_1"),
        ((0, 1), ("response_1", "response_2"), None),
        ((0, 1, 2), ("response_1", "response_2"), None),
        ((0, 1), ("response_a", "response_b"), None),
        (("[[A>B]]", "b > a"), ("response_1", "response_2"), "a"),
        ((-3, -1, 0, 2), ("response_a", "response_b"), "<0"),
        ((-1, 0, 1), ("response_a", "response_b"), None),
        ((1, 2, 3), ("response_a", "response_b"), None),
        ((1.0, 1.4, 2), ("output_1", "output_2"), "1"),
        ((1.1, 1.4), ("output_1", "output_2"), None),
        ((1.2, 1.9), ("output_a", "output_b"), None),
        ((float("nan"), float("inf"), 0.5), ("output_1", "output_2"), None),
        ((-1, 1), ("response_a", "response_b"), None),
        ((True, False), ("response_a", "response_b"), None),
    ],
)
def test_values_are_understood_only_where_they_are_evident(values, columns, first):
    rows = [{"prompt": "Q?", columns[0]: "x", columns[1]: "y", "winner": value} for value in values]
    if first is None:
        with pytest.raises(UserError, match=r"(not evident|do not say who wins).*prepare\.values"):
            find_layout(rows, "a.jsonl")
    else:
        votes = find_layout(rows, "a.jsonl").votes
        assert next(value for value, meaning in votes.items() if meaning == "first") == first


def test_ties_of_scores_follow_prepare_ties():
    rows = [{"prompt": "Q?", "response_a": "x", "response_b": "y", "winner_model_a": 0, "winner_model_b": 0}]
    layout = find_layout(rows, "a.jsonl")
    assert decode(rows, layout) == []
    assert [one.label for one in decode(rows, replace(layout, ties="soft"))] == [0.5]
