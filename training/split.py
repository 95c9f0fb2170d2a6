"""A model larger than one device: the ranks of a group share one copy (ZeRO-3), for passes without gradients."""

from pathlib import Path

from torch import nn

from training import engine
from training.logps import Scorer
from training.model import load_model


def load_split(folder: Path, dtype: str) -> tuple[Scorer, nn.Module]:
    """The scorer, and the engine around it by which rows are scored. A collective, as each pass is."""
    config = engine.inference_config(dtype)
    with engine.sharded_from_birth(config):
        scorer = Scorer(load_model(folder, dtype))
    scorer.whole_head = False
    return scorer, engine.shard(scorer, config)
