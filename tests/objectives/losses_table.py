"""The table of losses in docs/losses.md, from their declarations.

python -m tests.objectives.losses_table    # writes it into the page
"""

from typing import get_args

from tasks.config.paths import ROOT
from training.objectives.loss import Loss, LossOption
from training.objectives.registry import LOSSES

PAGE = ROOT / "docs" / "losses.md"
FIRST, LAST = "| name | formula |", "\n\n"
MODIFIERS = ("margin_scale", "f_divergence", "f_alpha")  # the page has a section about them
BOUNDS = {"ge": "from", "gt": "above", "le": "up to", "lt": "below"}  # of pydantic's Field


def table() -> str:
    rows = [f"| `{loss.name}` | {loss.formula} | {_options(loss)} | {_reads(loss)} |" for loss in LOSSES.values()]
    head = ["| name | formula | options beside `beta` | reads |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]).replace("|  |", "| |")


def _options(loss: Loss) -> str:
    named = [f"`{name}`{_details(name, option)}" for name, option in loss.options.items()]
    return ", ".join([*([] if loss.takes_beta else ["no `beta`"]), *named])


def _details(name: str, option: LossOption) -> str:
    """The default or `required`, and the range."""
    if name in MODIFIERS:
        return ""
    bounds = [bound for field in get_args(option.kind)[1:] for bound in field.metadata]
    kinds = [(type(bound).__name__.lower(), bound) for bound in bounds]
    limits = [f"{BOUNDS[kind]} {getattr(bound, kind):g}" for kind, bound in kinds]
    default = "required" if option.is_required else str(option.default).lower().removesuffix(".0")
    return f" ({default}; {' '.join(limits)})" if limits else f" ({default})"


def _reads(loss: Loss) -> str:
    traits = {
        "reference": loss.needs_reference,
        "label": loss.reads_label,
        "margin": "margin_scale" in loss.options,
        "the sorted batch": loss.sorts_batch,
        "[unpaired rows](#unpaired-rows)": loss.unpaired,
    }
    return ", ".join(name for name, holds in traits.items() if holds)


def of_page(text: str) -> str:
    start = text.index(FIRST)
    return text[start : text.index(LAST, start)]


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(page.replace(of_page(page), table()))
