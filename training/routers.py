"""The load-balancing loss of a mixture of experts: transformers' own formula over the tokens of a row."""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor

ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class LoadBalance:
    """Asks the base model for its router logits in every pass with gradients, and makes a loss of them.

    Hooks on the base model serve every path of a Scorer alike. Activation checkpointing repeats layers, not the base
    model, so that each pass is recorded once.
    """

    def __init__(self, causal: Any) -> None:
        self.formula = getattr(sys.modules[type(causal).__module__], "load_balancing_loss_func", None)
        config = causal.config.get_text_config()
        self.experts, self.chosen = (
            getattr(causal, name, None) or getattr(config, name, None)
            for name in ("num_experts", "num_experts_per_tok")
        )
        known = self.formula is not None and list(inspect.signature(self.formula).parameters) == ARGUMENTS
        if not (known and self.experts and self.chosen):
            raise ValueError(
                f"train.router_aux_loss_coef: {type(causal).__name__} has no routers whose load transformers can "
                "balance. Set it to null, or choose a mixture of experts such as Mixtral, Qwen3-MoE or OLMoE"
            )
        self.passes: list[tuple[tuple[Tensor, ...], Tensor | None]] = []
        self.real: Tensor | None = None  # (sequences, tokens) of the next pass; None where none is padding
        causal.base_model.register_forward_pre_hook(self._ask, with_kwargs=True)
        causal.base_model.register_forward_hook(self._keep)

    def _ask(self, _: Any, given: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return given, {**options, "output_router_logits": torch.is_grad_enabled()}

    def _keep(self, _: Any, __: tuple, output: Any) -> None:
        if torch.is_grad_enabled():
            self.passes.append((output.router_logits, self.real))

    def loss(self) -> Tensor:
        """Of the tokens of all passes since the last call, as one batch."""
        taken, self.passes = self.passes, []
        layers = zip(*([_tokens(layer, real) for layer in logits] for logits, real in taken), strict=True)
        return self.formula(tuple(torch.cat(layer) for layer in layers), self.experts, self.chosen)  # type: ignore[misc]


def _tokens(logits: Tensor, real: Tensor | None) -> Tensor:
    """(tokens, experts), without padding."""
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if real is None else flat[real.flatten()]
