"""Nothing of a conversation is lost between a row and its tokens: every chat template that TRL ships, and some of ours.

The templates are those of the wheel `trl`, read from its files. Each gets a tokenizer of bytes that knows the special
tokens in its text.
"""

import json
import re
from dataclasses import replace
from functools import cache
from importlib.metadata import files
from itertools import product

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from tasks.prepare.frames import opens_thought
from tasks.prepare.rows.preference import Preference
from tasks.prepare.rows.reasoning import separate
from tasks.prepare.sides import Note
from tasks.prepare.templates import ChatTemplate, choose_template
from tasks.prepare.tokenization import TokenizedPair, tokenize
from tasks.source.reject_reasons import RejectedRow

SPECIAL = re.compile(r"<[|｜][^<>'\"\s]+[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_\w+>|</s>|<sop>|\[gMASK\]")
ENDS = ("<|return|>", "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|eot|>")
TEMPLATES = {
    path.stem: path.locate().read_text()
    for path in files("trl")
    if path.suffix == ".jinja" and not path.stem.endswith("_training")
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather_of",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "description": "Which town?"}},
                "required": ["town"],
            },
        },
    }
]
IN_TOOLS = ["weather_of", "Tells the weather.", "town", "Which town?"]


def system(content: str) -> dict:
    return {"role": "system", "content": content}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


def call(town: str = "Oslo in the north", number: str = "call00001") -> dict:
    function = {"name": "weather_of", "arguments": {"town": town}}
    return assistant("", tool_calls=[{"id": number, "type": "function", "function": function}])


def result(content: str = "Rain, 7 degrees.", number: str = "call00001") -> dict:
    return {"role": "tool", "content": content, "tool_call_id": number, "name": "weather_of"}


QUESTION = [user("Where is the cup?")]
GOOD, BAD = assistant("On the table."), assistant("Look yourself!")
THOUGHT = "They mean the blue cup."
INLINE = assistant(f"<think>\n{THOUGHT}\n</think>\n\nOn the table.")
EARLIER = [user("Hello there."), assistant("<think>\nGreet back.\n</think>\n\nHello to you."), *QUESTION]
CASES = {  # prompt, chosen, tools, and what must be found in the prompt and the chosen answer besides their contents
    "one turn": (QUESTION, [GOOD], None),
    "system": ([system("Be brief and kind."), *QUESTION], [GOOD], None),
    "several turns": ([user("Hello there."), assistant("Hello to you."), *QUESTION], [GOOD], None),
    "reasoning in the content": (QUESTION, [INLINE], None),
    "reasoning in its field": (QUESTION, [{**GOOD, "reasoning_content": THOUGHT}], None),
    "earlier reasoning": (EARLIER, [GOOD], None),
    "tools": (QUESTION, [GOOD], TOOLS),
    "a call": (QUESTION, [call()], TOOLS),
    "a call without tools": (QUESTION, [call()], None),
    "a result": ([*QUESTION, call(), result()], [GOOD], TOOLS),
    "an answer of several turns": (QUESTION, [call(), result(), GOOD], TOOLS),
}


