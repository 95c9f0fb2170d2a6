"""Section `train` as earlier versions wrote it: refused with its new form in a file, converted where it is only read.

Options of a loss stood beside `loss`, for every loss that has them: {loss: {sigmoid: 1.0}, label_smoothing: 0.1}.
"""

from collections.abc import Mapping
from typing import Any

from tasks.config.strict import to_yaml
from training.objectives.mixture import WEIGHT
from training.objectives.registry import LOSSES

MOVED = (
    *("label_smoothing", "gamma", "length_normalization", "reference", "tau", "cpo_alpha", "dpop_lambda"),
    *("desirable_weight", "undesirable_weight", "f_divergence", "f_alpha", "margin", "margin_scale"),
)
GONE = ("beta_alpha", "beta_momentum", "beta_filter")  # of beta-DPO
MUON = "The optimizer muon is gone: nobody aligns with it. Set `optimizer` to adamw"


def to_new_form(params: Mapping[str, Any]) -> dict[str, Any]:
    """Stored params with the section `train` of today. `margin: scores` is what `margin_scale` alone says now."""
    train = params.get("train")
    if not isinstance(train, Mapping) or not isinstance(train.get("loss"), Mapping):
        return dict(params)
    kept = {name: value for name, value in train.items() if name not in (*MOVED, *GONE)}
    return {**params, "train": {**kept, "loss": _new_loss(train["loss"], train)}}


def _new_loss(loss: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """The losses with the options that stand beside them."""
    given = {name: train[name] for name in MOVED if train.get(name) is not None and name != "margin"}
    terms = {}
    for name, term in loss.items():
        own = {key: value for key, value in given.items() if name in LOSSES and key in LOSSES[name].options}
        terms[name] = {**(term if isinstance(term, Mapping) else {WEIGHT: term}), **own} if own else term
    return terms


def refusal(train: Mapping[str, Any], loss: Mapping[str, Any]) -> str | None:
    """What to write in place of the old keys of a section `train`, ready to paste; None if there are none."""
    sentences = [_gone(name) for name in GONE if train.get(name) is not None]
    sentences += [MUON] if train.get("optimizer") == "muon" else []
    if old := [name for name in (*MOVED, *GONE) if name in train and (name in MOVED or train[name] is None)]:
        names = ", ".join(f"`{name}`" for name in ("loss", *old))
        own = train.get("loss")
        new = to_yaml({"loss": _new_loss(own if isinstance(own, Mapping) else loss, train)})[1:-1]
        sentences.append(f"The options of a loss stand with the loss now. In place of {names} write\n    {new}")
    return ". ".join(sentences) or None


def override_refusal(overrides: Mapping[str, Any], loss: Mapping[str, Any]) -> str | None:
    """What to write in place of overrides of old keys; None if there are none. `loss`: the losses of the run."""
    given = {name.removeprefix("train."): value for name, value in overrides.items() if name.startswith("train.")}
    sentences = [_gone(name) for name in GONE if name in given]
    sentences += [MUON] if given.get("optimizer") == "muon" else []
    if old := [name for name in MOVED if name in given]:
        names = ", ".join(f"`train.{name}`" for name in old)
        written = " and ".join(text for name in old for text in _new_overrides(name, given, loss))
        sentences.append(f"The options of a loss stand with the loss now. In place of {names} write {written}")
    return ". ".join(sentences) or None


def _new_overrides(name: str, given: Mapping[str, Any], loss: Mapping[str, Any]) -> list[str]:
    """Of an option: for each loss of the run that has it, or for each that there is if none of the run's has it."""
    if name == "margin":
        return []
    takers = [other for other, declared in LOSSES.items() if name in declared.options]
    chosen = [taker for taker in takers if taker in loss] or takers
    return [f"train.loss.{taker}.{name}={to_yaml(given[name])}" for taker in chosen]


def _gone(name: str) -> str:
    return f"`train.{name}` is gone: nobody aligns with beta-DPO. Remove it"
