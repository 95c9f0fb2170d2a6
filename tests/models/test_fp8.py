"""LoRA on a base model with 8-bit matrix products. A CPU computes the same rounded values that a GPU does."""

from pathlib import Path

import pytest
import torch

from training.models.fp8 import FP8, Fp8Linear, round_rows
from training.models.loading import load_model
from training.trainer.memory import model_sizes, weight_bytes


def linear(outputs: int = 48, inputs: int = 32, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(inputs, outputs, bias=bias)


def test_values_and_gradients_are_those_of_rounded_operands():
    layer = linear()
    rounded = Fp8Linear(layer)
    x = torch.randn(2, 5, 32, requires_grad=True)
    (output := rounded(x)).backward(upstream := torch.randn(2, 5, 48))

    def nearest(values: torch.Tensor) -> torch.Tensor:
        quantized, scale = round_rows(values)
        return quantized.float() * scale

    expected = nearest(x.reshape(-1, 32)) @ nearest(layer.weight).T + layer.bias
    torch.testing.assert_close(output.reshape(-1, 48), expected, rtol=1e-5, atol=1e-6)
    gradient = nearest(upstream.reshape(-1, 48)) @ nearest(layer.weight.T).T
    torch.testing.assert_close(x.grad.reshape(-1, 32), gradient, rtol=1e-5, atol=1e-6)
    exact = layer(x)
    assert 0 < (output - exact).norm() / exact.norm() < 0.05


def test_a_row_does_not_depend_on_its_neighbours():
    layer, x = Fp8Linear(linear()), torch.randn(4, 32)
    alone = layer(x[:1])
    torch.testing.assert_close(layer(torch.cat([x[:1], 1000 * x[1:]]))[:1], alone, rtol=0, atol=0)


def test_a_row_of_zeros_and_the_largest_values_survive():
    values = torch.tensor([[0.0, 0.0], [1e4, -1e-4]])
    quantized, scale = round_rows(values)
    assert quantized.dtype == FP8
    assert (quantized.float() * scale)[0].tolist() == [0.0, 0.0]
    assert (quantized.float() * scale)[1, 0].item() == pytest.approx(1e4)


def test_a_cast_of_the_model_does_not_change_it():
    layer, x = Fp8Linear(linear(bias=False)), torch.randn(3, 32)
    torch.testing.assert_close(layer.bfloat16()(x), Fp8Linear(linear(bias=False))(x), rtol=0, atol=0)


def test_only_decoder_layers_of_fitting_sizes_are_replaced(tiny_base: Path):
    model = load_model(tiny_base, "float32", quantization="fp8")
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert kinds.pop("lm_head") is torch.nn.Linear
    assert set(kinds.values()) == {Fp8Linear}
    with pytest.raises(ValueError, match="needs dtype bfloat16"):
        load_model(tiny_base, "float16", quantization="fp8")


def test_the_memory_estimate_counts_both_copies(tiny_base: Path):
    sizes = model_sizes(tiny_base, None, "fp8")
    expected = 4 * (sizes.parameters - sizes.quantized) + 2 * sizes.quantized
    assert weight_bytes(tiny_base, "float32", "fp8") == expected
