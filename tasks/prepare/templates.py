"""Chat templates: the model's own, a built-in one or the text in `prepare.template`, with the limits for rendering."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.artifacts.models import source_folder
from tasks.config.params import Params
from tasks.config.prepare import Prepare
from tasks.errors import UserError
from tasks.prepare.rows.messages import Message
from tasks.source.reject_reasons import RejectedRow
from training.models.limits import bounded

# For a model without a chat template.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant: {{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# For a model that has these two tokens and no template.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BUILT_IN = {"plain": PLAIN, "chatml": CHATML}
RENDER_SECONDS = 60.0  # for the conversations of a chunk, which usually take less than a second
RENDER_BYTES = 1 << 30


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with its chat template set, and the options of `prepare` for it."""

    tokenizer: Any
    name: str
    kwargs: dict[str, Any]
    loss_on: str
    added_tokens: tuple[str, ...]  # a text may be cut before any of them
    end_ids: frozenset[int]  # tokens that may end a turn
    stop_ids: frozenset[int]  # of them, those at which the model stops
    tools: str = "template"  # prepare.tools
    reasoning: str = "keep"  # prepare.reasoning
    known: dict[Any, Any] = field(default_factory=dict, compare=False)  # what tasks.prepare.rendering found out


def load_template(params: Params) -> ChatTemplate:
    from training.models.tokenizer import load_tokenizer  # heavy: transformers

    # Processes share the work, not threads: the tokenizer's threads would not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = source_folder(params.source.model)
    return template_of(load_tokenizer(folder), folder, params.prepare)


def template_of(tokenizer: Any, folder: Path, options: Prepare) -> ChatTemplate:
    """The template of a model folder, by the settings of `prepare`."""
    from training.models.ends import end_ids_of  # heavy: transformers

    chosen = choose_template(tokenizer, options.template, options.chat_template_kwargs, options.loss_on)
    stops = chosen.stop_ids.union(end_ids_of(tokenizer, folder))
    return replace(
        chosen, stop_ids=stops, end_ids=chosen.end_ids | stops, tools=options.tools, reasoning=options.reasoning
    )


def choose_template(
    tokenizer: Any, wanted: str, kwargs: dict[str, Any] | None = None, loss_on: str = "last"
) -> ChatTemplate:
    """Set the tokenizer's template: the model's own, a built-in one by name, or the template text in `wanted`."""
    name = f"the built-in {wanted}" if wanted in BUILT_IN else "the text in prepare.template"
    if wanted == "auto":
        name = "the model's chat template" if tokenizer.chat_template else "the built-in plain"
        tokenizer.chat_template = tokenizer.chat_template or PLAIN
    else:
        tokenizer.chat_template = BUILT_IN.get(wanted, wanted)
    if wanted == "chatml" and len(encode(tokenizer, ["<|im_end|>"])[0]) != 1:
        raise UserError("prepare.template: chatml needs the token <|im_end|>, which this tokenizer lacks. Use plain.")
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_truncation()  # tokenizer.json may set both
        backend.no_padding()
    added = tokenizer.added_tokens_decoder
    cuts = tuple(token.content for token in added.values() if not token.lstrip and not token.single_word)
    end_ids = frozenset({number for number, token in added.items() if token.special} | {tokenizer.eos_token_id})
    return ChatTemplate(tokenizer, name, kwargs or {}, loss_on, cuts, end_ids, frozenset({tokenizer.eos_token_id}))


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids without added special tokens: the template has written those that it needs."""
    if not texts:
        return []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def render_all(
    template: ChatTemplate, chats: Sequence[list[Message]], tools: Sequence[list[Any] | None], generation: bool = False
) -> list[str | RejectedRow]:
    """The text of each chat, or why there is none. Chats without tools are rendered all at once."""
    plain = iter(_render_plain(template, [c for c, t in zip(chats, tools, strict=True) if not t], generation))
    return [
        next(plain) if not used else _try_render(template, chat, used, generation)
        for chat, used in zip(chats, tools, strict=True)
    ]


def _render_plain(template: ChatTemplate, chats: list[list[Message]], generation: bool) -> list[str | RejectedRow]:
    """All at once; if the template raises an error for one of them, each alone."""
    if not chats:
        return []
    try:
        return render(template, chats, None, generation)
    except RejectedRow as rejected:
        if len(chats) == 1:
            return [rejected]
        return [_try_render(template, chat, None, generation) for chat in chats]


def _try_render(template: ChatTemplate, chat: list[Message], tools: list[Any] | None, generation: bool) -> Any:
    try:
        return render(template, chat, tools, generation)
    except RejectedRow as rejected:
        return rejected


def render(template: ChatTemplate, chat: list[Any], tools: list[Any] | None, generation: bool = False) -> Any:
    """The text of a chat, or of each chat of a list, within limits of time and memory: Jinja's sandbox has none."""
    try:
        with bounded(RENDER_SECONDS, RENDER_BYTES):
            return template.tokenizer.apply_chat_template(
                chat, tools=tools, add_generation_prompt=generation, tokenize=False, **template.kwargs
            )
    except TimeoutError:
        raise UserError(
            f"prepare.template: {template.name} did not render a few conversations within {RENDER_SECONDS:g} s; it may "
            "loop forever. Set prepare.template to plain, chatml or the text of a template, or use another model."
        ) from None
    except Exception as error:  # a template may raise anything
        raise RejectedRow("template_refused", (str(error) or type(error).__name__).splitlines()[0]) from None
