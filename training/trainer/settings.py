"""The settings of a training run, as plain values: the process that starts workers need not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.objectives.objective import Objective

# Per trainable parameter, besides the float32 weight.
MOMENT_BYTES = {"adamw": 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2.0 + 2 * 4 / 256}
SAVED_MOMENT_BYTES = {**MOMENT_BYTES, "adamw_8bit": 8.0}  # in a checkpoint


class Preempted(Exception):
    """A rank was asked to stop, and all ranks have saved a checkpoint."""


class ReferenceMismatch(ValueError):
    """The stored reference log-probabilities are not those of the model to be trained."""


@dataclass(frozen=True)
class Settings:
    """Without defaults: a missing value is an error, not a different run."""

    model: str  # folder of the base model
    model_name: str  # base model that the adapter's config names
    folder: str  # checkpoints and, at the end, `policy`; shared by all ranks
    attempt: str  # id of the only attempt that may publish into the folder
    loss: Mapping[str, Any]  # by name the weight, or weight and options
    loss_options: Mapping[str, Any]  # of all losses
    reference_model: str  # start: the policy starts as the reference; base: the reference is another model
    reference_update: dict[str, Any] | None  # TR-DPO: `every` steps, with weight `alpha`
    router_aux_loss_coef: float | None  # weight of the load-balancing loss of a mixture of experts
    learning_rate: float
    global_batch_size: int
    row_tokens: int
    adapter: dict[str, Any] | None
    quantization: str | None
    dtype: str
    schedule: str
    warmup_fraction: float
    optimizer: str  # a key of MOMENT_BYTES
    weight_decay: float
    max_grad_norm: float
    epochs: int
    max_steps: int | None
    logging_steps: int
    eval_steps: int | float | str | None  # below 1: a fraction of all steps; "epoch": at the end of each epoch
    save_steps: int
    keep_checkpoints: int
    keep_best: int  # number of further checkpoints, the best by `select`
    origin: dict[str, Any]  # the inputs that determine this training, as plain JSON; each checkpoint contains it
    seed: int
    deterministic: bool  # on a GPU: bit-identical weights in every run and after any interruption
    zero_stage: int
    offload: str
    activation_checkpointing: bool | str  # "offload": the kept inputs of layers are in host memory
    mlp_tile_tokens: int | None  # tokens of a row that an MLP computes at a time; None: all
    sequence_parallel: int  # ranks that share the tokens of a row; 1: each rank computes whole rows
    tensor_parallel: int  # ranks that share the weights of every layer; 1: each rank computes whole layers
    compile: bool  # applies on a GPU
    select: str | None  # metric whose best checkpoint becomes the policy; None: the last
    patience: int | None  # evaluations without improvement before training stops
    max_skipped_steps: int  # in a row
    kl_limit: float | None
    stop_on_alarm: bool

    @cached_property
    def objective(self) -> "Objective":
        from training.objectives.objective import Objective  # loads torch

        return Objective(self.loss, self.loss_options)
