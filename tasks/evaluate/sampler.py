"""A worker of the group `inference` that draws answers: holds one model at a time, samples, and asks a reward model.

A task names its model and contains everything that determines its result, so any worker can run it, also after a
restart. Methods import the code of training/ themselves: the driver imports this module and must not load torch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tasks.cluster.worker_pool import Worker
from tasks.errors import UserError
from tasks.system.files import read_json_or_empty
from training.evaluation.samples import Answer

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


class Sampler(Worker):
    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.model: Any = None
        self.engine: Any = None  # DeepSpeed's, of a model that ZeRO-3 shards
        self.weights: Weights | None = None  # what the model was loaded from, with its current adapter

    def sample(self, weights: Weights, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        """One batch, by transformers."""
        from training.evaluation.sampling import sample

        self._before_sampling()
        with self._loaded(weights) as model:
            return sample(model, tokenizer_of(weights), prompts, **vars(sampling), batch_size=len(prompts))

    def has_vllm(self, weights: Weights) -> tuple[bool, bool]:
        """Whether vLLM is installed, and whether it loads these weights' adapter."""
        config = read_json_or_empty(weights.adapter / "adapter_config.json") if weights.adapter else {}
        return find_spec("vllm") is not None, not config.get("modules_to_save")

    def sample_by_vllm(
        self, weights: Weights, prompts: Sequence[Sequence[int]], sampling: Sampling, memory: float
    ) -> tuple[list[Answer], float]:
        """All answers, from a vLLM process, and the GiB of GPU memory that this process held meanwhile."""
        from training.evaluation import vllm_sampling

        held = self.free()
        request = {**vars(sampling), "dtype": weights.dtype, "gpu_memory_utilization": memory}
        model, adapter, tokenizer = weights.folder, weights.adapter, tokenizer_of(weights)
        with TemporaryDirectory(prefix="dpo-vllm-") as folder:
            return vllm_sampling.sample(model, adapter, tokenizer, prompts, request, Path(folder)), held

    def decode(self, weights: Weights, sequences: list[list[int]]) -> list[str]:
        tokenizer = tokenizer_of(weights)
        return [str(tokenizer.decode(ids)) for ids in sequences]

    def reward_scores(
        self, folder: Path, label: str | None, exchanges: Sequence[tuple[str, str]], dtype: str
    ) -> list[float]:
        from training.evaluation.reward_model import scores
        from training.models.loading import best_device

        self._drop()
        return scores(folder, label, exchanges, dtype, best_device())

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
            self._before_sampling()
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

        if self.zero3 and weights.quantization:
            raise UserError(
                "infra/cluster.yaml: inference.zero_stage is 3, which cannot shard a quantized base model. Set it to "
                "0, or train.quantization to null."
            )
        self._drop()
        reward_model.load.cache_clear()
        try:
            if self.zero3:
                self.model, self.engine = self._load_shared(weights)
            else:
                self.model = load_model(weights.folder, weights.dtype, best_device(), weights.quantization)
        except ValueError as error:
            raise UserError(f"The model in {weights.folder} cannot be used: {error}.") from error
        self.weights = weights

    def _load_shared(self, weights: Weights) -> tuple[Any, Any]:
        """The model that ZeRO-3 shards, and DeepSpeed's engine."""
        from training.models.sharded import load_sharded

        return load_sharded(weights.folder, weights.dtype, weights.adapter)

    def _drop(self) -> None:
        from training.models.sharded import release

        self._before_sampling()
        if self.engine:
            release(self.engine)
        self.model = self.weights = self.engine = None

    def _before_sampling(self) -> None:
        """Undo what a model cannot generate with."""


def tokenizer_of(weights: Weights) -> Any:
    from training.models.tokenizer import load_tokenizer

    return load_tokenizer(weights.tokenizer)
