"""Conversations to tokens: one prompt and two responses, so that prompt + response is the whole templated text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.formats import BadRow, Conversation

# For a model without a chat template.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant: {{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True)
class Tokens:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    merged: bool  # the tokenizer merged across the border, so the response was tokenised on its own


def choose_template(tokenizer: Any, wanted: str) -> str:
    """Set the template on the tokenizer; its name, for the report."""
    if wanted == "auto" and tokenizer.chat_template:
        return "the model's chat template"
    tokenizer.chat_template = PLAIN
    return "plain"


def tokenise(tokenizer: Any, conversations: Sequence[Conversation]) -> list[Tokens | BadRow]:
    """Tokens of each conversation, or why it has none. One call of the tokenizer for all."""
    texts = [_texts(tokenizer, conversation) for conversation in conversations]
    flat = [text for triple in texts if isinstance(triple, tuple) for text in triple]
    ids = iter(tokenizer(flat, add_special_tokens=False)["input_ids"] if flat else [])
    return [
        _tokens(tokenizer, triple, (next(ids), next(ids), next(ids))) if isinstance(triple, tuple) else triple
        for triple in texts
    ]


def _texts(tokenizer: Any, conversation: Conversation) -> tuple[str, str, str] | BadRow:
    """The prompt with its generation prompt, and both whole conversations."""
    try:
        prompt = tokenizer.apply_chat_template(conversation.prompt, add_generation_prompt=True, tokenize=False)
        whole = [
            tokenizer.apply_chat_template(
                [*conversation.prompt, {"role": "assistant", "content": text}], tokenize=False
            )
            for text in (conversation.chosen, conversation.rejected)
        ]
    except Exception as error:  # a template raises what it likes
        return BadRow(f"the chat template refuses the turns ({str(error).splitlines()[0]})")
    if not all(text.startswith(prompt) for text in whole):
        return BadRow("the chat template changes the prompt once there is an answer")
    return prompt, whole[0], whole[1]


def _tokens(
    tokenizer: Any, texts: tuple[str, str, str], ids: tuple[list[int], list[int], list[int]]
) -> Tokens | BadRow:
    prompt, *wholes = ids
    merged = any(whole[: len(prompt)] != prompt for whole in wholes)
    if merged:
        answers = [text[len(texts[0]) :] for text in texts[1:]]
        responses = tokenizer(answers, add_special_tokens=False)["input_ids"]
    else:
        responses = [whole[len(prompt) :] for whole in wholes]
    chosen, rejected = (_until_end(response, tokenizer.eos_token_id) for response in responses)
    if not prompt or not chosen or not rejected:
        return BadRow("nothing is left of the prompt or of an answer after tokenising")
    return Tokens(prompt, chosen, rejected, merged)


def _until_end(response: list[int], end: int | None) -> list[int]:
    """Without what a template writes after the end of the turn (ChatML's newline): the model never says that."""
    last = len(response) - 1 - response[::-1].index(end) if end in response else None
    return response if last is None else response[: last + 1]
