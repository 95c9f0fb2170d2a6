"""The headline metrics of evaluate.json, as all pages, tables and the model card show them: label, value, interval."""

from collections.abc import Mapping
from typing import NamedTuple

from tasks.config.metrics import ACCURACY

# (metric, label, whether it is a share)
HEADLINE_METRICS = (
    ("win_rate/rate", "win rate vs. base model", True),
    ("win_rate/length_controlled/rate", "win rate at equal length", True),
    (ACCURACY, "prefers the chosen answer", True),
    ("rewards/margins", "reward margin", False),
    ("kl/answers", "KL to the base model, nats per answer", False),
    ("calibration/expected_error", "calibration error", False),
    ("health/repetition", "repetition", False),
    ("health/length_ratio", "length vs. base model", False),
)
Interval = tuple[float, float]


class Headline(NamedTuple):
    name: str
    label: str
    value: float
    interval: Interval | None  # of 95%
    is_share: bool


def headlines(values: Mapping[str, float]) -> list[Headline]:
    """Those among the values of evaluate.json by flat name (`flatten_metrics`)."""
    labels = {ACCURACY: accuracy_label(values)}
    return [
        Headline(name, labels.get(name, label), values[name], interval(values, name), is_share)
        for name, label, is_share in HEADLINE_METRICS
        if name in values
    ]


def interval(values: Mapping[str, float], name: str) -> Interval | None:
    """The 95% interval of a metric, if it has one. A rate has its bounds beside it."""
    for prefix in (f"intervals/{name}", name.removesuffix("/rate")):
        if f"{prefix}/low" in values:
            return values[f"{prefix}/low"], values[f"{prefix}/high"]
    return None


def accuracy_label(values: Mapping[str, float]) -> str:
    """What rewards/accuracies counts: pairs, or unpaired rows."""
    return "rates the answer as its label" if is_unpaired(values) else "prefers the chosen answer"


def is_unpaired(values: Mapping[str, float]) -> bool:
    """Whether the held-out rows have one answer each."""
    return "rewards/auc" in values


def with_interval(value: float, bounds: Interval | None, form: str) -> str:
    """`0.86 (0.8 to 0.91)`."""
    return f"{value:{form}}" + (f" ({bounds[0]:{form}} to {bounds[1]:{form}})" if bounds else "")
