"""A worker of the group `reference`: holds the base model and writes shards of log-probabilities."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.artifacts.pairs import PairTable, open_table, pairs_file
from tasks.cluster.worker_pool import Worker
from tasks.reference.logp_shards import write_shard
from training.pairs.pair import Pair


@dataclass(frozen=True)
class BaseModel:
    """The model on disk, and how a worker loads it."""

    folder: str
    dtype: str
    quantization: str | None = None
    compile: bool = False  # its layers, on a GPU


@dataclass(frozen=True)
class ShardStats:
    """What one worker computed of a shard."""

    worker: int
    pairs: int
    tokens: int
    seconds: float
    note: str | None  # why the worker uses a slow path


class ReferenceScorer(Worker):
    """Holds the base model, or with ZeRO-3 a rank's part of it, and writes shards of log-probabilities.

    On Ray even when it is the only worker: there it has the threads of `cpus_per_worker`, and values do not depend on
    the number of workers.
    """

    REPLICATED = frozenset({"score"})  # ranks of a ZeRO-3 group compute different rows of the same shard
    IN_PROCESS = False

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.engine: Any = None
        self.note: str | None = None
        self.splits: dict[str, PairTable] = {}

    def load(self, model: BaseModel, pairs: Sequence[Pair]) -> None:
        """Load the model, and choose the fastest path that reproduces the model's own numbers on these pairs."""
        # Here and in `score`: torch and transformers, which the driver never needs.
        from training.models.compiling import compile_layers, start_compiler

        compiles = model.compile and not self.zero3 and start_compiler()

        from training.models.loading import best_device, load_model
        from training.scoring.logps import Scorer
        from training.scoring.parity import select_scoring_path

        self.device = best_device()
        if self.zero3:
            from training.scoring.sharded_scorer import load_sharded_scorer  # DeepSpeed

            scorer, engine = load_sharded_scorer(Path(model.folder), model.dtype)
        else:
            whole = load_model(Path(model.folder), model.dtype, self.device, model.quantization).eval()
            scorer = engine = Scorer(whole)
        self.note = select_scoring_path(scorer, pairs, self.device)
        if self.zero3 and scorer.path == "plain":
            raise ValueError(f"{self.note}. Ranks would make different passes: set reference.zero_stage to 0")
        if compiles and scorer.is_packed:
            compile_layers(whole)
        self.engine = engine

    def score(
        self, model: BaseModel, root: str, split: str, shard: dict[str, int], folder: str, row_tokens: int
    ) -> ShardStats:
        """Compute this rank's rows of a shard and write their pairs. A collective under ZeRO-3."""
        if split not in self.splits:
            self.splits[split] = PairTable(open_table(pairs_file(split, Path(root))))
        keys, pairs = list(shard), self.splits[split].select(np.array([*shard.values()], dtype=np.int64))
        if self.engine is None:
            self.load(model, pairs)

        from training.scoring.logps import score_rank_share

        started = time.monotonic()
        scores = score_rank_share(self.engine, pairs, row_tokens, self.device, rank=self.rank, world=self.world_size)
        numbers = sorted(scores)
        if numbers:
            write_shard(Path(folder), [keys[n] for n in numbers], [scores[n] for n in numbers])
        tokens = int(pairs.columns.lengths[numbers].sum())
        return ShardStats(self.number, len(numbers), tokens, time.monotonic() - started, self.note)
