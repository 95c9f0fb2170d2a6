"""A worker of the group `evaluate`: holds one model at a time, and samples or scores what it is given.

A task names its model and carries everything that decides its result: any worker can do it, a restarted one too.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tasks.errors import UserError
from tasks.machines.pool import Member
from training.objective import Objective
from training.outputs import Answer, PairValues
from training.packing import Pair

GIB = 2**30


@dataclass(frozen=True)
class Weights:
    """A model on disk, and how it is loaded."""

    folder: str
    tokenizer: str  # the folder that holds it
    dtype: str
    quantization: str | None = None
    adapter: str | None = None  # a folder; None is the model without one

    def base(self) -> "Weights":
        return replace(self, adapter=None)


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


class Evaluator(Member):
    ALIKE = frozenset({"values", "harness"})

    def __init__(self) -> None:
        self.split = False  # whether the model is shared with the other workers
        self.shared: tuple[Any, Any] | None = None  # scorer and engine of a model that is
        self.model: Any = None
        self.weights: Weights | None = None  # of the model, with the adapter that was put on it
        self.scorer: Any = None
        self.scores: tuple[Weights, list[str]] | None = None  # what the scorer is for: a model, and pairs' ids
        self.scoring = ExitStack()

    def join(self, meeting: str, rank: int, world: int) -> None:
        super().join(meeting, rank, world)
        self.split = True

    def sample(self, weights: Weights, prompts: Sequence[Sequence[int]], how: Sampling) -> list[Answer]:
        """One batch, by transformers."""
        from training.model import load_tokenizer
        from training.sampling import sample

        self._stop_scoring()
        given = (how.max_new_tokens, how.temperature, how.top_p, how.seed)
        with self._loaded(weights) as model:
            tokenizer = load_tokenizer(Path(weights.tokenizer))
            return sample(model, tokenizer, prompts, *given, batch_size=len(prompts))

    def has_vllm(self) -> bool:
        return find_spec("vllm") is not None

    def sample_by_vllm(
        self, weights: Weights, prompts: Sequence[Sequence[int]], how: Sampling, memory: float
    ) -> tuple[list[Answer], float]:
        """All prompts in a process of vLLM's own, and the GiB that this process held of the GPU meanwhile."""
        from training import vllm_sampling
        from training.model import load_tokenizer

        held = self.free()
        request = {**vars(how), "dtype": weights.dtype, "gpu_memory_utilization": memory}
        adapter = Path(weights.adapter) if weights.adapter else None
        with TemporaryDirectory(prefix="dpo-vllm-") as folder:
            tokenizer = load_tokenizer(Path(weights.tokenizer))
            answers = vllm_sampling.sample(Path(weights.folder), adapter, tokenizer, prompts, request, Path(folder))
        return answers, held

    def score(
        self, weights: Weights, pairs: Sequence[Pair], rows: Sequence[Sequence[int]], probes: Sequence[Pair]
    ) -> tuple[list[Any], str | None]:
        """Values of each pair's tokens, and what is slow about it. `probes` stand for all pairs of all tasks."""
        from training.evaluation import row_values
        from training.model import best_device

        with self._loaded(weights):
            note = self._start_scoring(weights, probes)
            return row_values(self.scorer, pairs, rows, best_device()), note

    def values(
        self, objective: Objective, pairs: Sequence[Pair], values: Sequence[Any], row_tokens: int
    ) -> tuple[dict[str, float], list[PairValues]]:
        """The training metrics, from the values of all pairs. No model is needed."""
        from training.evaluation import stored_pair_values

        return stored_pair_values(values, objective, pairs, row_tokens)

    def texts(self, tokenizer: str, sequences: list[list[int]]) -> list[str]:
        from training.model import load_tokenizer

        decode = load_tokenizer(Path(tokenizer)).decode
        return [str(decode(ids)) for ids in sequences]

    def rewards(self, folder: str, label: str | None, exchanges: Sequence[tuple[str, str]], dtype: str) -> list[float]:
        from training.model import best_device
        from training.reward import scores

        self._drop()
        return scores(Path(folder), label, exchanges, dtype, best_device())

    def harness(
        self, weights: Weights, tasks: list[str], limit: int | None, folder: str | None, seed: int
    ) -> dict[str, float]:
        if find_spec("lm_eval") is None:
            raise UserError(
                "evaluate.harness needs lm-evaluation-harness, which is not installed. Run `.venv/bin/pip install "
                "lm_eval`, or set evaluate.harness to null."
            )
        from training.harness import scores
        from training.model import load_tokenizer

        self._stop_scoring()
        try:
            with self._loaded(weights) as model:
                tokenizer = load_tokenizer(Path(weights.tokenizer))
                return scores(model, tokenizer, tasks, limit, Path(folder) if folder else None, seed)
        except ValueError as error:
            raise UserError(f"evaluate.harness: {error}. Mend evaluate.harness.") from error

    def free(self) -> float:
        """Let go of every model; the GiB that this process still holds of its GPU."""
        from training import reward
        from training.hardware import give_back_memory

        self._drop()
        reward.load.cache_clear()
        return give_back_memory() / GIB

    @contextmanager
    def _loaded(self, weights: Weights) -> Iterator[Any]:
        """The model; one whose adapter another task put on is used with it switched off."""
        from training import adapters

        if self.split:
            self._load_together(weights)
        elif self.weights is None or self.weights.base() != weights.base():
            self._load(weights.base())
        assert self.weights is not None
        if weights.adapter and self.weights != weights:
            if self.weights.adapter:
                self._load(weights.base())
            self._stop_scoring()
            self.model, self.weights = adapters.load_adapter(self.model, Path(weights.adapter)), weights
        if self.weights.adapter and not weights.adapter:
            with adapters.switched_off(self.model) as model:
                yield model
        else:
            yield self.model

    def _load_together(self, weights: Weights) -> None:
        """Where any rank lacks the model all load it, the adapter with it: ZeRO-3 splits what it is given once."""
        from training.engine import most

        there = self.weights is not None and weights in (self.weights, self.weights.base())
        if most(0 if there else 1):
            self._load(weights)

    def _load(self, weights: Weights) -> None:
        from training import reward, split
        from training.model import best_device, load_model

        if self.split and weights.quantization:
            raise UserError(
                "infra/cluster.yaml: evaluate.zero_stage 3 cannot split a base of 4 bits. Set it to 0, or "
                "train.quantization to null."
            )
        self._drop()
        reward.load.cache_clear()
        folder, adapter = Path(weights.folder), Path(weights.adapter) if weights.adapter else None
        try:
            if self.split:
                self.shared = split.load_split(folder, weights.dtype, adapter)
                self.model = self.shared[0].model
            else:
                self.model = load_model(folder, weights.dtype, best_device(), weights.quantization)
        except ValueError as error:
            raise UserError(f"The model in {weights.folder} cannot be used: {error}.") from error
        self.weights = weights

    def _drop(self) -> None:
        from training import engine

        self._stop_scoring()
        if self.shared:
            engine.release(self.shared[1])
        self.model = self.weights = self.shared = None

    def _start_scoring(self, weights: Weights, probes: Sequence[Pair]) -> str | None:
        """A scorer for this model and these pairs, kept for the tasks that follow; a sentence if it is a slow one."""
        from training.model import best_device
        from training.proof import scoring

        wanted = (weights, [pair.id for pair in probes])
        if self.scores == wanted:
            return None
        self._stop_scoring()
        notes: list[str] = []
        model = self.shared[0] if self.shared else self.model
        self.scorer = self.scoring.enter_context(scoring(model, probes, best_device(), notes.append))
        if self.split and self.scorer.how == "plain":
            raise UserError(f"{notes[0]}. Its workers cannot share one copy: set evaluate.zero_stage to 0.")
        self.scores = wanted
        return notes[0] if notes else None

    def _stop_scoring(self) -> None:
        """The model is as it was, ready to generate."""
        self.scoring.close()
        self.scorer = self.scores = None
