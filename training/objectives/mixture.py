"""`train.loss`, a weighted sum of losses with their options, and the options that all of its losses share.

A mixture is {sigmoid: 1.0} or, with options, {sigmoid: {weight: 1.0, label_smoothing: 0.1}}. A missing option and one
without effect are errors. Nothing here imports torch, so that a configuration is validated fast.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from training.objectives.loss import Loss, Option
from training.objectives.registry import LOSSES

Mixture = Mapping[str, float | Mapping[str, Option]]
WEIGHT = "weight"
SHARED = ("beta", "ld_alpha", "wpo")  # options of every loss of a mixture, beside it under `train`


def weights_of(mixture: Mixture) -> dict[str, float]:
    return {name: float(term[WEIGHT] if isinstance(term, Mapping) else term) for name, term in mixture.items()}


def long_form(mixture: Mixture) -> dict[str, dict[str, Option]]:
    """{sigmoid: {weight: 1.0}} for {sigmoid: 1.0}."""
    return {name: {WEIGHT: weight, **options_of(mixture, name)} for name, weight in weights_of(mixture).items()}


def options_of(mixture: Mixture, name: str) -> dict[str, Option]:
    """The options that one of the losses has been given."""
    term = mixture[name]
    return {key: value for key, value in term.items() if key != WEIGHT} if isinstance(term, Mapping) else {}


def arguments_of(mixture: Mixture, name: str, shared: Mapping[str, Option]) -> dict[str, Option]:
    """The options with which one of the losses is called."""
    beta = {"beta": shared["beta"]} if LOSSES[name].takes_beta else {}
    return {**beta, **options_of(mixture, name)}


def needs_reference(mixture: Mixture) -> bool:
    return any(LOSSES[name].has_reference(options_of(mixture, name)) for name in mixture)


def is_unpaired(mixture: Mixture) -> bool:
    """Whether the losses are for rows with one answer; `check` accepts no other loss beside them."""
    return any(LOSSES[name].unpaired for name in mixture)


def check(mixture: Mapping[str, Any]) -> dict[str, Any]:
    """The mixture with numbers as floats. ValueError for an unknown loss, a wrong weight or value, a missing option."""
    if not mixture:
        raise ValueError(f"it is empty: name at least one of {', '.join(LOSSES)}")
    checked = {name: check_term(name, term) for name, term in mixture.items()}
    if len({LOSSES[name].unpaired for name in checked}) > 1:
        unpaired, paired = (", ".join(n for n in checked if LOSSES[n].unpaired is kind) for kind in (True, False))
        raise ValueError(f"loss {unpaired} is for unpaired rows and {paired} for pairs: choose losses of one kind")
    return checked


def check_term(name: str, term: Any) -> Any:
    """The weight of a loss, or its weight and options; the weight alone if there are no options."""
    if name not in LOSSES:
        near = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f". Did you mean {near[0]}?" if near else f": the losses are {', '.join(LOSSES)}"
        raise ValueError(f"there is no loss '{name}'{hint}")
    if not isinstance(term, Mapping):
        checked: Any = _check_value(name, WEIGHT, float, term)
        weight, given = checked, {}
    else:
        if WEIGHT not in term:
            raise ValueError(f"`{name}.{WEIGHT}` is missing: write {{{name}: {{{WEIGHT}: 1.0, ...}}}}")
        checked = {key: _check_value(name, key, _kind_of(LOSSES[name], key), value) for key, value in term.items()}
        weight, given = checked[WEIGHT], checked
    if not weight > 0:
        raise ValueError(f"the weight of loss '{name}' must be above 0, but it is {weight}: remove the loss")
    _check_together(LOSSES[name], given)
    return weight if given.keys() == {WEIGHT} else checked


def _kind_of(loss: Loss, key: str) -> Any:
    """The type of an option's value."""
    if key == WEIGHT:
        return float
    if key not in loss.options:
        others = [other.name for other in LOSSES.values() if key in other.options]
        where = "set it as train." + key if key in SHARED else f"losses with it are {', '.join(others)}"
        hint = f"; {where}" if others or key in SHARED else ""
        raise ValueError(
            f"`{key}` has no effect on loss {loss.name}, whose options are {', '.join([WEIGHT, *loss.options])}{hint}"
        )
    return loss.options[key].kind


def _check_value(name: str, key: str, kind: Any, value: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise ValueError(f"`{name}.{key}`: {error.errors()[0]['msg']}, but it is {value!r}") from None


def _check_together(loss: Loss, given: Mapping[str, Option]) -> None:
    for key, option in loss.options.items():
        if option.is_required and key not in given:
            raise ValueError(f"loss '{loss.name}' needs `{key}`: write {{{loss.name}: {{{WEIGHT}: 1.0, {key}: ...}}}}")
    if ("f_alpha" in given) != (given.get("f_divergence") == "alpha"):
        raise ValueError(f"`{loss.name}.f_alpha` belongs to `f_divergence: alpha`: set both or neither")


def check_shared(mixture: Mixture, shared: Mapping[str, Option]) -> None:
    """ValueError for an option of all losses that is missing, or that has no effect on any of these."""
    takes_beta = [name for name in mixture if LOSSES[name].takes_beta]
    if takes_beta and "beta" not in shared:
        raise ValueError(f"loss '{takes_beta[0]}' needs `beta`: set it")
    has_effect = {
        "beta": bool(takes_beta),
        "wpo": not is_unpaired(mixture),  # it weighs by both responses
        # It weighs the tokens of sums, by the shorter of two responses.
        "ld_alpha": not is_unpaired(mixture)
        and any(LOSSES[name].has_sums(options_of(mixture, name)) for name in mixture),
    }
    for option in shared:
        if not has_effect[option]:
            raise ValueError(f"`{option}` has no effect on loss {', '.join(mixture)}: set it to null")


def check_rows(mixture: Mixture, unpaired: bool) -> None:
    """ValueError if the losses are for the other kind of data."""
    if unpaired and not is_unpaired(mixture):
        raise ValueError(
            f"the rows are unpaired (one answer each, desirable or not), and loss {', '.join(mixture)} compares two "
            "answers: set train.loss to {kto: 1.0}"
        )
    if not unpaired and is_unpaired(mixture):
        raise ValueError(
            f"loss {', '.join(mixture)} is for unpaired rows, and the data has pairs: set prepare.format to unpaired, "
            "which makes two rows of each pair, or train.loss to {sigmoid: 1.0}"
        )