@cache
def tokenizer_of(text: str) -> PreTrainedTokenizerFast:
    special = sorted({*SPECIAL.findall(text), "<bos>", "<eos>"})
    inner = Tokenizer(models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    end = next((end for end in ENDS if end in special), "<eos>")
    names = {"bos_token": "<bos>", "eos_token": end, "extra_special_tokens": special}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def make(text: str, stops: tuple[str, ...] = (), **options) -> ChatTemplate:
    template = choose_template(tokenizer_of(text), text)
    ids = {template.tokenizer.convert_tokens_to_ids(stop) for stop in stops}
    return replace(template, stop_ids=template.stop_ids | ids, end_ids=template.end_ids | ids, **options)


def render(template: ChatTemplate, prompt, chosen, tools=None, rejected=None) -> TokenizedPair | RejectedRow:
    (tokens,) = tokenize(template, [Preference(prompt, chosen, rejected or [*chosen[:-1], BAD], tools=tools)])
    return tokens


def shown(template: ChatTemplate, tokens: TokenizedPair) -> tuple[str, str]:
    return template.tokenizer.decode(tokens.prompt_ids), template.tokenizer.decode(tokens.chosen_ids)


def inference_prompts(template: ChatTemplate, turns, tools) -> list[list[int]]:
    """What a server gives the model, in each form in which a client may hand over messages."""
    found = []
    for parts, as_text, none, thoughts in product((False, True), (False, True), (False, True), ("out", "in", "field")):
        messages = [client_turn(turn, parts, as_text, none, thoughts) for turn in turns]
        options = {"tools": tools, "chat_template": template.tokenizer.chat_template, "add_generation_prompt": True}
        try:
            text = template.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception:  # the template does not take this form
            continue
        found.append(template.tokenizer(text, add_special_tokens=False)["input_ids"])
    return found


def client_turn(turn: dict, parts: bool, as_text: bool, none: bool, thoughts: str) -> dict:
    made = {**turn}
    if turn["role"] == "assistant" and "</think>" in turn["content"] and thoughts != "in":
        thought, made["content"] = turn["content"].split("</think>\n\n")
        made |= {"reasoning_content": thought.removeprefix("<think>\n").strip()} if thoughts == "field" else {}
    if "tool_calls" in made:
        (one,) = made["tool_calls"]
        arguments = json.dumps(one["function"]["arguments"]) if as_text else one["function"]["arguments"]
        made["tool_calls"] = [{**one, "function": {**one["function"], "arguments": arguments}}]
        made["content"] = None if none else made["content"]
    if parts and made["content"] is not None:
        made["content"] = [{"type": "text", "text": made["content"]}]
    return made


def contents(turns, reasoning: bool) -> list[str]:
    """What must be in the text. Reasoning of earlier turns is as the template wants it."""
    texts = [turn["content"].split("</think>")[-1].strip() for turn in turns]
    for turn in turns:
        for one in turn.get("tool_calls", ()):
            texts += ["weather_of", "town", one["function"]["arguments"]["town"]]
    return [*filter(None, texts), *([THOUGHT] if reasoning else [])]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_template_loses_anything_without_a_reason_and_a_setting_that_helps(name, case):
    prompt, chosen, tools = CASES[case]
    template = make(TEMPLATES[name])
    tokens = render(template, prompt, chosen, tools)
    if isinstance(tokens, RejectedRow):
        reason = str(tokens)
        assert tokens.name in ("template_drops", "template_refused", "template_rewrites")
        assert template.name in reason
        if "prepare.tools to text" in reason:
            template = make(TEMPLATES[name], tools="text")
        elif "prepare.reasoning to text" in reason:
            template = make(TEMPLATES[name], reasoning="text")
        elif "prepare.reasoning to strip" in reason:
            template = make(TEMPLATES[name], reasoning="strip")
        else:
            assert (name, case) == ("gemma", "system")  # the one template that refuses a system turn
            assert "prepare.template" in reason
            return
        tokens = render(template, prompt, chosen, tools)
        assert isinstance(tokens, TokenizedPair), f"{reason}: the setting does not help: {tokens}"
    before, answer = shown(template, tokens)
    reasoning = "reasoning in" in case and template.reasoning != "strip"
    expected = [*contents([*prompt, *chosen], reasoning), *(IN_TOOLS if tools else [])]
    assert [text for text in expected if text not in before + answer] == []
    assert tokens.chosen_ids[-1] in template.end_ids
    assert tokens.chosen_ids[-1] not in tokens.chosen_ids[:-1] or len(chosen) > 1
    inside = tokens.chosen_mask.index(1)
    assert all(tokens.chosen_mask[inside:])
    if template.tools == "template":
        given = tokens.prompt_ids + tokens.chosen_ids[:inside]
        assert given in inference_prompts(template, [*prompt, *chosen[:-1]], tools)


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3"])
def test_an_answer_continues_the_thought_that_its_prompt_opens(name):
    template = make(TEMPLATES[name])
    for chosen in (INLINE, {**GOOD, "reasoning_content": THOUGHT}):
        tokens = render(template, QUESTION, [chosen])
        prompt, answer = shown(template, tokens)
        assert prompt.endswith("<｜Assistant｜><think>\n")
        assert answer == f"{THOUGHT}\n</think>\n\nOn the table.<｜end▁of▁sentence｜>"
        assert template.tokenizer.decode(tokens.rejected_ids) == "\n</think>\n\nLook yourself!<｜end▁of▁sentence｜>"
        assert tokens.notes == Note.REASONING_KEPT | Note.EMPTY_THOUGHT
    tokens = render(make(TEMPLATES[name], reasoning="strip"), QUESTION, [INLINE])
    assert shown(template, tokens)[1] == "\n</think>\n\nOn the table.<｜end▁of▁sentence｜>"
    assert tokens.notes == Note.REASONING_STRIPPED | Note.EMPTY_THOUGHT
    early = render(template, EARLIER, [GOOD])
    assert "Greet back." not in shown(template, early)[0]
    assert early.notes & Note.EARLIER_REASONING_LEFT_OUT


def test_an_empty_thought_is_written_as_the_template_writes_thoughts():
    template = make(TEMPLATES["nemotron_3_nano"])
    tokens = render(template, QUESTION, [{**GOOD, "reasoning_content": THOUGHT}])
    prompt, answer = shown(template, tokens)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    assert answer == f"{THOUGHT}\n</think>\nOn the table.<|im_end|>"
    assert template.tokenizer.decode(tokens.rejected_ids) == "\n</think>\nLook yourself!<|im_end|>"


def test_reasoning_goes_into_the_field_that_the_template_reads():
    template = make(TEMPLATES["gptoss"], ("<|call|>",))
    tokens = render(template, QUESTION, [INLINE])
    assert shown(template, tokens)[1] == (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
        "<|start|>assistant<|channel|>final<|message|>On the table.<|return|>"
    )
    calls = render(template, QUESTION, [call()], TOOLS)
    assert shown(template, calls)[1].endswith('{"town": "Oslo in the north"}<|call|>')


def test_a_turn_that_a_later_one_rewrites_is_in_the_loss_only_if_it_is_the_last():
    answer = [call(), result(), GOOD]
    tokens = render(make(TEMPLATES["qwen3"]), QUESTION, answer, TOOLS)
    template = make(TEMPLATES["qwen3"])
    inside = [token for token, masked in zip(tokens.chosen_ids, tokens.chosen_mask, strict=True) if masked]
    assert template.tokenizer.decode(inside) == "<think>\n\n</think>\n\nOn the table.<|im_end|>"
    rejected = render(make(TEMPLATES["qwen3"], loss_on="all"), QUESTION, answer, TOOLS)
    assert rejected.name == "template_rewrites"
    assert "prepare.loss_on to last" in str(rejected)
    every = render(make(TEMPLATES["qwen2_5"], loss_on="all"), QUESTION, answer, TOOLS)
    inside = [token for token, masked in zip(every.chosen_ids, every.chosen_mask, strict=True) if masked]
    assert template.tokenizer.decode(inside) == (
        '<tool_call>\n{"name": "weather_of", "arguments": {"town": "Oslo in the north"}}\n</tool_call><|im_end|>'
        "On the table.<|im_end|>"
    )


@pytest.mark.parametrize(
    ("stops", "after_answer", "after_call"),
    [((), "<eos>", "<eos>"), (("<|user|>", "<|observation|>"), "<|user|>", "<|observation|>")],
)
def test_an_answer_without_an_end_gets_the_models_own(stops, after_answer, after_call):
    template = make(TEMPLATES["glm4moe"], stops)
    tokens = render(template, QUESTION, [GOOD])
    assert shown(template, tokens)[1] == f"\n<think></think>\nOn the table.{after_answer}"
    assert tokens.notes == Note.END_ADDED
    assert shown(template, render(template, QUESTION, [call()], TOOLS))[1].endswith(f"</tool_call>{after_call}")
    several = [GOOD, user("And the other cup?"), assistant("In the kitchen.")]
    both = render(replace(template, loss_on="all"), QUESTION, several)
    inside = [token for token, masked in zip(both.chosen_ids, both.chosen_mask, strict=True) if masked]
    assert template.tokenizer.decode(inside).count(after_answer) == (2 if stops else 1)


def test_a_response_ends_where_the_model_stops_first():
    assert shown(t := make(TEMPLATES["phi3"], ("<|end|>",)), render(t, QUESTION, [GOOD]))[1] == "On the table.<|end|>"
    text = TEMPLATES["phi3"]
    alone = choose_template(PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(text).backend_tokenizer, eos_token="<eos>", bos_token="<bos>"), text)  # fmt: skip
    assert shown(alone, render(alone, QUESTION, [GOOD]))[1] == "On the table.<|end|>\n<eos>"  # it stops at nothing else


