"""HTML and Markdown from values. Text comes from others: everything that is shown passes `escape` or `plain`."""

import html
import re
from collections.abc import Sequence
from typing import Any

LONGEST = 1500  # characters of a text
# What Markdown may take for its own: punctuation, an underscore but inside a word, the beginning of a bare link.
RISKY = re.compile(r"[\\`*\[\]<>|~&]|^#|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.")


def section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def charts(figures: Sequence[str]) -> str:
    drawn = "".join(figures)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def text(content: str) -> str:
    """Of an answer or a prompt: cut where it is very long."""
    return escape(content if len(content) <= LONGEST else content[:LONGEST] + " ...")


def escape(value: Any) -> str:
    plain = "".join(char if char.isprintable() or char == "\n" else " " for char in str(value))  # no direction marks
    return html.escape(plain)


def plain(value: Any) -> str:
    """Text as one line of Markdown that shows it and does nothing else."""
    shown = " ".join("".join(char if char.isprintable() else " " for char in str(value)).split())
    return RISKY.sub(lambda match: f"\\{match.group()}", shown)
