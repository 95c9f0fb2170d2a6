"""What a training run is told. Plain values, so that whoever starts workers need not load what they load."""

from dataclasses import dataclass
from typing import Any

from training.objective import Objective


class Mismatch(ValueError):
    """The pairs' reference values are not this policy's starting point."""


@dataclass(frozen=True)
class Settings:
    model: str  # folder of the base model
    model_name: str  # what the adapter says it belongs to
    folder: str  # checkpoints and, at the end, `policy`; shared by all ranks
    attempt: str  # who may publish into the folder
    objective: Objective
    learning_rate: float
    global_batch_size: int
    row_tokens: int
    adapter: dict[str, Any] | None = None
    quantization: str | None = None
    dtype: str = "float32"
    schedule: str = "cosine"
    warmup_fraction: float = 0.1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    epochs: int = 1
    max_steps: int | None = None
    logging_steps: int = 10
    eval_steps: int | None = None
    save_steps: int = 100
    keep_checkpoints: int = 2
    seed: int = 0
    zero_stage: int = 2
    offload: str = "none"
    activation_checkpointing: bool = False
    compile: bool = True  # on a GPU
    select: str | None = None  # metric by which the best checkpoint becomes the policy; None: the last
    patience: int | None = None  # evaluations without a better one after which training stops
    max_skipped_steps: int = 5  # in a row
    kl_limit: float | None = None
    stop_on_alarm: bool = False
