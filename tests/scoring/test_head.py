"""The fused head against the plain formulas: values and gradients, kept or recomputed, whatever the head is like."""

import pytest
import torch
from torch import nn

from training.scoring import head
from training.scoring.head import FusedHead, LogitTransform, head_logps, target_values

SHAPINGS = {
    "plain": LogitTransform(),
    "scaled": LogitTransform(scale=0.5),
    "capped": LogitTransform(softcap=3.0),
    "both": LogitTransform(scale=1.7, softcap=2.0),
}


def make(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(8, 31, bias=bias, dtype=dtype)
    hidden = torch.randn(13, 8, dtype=dtype, requires_grad=True)
    return linear, hidden, torch.randint(0, 31, (13,)), torch.randn(13, dtype=dtype)


def course(values, wanted, *inputs):
    for tensor in inputs:
        tensor.grad = None
    (values[0] * wanted).sum().backward()
    return [*(value.detach() for value in values), *(tensor.grad.clone() for tensor in inputs)]


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "recomputed"])
@pytest.mark.parametrize("bias", [True, False], ids=["biased", "unbiased"])
@pytest.mark.parametrize("transform", SHAPINGS.values(), ids=SHAPINGS)
def test_the_fused_head_equals_the_formulas(monkeypatch, transform, bias, keep):
    monkeypatch.setattr(head, "KEEP_BYTES", 2**30 if keep else 0)
    monkeypatch.setattr(head, "CHUNK_BYTES", 31 * 8 * 5)  # five positions at a time
    linear, hidden, targets, wanted = make(bias)
    inputs = [hidden, *linear.parameters()]
    plain = course(target_values(transform(linear(hidden)), targets), wanted, *inputs)
    fused = course(head_logps(linear, hidden, targets, transform, fused=True), wanted, *inputs)
    by_module = course(head_logps(linear, hidden, targets, transform, fused=False), wanted, *inputs)
    for expected, *given in zip(plain, fused, by_module, strict=True):
        for ours in given:
            torch.testing.assert_close(ours, expected)


def test_its_gradient_is_that_of_finite_differences(monkeypatch):
    monkeypatch.setattr(head, "KEEP_BYTES", 0)  # kept logits are used up by one backward pass
    linear, hidden, targets, _ = make(bias=True)
    given = hidden[:3].detach().requires_grad_()

    def logps(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return FusedHead.apply(hidden, weight, bias, targets[:3], LogitTransform(softcap=3.0))[0]

    assert torch.autograd.gradcheck(logps, (given, linear.weight, linear.bias))


def test_a_frozen_head_gets_no_gradient():
    linear, hidden, targets, wanted = make(bias=False)
    linear.requires_grad_(False)
    (head_logps(linear, hidden, targets, LogitTransform(), fused=True)[0] * wanted).sum().backward()
    assert linear.weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_what_is_kept_is_bounded(monkeypatch):
    """Bytes that a forward pass keeps: the logits once, or none of them."""
    linear, hidden, targets, _ = make(bias=False, dtype=torch.float32)

    def kept() -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel() * 4) or t, lambda t: t):
            FusedHead.apply(hidden, linear.weight, None, targets, LogitTransform())
        return sum(sizes)

    whole = kept()
    monkeypatch.setattr(head, "KEEP_BYTES", 0)
    assert whole - kept() == 13 * 31 * 4


@pytest.mark.parametrize(
    ("config", "transform"),
    [
        ({}, LogitTransform()),
        ({"final_logit_softcapping": 30.0}, LogitTransform(softcap=30.0)),
        ({"logits_scaling": 8.0}, LogitTransform(scale=0.125)),
        ({"logit_scale": 0.0625}, LogitTransform(scale=0.0625)),
    ],
)
def test_shaping_is_read_from_the_configuration(config, transform):
    assert LogitTransform.from_config(type("Config", (), config)) == transform
