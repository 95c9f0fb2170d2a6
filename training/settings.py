"""What a training run is told. Plain values, so that whoever starts workers need not load what they load."""

from dataclasses import dataclass
from typing import Any

from training.objective import Objective


class Mismatch(ValueError):
    """The pairs' reference values are not this policy's starting point."""


@dataclass(frozen=True)
class Settings:
    """Without defaults: a value that nobody fills in is an error, not another run."""

    model: str  # folder of the base model
    model_name: str  # what the adapter says it belongs to
    folder: str  # checkpoints and, at the end, `policy`; shared by all ranks
    attempt: str  # who may publish into the folder
    objective: Objective
    reference_update: dict[str, Any] | None  # TR-DPO: `every` so many steps, by `alpha`
    router_aux_loss_coef: float | None  # weight of the load-balancing loss of a mixture of experts
    learning_rate: float
    global_batch_size: int
    row_tokens: int
    adapter: dict[str, Any] | None
    quantization: str | None
    dtype: str
    schedule: str
    warmup_fraction: float
    weight_decay: float
    max_grad_norm: float
    epochs: int
    max_steps: int | None
    logging_steps: int
    eval_steps: int | float | str | None  # below 1: a share of all steps; "epoch": at the end of each
    save_steps: int
    keep_checkpoints: int
    keep_best: int  # more of them, the best by `select`
    origin: dict[str, Any]  # what determines this training, in plain JSON; each checkpoint holds it
    seed: int
    deterministic: bool  # on a GPU: the same weights bit for bit, in any run and after any interruption
    zero_stage: int
    offload: str
    activation_checkpointing: bool
    compile: bool  # on a GPU
    select: str | None  # metric by which the best checkpoint becomes the policy; None: the last
    patience: int | None  # evaluations without a better one after which training stops
    max_skipped_steps: int  # in a row
    kl_limit: float | None
    stop_on_alarm: bool