FORGETS_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_short_text_that_occurs_elsewhere_hides_no_loss():
    rejected = render(make(FORGETS_SYSTEM), [system("user"), *QUESTION], [GOOD])
    assert rejected.name == "template_drops"
    assert "the content of turn 1 (system)" in str(rejected)


def test_a_text_that_a_template_rewrites_is_noticed_in_its_row():
    soft = FORGETS_SYSTEM.replace("m.content", "(m.content | replace('damn', 'darn'))")
    template = make(soft)
    pairs = [Preference(QUESTION, [assistant(text)], [BAD]) for text in ("fine", "damn fine")]
    kept, rejected = tokenize(template, pairs)
    assert isinstance(kept, TokenizedPair)
    assert "the content of turn 2 (assistant)" in str(rejected)


def test_answers_that_a_template_makes_equal_are_no_pair():
    rejected = render(make(FORGETS_SYSTEM.replace("m.content", "m.content | trim")), QUESTION, [GOOD], None,
                      [assistant("On the table. \n")])  # fmt: skip
    assert rejected.name == "equal_answers"


LAST_USER = (  # Mistral: the system text is in the last user turn
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content ~ '\n' %}{% set ms = messages[1:] %}"
    "{% else %}{% set s = '' %}{% set ms = messages %}{% endif %}{% for m in ms %}"
    "{% if m.role == 'user' %}[INST]{% if IS_LAST %}{{ s }}{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
