"""What a chat template writes around the texts of a conversation, found by writing one."""

from dataclasses import dataclass
from typing import Any

from training.limits import bounded

RENDER_SECONDS, RENDER_BYTES = 60.0, 1 << 30  # for one conversation, which takes a fraction of a second
SYSTEM, USER = "0system0text0", "0user0text0"


@dataclass(frozen=True)
class Pieces:
    """`start` USER `after` begins an answer; with a system message it is `before_system` SYSTEM `after_system`."""

    start: str
    after: str
    before_system: str | None
    after_system: str | None
    ends: list[str]


def pieces(tokenizer: Any) -> Pieces | None:
    """None where there is no template, or one that does not write a text as it is."""
    if not tokenizer.chat_template:
        return None
    asked = _render(tokenizer, [{"role": "user", "content": USER}])
    if asked.count(USER) != 1:
        return None
    start, after = asked.split(USER)
    before_system = after_system = None
    try:
        told = _render(tokenizer, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}])
        if told.count(SYSTEM) == told.count(USER) == 1 and told.endswith(USER + after):
            before_system, rest = told.split(SYSTEM)
            after_system = rest.split(USER)[0]
    except Exception:  # a template may refuse a system message in any way it likes
        pass
    return Pieces(start, after, before_system, after_system, [tokenizer.eos_token])


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return render(tokenizer, messages, add_generation_prompt=True)


def render(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> str:
    """Jinja's sandbox bounds neither loops nor memory. ValueError where a template exceeds both bounds."""
    try:
        with bounded(RENDER_SECONDS, RENDER_BYTES):
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (TimeoutError, MemoryError) as error:
        raise ValueError(f"the model's chat template needs too much time or memory ({error})") from None
