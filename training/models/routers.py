"""The load-balancing loss of a mixture of experts: transformers' formula on the tokens of a row."""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from training.distributed.sequence_parallel import SequenceGroup

ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class LoadBalancingLoss:
    """Records the router logits of each pass with gradients, and computes the loss from them.

    Hooks on the base model work for every path of a Scorer. Activation checkpointing repeats layers, not the base
    model, so each pass is recorded once.
    """

    def __init__(self, causal: Any) -> None:
        self.formula = getattr(sys.modules[type(causal).__module__], "load_balancing_loss_func", None)
        config = causal.config.get_text_config()
        self.experts, self.experts_per_token = (
            getattr(causal, name, None) or getattr(config, name, None)
            for name in ("num_experts", "num_experts_per_tok")
        )
        supported = self.formula is not None and list(inspect.signature(self.formula).parameters) == ARGUMENTS
        if not (supported and self.experts and self.experts_per_token):
            raise ValueError(
                f"train.router_aux_loss_coef: transformers has no load-balancing loss for {type(causal).__name__}. "
                "Set it to null, or choose a mixture of experts such as Mixtral, Qwen3-MoE or OLMoE"
            )
        self.passes: list[tuple[tuple[Tensor, ...], Tensor | None]] = []
        self.is_token: Tensor | None = None  # (sequences, tokens) of the next pass, False for padding; None: no padding
        causal.base_model.register_forward_pre_hook(self._request_logits, with_kwargs=True)
        causal.base_model.register_forward_hook(self._record)

    def _request_logits(self, _: Any, args: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {**options, "output_router_logits": torch.is_grad_enabled()}

    def _record(self, _: Any, __: tuple, output: Any) -> None:
        if torch.is_grad_enabled():
            self.passes.append((output.router_logits, self.is_token))

    def loss(self, tokens: int, group: SequenceGroup | None = None) -> Tensor:
        """Load-balancing loss of all passes since the last call, as one batch; `group` has shared a row of `tokens`."""
        passes, self.passes = self.passes, []
        parts = zip(*([_tokens(layer, is_token) for layer in logits] for logits, is_token in passes), strict=True)
        layers = [torch.cat(layer) for layer in parts]
        if group:
            index = torch.arange(group.rank, tokens, group.size, device=layers[0].device)
            layers = [group.collect(layer[: len(index)], index, tokens) for layer in layers]
        return self.formula(tuple(layers), self.experts, self.experts_per_token)  # type: ignore[misc]


def _tokens(logits: Tensor, is_token: Tensor | None) -> Tensor:
    """(tokens, experts), without padding."""
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if is_token is None else flat[is_token.flatten()]
