"""Preference losses as pure functions: log-probabilities of pairs in, one loss per pair out.

The caller takes the mean over the global batch. A new loss is a function with the paper's equation on the line and
its name in LOSSES; its keyword arguments are the options that have an effect on it, and `check` refuses the others.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

OPTIONS = ("beta", "label_smoothing", "gamma", "length_normalization")


@dataclass(frozen=True)
class Pairs:
    """Summed log-probabilities of the responses' counted tokens, and how many tokens counted. All (pairs,)."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def chosen_ratio(self) -> Tensor:  # log pi(y_w|x) / pi_ref(y_w|x)
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected - self.ref_rejected

    @property
    def chosen_mean(self) -> Tensor:
        return self.chosen / self.chosen_tokens

    @property
    def rejected_mean(self) -> Tensor:
        return self.rejected / self.rejected_tokens


def sigmoid(pairs: Pairs, beta: float, label_smoothing: float = 0.0, length_normalization: bool = False) -> Tensor:
    """DPO, arXiv 2305.18290 eq. 7; label_smoothing is cDPO's chance that a label is wrong."""
    h = pairs.chosen_ratio - pairs.rejected_ratio
    if length_normalization:
        h = pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens
    return -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)


def hinge(pairs: Pairs, beta: float) -> Tensor:
    """SLiC / RSO, arXiv 2309.06657 eq. 8."""
    return torch.relu(1 - beta * (pairs.chosen_ratio - pairs.rejected_ratio))


def ipo(pairs: Pairs, beta: float) -> Tensor:
    """IPO, arXiv 2310.12036 eq. 17, on per-token averages as its authors confirmed."""
    h = pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens
    return (h - 1 / (2 * beta)) ** 2


def simpo(pairs: Pairs, beta: float, gamma: float = 0.0) -> Tensor:
    """SimPO, arXiv 2405.14734 eq. 6; gamma is a margin between rewards."""
    return -logsigmoid(beta * (pairs.chosen_mean - pairs.rejected_mean) - gamma)


def orpo(pairs: Pairs, beta: float) -> Tensor:
    """ORPO, arXiv 2403.07691 eq. 6-7: supervised loss plus the log odds ratio."""
    log_odds = log_odds_ratio(pairs.chosen_mean, pairs.rejected_mean)
    return -pairs.chosen_mean - beta * logsigmoid(log_odds)


def sft(pairs: Pairs) -> Tensor:
    """Negative log-likelihood per token of the chosen response: a term to combine."""
    return -pairs.chosen_mean


LOSSES: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (sigmoid, hinge, ipo, simpo, orpo, sft)}
REFERENCE_FREE = frozenset({"simpo", "orpo", "sft"})


@dataclass(frozen=True)
class Objective:
    """A weighted sum of losses with their options, as `check` has passed them."""

    weights: Mapping[str, float]
    options: Mapping[str, float | bool]

    @property
    def needs_reference(self) -> bool:
        return not REFERENCE_FREE.issuperset(self.weights)

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        """Loss per pair: the total as `loss` and, where there are several, each component."""
        parts = {name: LOSSES[name](pairs, **_taken(name, self.options)) for name in self.weights}
        total = torch.stack([weight * parts[name] for name, weight in self.weights.items()]).sum(0)
        components = {f"loss/{name}": part for name, part in parts.items()} if len(parts) > 1 else {}
        return {"loss": total, **components}

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Implicit rewards: of the ratio to the reference, or of the mean where no loss reads a reference."""
        beta = float(self.options.get("beta", 1.0))
        if self.needs_reference:
            return beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
        return beta * pairs.chosen_mean, beta * pairs.rejected_mean


def check(weights: Mapping[str, float], options: Mapping[str, float | bool]) -> None:
    """Raise ValueError for an unknown loss, a weight without meaning, an option that is missing or has no effect."""
    if not weights:
        raise ValueError(f"loss is empty: name at least one of {', '.join(LOSSES)}")
    for name, weight in weights.items():
        if name not in LOSSES:
            raise ValueError(f"there is no loss '{name}': the losses are {', '.join(LOSSES)}")
        if not weight > 0:
            raise ValueError(f"the weight of loss '{name}' must be above 0, and it is {weight}: leave the loss out")
        for option, default in _signature(name).items():
            if default is inspect.Parameter.empty and option not in options:
                raise ValueError(f"loss '{name}' needs `{option}`: set it")
    for option in options:
        if not any(option in _signature(name) for name in weights):
            raise ValueError(
                f"`{option}` has no effect on loss {', '.join(weights)}: set it to null, or choose one of "
                f"{', '.join(name for name in LOSSES if option in _signature(name))}"
            )


def log_odds_ratio(chosen_mean: Tensor, rejected_mean: Tensor) -> Tensor:
    """log(odds(y_w) / odds(y_l)) of mean log-probabilities, in float32 and stable near probability 1."""
    chosen_mean, rejected_mean = chosen_mean.float(), rejected_mean.float()
    return (chosen_mean - rejected_mean) - (log1mexp(chosen_mean) - log1mexp(rejected_mean))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0 without cancellation (Maechler 2012); x is kept below 0."""
    x = x.clamp(max=-1e-6)
    near_zero = x > -0.6931
    # Each branch sees a harmless value where the other is taken, so that no NaN enters the gradient.
    close = torch.log(-torch.expm1(torch.where(near_zero, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x)))
    return torch.where(near_zero, close, far)


def _signature(name: str) -> dict[str, object]:
    parameters = list(inspect.signature(LOSSES[name]).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


def _taken(name: str, options: Mapping[str, float | bool]) -> dict[str, float | bool]:
    return {option: value for option, value in options.items() if option in _signature(name)}
