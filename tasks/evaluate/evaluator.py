"""A worker of the group `evaluate`: holds one model at a time, samples answers and scores pairs.

A task names its model and contains everything that determines its result, so any worker can run it, also after a
restart. Methods import the code of training/ themselves: the driver imports this module and must not load torch.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tasks.cluster.worker_pool import Worker
from tasks.errors import UserError
from tasks.system.files import recall
from training.evaluation.samples import Answer, PairValues
from training.pairs.pair import Pair

if TYPE_CHECKING:  # it loads torch
    from training.objectives.objective import Objective

GIB = 2**30


@dataclass(frozen=True)
class Weights:
    """A model on disk and the settings to load it with."""

    folder: Path
    tokenizer: Path  # its folder
    dtype: str
    quantization: str | None = None
    adapter: Path | None = None  # its folder

    def base(self) -> "Weights":
        return replace(self, adapter=None)


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


class Evaluator(Worker):
    REPLICATED = frozenset({"pair_values", "harness"})

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.shared: tuple[Any, Any] | None = None  # scorer and engine of a model that ZeRO-3 shards
        self.model: Any = None
        self.weights: Weights | None = None  # what the model was loaded from, with its current adapter
        self.scorer: Any = None
        self.scorer_key: tuple[Weights, list[str]] | None = None  # the model and the probes of the scorer
        self.scorer_context = ExitStack()

    def sample(self, weights: Weights, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        """One batch, by transformers."""
        from training.evaluation.sampling import sample

        self._stop_scoring()
        with self._loaded(weights) as model:
            return sample(model, _tokenizer(weights), prompts, **vars(sampling), batch_size=len(prompts))

    def has_vllm(self, weights: Weights) -> tuple[bool, bool]:
        """Whether vLLM is installed, and whether it loads these weights' adapter."""
        config = recall(weights.adapter / "adapter_config.json") if weights.adapter else {}
        return find_spec("vllm") is not None, not config.get("modules_to_save")

    def sample_by_vllm(
        self, weights: Weights, prompts: Sequence[Sequence[int]], sampling: Sampling, memory: float
    ) -> tuple[list[Answer], float]:
        """All answers, from a vLLM process, and the GiB of GPU memory that this process held meanwhile."""
        from training.evaluation import vllm_sampling

        held = self.free()
        request = {**vars(sampling), "dtype": weights.dtype, "gpu_memory_utilization": memory}
        model, adapter, tokenizer = weights.folder, weights.adapter, _tokenizer(weights)
        with TemporaryDirectory(prefix="dpo-vllm-") as folder:
            return vllm_sampling.sample(model, adapter, tokenizer, prompts, request, Path(folder)), held

    def score(
        self, weights: Weights, pairs: Sequence[Pair], rows: Sequence[Sequence[int]], probes: Sequence[Pair]
    ) -> tuple[list[Any], str | None]:
        """Values of each pair's tokens, and a note if scoring is slow. `probes` represent the pairs of all tasks."""
        from training.evaluation.pair_scores import score_rows
        from training.models.loading import best_device

        with self._loaded(weights):
            note = self._start_scoring(weights, probes)
            return score_rows(self.scorer, pairs, rows, best_device()), note

    def pair_values(
        self, objective: "Objective", pairs: Sequence[Pair], values: Sequence[Any], row_tokens: int
    ) -> tuple[dict[str, float], list[PairValues]]:
        """The training metrics from the values of all pairs. Needs no model."""
        from training.evaluation.pair_scores import stored_pair_values

        return stored_pair_values(values, objective, pairs, row_tokens)

    def decode(self, weights: Weights, sequences: list[list[int]]) -> list[str]:
        tokenizer = _tokenizer(weights)
        return [str(tokenizer.decode(ids)) for ids in sequences]

    def reward_scores(
        self, folder: Path, label: str | None, exchanges: Sequence[tuple[str, str]], dtype: str
    ) -> list[float]:
        from training.evaluation.reward_model import scores
        from training.models.loading import best_device

        self._drop()
        return scores(folder, label, exchanges, dtype, best_device())

    def harness(
        self, weights: Weights, tasks: list[str], limit: int | None, folder: Path | None, seed: int
    ) -> dict[str, float]:
        if find_spec("lm_eval") is None:
            raise UserError(
                "evaluate.harness needs lm-evaluation-harness, which is not installed. Run `.venv/bin/pip install "
                "lm_eval`, or set evaluate.harness to null."
            )
        from training.evaluation.lm_eval_tasks import scores

        self._stop_scoring()
        try:
            with self._loaded(weights) as model:
                return scores(model, _tokenizer(weights), tasks, limit, folder, seed)
        except ValueError as error:
            raise UserError(f"evaluate.harness: {error}. Change evaluate.harness in params.yaml.") from error

    def free(self) -> float:
        """Release every model; the GiB of GPU memory that this process still holds."""
        from training.evaluation import reward_model
        from training.evaluation.hardware import free_gpu_memory

        self._drop()
        reward_model.load.cache_clear()
        return free_gpu_memory() / GIB

    @contextmanager
    def _loaded(self, weights: Weights) -> Iterator[Any]:
        """The model; an adapter that another task loaded is switched off where these weights have none."""
        from training.models import adapters

        if self.zero3:
            self._load_together(weights)
        elif self.weights is None or self.weights.base() != weights.base():
            self._load(weights.base())
        assert self.weights is not None
        if weights.adapter and self.weights != weights:
            if self.weights.adapter:
                self._load(weights.base())
            self._stop_scoring()
            self.model, self.weights = adapters.load_adapter(self.model, weights.adapter), weights
        if self.weights.adapter and not weights.adapter:
            with self.model.disable_adapter():
                yield self.model
        else:
            yield self.model

    def _load_together(self, weights: Weights) -> None:
        """All ranks load the model if any rank lacks it, with its adapter: ZeRO-3 shards a model once."""
        from training.distributed.process_group import max_over_ranks

        loaded = self.weights is not None and weights in (self.weights, self.weights.base())
        if max_over_ranks(0 if loaded else 1):
            self._load(weights)

    def _load(self, weights: Weights) -> None:
        from training.evaluation import reward_model
        from training.models.loading import best_device, load_model
        from training.scoring import sharded_model

        if self.zero3 and weights.quantization:
            raise UserError(
                "infra/cluster.yaml: evaluate.zero_stage is 3, which cannot shard a quantized base model. Set it to 0, "
                "or train.quantization to null."
            )
        self._drop()
        reward_model.load.cache_clear()
        try:
            if self.zero3:
                self.shared = sharded_model.load_sharded(weights.folder, weights.dtype, weights.adapter)
                self.model = self.shared[0].model
            else:
                self.model = load_model(weights.folder, weights.dtype, best_device(), weights.quantization)
        except ValueError as error:
            raise UserError(f"The model in {weights.folder} cannot be used: {error}.") from error
        self.weights = weights

    def _drop(self) -> None:
        from training.scoring import sharded_model

        self._stop_scoring()
        if self.shared:
            sharded_model.release(self.shared[1])
        self.model = self.weights = self.shared = None

    def _start_scoring(self, weights: Weights, probes: Sequence[Pair]) -> str | None:
        """A scorer for this model and these pairs, kept for the following tasks; a note if it is a slow one."""
        from training.models.loading import best_device
        from training.scoring.parity import scoring

        key = (weights, [pair.id for pair in probes])
        if self.scorer_key == key:
            return None
        self._stop_scoring()
        model = self.shared[0] if self.shared else self.model
        self.scorer, note = self.scorer_context.enter_context(scoring(model, probes, best_device()))
        if self.zero3 and self.scorer.path == "plain":
            raise UserError(f"{note}. Workers cannot share one copy of this model: set evaluate.zero_stage to 0.")
        self.scorer_key = key
        return note

    def _stop_scoring(self) -> None:
        """Restore the model, so that it can generate."""
        self.scorer_context.close()
        self.scorer = self.scorer_key = None


def _tokenizer(weights: Weights) -> Any:
    from training.models.tokenizer import load_tokenizer

    return load_tokenizer(weights.tokenizer)
