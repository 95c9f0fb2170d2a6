"""Whole settings of a training run for tests and benchmarks, which name only what they change."""

from typing import Any

from training.objectives.objective import Objective
from training.trainer.settings import Settings

KEY = bytes(32)  # of checkpoints
PLAIN: dict[str, Any] = {
    "model_name": "test",
    "attempt": "test",
    "loss": {"sigmoid": 1.0},
    "loss_options": {"beta": 0.1},
    "reference_model": "start",
    "reference_update": None,
    "router_aux_loss_coef": None,
    "adapter": None,
    "quantization": None,
    "dtype": "float32",
    "learning_rate": 1e-6,
    "schedule": "cosine",
    "warmup_fraction": 0.1,
    "weight_decay": 0.0,
    "optimizer": "adamw",
    "max_grad_norm": 1.0,
    "global_batch_size": 64,
    "epochs": 1,
    "max_steps": None,
    "logging_steps": 10,
    "eval_steps": None,
    "select": None,
    "patience": None,
    "max_skipped_steps": 5,
    "kl_limit": None,
    "stop_on_alarm": False,
    "seed": 0,
    "deterministic": False,
    "zero_stage": 2,
    "offload": "none",
    "row_tokens": 8192,
    "activation_checkpointing": False,
    "mlp_tile_tokens": None,
    "sequence_parallel": 1,
    "tensor_parallel": 1,
    "compile": True,
    "save_steps": 100,
    "keep_checkpoints": 2,
    "keep_best": 0,
    "origin": {},
}


def make_settings(objective: Objective | None = None, **changes: Any) -> Settings:
    if objective:
        changes |= {"loss": objective.loss, "loss_options": objective.options}
    return Settings(**{**PLAIN, **changes})
