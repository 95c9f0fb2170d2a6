"""Exports hold every tensor of the base model: what training changed is replaced, all others are copied unchanged.

A folder may hold more than the text model that is trained: a vision tower, heads for further tokens, buffers. Which
tensor of a file belongs to which parameter is transformers' own answer.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from training.models import weights
from training.models.loading import empty_model, load_config
from training.models.model_files import OF_PROCESSORS
from training.models.transformers_internals import (
    WeightConverter,
    WeightRenaming,
    get_model_conversion_mapping,
    rename_source_key,
)


def parameter_names(model: PreTrainedModel, tensors: Iterable[str]) -> dict[str, str | None]:
    """For each tensor of a folder: the parameter or buffer of the model that transformers loads it into, or None."""
    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found: dict[str, str | None] = {}
    for name in tensors:
        key, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if key not in state and name in state:
            key, _ = rename_source_key(name, [], [], model.base_model_prefix, state)
        found[name] = key if key in state else None
    return found


def untouched(base: Path) -> list[str]:
    """The tensors in the base model's files that are no part of the text model."""
    names = parameter_names(empty_model(load_config(base)), weights.locate(base))
    return [name for name, parameter in names.items() if parameter is None]


def replaced(base: Path, trained: Path | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the base model under its own name, with the values of the trained model where that has them.

    Left out are copies of tied weights, and tensors that the trained model stores in another form.
    """
    model = empty_model(load_config(base))
    before = weights.locate(base)
    after: Mapping[str, Any] = weights.locate(trained) if isinstance(trained, Path) else trained
    base_names, trained_names = parameter_names(model, before), parameter_names(model, after)
    alone, buffers, tied = one_to_one(trained_names), dict(model.named_buffers()), model.all_tied_weights_keys or {}
    sources = {name: name for name in before.keys() & after.keys() if trained_names[name] not in tied}
    sources |= {n: alone[p] for p, n in one_to_one(base_names).items() if n not in sources and p in alone}
    with ExitStack() as stack:
        files: dict[Path, Any] = {}

        def read(name: str, where: Mapping[str, Any]) -> Tensor:
            place = where[name]
            if isinstance(place, Tensor):
                return place
            if place not in files:
                files[place] = stack.enter_context(safe_open(place, "pt"))
            tensor: Tensor = files[place].get_tensor(name)
            return tensor

        for name, parameter in base_names.items():
            if name in sources:
                yield name, read(sources[name], after)
            elif parameter is None or parameter in buffers:
                yield name, read(name, before)
        for name in sorted(after.keys() - set(sources.values())):
            if trained_names[name] not in tied:
                yield name, read(name, after)


def one_to_one(parameters: Mapping[str, str | None]) -> dict[str, str]:
    """The tensor of each parameter that is a single tensor in the files."""
    names: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        if parameter:
            names.setdefault(parameter, []).append(name)
    return {parameter: tensors[0] for parameter, tensors in names.items() if len(tensors) == 1}


def exported_config(folder: Path) -> PreTrainedConfig:
    """The configuration of an export: of the whole model if the folder has all its tensors, else of the text model."""
    config = load_config(folder)
    text = empty_model(config)
    model, chosen = text, config if type(text.config) is type(config) else text.config
    if chosen is not config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        with torch.device("meta"):
            whole = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
        loaded = {*parameter_names(whole, weights.locate(folder)).values(), *whole.all_tied_weights_keys}
        if loaded >= {name for name, _ in whole.named_parameters()}:
            model, chosen = whole, config
    chosen.architectures = [type(model).__name__]
    return chosen


def copy_processor(base: Path, target: Path) -> None:
    """The files that prepare images, audio and video."""
    for name in (*OF_PROCESSORS, "chat_template.json"):
        if (base / name).is_file():
            shutil.copyfile(base / name, target / name)


def check_complete(base: Path, export: Path) -> int:
    """The number of tensors that training does not touch. ValueError unless the export has all, bit for bit."""
    names, before, after = untouched(base), weights.locate(base), weights.locate(export)
    for name in names:
        if name not in after or not _same(name, before[name], after[name]):
            raise ValueError(f"the export does not hold the base model's tensor {name} as it was")
    return len(names)


def _same(name: str, before: Path, after: Path) -> bool:
    with safe_open(before, "pt") as first, safe_open(after, "pt") as second:
        old, new = first.get_tensor(name), second.get_tensor(name)
    return old.dtype == new.dtype and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (old, new)))
