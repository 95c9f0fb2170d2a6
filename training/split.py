"""A model larger than one device: the ranks of a group share one copy (ZeRO-3), for passes without gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from training import adapters, engine
from training.logps import Scorer
from training.model import load_model


def load_split(folder: Path, dtype: str, adapter: Path | None = None) -> tuple[Scorer, nn.Module]:
    """The scorer, and the engine around it, which `engine.release` ends. A collective, as each pass is."""
    config = engine.inference_config(dtype)
    with engine.sharded_from_birth(config):
        model: Any = load_model(folder, dtype)
        scorer = Scorer(adapters.load_adapter(model, adapter) if adapter else model)
    scorer.whole_head = False
    ready = engine.shard(scorer, config)
    engine.starts_a_pass(ready, scorer.causal)  # where it generates, or gives logits
    return scorer, ready


@contextmanager
def split_model(folder: Path, adapter: Path | None, dtype: str) -> Iterator[Any]:
    """The model alone, for as long as the block lasts. Its passes are collectives: all ranks make as many."""
    scorer, ready = load_split(folder, dtype, adapter)
    try:
        yield scorer.model
    finally:
        engine.release(ready)
