"""Frozen linear layers whose matrix products are in 8-bit floating point (e4m3), for LoRA on GPUs that have it.

Each row of activations and of gradients gets a scale of its own when it is rounded, so that a token's values do not
depend on its neighbours in a packed row. The weights are rounded once, with a scale for each output of the forward pass
and, in a second copy, for each output of the backward pass. So they take as much memory as in 16 bits.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from training.models.dtypes import DTYPES

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
MULTIPLE = 16  # of both sizes of a weight, as the GPU's matrix product needs


class Fp8Linear(nn.Linear):
    """A frozen nn.Linear. Its tensors are stored as integers, so that no cast of the model changes them."""

    weight_backward: Tensor
    scale: Tensor
    scale_backward: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        _register_product()
        self.bias = linear.bias
        weight, scale = round_rows(linear.weight.detach())
        backward, scale_backward = round_rows(linear.weight.detach().T)
        self.weight = nn.Parameter(weight.view(torch.uint8), requires_grad=False)
        self.register_buffer("weight_backward", backward.view(torch.uint8), persistent=False)
        self.register_buffer("scale", scale.view(torch.int32), persistent=False)
        self.register_buffer("scale_backward", scale_backward.view(torch.int32), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        operands = rows, self.weight, self.scale, self.weight_backward, self.scale_backward
        output = torch.ops.dpo.fp8_product.default(*operands)
        output = output.reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def _product(x: Tensor, weight: Tensor, scale: Tensor, weight_backward: Tensor, scale_backward: Tensor) -> Tensor:
    """x (rows, inputs) times the transpose of a weight (outputs, inputs), in the dtype of x.

    An operator of its own, because torch cannot compile an autograd.Function with rows of any number.
    """
    rows, scales = _compiled_round_rows()(x) if x.is_cuda else round_rows(x)
    columns, column_scales = weight.view(FP8).T, scale.view(torch.float32).T  # (inputs, outputs), (1, outputs)
    if x.is_cuda:
        options = (scales, column_scales, None, None, torch.bfloat16, True)  # no bias, fast accumulation
        return torch._scaled_mm(rows, columns, *options).to(x.dtype)
    return ((rows.float() @ columns.float()) * scales * column_scales).to(x.dtype)  # the same values, for tests


def _empty_product(x: Tensor, weight: Tensor, scale: Tensor, weight_backward: Tensor, scale_backward: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _keep_operands(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _input_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weight, scale, weight_backward, scale_backward = ctx.saved_tensors
    operands = gradient.contiguous(), weight_backward, scale_backward, weight, scale
    return torch.ops.dpo.fp8_product.default(*operands), None, None, None, None


@cache
def _register_product() -> Any:
    """Not at import: torch looks for the source of each function among all modules, which takes a third of a second."""
    operator = torch.library.custom_op("dpo::fp8_product", _product, mutates_args=())
    operator.register_fake(_empty_product)
    operator.register_autograd(_input_gradient, setup_context=_keep_operands)
    return operator  # torch forgets it otherwise


def round_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) in e4m3, and the scale of each row, (rows, 1) in float32."""
    scale = values.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (values.float() / scale).clamp(-LARGEST, LARGEST).to(FP8).contiguous(), scale


@cache
def _compiled_round_rows() -> Any:
    return torch.compile(round_rows, dynamic=True)  # not at import: it loads the compiler


def use_fp8(model: nn.Module, dtype: str) -> None:
    """Replace the linear layers of a model, except its head."""
    if DTYPES[dtype] == torch.float16:
        raise ValueError("quantization: fp8 needs dtype bfloat16: float16 gradients overflow")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        raise ValueError(
            "quantization: fp8 needs a GPU with 8-bit matrix products (Ada, Hopper or newer): set it to null"
        )
    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    for name, linear in linears:
        if linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0:
            model.set_submodule(name, Fp8Linear(linear))
