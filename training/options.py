"""What each loss takes, and the refusal of options that are missing or would be ignored.

No torch here: a configuration is checked before anything heavy is imported. tests/test_objective.py holds this table to
the signatures in training/losses.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Option = float | bool | str
_OF_LOSSES = ("beta", "label_smoothing", "gamma", "length_normalization", "reference", "tau", "cpo_alpha")
_OF_BETA = ("beta_alpha", "beta_momentum", "beta_filter")  # beta-DPO
_OF_PAIRS = ("margin", "margin_scale", "ld_alpha", "wpo")
OPTIONS = (*_OF_LOSSES, "dpop_lambda", "f_divergence", "f_alpha", *_OF_BETA, *_OF_PAIRS)
DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")
_F = ("f_divergence", "f_alpha")


@dataclass(frozen=True)
class Takes:
    needs: tuple[str, ...] = ("beta",)
    may: tuple[str, ...] = ()


TAKES = {
    "sigmoid": Takes(may=("label_smoothing", "gamma", "length_normalization", *_F)),
    "sigmoid_norm": Takes(may=("label_smoothing", "gamma", *_F)),
    "hinge": Takes(may=_F),
    "ipo": Takes(may=_F),
    "ipo_sum": Takes(may=_F),
    "robust": Takes(needs=("beta", "label_smoothing"), may=_F),
    "exo_pair": Takes(needs=("beta", "label_smoothing"), may=_F),
    "nca_pair": Takes(),
    "bco_pair": Takes(),
    "sppo_hard": Takes(),
    "aot": Takes(may=("label_smoothing",)),
    "aot_unpaired": Takes(may=("label_smoothing",)),
    "apo_zero": Takes(),
    "apo_down": Takes(),
    "discopop": Takes(may=("tau", *_F)),
    "dpop": Takes(may=("dpop_lambda",)),
    "simpo": Takes(may=("gamma", "reference")),
    "cpo": Takes(may=("cpo_alpha",)),
    "orpo": Takes(),
    "sft": Takes(needs=()),
}
REFERENCE_FREE = frozenset({"simpo", "cpo", "orpo", "sft"})
SORTED = frozenset({"aot", "aot_unpaired"})  # over the global batch
SOFT = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "ipo_sum", "simpo", "cpo", "orpo"})  # read pairs.label
MARGIN = frozenset({"sigmoid", "sigmoid_norm", "robust", "simpo", "cpo"})  # read pairs.margin
DYNAMIC = frozenset({"dpop", *(name for name, takes in TAKES.items() if "f_divergence" in takes.may)})  # read beta * h


def needs_reference(weights: Mapping[str, float], options: Mapping[str, Option]) -> bool:
    return not REFERENCE_FREE.issuperset(weights) or bool(options.get("reference"))


def taken(name: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """Those of the options that the loss takes."""
    return {option: value for option, value in options.items() if option in (*TAKES[name].needs, *TAKES[name].may)}


def check(weights: Mapping[str, float], options: Mapping[str, Option]) -> None:
    """Raise ValueError for an unknown loss, a weight without meaning, an option that is missing or has no effect."""
    if not weights:
        raise ValueError(f"loss is empty: name at least one of {', '.join(TAKES)}")
    for name, weight in weights.items():
        if name not in TAKES:
            raise ValueError(f"there is no loss '{name}': the losses are {', '.join(TAKES)}")
        if not weight > 0:
            raise ValueError(f"the weight of loss '{name}' must be above 0, and it is {weight}: leave the loss out")
        for option in TAKES[name].needs:
            if option not in options:
                raise ValueError(f"loss '{name}' needs `{option}`: set it")
    for option in options:
        _check_effect(option, weights, options)
    _check_values(weights, options)


def _check_effect(option: str, weights: Mapping[str, float], options: Mapping[str, Option]) -> None:
    readers = [name for name in TAKES if _reads(name, option, options)]
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
    for option in ("beta_momentum", "beta_filter"):
        if option in options and "beta_alpha" not in options:
            raise ValueError(f"`{option}` belongs to `beta_alpha`: set `beta_alpha` too, or `{option}` to null")
    if ("margin_scale" in options) != ("margin" in options):
        raise ValueError("`margin_scale` belongs to `margin: scores`: set both or neither")


def _reads(name: str, option: str, options: Mapping[str, Option]) -> bool:
    if option == "wpo":
        return True
    if option in ("margin", "margin_scale"):
        return name in MARGIN
    if option in _OF_BETA:
        return name in DYNAMIC
    if option == "ld_alpha":  # weighs the tokens of sums, which these read none of
        return name not in ("orpo", "sft") and (name != "simpo" or bool(options.get("reference")))
    return bool(taken(name, {option: True}))
