"""Parts of a chat template, found by rendering a conversation of marker texts; the template of an exported model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.models.ends import end_ids_of
from training.models.limits import bounded
from training.models.model_files import read_object
from training.models.tokenizer import load_tokenizer

RENDER_SECONDS, RENDER_BYTES = 60.0, 1 << 30  # for one conversation, which normally takes a fraction of a second
SYSTEM, USER, ANSWER = "0system0text0", "0user0text0", "0answer0text0"
_parts_alone: dict[str, bool] = {}  # by template: found out once


@dataclass(frozen=True)
class ChatPieces:
    """A prompt is start + user text + after; with a system text, before_system + it + after_system replace start."""

    start: str
    after: str
    before_system: str | None
    after_system: str | None
    ends: list[str]


def chat_pieces(folder: Path) -> ChatPieces | None:
    """Of the model in a folder; None if there is no template, or if it changes the texts."""
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template:
        return None
    user = {"role": "user", "content": USER}
    prompt = render(tokenizer, [user], add_generation_prompt=True)
    if prompt.count(USER) != 1:
        return None
    start, after = prompt.split(USER)
    before_system = after_system = None
    try:
        with_system = render(tokenizer, [{"role": "system", "content": SYSTEM}, user], add_generation_prompt=True)
        if with_system.count(SYSTEM) == with_system.count(USER) == 1 and with_system.endswith(USER + after):
            before_system, rest = with_system.split(SYSTEM)
            after_system = rest.split(USER)[0]
    except Exception:  # a template may reject a system message with any exception
        pass
    ends = [text for token in end_ids_of(tokenizer, folder) if (text := str(tokenizer.decode([token]))).strip()]
    return ChatPieces(start, after, before_system, after_system, ends)


def keep_template(folder: Path, template: Any, arguments: Mapping[str, Any]) -> None:
    """The folder's tokenizer and processor render prompts as training did, unless they are given other arguments."""
    _drop_processors_template(folder)
    if not isinstance(template, str):  # a model's own templates by name, which are in the folder
        return
    defaults = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        for name, value in arguments.items()
    )
    if load_tokenizer(folder).chat_template == defaults + template:
        return
    (folder / "chat_template.jinja").write_text(defaults + template)
    if load_tokenizer(folder).chat_template != defaults + template:
        raise ValueError("the chat template that training used could not be written into the exported model's folder")


def _drop_processors_template(folder: Path) -> None:
    """In two files of earlier releases of transformers, which processors read before the tokenizer's."""
    (folder / "chat_template.json").unlink(missing_ok=True)
    path = folder / "processor_config.json"
    settings = read_object(path) if path.is_file() else {}
    if settings.pop("chat_template", None):
        path.write_text(json.dumps(settings, indent=2) + "\n")


def _literal(value: Any) -> str:
    """The value in Jinja's words, which are those of JSON but for null."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value)


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """ValueError if a template exceeds the limits: Jinja's sandbox limits neither loops nor memory."""
    try:
        with bounded(RENDER_SECONDS, RENDER_BYTES):
            return str(tokenizer.apply_chat_template(as_read(tokenizer, messages), tokenize=False, **options))
    except (TimeoutError, MemoryError) as error:
        raise ValueError(f"the model's chat template needs too much time or memory ({error})") from None


def as_read(tokenizer: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the form that the template reads."""
    return _in_parts(messages) if _reads_parts(tokenizer) else messages


def _reads_parts(tokenizer: Any) -> bool:
    """Whether the template reads content from parts alone, as those of models for images do: it loses a string."""
    template = str(tokenizer.chat_template)
    if template not in _parts_alone:
        chat = [{"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}]
        _parts_alone[template] = not _writes(tokenizer, chat) and _writes(tokenizer, _in_parts(chat))
    return _parts_alone[template]


def _writes(tokenizer: Any, chat: list[dict[str, Any]]) -> bool:
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except (TimeoutError, MemoryError):
        raise
    except Exception:  # a template may raise anything
        return False
    return USER in text and ANSWER in text


def _in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    contents = (message["content"] for message in messages)
    parts = ([{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents)
    return [{**message, "content": part} for message, part in zip(messages, parts, strict=True)]
