"""What a loss declares beside its function: a formula, its traits, and its value while the policy is the reference."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import Field

from training.objectives.pair_logps import PairLogps

if TYPE_CHECKING:
    from torch import Tensor

Option = float | bool | str
Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]  # f of `f_divergence`
Positive = Annotated[float, Field(gt=0.0)]
Smoothing = Annotated[float, Field(ge=0.0, le=0.5)]  # the probability that a label is flipped


@dataclass(frozen=True, kw_only=True)
class LossOption:
    """An option of a loss: a keyword argument of its function."""

    kind: Any  # its type, with the range
    default: Any  # inspect.Parameter.empty if the option must be set

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A function of log-probabilities and options that returns one loss per pair (or unpaired row), and its traits."""

    function: Callable[..., Tensor]
    formula: str  # for docs/losses.md
    # Takes by keyword `label`, `margin` and `sign` of a pair, `beta` and the options. None: depends on the model.
    at_reference: Callable[..., float] | None = None
    needs_reference: bool = True  # False: an option `reference: true` may still ask for one
    reads_sums: bool = True  # of log-probabilities over a response; False: means per token alone
    reads_label: bool = False  # the probability that chosen is the better response
    sorts_batch: bool = False  # a pair's loss depends on its position in the sorted global batch
    unpaired: bool = False  # for rows with one answer, desirable or undesirable
    reads_kl: bool = False  # KTO's KL of the global batch

    @property
    def name(self) -> str:
        return self.function.__name__

    def __call__(self, pairs: PairLogps, **options: Any) -> Tensor:
        return self.function(pairs, **options)

    @cached_property
    def _arguments(self) -> dict[str, LossOption]:
        hints = get_type_hints(self.function, localns={"Tensor": object}, include_extras=True)
        _, *parameters = inspect.signature(self.function).parameters.values()
        return {given.name: LossOption(kind=hints[given.name], default=given.default) for given in parameters}

    @property
    def takes_beta(self) -> bool:
        return "beta" in self._arguments

    @cached_property
    def options(self) -> dict[str, LossOption]:
        """The options that belong to this loss alone, by name."""
        return {name: option for name, option in self._arguments.items() if name != "beta"}

    def has_reference(self, options: Mapping[str, Option]) -> bool:
        return self.needs_reference or bool(options.get("reference"))

    def has_sums(self, options: Mapping[str, Option]) -> bool:
        return self.reads_sums or self.has_reference(options)

    def start_value(
        self, arguments: Mapping[str, Option], label: float = 1.0, margin: float = 0.0, sign: float = 1.0
    ) -> float | None:
        """A pair's loss while the policy equals its reference; None if it depends on the model.

        Both log-ratios a and b are 0, and so is the gap h, also per token and with any f-divergence (each score is 0
        at a ratio of 1). That leaves z = -(gamma + margin).
        """
        if self.at_reference is None or not self.has_reference(arguments):
            return None
        defaults = {name: option.default for name, option in self.options.items() if not option.is_required}
        return self.at_reference(**{**defaults, **arguments}, label=label, margin=margin, sign=sign)


def loss(**declaration: Any) -> Callable[[Callable[..., Tensor]], Loss]:
    """Declare a function as a loss under its name; the fields of `Loss` by keyword."""
    return lambda function: Loss(function=function, **declaration)


def logistic(z: float) -> float:
    """-log sigmoid(z) without overflow; ln 2 at 0."""
    return max(-z, 0.0) + math.log1p(math.exp(-abs(z)))


def logistic_at_reference(
    *, label: float, margin: float, gamma: float = 0.0, label_smoothing: float = 0.0, margin_scale: float, **_: Any
) -> float:
    """Of a logistic loss of z = beta h - gamma - margin: the expected loss if chosen is better with probability p."""
    z = -(gamma + margin_scale * margin)
    p = label * (1 - label_smoothing) + (1 - label) * label_smoothing
    return logistic(z) if p == 1.0 else p * logistic(z) + (1 - p) * logistic(-z)
