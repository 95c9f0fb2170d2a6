"""What the adapters of `train` and `sft` train in the base model. One that does not fit is refused before a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.config.params import Params
from tasks.config.train import Optimization
from tasks.errors import UserError


def check(folder: Path, params: Params) -> dict[str, str]:
    """What the adapter of each section trains; UserError if one does not fit the model in the folder."""
    described = {section: describe(folder, section, getattr(params, section)) for section in ("sft", "train")}
    return {section: text for section, text in described.items() if text}


def describe(folder: Path, section: str, train: Optimization | None) -> str | None:
    """What the adapter of a section trains and what stays frozen; None without one."""
    if train is None or train.adapter is None:
        return None
    from training.models.adaptation import examine  # heavy: torch, peft
    from training.models.loading import empty_model, load_config

    with errors_of(section):
        adapted = examine(empty_model(load_config(folder)), train.adapter.model_dump())
    return f"LoRA of rank {train.adapter.rank}: {adapted}"


@contextmanager
def errors_of(section: str) -> Iterator[None]:
    """ValueErrors about an adapter, which name keys of `train`, as UserErrors that name the section's keys."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"params.yaml: {str(error).replace('train.', f'{section}.')}.") from None
