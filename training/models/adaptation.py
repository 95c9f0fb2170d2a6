"""What an adapter trains in a model: peft's own answer for an empty model, before any weight is loaded."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from training.models.adapters import AdaptedWeight, adapted_weights, add_adapter
from training.models.loading import empty_model

ROUTERS = ("gate", "router")
SAVED = ".modules_to_save.default"  # in names of parameters that are trained whole
UNSHOWN = 5e-4  # share of the model below which a frozen kind other than the router is not named
_examined: dict[tuple[str, str], "Adaptation"] = {}  # seconds for a large model, and estimates ask several times


@dataclass(frozen=True)
class Adaptation:
    """Numbers of parameters. A kind is the name of a layer, `experts` or `router`."""

    model: int
    trainable: int  # of the adapter, with the copies of modules that are trained whole
    copied: int  # of these copies
    adapted: Mapping[str, int]  # by kind: weights that the adapter changes
    frozen: Mapping[str, int]  # by kind: the other weights, without vectors
    ranks: Mapping[str, int]  # by name in the model: rank at an adapted weight
    experts: Mapping[str, int]  # by module: weights of adapted experts, which peft merges in every pass

    def __str__(self) -> str:
        share = f"{_in_words(self.trainable)} trained parameters, {self.trainable / self.model:.2%} of the model's"
        kinds = sorted(self.frozen, key=lambda kind: -self.frozen[kind])
        frozen = [
            f"{kind} ({self.frozen[kind] / self.model:.1%})"
            for kind in kinds
            if kind == "router" or self.frozen[kind] > UNSHOWN * self.model
        ]
        return (
            f"{share} {_in_words(self.model)}, on {', '.join(self.adapted)}; "
            f"frozen: {', '.join(frozen) or 'biases and norms'}"
        )


def _in_words(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.1f} billion"
    return f"{count / 1e6:.3g} million" if count >= 1e6 else f"{count:,}"


def examine(model: PreTrainedModel, adapter: Mapping[str, Any]) -> Adaptation:
    """What this adapter trains in a model like this empty one. ValueError in a sentence if the two do not fit."""
    key = model.config.to_json_string(use_diff=False), json.dumps(adapter)
    if key not in _examined:
        _examined[key] = _examine(model, adapter)
    return _examined[key]


def _examine(model: PreTrainedModel, adapter: Mapping[str, Any]) -> Adaptation:
    options = {name: value for name, value in adapter.items() if name != "lora_plus_ratio"} | {"init": "zero"}
    plain = _add(empty_model(model.config), {**options, "use_dora": False, "dropout": 0.0})
    _check_whole_tensors(type(model).__name__, adapter, list(adapted_weights(plain)))
    adapted = _add(empty_model(model.config), options) if options.get("use_dora") else plain
    return _describe(model, adapted)


def _add(model: PreTrainedModel, options: Mapping[str, Any]) -> nn.Module:
    name = type(model).__name__
    try:
        with torch.device("meta"):
            return add_adapter(model, **options, seed=0)
    except (ValueError, re.error) as error:
        if str(error).startswith("train.adapter."):
            raise
        problem = str(error).strip().splitlines()[0].split(". ")[0].rstrip(".")
        raise ValueError(
            f"train.adapter.targets: peft cannot adapt {options['targets']} of {name}: {problem}"
        ) from None


def _check_whole_tensors(name: str, adapter: Mapping[str, Any], weights: list[AdaptedWeight]) -> None:
    """ValueError for options that peft has for linear layers alone; experts and their routers are single tensors."""
    plain = {"dropout": 0.0, "use_dora": False, "init": "zero"}
    wrong = next((key for key, value in plain.items() if adapter.get(key, value) != value), None)
    if wrong and any(weight.experts for weight in weights):
        usable = sorted({weight.name.split(".")[-2] for weight in weights if not weight.experts})
        raise ValueError(
            f"train.adapter.{wrong}: {json.dumps(adapter[wrong])} does not work on the experts and routers of {name}, "
            f"which peft adapts as whole tensors: set it to {json.dumps(plain[wrong])}, or train.adapter.targets to "
            f"[{', '.join(usable)}]"
        )


def _describe(model: PreTrainedModel, adapted: nn.Module) -> Adaptation:
    names = dict(model.named_parameters())
    weights = list(adapted_weights(adapted))
    ranks = {weight.name: weight.rank for weight in weights}
    experts: dict[str, int] = {}
    for weight in weights:
        if weight.experts > 1:
            owner = weight.name.rpartition(".")[0]
            experts[owner] = experts.get(owner, 0) + weight.size
    whole = {name: p for name, p in adapted.named_parameters() if SAVED in name}
    saved = {name.removeprefix("base_model.model.").replace(SAVED, "") for name in whole}
    changed: dict[str, int] = {}
    frozen: dict[str, int] = {}
    for name, parameter in names.items():
        if parameter.dim() > 1 or name in saved:
            kind = f"{_kind(name, parameter)}{' (whole)' if name in saved else ''}"
            counts = changed if name in saved or name in ranks else frozen
            counts[kind] = counts.get(kind, 0) + parameter.numel()
    return Adaptation(
        model=sum(parameter.numel() for parameter in names.values()),
        trainable=sum(p.numel() for p in adapted.parameters() if p.requires_grad),
        copied=sum(p.numel() for p in whole.values()),
        adapted=changed,
        frozen=frozen,
        ranks=ranks,
        experts=experts,
    )


def _kind(name: str, parameter: torch.Tensor) -> str:
    *path, last = name.split(".")
    owner = path[-1] if last in ("weight", "bias") else last
    if parameter.dim() == 3 and any("expert" in part for part in path):
        return "experts"
    return "router" if owner in ROUTERS or "router" in path else owner
