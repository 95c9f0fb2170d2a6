"""The vocabulary head: from hidden states to the log-probabilities of given tokens, without keeping the logits.

Projection, log-softmax and gather run over chunks of positions. Where all logits of a row fit into `KEEP_BYTES` they
are kept for the backward pass in the model's precision and turned into their own gradient there; otherwise each chunk
is projected again. One kernel reads a position's logits once for normaliser, entropy and collision probability.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

try:
    from training import kernels
except ImportError:  # no Triton: no NVIDIA GPU
    kernels = None  # type: ignore[assignment]

KEEP_BYTES = 4 * 2**30
CHUNK_BYTES = 2**30


@dataclass(frozen=True)
class Shaping:
    """What a model does to its logits after the projection."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "Shaping":
        """Cohere multiplies, Granite divides, Gemma 2 caps; what is missing here, the check at start finds."""
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def slope(self, shaped: Tensor) -> Tensor | float:
        """d shaped / d projected, from the shaped value."""
        return self.scale if self.softcap is None else self.scale * (1 - (shaped / self.softcap) ** 2)


Values = tuple[Tensor, Tensor, Tensor]  # per target: log-probability, entropy and log sum_v p_v^2 of its distribution


def head_logps(head: nn.Module, hidden: Tensor, targets: Tensor, shaping: Shaping, fused: bool) -> Values:
    """Of each target (targets,) under head(hidden) (targets, size). Gradients flow through the first of the three."""
    if fused and type(head) is nn.Linear:
        return FusedHead.apply(hidden, head.weight, head.bias, targets, shaping)
    return _by_module(head, hidden, targets, shaping)


def _by_module(head: nn.Module, hidden: Tensor, targets: Tensor, shaping: Shaping) -> Values:
    """Any head as it stands (adapted, sharded by ZeRO-3): each chunk calls the module, again in the backward pass."""

    def values(hidden: Tensor, targets: Tensor) -> Values:
        logits = shaping(head(hidden))
        return gather(logits if logits.dtype == torch.float64 else logits.float(), targets)

    width = int(head.out_features)  # type: ignore[arg-type]
    chunks = list(zip(*(part.split(_chunk(width, 4)) for part in (hidden, targets)), strict=True))
    if len(chunks) == 1 or not torch.is_grad_enabled():
        parts = [values(*chunk) for chunk in chunks]
    else:
        parts = [checkpoint(values, *chunk, use_reentrant=False) for chunk in chunks]
    logps, entropy, collision = (torch.cat(column) for column in zip(*parts, strict=True))
    return logps, entropy, collision


def gather(logits: Tensor, targets: Tensor) -> Values:
    """The plain formulas, differentiable by autograd in the first."""
    normaliser = logits.logsumexp(-1)
    logps = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    with torch.no_grad():
        probability = (logits - normaliser[:, None]).exp_()
        entropy = normaliser - (probability * logits).sum(-1)
        collision = probability.square_().sum(-1).log()
    return logps, entropy, collision


class FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shaping: Shaping
    ) -> Values:
        keep = ctx.needs_input_grad[0] and targets.numel() * weight.shape[0] * weight.element_size() <= KEEP_BYTES
        size = len(targets) if keep else _chunk(weight.shape[0], weight.element_size())
        parts, kept = [], None
        for rows, wanted in zip(hidden.split(size), targets.split(size), strict=True):
            logits = _project(rows, weight, bias, shaping)
            parts.append(_stats(logits)(logits, wanted))
            kept = logits if keep else None
        logps, normaliser, entropy, collision = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, kept)
        ctx.shaping, ctx.size = shaping, size
        ctx.mark_non_differentiable(entropy, collision)
        return logps, entropy, collision

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, kept = ctx.saved_tensors
        wants_weight, wants_bias = ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2]
        grad_hidden, grad_weight, grad_bias = torch.empty_like(hidden), None, None
        for start in range(0, len(targets), ctx.size):
            part = slice(start, start + ctx.size)
            logits = kept if kept is not None else _project(hidden[part], weight, bias, ctx.shaping)
            slope = ctx.shaping.slope(logits)
            _grads(logits)(logits, targets[part], normaliser[part], grad[part])  # in place
            logits = logits if isinstance(slope, float) and slope == 1.0 else logits * slope
            torch.mm(logits, weight, out=grad_hidden[part])
            if wants_weight:
                grad_weight = _add_product(grad_weight, logits, hidden[part], whole=len(targets) <= ctx.size)
            if wants_bias:
                summed = logits.sum(0, dtype=torch.promote_types(logits.dtype, torch.float32))
                grad_bias = summed if grad_bias is None else grad_bias + summed
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
        )


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, shaping: Shaping) -> Tensor:
    return shaping(nn.functional.linear(hidden, weight, bias))


def _add_product(total: Tensor | None, logits: Tensor, hidden: Tensor, whole: bool) -> Tensor:
    """logits^T hidden; sums of several chunks are kept in float32 (float64 where that is the model's precision)."""
    if whole or logits.dtype == torch.float64:
        product = logits.t() @ hidden
    elif logits.is_cuda:
        product = torch.mm(logits.t(), hidden, out_dtype=torch.float32)
    else:
        product = (logits.t() @ hidden).float()
    return product if total is None else total.add_(product)


def _chunk(width: int, bytes_each: int) -> int:
    return max(1, CHUNK_BYTES // (width * bytes_each))


def _stats(logits: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    return kernels.stats if kernels and logits.is_cuda else _torch_stats


def _grads(logits: Tensor) -> Callable[..., None]:
    return kernels.grads_ if kernels and logits.is_cuda else _torch_grads_


def _torch_stats(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability of the targets, normaliser, entropy, log collision probability."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logps, entropy, collision = gather(wide, targets)
    return logps, wide.gather(-1, targets[:, None]).squeeze(-1) - logps, entropy, collision


def _torch_grads_(logits: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor) -> None:
    """Logits become the gradient of sum(grad * logps) by them: grad * (1[v is target] - p_v)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide = (wide - normaliser[:, None]).exp_().mul_(-grad[:, None])
    wide[torch.arange(len(targets), device=logits.device), targets] += grad
    logits.copy_(wide)
