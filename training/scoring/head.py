"""The fused vocabulary head: log-probabilities of target tokens from hidden states, in chunks of positions.

Logits of a row that fit into `KEEP_BYTES` are kept for the backward pass in the model's precision, and overwritten
there by their gradient. Otherwise the backward pass projects each chunk again. One kernel reads the logits of a
position once and computes the normaliser, the entropy and the collision probability.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

try:
    from training.scoring import kernels
except ImportError:  # no Triton: no NVIDIA GPU
    kernels = None  # type: ignore[assignment]

KEEP_BYTES = 4 * 2**30
CHUNK_BYTES = 2**30


@dataclass(frozen=True)
class LogitTransform:
    """Scaling and capping of logits after the projection."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: Any) -> "LogitTransform":
        """Cohere multiplies, Granite divides, Gemma 2 caps. The parity check finds models that do something else."""
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def slope(self, transformed: Tensor) -> Tensor | float:
        """d transformed / d logits, as a function of the transformed logits."""
        return self.scale if self.softcap is None else self.scale * (1 - (transformed / self.softcap) ** 2)


Values = tuple[Tensor, Tensor, Tensor]  # (targets,) each: log-probability, entropy, log collision probability


def head_logps(head: nn.Module, hidden: Tensor, targets: Tensor, transform: LogitTransform, fused: bool) -> Values:
    """Values of the targets (targets,) under head(hidden), hidden (targets, size). Log-probabilities have gradients."""
    if fused and type(head) is nn.Linear:
        return FusedHead.apply(hidden, head.weight, head.bias, targets, transform)
    return _by_module(head, hidden, targets, transform, sharded=not fused)


def _by_module(head: nn.Module, hidden: Tensor, targets: Tensor, transform: LogitTransform, sharded: bool) -> Values:
    """For any head (with an adapter, sharded by ZeRO-3): calls the module per chunk, and again in the backward pass."""

    def values(hidden: Tensor, targets: Tensor) -> Values:
        return target_values(transform(head(hidden)), targets)

    width = int(head.out_features)  # type: ignore[arg-type]
    count = max(1, math.ceil(len(targets) / _chunk(width, 4)))
    if sharded and dist.is_initialized():  # each call gathers the weights, a collective: all ranks make equally many
        most = torch.tensor(count, device=hidden.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        count = int(most)
    chunks = list(zip(*(part.tensor_split(count) for part in (hidden, targets)), strict=True))
    if len(chunks) == 1 or not torch.is_grad_enabled():
        parts = [values(*chunk) for chunk in chunks]
    else:
        parts = [checkpoint(values, *chunk, use_reentrant=False) for chunk in chunks]
    logps, entropy, collision = (torch.cat(column) for column in zip(*parts, strict=True))
    return logps, entropy, collision


def target_values(logits: Tensor, targets: Tensor) -> Values:
    """Unfused formulas, in float32 at least. autograd differentiates the log-probabilities."""
    logits = _wide(logits)
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
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform
    ) -> Values:
        keep = ctx.needs_input_grad[0] and targets.numel() * weight.shape[0] * weight.element_size() <= KEEP_BYTES
        size = max(1, len(targets)) if keep else _chunk(weight.shape[0], weight.element_size())
        parts, kept = [], None
        for chunk, chunk_targets in zip(hidden.split(size), targets.split(size), strict=True):
            logits = _project(chunk, weight, bias, transform)
            parts.append(_stats(logits)(logits, chunk_targets))
            kept = logits if keep else None
        logps, normaliser, entropy, collision = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, kept)
        ctx.transform, ctx.size = transform, size
        ctx.mark_non_differentiable(entropy, collision)
        return logps, entropy, collision

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, kept = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2]
        grad_hidden, grad_weight, grad_bias = torch.empty_like(hidden), None, None
        for start in range(0, max(1, len(targets)), ctx.size):  # without targets the weights' gradients are 0, not None
            part = slice(start, start + ctx.size)
            logits = kept if kept is not None else _project(hidden[part], weight, bias, ctx.transform)
            slope = ctx.transform.slope(logits)
            _grads(logits)(logits, targets[part], normaliser[part], grad[part])  # in place
            logits = logits if isinstance(slope, float) and slope == 1.0 else logits * slope
            torch.mm(logits, weight, out=grad_hidden[part])
            if needs_weight:
                grad_weight = _add_product(grad_weight, logits, hidden[part], only_chunk=len(targets) <= ctx.size)
            if needs_bias:
                summed = logits.sum(0, dtype=torch.promote_types(logits.dtype, torch.float32))
                grad_bias = summed if grad_bias is None else grad_bias + summed
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
        )


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    return transform(nn.functional.linear(hidden, weight, bias))


def _add_product(total: Tensor | None, logits: Tensor, hidden: Tensor, only_chunk: bool) -> Tensor:
    """logits^T hidden. Chunks are summed in float32, or in float64 for a float64 model."""
    if only_chunk or logits.dtype == torch.float64:
        product = logits.t() @ hidden
    elif logits.is_cuda:
        product = torch.mm(logits.t(), hidden, out_dtype=torch.float32)
    else:
        product = (logits.t() @ hidden).float()
    return product if total is None else total.add_(product)


def _chunk(vocabulary: int, bytes_each: int) -> int:
    return max(1, CHUNK_BYTES // (vocabulary * bytes_each))


def _stats(logits: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    return kernels.stats if kernels and logits.is_cuda else _torch_stats


def _grads(logits: Tensor) -> Callable[..., None]:
    return kernels.grads_ if kernels and logits.is_cuda else _torch_grads_


def _torch_stats(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability of the targets, normaliser, entropy, log collision probability."""
    logits = _wide(logits)
    logps, entropy, collision = target_values(logits, targets)
    return logps, logits.gather(-1, targets[:, None]).squeeze(-1) - logps, entropy, collision


def _torch_grads_(logits: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor) -> None:
    """Overwrite logits by the gradient of sum(grad * logps): grad * (1[v is target] - p_v)."""
    wide = (_wide(logits) - normaliser[:, None]).exp_().mul_(-grad[:, None])
    wide[torch.arange(len(targets), device=logits.device), targets] += grad
    logits.copy_(wide)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