TALK = [system("Be brief and kind."), user("Hello there."), assistant("Hello to you."), *QUESTION]


def test_a_system_prompt_may_be_written_into_the_last_user_turn():
    by_role = make(LAST_USER.replace("IS_LAST", "m == (ms | selectattr('role', 'eq', 'user') | list)[-1]"))
    tokens = render(by_role, TALK, [GOOD])
    assert shown(by_role, tokens)[0].endswith("[INST]Be brief and kind.\nWhere is the cup?[/INST]")
    template = make(LAST_USER.replace("IS_LAST", "loop.last"))  # and with an answer it is in no turn
    rejected = render(template, TALK, [GOOD])
    assert rejected.name == "template_rewrites"
    assert "the system prompt is not written at the start" in str(rejected)
    assert isinstance(render(template, TALK[1:], [GOOD]), TokenizedPair)


@pytest.mark.parametrize(
    ("content", "ends_a_thought"),
    [
        (f"{THOUGHT}\n</think>\n\nOn the table.", True),
        ("</think>\n\nOn the table.", True),
        ("The tag </think> ends a thought.", False),
        ("Models end a thought with </think>\nand then answer.", False),
    ],
)
def test_a_text_may_mention_the_end_of_a_thought(content: str, ends_a_thought: bool):
    (turn,) = separate([assistant(content)])
    assert (turn["content"] != content) == ends_a_thought
    (after_opened,) = separate([assistant(content)], opened=True)
    assert after_opened["content"] != content
    template = make(TEMPLATES["qwen2_5"], reasoning="strip")
    shown_answer = shown(template, render(template, QUESTION, [assistant(content)]))[1]
    assert ("</think>" in shown_answer) != ends_a_thought


def test_a_prompt_that_opens_a_thought_lets_it_end_anywhere():
    assert not opens_thought(make(TEMPLATES["qwen2_5"]))
    template = make(TEMPLATES["deepseek_r1_distill"])
    tokens = render(template, QUESTION, [assistant(f"{THOUGHT}</think>On the table.")])
    assert shown(template, tokens)[1] == f"{THOUGHT}\n</think>\n\nOn the table.<｜end▁of▁sentence｜>"


