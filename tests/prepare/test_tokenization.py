"""Preferences to tokens: prompt + response are exactly the tokens of the whole text."""

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from tasks.errors import UserError
from tasks.prepare.rows.preference import Preference
from tasks.prepare.templates import CHATML, PLAIN, ChatTemplate, choose_template, encode
from tasks.prepare.tokenization import TokenizedPair, tokenize, truncate
from tasks.source.reject_reasons import RejectedRow
from training.models.ends import end_ids_of


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


PROMPT = [turn("user", "hello there")]
GOOD, BAD = [turn("assistant", "hello you")], [turn("assistant", "go away")]
PAIR = Preference(PROMPT, GOOD, BAD)


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(["hello there hello you go away user assistant\n\n"] * 4, trainer)
    inner.decoder = ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def make(template: str | None = CHATML, wanted: str = "auto", **options) -> ChatTemplate:
    return choose_template(make_tokenizer(template), wanted, **options)


def whole(template: ChatTemplate, conversation: list[dict[str, str]]) -> list[int]:
    text = template.tokenizer.apply_chat_template(conversation, tokenize=False)
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("answer", ["hello you", "\n\nhello", " you", "<|im_start|>", "user\nhello <|im_end|> there"])
@pytest.mark.parametrize("prompt", ["hello there", "go\n<|im_start|>away\n", "<|im_end|>"])
def test_prompt_and_response_are_the_tokens_of_the_whole_conversation(prompt, answer):
    template = make("{% for m in messages %}<|im_start|>{{ m['role'] }}{{ m['content'] }}<|im_end|>{% endfor %}"
                    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}")  # fmt: skip
    pair = Preference([turn("user", prompt)], [turn("assistant", answer)], BAD)
    (tokens,) = tokenize(template, [pair])
    expected = whole(template, pair.prompt + pair.chosen)
    text = template.tokenizer.decode(expected)
    if tokens.merged:  # a token of the whole lies across the border: the texts are the same all the same
        assert template.tokenizer.decode(tokens.prompt_ids + tokens.chosen_ids) == text
    else:
        assert tokens.prompt_ids + tokens.chosen_ids == expected
    assert tokens.prompt_ids + tokens.rejected_ids == whole(template, pair.prompt + pair.rejected)


def test_a_text_is_not_cut_where_that_changes_its_tokens():
    template = make()
    begins = [turn("user", "hello")]
    broken = replace(template, added_tokens=("ello",))  # no border at all: the word would fall apart
    pairs = [Preference(begins, GOOD, BAD)]
    assert tokenize(broken, pairs) == tokenize(template, pairs)


def test_the_newline_that_chatml_writes_after_the_end_is_not_in_the_response():
    template = make()
    (tokens,) = tokenize(template, [PAIR])
    text = template.tokenizer.decode(tokens.prompt_ids + tokens.chosen_ids)
    assert text == "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\nhello you<|im_end|>"
    assert template.tokenizer.decode(tokens.prompt_ids).endswith("<|im_start|>assistant\n")
    assert tokens.chosen_ids.count(template.tokenizer.eos_token_id) == 1  # and nothing behind it
    assert tokens.rejected_ids[-1] == template.tokenizer.eos_token_id
    assert tokens.chosen_mask == [1] * len(tokens.chosen_ids)
    assert not tokens.merged


def test_a_turn_may_end_with_another_token_than_the_text():
    template = make()
    template.tokenizer.eos_token = "<s>"  # as Gemma's <end_of_turn> is not its <eos>
    (tokens,) = tokenize(template, [PAIR])
    assert template.tokenizer.decode(tokens.chosen_ids) == "hello you<|im_end|>"


