"""Conversations to tokens: nothing doubled, nothing lost, and prompt + response is the whole text."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tasks.formats import BadRow, Conversation
from tasks.templates import PLAIN, choose_template, tokenise

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = Conversation([{"role": "user", "content": "hello there"}], "hello you", "go away")


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(["hello there hello you go away user assistant"] * 4, trainer)
    from tokenizers.decoders import ByteLevel

    inner.decoder = ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def test_prompt_and_response_are_the_templated_conversation_up_to_its_end():
    tokenizer = make_tokenizer()
    (tokens,) = tokenise(tokenizer, [TALK])
    text = tokenizer.decode(tokens.prompt + tokens.chosen)
    assert text == "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\nhello you<|im_end|>"
    assert tokenizer.decode(tokens.prompt).endswith("<|im_start|>assistant\n")
    assert tokens.chosen.count(tokenizer.eos_token_id) == 1  # and nothing behind it
    assert tokens.rejected[-1] == tokenizer.eos_token_id
    assert not tokens.merged


def test_the_models_template_is_used_and_plain_where_there_is_none():
    assert choose_template(make_tokenizer(), "auto") == "the model's chat template"
    for tokenizer, wanted in ((make_tokenizer(None), "auto"), (make_tokenizer(), "plain")):
        assert choose_template(tokenizer, wanted) == "plain"
        assert tokenizer.chat_template == PLAIN


def test_plain_has_one_bos_and_one_eos():
    tokenizer = make_tokenizer(None)
    choose_template(tokenizer, "auto")
    (tokens,) = tokenise(tokenizer, [TALK])
    assert tokens.prompt.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(tokens.prompt + tokens.chosen) == "<s>User: hello there\nAssistant: hello you<|im_end|>"


def test_a_merge_across_the_border_is_seen_and_handled():
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    talk = Conversation([{"role": "user", "content": "hel"}], "lo you", "lo away")
    (tokens,) = tokenise(tokenizer, [talk])
    assert tokens.merged
    assert tokenizer.decode(tokens.prompt) == "hel"
    assert tokenizer.decode(tokens.prompt + tokens.chosen) == "hello you"


def test_a_template_that_refuses_or_rewrites_the_prompt_makes_a_bad_row():
    refuses = make_tokenizer("{{ raise_exception('no system turns') }}")
    rewrites = make_tokenizer("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for tokenizer, reason in ((refuses, "no system turns"), (rewrites, "changes the prompt")):
        (bad,) = tokenise(tokenizer, [TALK])
        assert isinstance(bad, BadRow)
        assert reason in str(bad)


@pytest.mark.parametrize("count", [0, 3])
def test_many_conversations_keep_their_order(count):
    talks = [Conversation(TALK.prompt, f"hello {n}", "go away") for n in range(count)]
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(tokens.chosen) for tokens in tokenise(tokenizer, talks)]
    assert texts == [f"hello {n}<|im_end|>" for n in range(count)]
