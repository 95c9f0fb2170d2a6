"""Options of each loss. A missing option and an option without effect are errors.

This module imports no torch, so that a configuration is validated fast. tests/objectives/test_objective.py compares
the table with the signatures in losses.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Option = float | bool | str
_OF_PAIRS = ("f_divergence", "f_alpha", "margin", "margin_scale", "ld_alpha", "wpo")
_OF_UNPAIRED = ("desirable_weight", "undesirable_weight")
DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")


@dataclass(frozen=True)
class LossOptions:
    required: tuple[str, ...] = ("beta",)
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return *self.required, *self.optional


LOSS_OPTIONS = {
    "sigmoid": LossOptions(optional=("label_smoothing", "gamma", "length_normalization")),
    "sigmoid_norm": LossOptions(optional=("label_smoothing", "gamma")),
    "hinge": LossOptions(),
    "ipo": LossOptions(),
    "ipo_sum": LossOptions(),
    "robust": LossOptions(required=("beta", "label_smoothing")),
    "exo_pair": LossOptions(required=("beta", "label_smoothing")),
    "nca_pair": LossOptions(),
    "bco_pair": LossOptions(),
    "sppo_hard": LossOptions(),
    "aot": LossOptions(optional=("label_smoothing",)),
    "aot_unpaired": LossOptions(optional=("label_smoothing",)),
    "apo_zero": LossOptions(),
    "apo_down": LossOptions(),
    "discopop": LossOptions(optional=("tau",)),
    "dpop": LossOptions(optional=("dpop_lambda",)),
    "kto": LossOptions(optional=_OF_UNPAIRED),
    "apo_zero_unpaired": LossOptions(optional=_OF_UNPAIRED),
    "simpo": LossOptions(optional=("gamma", "reference")),
    "cpo": LossOptions(optional=("cpo_alpha",)),
    "orpo": LossOptions(),
    "sft": LossOptions(required=()),
}
OPTIONS = (*dict.fromkeys(name for own in LOSS_OPTIONS.values() for name in own.names), *_OF_PAIRS)
REFERENCE_FREE = frozenset({"simpo", "cpo", "orpo", "sft"})
UNPAIRED = frozenset({"kto", "apo_zero_unpaired"})  # for rows with one answer, desirable or undesirable
SORTS_BATCH = frozenset({"aot", "aot_unpaired"})  # over the global batch
READS_LABEL = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "ipo_sum", "simpo", "cpo", "orpo"})
READS_MARGIN = frozenset({"sigmoid", "sigmoid_norm", "robust", "simpo", "cpo"})
READS_DIVERGENCE = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "ipo_sum", "robust", "exo_pair", "discopop"})


def needs_reference(weights: Mapping[str, float], options: Mapping[str, Option]) -> bool:
    return not REFERENCE_FREE.issuperset(weights) or bool(options.get("reference"))


def options_of(loss: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """The options that are arguments of the loss."""
    return {option: value for option, value in options.items() if option in LOSS_OPTIONS[loss].names}


def check(weights: Mapping[str, float], options: Mapping[str, Option]) -> None:
    """ValueError for an unknown loss, an invalid weight or value, a missing option, an option without effect."""
    if not weights:
        raise ValueError(f"loss is empty: name at least one of {', '.join(LOSS_OPTIONS)}")
    for loss, weight in weights.items():
        if loss not in LOSS_OPTIONS:
            raise ValueError(f"there is no loss '{loss}': the losses are {', '.join(LOSS_OPTIONS)}")
        if not weight > 0:
            raise ValueError(f"the weight of loss '{loss}' must be above 0, but it is {weight}: remove the loss")
        for option in LOSS_OPTIONS[loss].required:
            if option not in options:
                raise ValueError(f"loss '{loss}' needs `{option}`: set it")
    if not UNPAIRED.isdisjoint(weights) and not UNPAIRED.issuperset(weights):
        unpaired, paired = (", ".join(n for n in weights if (n in UNPAIRED) == kind) for kind in (True, False))
        raise ValueError(f"loss {unpaired} is for unpaired rows and {paired} for pairs: choose losses of one kind")
    for option in options:
        readers = [loss for loss in LOSS_OPTIONS if _has_effect(option, loss, options)]
        if not set(readers).intersection(weights):
            raise ValueError(
                f"`{option}` has no effect on loss {', '.join(weights)}: set it to null, or choose one of "
                f"{', '.join(readers)}"
            )
    _check_values(weights, options)


def check_rows(weights: Mapping[str, float], unpaired: bool) -> None:
    """ValueError if the losses are for the other kind of data."""
    if unpaired and UNPAIRED.isdisjoint(weights):
        raise ValueError(
            f"the rows are unpaired (one answer each, desirable or not), and loss {', '.join(weights)} compares two "
            "answers: set train.loss to {kto: 1.0}"
        )
    if not unpaired and not UNPAIRED.isdisjoint(weights):
        raise ValueError(
            f"loss {', '.join(weights)} is for unpaired rows, and the data has pairs: set prepare.format to unpaired, "
            "which makes two rows of each pair, or train.loss to {sigmoid: 1.0}"
        )


def _check_values(weights: Mapping[str, float], options: Mapping[str, Option]) -> None:
    smoothing, divergence = options.get("label_smoothing"), options.get("f_divergence")
    if "exo_pair" in weights and not smoothing:
        raise ValueError("loss 'exo_pair' takes the logarithm of `label_smoothing`: set it above 0")
    if "robust" in weights and not float(smoothing or 0.0) < 0.5:
        raise ValueError(f"loss 'robust' needs `label_smoothing` below 0.5, but it is {smoothing}")
    if divergence is not None and divergence not in DIVERGENCES:
        raise ValueError(f"there is no `f_divergence` '{divergence}': choose one of {', '.join(DIVERGENCES)}")
    if ("f_alpha" in options) != (divergence == "alpha"):
        raise ValueError("`f_alpha` belongs to `f_divergence: alpha`: set both or neither")
    if ("margin_scale" in options) != ("margin" in options):
        raise ValueError("`margin_scale` belongs to `margin: scores`: set both or neither")


def _has_effect(option: str, loss: str, options: Mapping[str, Option]) -> bool:
    if option == "wpo":  # of both responses
        return loss not in UNPAIRED
    if option in ("f_divergence", "f_alpha"):
        return loss in READS_DIVERGENCE
    if option in ("margin", "margin_scale"):
        return loss in READS_MARGIN
    if option == "ld_alpha":  # weights the tokens of sums, which these losses do not use
        return loss not in ("orpo", "sft", *UNPAIRED) and (loss != "simpo" or bool(options.get("reference")))
    return bool(options_of(loss, {option: True}))