def test_the_template_is_the_models_own_a_built_in_one_or_a_text():
    assert make().name == "the model's chat template"
    for template in (make(None), make(wanted="plain")):
        assert template.name == "the built-in plain"
        assert template.tokenizer.chat_template == PLAIN
    assert make(None, "chatml").tokenizer.chat_template == CHATML
    own = make(wanted="{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert own.name == "the text in prepare.template"
    assert own.tokenizer.decode(tokenize(own, [PAIR])[0].prompt_ids) == "[hello there]"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(UserError, match=r"chatml needs the token <\|im_end\|>"):
        choose_template(tokenizer, "chatml")


def test_the_template_gets_its_arguments():
    shout = "{% for m in messages %}{{ m['content'] }}{{ mark }}{% endfor %}"
    template = make(shout, kwargs={"mark": "!!"})
    assert template.tokenizer.decode(tokenize(template, [PAIR])[0].prompt_ids) == "hello there!!"


def test_plain_has_one_bos_and_one_eos():
    template = make(None)
    (tokens,) = tokenize(template, [PAIR])
    assert tokens.prompt_ids.count(template.tokenizer.bos_token_id) == 1
    text = template.tokenizer.decode(tokens.prompt_ids + tokens.chosen_ids)
    assert text == "<s>User: hello there\nAssistant: hello you<|im_end|>"


def test_a_doubled_bos_becomes_one():
    template = make("<s>" + PLAIN)
    (tokens,) = tokenize(template, [PAIR])
    assert tokens.prompt_ids.count(template.tokenizer.bos_token_id) == 1


def test_a_merge_of_prompt_and_response_is_detected():
    template = make("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    pair = Preference([turn("user", "hel")], [turn("assistant", "lo you")], [turn("assistant", "lo away")])
    (tokens,) = tokenize(template, [pair])
    assert tokens.merged
    assert template.tokenizer.decode(tokens.prompt_ids) == "hel"
    assert template.tokenizer.decode(tokens.prompt_ids + tokens.chosen_ids) == "hello you<|im_end|>"


@pytest.mark.parametrize(
    ("loss_on", "in_loss"), [("last", ["go<|im_end|>"]), ("all", ["hello<|im_end|>", "go<|im_end|>"])]
)
def test_the_loss_mask_covers_only_assistant_turns(loss_on, in_loss):
    template = make(loss_on=loss_on)
    chosen = [turn("assistant", "hello"), turn("user", "you"), turn("tool", "there"), turn("assistant", "go")]
    (tokens,) = tokenize(template, [Preference(PROMPT, chosen, BAD)])
    assert (
        tokens.prompt_ids + tokens.chosen_ids == whole(template, PROMPT + chosen)[:-1]
    )  # without ChatML's last newline
    assert tokens.rejected_mask == [1] * len(tokens.rejected_ids)
    runs, before = [], 0
    for token, masked in zip(tokens.chosen_ids, tokens.chosen_mask, strict=True):
        if masked:
            runs = [*runs, [token]] if not before else [*runs[:-1], [*runs[-1], token]]
        before = masked
    assert [template.tokenizer.decode(run) for run in runs] == in_loss


def test_an_answer_that_starts_with_a_user_turn_starts_outside_the_loss():
    template = make(loss_on="all")
    shared = [*PROMPT, *GOOD]
    pair = Preference(shared, [turn("user", "you"), *GOOD], [turn("user", "go"), *BAD])
    (tokens,) = tokenize(template, [pair])
    assert tokens.prompt_ids == whole(template, shared)
    assert template.tokenizer.decode([t for t, m in zip(tokens.chosen_ids, tokens.chosen_mask, strict=True) if m]) == (
        "hello you<|im_end|>"
    )
    assert tokens.chosen_mask[0] == 0


def test_tools_reach_the_template():
    template = make("{% for t in tools or [] %}<{{ t['name'] }}>{% endfor %}" + CHATML)
    (tokens,) = tokenize(template, [Preference(PROMPT, GOOD, BAD, tools=[{"name": "look"}])])
    assert template.tokenizer.decode(tokens.prompt_ids).startswith("<look><|im_start|>user")


def test_a_template_that_raises_or_rewrites_the_prompt_rejects_the_row():
    wanted = "{{ raise_exception('no') if message.content == 'x' else message.content }}"
    fussy = CHATML.replace("{{ message['content'] }}", wanted)
    results = tokenize(make(fussy), [PAIR, Preference([turn("user", "x")], GOOD, BAD)])
    assert isinstance(results[0], TokenizedPair)
    assert isinstance(results[1], RejectedRow)
    assert results[1].name == "template_refused"
    (bad,) = tokenize(make("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"), [PAIR])
    assert isinstance(bad, RejectedRow)
    assert bad.name == "template_rewrites"


def test_the_tokens_that_end_an_answer_are_those_of_the_model_folder(tmp_path):
    tokenizer = make_tokenizer()
    eos = tokenizer.eos_token_id

    def ends(name: str, **values) -> set[int]:
        (tmp_path / name).write_text(json.dumps(values))
        return set(end_ids_of(tokenizer, tmp_path)) - {eos}

    text = {"model_type": "gemma3_text", "eos_token_id": 95}
    assert ends("config.json", model_type="gemma3", eos_token_id=None, text_config=text) == {95}
    assert ends("config.json", model_type="llama", eos_token_id=95) == {95}
    assert ends("generation_config.json", temperature=1.0) == {95}
    assert ends("generation_config.json", eos_token_id=[96, -1]) == {96}
    assert eos in end_ids_of(tokenizer, tmp_path)


def test_truncation_set_in_the_tokenizer_is_switched_off():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    template = choose_template(tokenizer, "auto")
    assert len(encode(template.tokenizer, ["hello there you go away"])[0]) > 3


@pytest.mark.parametrize("count", [0, 3])
def test_many_conversations_keep_their_order(count):
    pairs = [Preference(PROMPT, [turn("assistant", f"hello {n}")], BAD) for n in range(count)]
    template = make()
    texts = [template.tokenizer.decode(tokens.chosen_ids) for tokens in tokenize(template, pairs)]
    assert texts == [f"hello {n}<|im_end|>" for n in range(count)]


LONG = TokenizedPair([1, 5, 6, 7], [8, 9, 10, 2], [11, 2], [1, 1, 1, 1], [1, 1])


@pytest.mark.parametrize(
    ("most", "policy", "prompt", "chosen", "rejected"),
    [
        (8, "drop", [1, 5, 6, 7], [8, 9, 10, 2], [11, 2]),
        (7, "truncate_prompt", [1, 6, 7], [8, 9, 10, 2], [11, 2]),  # the first token stays
        (6, "truncate_prompt", [1, 7], [8, 9, 10, 2], [11, 2]),
        (6, "truncate_response", [1, 5, 6, 7], [8, 9], [11, 2]),
        (5, "truncate_response", [1, 5, 6, 7], [8], [11]),
    ],
)
def test_both_responses_keep_the_same_prompt(most, policy, prompt, chosen, rejected):
    truncated = truncate(LONG, most, policy, bos_id=1)
    assert isinstance(truncated, TokenizedPair)
    assert (truncated.prompt_ids, truncated.chosen_ids, truncated.rejected_ids) == (prompt, chosen, rejected)
    assert len(truncated.chosen_mask) == len(chosen)
    assert truncated.truncated == (most < 8)


@pytest.mark.parametrize(
    ("tokens", "most", "policy"),
    [
        (LONG, 7, "drop"),
        (LONG, 5, "truncate_prompt"),  # one token for the prompt, and that is the first
        (LONG, 4, "truncate_response"),
        (
            TokenizedPair([1], [8, 9, 2], [8, 9, 3, 2], [1, 1, 1], [1, 1, 1, 1]),
            3,
            "truncate_response",
        ),  # 8, 9 of both
        (
            TokenizedPair([1], [8, 9, 2], [7, 9, 3, 2], [0, 0, 1], [1, 1, 1, 1]),
            3,
            "truncate_response",
        ),  # none of 8, 9 counts
    ],
)
def test_a_pair_that_truncation_would_empty_is_skipped(tokens, most, policy):
    rejected = truncate(tokens, most, policy, bos_id=1)
    assert isinstance(rejected, RejectedRow)
    assert rejected.name == "over_length"
