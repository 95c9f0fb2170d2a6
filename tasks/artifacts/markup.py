"""Text from data, made safe to show: `printable` for HTML (Jinja escapes it), `plain` for Markdown."""

import re
import unicodedata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

# What Markdown interprets: punctuation, an underscore outside a word, the beginning of a bare link.
RISKY = re.compile(r"[\\`*\[\]<>|~&]|^#|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.")


JOINERS = "\u200c\u200d"  # between letters of Persian or Hindi, and between the parts of an emoji


def printable(value: Any) -> str:
    """Without control characters and marks that reverse the direction of text."""
    return "".join(char if char.isprintable() or char == "\n" or char in JOINERS else " " for char in str(value))


def shortened(text: str, width: int, tail: float = 0.3) -> str:
    """At most `width` characters, with dots for what is left out before the `tail`. No emoji or letter is cut apart."""
    if len(text) <= width:
        return text
    end = len(text) - int(tail * (width - 3))
    start = width - 3 - (len(text) - end)
    while start and _joined(text, start):
        start -= 1
    while end < len(text) and _joined(text, end):
        end += 1
    return f"{text[:start]}...{text[end:]}"


def _joined(text: str, at: int) -> bool:
    """Whether the character at `at` belongs to the one before: an accent, a skin tone, half of a flag."""
    before, char = text[at - 1], text[at]
    if _is_indicator(char):
        indicators = next((n for n in range(at) if not _is_indicator(text[at - 1 - n])), at)
        return indicators % 2 == 1
    mark = unicodedata.category(char) in ("Mn", "Mc", "Me") or "\U0001f3fb" <= char <= "\U0001f3ff"
    return mark or char in JOINERS or before == JOINERS[1]


def _is_indicator(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def plain(value: Any) -> str:
    """As one line of Markdown that shows the text and interprets none of it."""
    return RISKY.sub(lambda match: f"\\{match.group()}", " ".join(printable(value).split()))


def templates(folder: Path, autoescape: bool = False) -> Environment:
    """The Jinja2 templates of a folder. A missing value is an error. Markdown escapes text with the filter `plain`."""
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["plain"] = plain
    return environment
