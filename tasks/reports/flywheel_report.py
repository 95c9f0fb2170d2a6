"""The report of `dpo flywheel`: win rate night by night, and the votes, data and weights of each version."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tasks.artifacts.evaluation import with_interval
from tasks.artifacts.markup import templates
from tasks.tracking import plots

Night = Mapping[str, Any]
HEAD = (
    "night",
    "version",
    "starts from",
    "votes before",
    "win rate vs. base",
    "champion / tie / base",
    "data",
    "weights",
)


def rows(nights: Sequence[Night]) -> list[tuple[str, ...]]:
    counts = [sum(night["votes"].values()) for night in nights]
    return [_row(night, sum(counts[:number])) for number, night in enumerate(nights)]


def _row(night: Night, votes_before: int) -> tuple[str, ...]:
    rate, votes = night["win_rate"], night["votes"]
    return (
        str(night["night"]),
        night["version"] or "base model",
        _start(night["start"]),
        str(votes_before),
        with_interval(rate["rate"], (rate["low"], rate["high"]), ".1%"),
        f"{votes.get('second', 0)} / {votes.get('tie', 0) + votes.get('both_bad', 0)} / {votes.get('first', 0)}",
        night["data"][:12],
        night["weights"][:12],
    )


def _start(model: str) -> str:
    """`registry:NAME/2|ADDRESS` as `version 2`; another model is the base model."""
    registered = model.partition("|")[0].rpartition("/")[2]
    return f"version {registered}" if registered.isdecimal() else "base model" if model else ""


def write(nights: Sequence[Night], folder: Path) -> Path:
    """The page, and its figure as a file of its own."""
    points = [(night["night"], night["win_rate"]) for night in nights]
    plots.win_rates(points, folder / "flywheel.svg")
    picture = (folder / "flywheel.svg").read_text()
    environment = templates(Path(__file__).parent, autoescape=True)
    content = {"head": HEAD, "rows": rows(nights), "picture": Markup(picture[picture.index("<svg") :])}
    (folder / "report.html").write_text(environment.get_template("flywheel.html").render(content))
    return folder / "report.html"