TWO_CALLS = {**call(), "tool_calls": call()["tool_calls"] + call("Rome in the south", "call00002")["tool_calls"]}


@pytest.mark.parametrize(
    ("name", "field", "prompt", "chosen"),
    [
        ("qwen3", "`name` of turn 1", [{**QUESTION[0], "name": "Alice of the north"}], [GOOD]),
        ("qwen3", "`name` of turn 2 (tool)", [*QUESTION, result()], [GOOD]),
        ("gptoss", "`tool_calls[1]`", QUESTION, [TWO_CALLS]),
        ("gptoss", "`tool_calls[1]`", QUESTION, [{**call(), "tool_calls": [*call()["tool_calls"]] * 2}]),
        ("qwen3", "`tool_call_id`", [*QUESTION, TWO_CALLS, result("Sun.", "call00002"), result()], [GOOD]),
    ],
)
def test_what_the_template_drops_is_named(name, field, prompt, chosen):
    rejected = render(make(TEMPLATES[name]), prompt, chosen, None if "name" in field else TOOLS)
    assert rejected.name == "template_drops"
    assert field in str(rejected)


def test_a_call_without_arguments_and_tools_of_other_layouts_are_rendered():
    without = assistant("", tool_calls=[{"function": {"name": "weather_of"}}])
    for tools in (None, [TOOLS[0]["function"]], [{"name": "weather_of"}]):
        template = make(TEMPLATES["qwen3"])
        tokens = render(template, QUESTION, [without], tools)
        assert '{"name": "weather_of", "arguments": ' in shown(template, tokens)[1]
        assert "weather_of" in shown(template, tokens)[0] or not tools


def test_arguments_of_every_kind_are_found_again():
    arguments = {"deep": {"list": [1, 2.5, True, None, 'it\'s "so"\nand so']}, "town": "Köln"}
    chosen = assistant("", tool_calls=[{"function": {"name": "weather_of", "arguments": arguments}}])
    as_text = {"name": "weather_of", "arguments": '{"town": "Oslo"}'}
    for name in ("qwen2_5", "qwen3", "qwen3_5_think", "lfm2_v2", "glm4moe", "llama3_1", "gemma4_v5"):
        template = make(TEMPLATES[name])
        assert isinstance(render(template, QUESTION, [chosen], TOOLS), TokenizedPair), name
        tokens = render(template, QUESTION, [assistant("", tool_calls=[{"function": as_text}])], TOOLS)
        assert '\\"town' not in shown(template, tokens)[1]  # an object, not a text in a text


def test_tools_as_text_are_found_by_the_words_of_hermes():
    template = make(TEMPLATES["llama3"], tools="text")
    tokens = render(template, [*QUESTION, call(), result()], [call("Rome in the south")], TOOLS)
    prompt, answer = shown(template, tokens)
    assert answer == (
        '<tool_call>\n{"name": "weather_of", "arguments": {"town": "Rome in the south"}}\n</tool_call><|eot_id|>'
    )
    assert '<tool_response>\n{"name": "weather_of", "content": "Rain, 7 degrees."}\n</tool_response>' in prompt
    assert prompt.index("<tools>") < prompt.index("Where is the cup?")
    assert tokens.notes == Note.TOOLS_AS_TEXT


def test_tools_as_text_join_the_system_turn_or_else_the_first_question():
    told = [system("Be brief and kind."), *QUESTION]
    for name, prompt, before in (
        ("llama3", told, "Be brief and kind.\n\nYou may call these functions."),
        ("gemma", QUESTION, "<start_of_turn>user\nYou may call these functions."),
    ):
        template = make(TEMPLATES[name], tools="text")
        text, _ = shown(template, render(template, prompt, [GOOD], TOOLS))
        assert before in text
        assert text.index("</tools>") < text.index("Where is the cup?")
    results = [result("Sun.", "call00002"), result("Rain.", "call00001")]
    text, _ = shown(template, render(template, [*QUESTION, TWO_CALLS, *results], [GOOD], TOOLS))
    assert text.index("Rain.") < text.index("Sun.")  # in the order of their calls, which have no ids here
