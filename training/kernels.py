"""Triton kernels of the vocabulary head: each position's logits are read once (and written once, for their gradient).

head.py has the same in torch, which tests compare these to.
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
        higher = tl.maximum(top, tl.max(x, 0))
        fade = tl.exp(top - higher)
        e = tl.exp(x - higher)
        total = total * fade + tl.sum(e, 0)
        weighted = weighted * fade + tl.sum(tl.where(columns < width, x * e, 0.0), 0)
        squared = squared * fade * fade + tl.sum(e * e, 0)
        top = higher
    normaliser = top + tl.log(total)
    wanted = tl.load(at + tl.load(targets + row)).to(tl.float32)
    tl.store(logps + row, wanted - normaliser)
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
    # Four tensors and not one: Triton compiles again for addresses that are less aligned.
    logps, normaliser, entropy, collision = (torch.empty(rows, device=logits.device) for _ in range(4))
    _stats_kernel[(rows,)](logits, targets, logps, normaliser, entropy, collision, width, BLOCK, num_warps=8)
    return logps, normaliser, entropy, collision


def grads_(logits: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor) -> None:
    """Logits become the gradient of sum(grad * logps) by them, in place."""
    rows, width = logits.shape
    grid = (rows, triton.cdiv(width, BLOCK))
    _grads_kernel[grid](logits, targets, normaliser, grad.contiguous(), width, BLOCK, num_warps=8)
