"""The objective of a run: a weighted sum of losses with their options, and the refusal of what would be ignored."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from training.losses import DIVERGENCES, LOSSES, MARGIN, REFERENCE_FREE, SOFT, SORTED, Pairs
from training.packing import Pair

Option = float | bool | str
_OF_LOSSES = ("beta", "label_smoothing", "gamma", "length_normalization", "reference", "tau", "cpo_alpha")
OPTIONS = (*_OF_LOSSES, "f_divergence", "f_alpha", "ld_alpha", "wpo")


@dataclass(frozen=True)
class Objective:
    """As `check` has passed it."""

    weights: Mapping[str, float]
    options: Mapping[str, Option]

    @property
    def needs_reference(self) -> bool:
        return not REFERENCE_FREE.issuperset(self.weights) or bool(self.options.get("reference"))

    @property
    def needs_ranks(self) -> bool:
        """Whether a pair's loss depends on its rank in the global batch."""
        return not SORTED.isdisjoint(self.weights)

    @property
    def ld_alpha(self) -> float:
        return float(self.options.get("ld_alpha", 1.0))

    @property
    def wpo(self) -> bool:
        return bool(self.options.get("wpo", False))

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        """Loss per pair: the total as `loss` and, where there are several, each component."""
        parts = {name: LOSSES[name](pairs, **_taken(name, self.options)) for name in self.weights}
        total = torch.stack([weight * parts[name] for name, weight in self.weights.items()]).sum(0)
        components = {f"loss/{name}": part for name, part in parts.items()} if len(parts) > 1 else {}
        return {"loss": total * pairs.factor if self.wpo else total, **components}

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Implicit rewards: of the ratio to the reference; without one of the sum (cpo) or of the mean."""
        beta = float(self.options.get("beta", 1.0))
        if self.needs_reference:
            return beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
        if "cpo" in self.weights:
            return beta * pairs.chosen, beta * pairs.rejected
        return beta * pairs.chosen_mean, beta * pairs.rejected_mean

    def check_pairs(self, pairs: Iterable[Pair]) -> None:
        """Raise ValueError where pairs carry a label or a margin that no chosen loss reads."""
        found = {"label": False, "margin": False}
        for pair in pairs:
            found["label"] |= pair.label != 1.0
            found["margin"] |= pair.margin != 0.0
        for name, readers in (("label", SOFT), ("margin", MARGIN)):
            if found[name] and readers.isdisjoint(self.weights):
                raise ValueError(
                    f"the pairs carry a {name}, which loss {', '.join(self.weights)} does not read: choose one of "
                    f"{', '.join(sorted(readers))}, or prepare the pairs without it"
                )


def check(weights: Mapping[str, float], options: Mapping[str, Option]) -> None:
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
        _check_effect(option, weights, options)
    _check_values(weights, options)


def _check_effect(option: str, weights: Mapping[str, float], options: Mapping[str, Option]) -> None:
    readers = [name for name in LOSSES if _reads(name, option, options)]
    if not set(readers).intersection(weights):
        raise ValueError(
            f"`{option}` has no effect on loss {', '.join(weights)}: set it to null, or choose one of "
            f"{', '.join(readers)}"
        )


def _check_values(weights: Mapping[str, float], options: Mapping[str, Option]) -> None:
    smoothing, divergence = options.get("label_smoothing"), options.get("f_divergence")
    if "exo_pair" in weights and not smoothing:
        raise ValueError("loss 'exo_pair' takes the logarithm of `label_smoothing`: set it above 0")
    if "robust" in weights and not float(smoothing or 0.0) < 0.5:
        raise ValueError(f"loss 'robust' needs `label_smoothing` below 0.5, and it is {smoothing}")
    if divergence is not None and divergence not in DIVERGENCES:
        raise ValueError(f"there is no `f_divergence` '{divergence}': there are {', '.join(DIVERGENCES)}")
    if ("f_alpha" in options) != (divergence == "alpha"):
        raise ValueError("`f_alpha` belongs to `f_divergence: alpha`: set both or neither")


def _reads(name: str, option: str, options: Mapping[str, Option]) -> bool:
    if option == "wpo":
        return True
    if option == "ld_alpha":  # weighs the tokens of sums, which these read none of
        return name not in ("orpo", "sft") and (name != "simpo" or bool(options.get("reference")))
    return option in _signature(name)


def _signature(name: str) -> dict[str, object]:
    parameters = list(inspect.signature(LOSSES[name]).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


def _taken(name: str, options: Mapping[str, Option]) -> dict[str, Option]:
    return {option: value for option, value in options.items() if option in _signature(name)}
