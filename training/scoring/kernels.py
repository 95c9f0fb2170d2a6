"""Triton kernels of the fused vocabulary head: they read the logits of a position once.

head.py has the same functions in torch; tests compare both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def _stats_kernel(
    logits, targets, logps, normalisers, entropies, collisions, width: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * width
    top = -float("inf")
    total, weighted, squared = 0.0, 0.0, 0.0  # sums of e^(x - top), of x e^(x - top), of e^(2 (x - top))
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        x = tl.load(at + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        rescale = tl.exp(top - new_top)
        e = tl.exp(x - new_top)
        total = total * rescale + tl.sum(e, 0)
        weighted = weighted * rescale + tl.sum(tl.where(columns < width, x * e, 0.0), 0)
        squared = squared * rescale * rescale + tl.sum(e * e, 0)
        top = new_top
    normaliser = top + tl.log(total)
    target = tl.load(at + tl.load(targets + row)).to(tl.float32)
    tl.store(logps + row, target - normaliser)
    tl.store(normalisers + row, normaliser)
    tl.store(entropies + row, normaliser - weighted / total)
    tl.store(collisions + row, tl.log(squared) - 2.0 * tl.log(total))


@triton.jit
def _grads_kernel(logits, targets, normalisers, grads, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    x = tl.load(logits + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    p = tl.exp(x - tl.load(normalisers + row))
    hit = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    slope = tl.load(grads + row) * (hit - p)
    tl.store(logits + row * width + columns, slope.to(logits.dtype.element_ty), mask=inside)


def stats(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability of the targets, normaliser, entropy, log collision probability; (positions,) float32 each."""
    rows, width = logits.shape
    # Four tensors instead of one: Triton would compile again for rows with another alignment.
    logps, normaliser, entropy, collision = (torch.empty(rows, device=logits.device) for _ in range(4))
    _stats_kernel[(rows,)](logits, targets, logps, normaliser, entropy, collision, width, BLOCK, num_warps=8)
    return logps, normaliser, entropy, collision


def grads_(logits: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor) -> None:
    """Overwrite logits by the gradient of sum(grad * logps)."""
    rows, width = logits.shape
    grid = (rows, triton.cdiv(width, BLOCK))
    _grads_kernel[grid](logits, targets, normaliser, grad.contiguous(), width, BLOCK, num_warps=8)
