"""Conversations to tokens: nothing doubled, nothing lost, and prompt + response is the whole text."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from tasks.dataset.conversations import Conversation
from tasks.dataset.lengths import fit
from tasks.dataset.templates import CHATML, PLAIN, Template, Tokens, choose_template, encode, tokenise
from tasks.dataset.violations import BadRow
from tasks.errors import UserError


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED = [say("user", "hello there")]
GOOD, BAD = [say("assistant", "hello you")], [say("assistant", "go away")]
TALK = Conversation(ASKED, GOOD, BAD)


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


def make(template: str | None = CHATML, wanted: str = "auto", **options) -> Template:
    return choose_template(make_tokenizer(template), wanted, **options)


def whole(template: Template, conversation: list[dict[str, str]]) -> list[int]:
    text = template.tokenizer.apply_chat_template(conversation, tokenize=False)
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("answer", ["hello you", "\n\nhello", " you", "<|im_start|>", "user\nhello <|im_end|> there"])
@pytest.mark.parametrize("prompt", ["hello there", "go\n<|im_start|>away\n", "<|im_end|>"])
def test_prompt_and_response_are_the_tokens_of_the_whole_conversation(prompt, answer):
    template = make("{% for m in messages %}<|im_start|>{{ m['role'] }}{{ m['content'] }}<|im_end|>{% endfor %}"
                    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}")  # fmt: skip
    talk = Conversation([say("user", prompt)], [say("assistant", answer)], BAD)
    (tokens,) = tokenise(template, [talk])
    expected = whole(template, talk.prompt + talk.chosen)
    text = template.tokenizer.decode(expected)
    if tokens.merged:  # a token of the whole lies across the border: the texts are the same all the same
        assert template.tokenizer.decode(tokens.prompt + tokens.chosen) == text
    else:
        assert tokens.prompt + tokens.chosen == expected
    assert tokens.prompt + tokens.rejected == whole(template, talk.prompt + talk.rejected)


def test_a_tokenizer_that_is_not_the_same_in_pieces_is_not_cut():
    template = make()
    begins = [say("user", "hello")]
    broken = replace(template, borders=("ello",))  # no border at all: the word would fall apart
    talks = [Conversation(begins, GOOD, BAD)]
    assert tokenise(broken, talks) == tokenise(template, talks)


def test_what_chatml_writes_after_the_end_does_not_count():
    template = make()
    (tokens,) = tokenise(template, [TALK])
    text = template.tokenizer.decode(tokens.prompt + tokens.chosen)
    assert text == "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\nhello you<|im_end|>"
    assert template.tokenizer.decode(tokens.prompt).endswith("<|im_start|>assistant\n")
    assert tokens.chosen.count(template.tokenizer.eos_token_id) == 1  # and nothing behind it
    assert tokens.rejected[-1] == template.tokenizer.eos_token_id
    assert tokens.chosen_mask == [1] * len(tokens.chosen)
    assert not tokens.merged


def test_a_turn_may_end_with_another_token_than_the_text():
    template = make()
    template.tokenizer.eos_token = "<s>"  # as Gemma's <end_of_turn> is not its <eos>
    (tokens,) = tokenise(template, [TALK])
    assert template.tokenizer.decode(tokens.chosen) == "hello you<|im_end|>"


def test_the_models_template_is_used_and_a_named_one_or_a_text_where_asked_for():
    assert make().name == "the model's chat template"
    for template in (make(None), make(wanted="plain")):
        assert template.name == "the built-in plain"
        assert template.tokenizer.chat_template == PLAIN
    assert make(None, "chatml").tokenizer.chat_template == CHATML
    own = make(wanted="{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert own.name == "the text in prepare.template"
    assert own.tokenizer.decode(tokenise(own, [TALK])[0].prompt) == "[hello there]"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(UserError, match=r"no <\|im_end\|>, so chatml is not for it"):
        choose_template(tokenizer, "chatml")


def test_the_template_gets_its_arguments():
    shout = "{% for m in messages %}{{ m['content'] }}{{ mark }}{% endfor %}"
    template = make(shout, kwargs={"mark": "!!"})
    assert template.tokenizer.decode(tokenise(template, [TALK])[0].prompt) == "hello there!!"


def test_plain_has_one_bos_and_one_eos():
    template = make(None)
    (tokens,) = tokenise(template, [TALK])
    assert tokens.prompt.count(template.tokenizer.bos_token_id) == 1
    text = template.tokenizer.decode(tokens.prompt + tokens.chosen)
    assert text == "<s>User: hello there\nAssistant: hello you<|im_end|>"


def test_a_doubled_bos_becomes_one():
    template = make("<s>" + PLAIN)
    (tokens,) = tokenise(template, [TALK])
    assert tokens.prompt.count(template.tokenizer.bos_token_id) == 1


def test_a_merge_across_the_border_is_seen_and_handled():
    template = make("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    talk = Conversation([say("user", "hel")], [say("assistant", "lo you")], [say("assistant", "lo away")])
    (tokens,) = tokenise(template, [talk])
    assert tokens.merged
    assert template.tokenizer.decode(tokens.prompt) == "hel"
    assert template.tokenizer.decode(tokens.prompt + tokens.chosen) == "hello you"


@pytest.mark.parametrize(
    ("loss_on", "counted"), [("last", ["go<|im_end|>"]), ("all", ["hello<|im_end|>", "go<|im_end|>"])]
)
def test_of_several_turns_only_the_assistants_count(loss_on, counted):
    template = make(loss_on=loss_on)
    chosen = [say("assistant", "hello"), say("user", "you"), say("tool", "there"), say("assistant", "go")]
    (tokens,) = tokenise(template, [Conversation(ASKED, chosen, BAD)])
    assert tokens.prompt + tokens.chosen == whole(template, ASKED + chosen)[:-1]  # without ChatML's last newline
    assert tokens.rejected_mask == [1] * len(tokens.rejected)
    runs, before = [], 0
    for token, counts in zip(tokens.chosen, tokens.chosen_mask, strict=True):
        if counts:
            runs = [*runs, [token]] if not before else [*runs[:-1], [*runs[-1], token]]
        before = counts
    assert [template.tokenizer.decode(run) for run in runs] == counted


def test_a_conversation_that_parts_at_a_users_turn_begins_with_tokens_that_do_not_count():
    template = make(loss_on="all")
    shared = [*ASKED, *GOOD]
    talk = Conversation(shared, [say("user", "you"), *GOOD], [say("user", "go"), *BAD])
    (tokens,) = tokenise(template, [talk])
    assert tokens.prompt == whole(template, shared)
    assert template.tokenizer.decode([t for t, m in zip(tokens.chosen, tokens.chosen_mask, strict=True) if m]) == (
        "hello you<|im_end|>"
    )
    assert tokens.chosen_mask[0] == 0


def test_tools_reach_the_template():
    template = make("{% for t in tools or [] %}<{{ t['name'] }}>{% endfor %}" + CHATML)
    (tokens,) = tokenise(template, [Conversation(ASKED, GOOD, BAD, tools=[{"name": "look"}])])
    assert template.tokenizer.decode(tokens.prompt).startswith("<look><|im_start|>user")


def test_a_template_that_refuses_or_rewrites_the_prompt_makes_a_bad_row():
    fussy = CHATML.replace("{{ message['content'] }}", "{{ raise_exception('no') if message.content == 'x' else 1 }}")
    results = tokenise(make(fussy), [TALK, Conversation([say("user", "x")], GOOD, BAD)])
    assert isinstance(results[0], Tokens)
    assert isinstance(results[1], BadRow)
    assert results[1].name == "template_refused"
    (bad,) = tokenise(make("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"), [TALK])
    assert isinstance(bad, BadRow)
    assert bad.name == "template_rewrites"


def test_a_tokenizer_that_truncates_does_not():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    template = choose_template(tokenizer, "auto")
    assert len(encode(template.tokenizer, ["hello there you go away"])[0]) > 3


@pytest.mark.parametrize("count", [0, 3])
def test_many_conversations_keep_their_order(count):
    talks = [Conversation(ASKED, [say("assistant", f"hello {n}")], BAD) for n in range(count)]
    template = make()
    texts = [template.tokenizer.decode(tokens.chosen) for tokens in tokenise(template, talks)]
    assert texts == [f"hello {n}<|im_end|>" for n in range(count)]


LONG = Tokens([1, 5, 6, 7], [8, 9, 10, 2], [11, 2], [1, 1, 1, 1], [1, 1])


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
    fitted = fit(LONG, most, policy, bos=1)
    assert isinstance(fitted, Tokens)
    assert (fitted.prompt, fitted.chosen, fitted.rejected) == (prompt, chosen, rejected)
    assert len(fitted.chosen_mask) == len(chosen)
    assert fitted.truncated == (most < 8)


@pytest.mark.parametrize(
    ("tokens", "most", "policy"),
    [
        (LONG, 7, "drop"),
        (LONG, 5, "truncate_prompt"),  # one token for the prompt, and that is the first
        (LONG, 4, "truncate_response"),
        (
            Tokens([1], [8, 9, 2], [8, 9, 3, 2], [1, 1, 1], [1, 1, 1, 1]),
            3,
            "truncate_response",
        ),  # 8, 9 of both
        (Tokens([1], [8, 9, 2], [7, 9, 3, 2], [0, 0, 1], [1, 1, 1, 1]), 3, "truncate_response"),  # none of 8, 9 counts
    ],
)
def test_what_would_be_emptied_is_left_out(tokens, most, policy):
    bad = fit(tokens, most, policy, bos=1)
    assert isinstance(bad, BadRow)
    assert bad.name == "over_length"
