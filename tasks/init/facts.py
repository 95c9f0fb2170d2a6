"""What decides how to train and how long it takes: the data, the model and this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.config.params import Params
from tasks.init.data_facts import DataFacts, examine_data
from tasks.init.machine import Machine, ModelFacts, examine_machine, examine_model
from tasks.prepare.templates import template_of
from tasks.source.stage import KEYS


@dataclass(frozen=True)
class Facts:
    data: DataFacts
    model: ModelFacts
    machine: Machine
    template: str  # its name


def examine(params: Params, folder: Path, called: Mapping[str, str] = KEYS) -> Facts:
    """The facts about the data of `params`, the model in a folder and this machine."""
    from training.models.tokenizer import load_tokenizer  # heavy: transformers

    tokenizer = load_tokenizer(folder)
    model = examine_model(folder, tokenizer)
    template = template_of(tokenizer, folder, params.prepare)
    return Facts(examine_data(params, template, called), model, examine_machine(), template.name)
