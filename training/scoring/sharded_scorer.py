"""A scorer of a model that the ranks of a group share."""

from pathlib import Path

from torch import nn

from training.models.sharded import load_sharded
from training.scoring.logps import Scorer


def load_sharded_scorer(folder: Path, dtype: str, adapter: Path | None = None) -> tuple[Scorer, nn.Module]:
    """The scorer and the DeepSpeed engine around it; end the engine by `release`. A collective, as is each pass."""
    scorer, engine = load_sharded(folder, dtype, adapter, Scorer)
    scorer.head_is_sharded = True
    return scorer, engine
