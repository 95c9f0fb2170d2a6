"""Text from data, made safe to show: `printable` for HTML (Jinja escapes it), `plain` for Markdown."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

# What Markdown interprets: punctuation, an underscore outside a word, the beginning of a bare link.
RISKY = re.compile(r"[\\`*\[\]<>|~&]|^#|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.")


def printable(value: Any) -> str:
    """Without control characters and marks that reverse the direction of text."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in str(value))


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
