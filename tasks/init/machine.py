"""Facts about the model and the machine that decide how to train: sizes, memory, dtypes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tasks.system.files import read_json
from tasks.system.process_pool import available_cpus
from training.evaluation.hardware import gpus
from training.models.dtypes import gpu_has_bfloat16
from training.models.prompt_tokens import context_length
from training.trainer.memory import Sizes, model_sizes

GIB = 2**30


@dataclass(frozen=True)
class ModelFacts:
    folder: Path
    sizes: Sizes
    dtype: str  # of the stored weights
    context: int | None  # tokens that the model's positions allow
    has_template: bool

    @property
    def millions(self) -> str:
        count = self.sizes.parameters
        return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"


def examine_model(folder: Path, tokenizer: Any) -> ModelFacts:
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    dtype = text.get("dtype") or text.get("torch_dtype") or "float32"
    return ModelFacts(
        folder, model_sizes(folder, None), dtype, context_length(folder), tokenizer.chat_template is not None
    )


@dataclass(frozen=True)
class Machine:
    gpus: list[tuple[str, int]]  # name and bytes
    cores: int
    memory: int  # bytes that are free
    has_bfloat16: bool  # on the GPU

    @property
    def workers(self) -> int:
        return len(self.gpus) or min(2, self.cores)

    @property
    def dtype(self) -> str:
        """The fast dtype that loses nothing: many CPUs have no bfloat16 instructions."""
        return "bfloat16" if self.has_bfloat16 else "float32"

    @property
    def worker_memory(self) -> float:
        """Bytes that a worker may use."""
        return 0.93 * min(size for _, size in self.gpus) if self.gpus else 0.8 * self.memory / self.workers

    def __str__(self) -> str:
        if self.gpus:
            name, size = self.gpus[0]
            return f"{len(self.gpus)} x {name} with {size / GIB:.0f} GiB"
        return f"{self.cores} CPU cores and {self.memory / GIB:.0f} GiB of free memory, no GPU"


def examine_machine() -> Machine:
    return Machine(gpus(), available_cpus(), psutil.virtual_memory().available, gpu_has_bfloat16())
