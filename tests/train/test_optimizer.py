"""AdamW with smaller moments: close to torch's AdamW, and the same after a restart."""

import pytest
import torch
from transformers import Trainer

from tests.models.test_architectures import ALL, make_model
from training.trainer.optimizer import (
    BLOCK,
    MOMENTS,
    AdamW8bit,
    AdamWBf16,
    CompactAdamW,
    decays,
    dequantize,
    make_optimizer,
    quantize,
    round_stochastically,
)

COMPACT = ["adamw_bf16", "adamw_8bit"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_rounding_is_right_on_average_and_exact_where_bfloat16_is() -> None:
    exact = torch.tensor([0.0, 1.0, -2.5, 3.0e-30, -0.0078125]).bfloat16().float()
    assert torch.equal(round_stochastically(exact, generator()).float(), exact)
    for value in (1.001, -1.001, 3.3e-7):
        rounded = round_stochastically(torch.full((200_000,), value), generator(1)).float()
        assert len(rounded.unique()) == 2
        assert rounded.double().mean().item() == pytest.approx(value, rel=2e-5)


def test_a_second_moment_grows_although_each_change_is_below_a_bfloat16() -> None:
    weight = torch.nn.Parameter(torch.zeros(4096))
    optimizer = AdamWBf16([weight], lr=0.0, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    for _ in range(200):
        optimizer.step()
    expected = 1 - 0.999**200
    assert optimizer.state[weight]["exp_avg_sq"].float().mean().item() == pytest.approx(expected, rel=0.01)


def fit(name: str, steps: int = 300) -> tuple[float, torch.Tensor]:
    """A regression with noisy gradients; the loss at the end and the weights."""
    torch.manual_seed(0)
    inputs, weight = torch.randn(512, 32), torch.nn.Parameter(torch.zeros(32))
    targets = inputs @ torch.linspace(-1, 1, 32) + 0.1 * torch.randn(512)
    optimizer = make_optimizer(name, [("weight", weight)], 0.01, 0.01)
    for step in range(steps):
        rows = torch.randint(0, 512, (32,), generator=generator(step))
        loss = (inputs[rows] @ weight - targets[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (inputs @ weight - targets).square().mean().item(), weight.detach()


@pytest.mark.parametrize("name", MOMENTS)
def test_bytes_keep_seven_digits_of_range_and_the_second_moment_is_never_rounded_to_0(name: str) -> None:
    values = 10.0 ** torch.linspace(-7, 0, 1000)
    values = values if name == "exp_avg_sq" else torch.cat([values, -values, torch.zeros(5)])
    codes, scales = quantize(values, name)
    assert (codes.dtype, len(scales)) == (torch.uint8, -(-len(values) // BLOCK))
    found = dequantize(codes, scales, name)
    largest = scales.repeat_interleave(BLOCK)[: len(values)]
    upper = values.abs() > 0.1 * largest
    assert ((found - values).abs()[upper] <= 0.08 * values.abs()[upper]).all()
    assert ((found - values).abs() <= 0.008 * largest).all()
    if name == "exp_avg_sq":
        assert found.min() > 0
    again = quantize(found, name)  # a checkpoint contains the values
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize("name", COMPACT)
def test_it_converges_like_torchs_adamw(name: str) -> None:
    (loss, weights), (torchs, expected) = fit(name), fit("adamw")
    assert loss == pytest.approx(torchs, rel=0.03)
    assert (weights - expected).abs().max() < 0.02


@pytest.mark.parametrize("name", COMPACT)
def test_the_first_step_is_that_of_torchs_adamw(name: str) -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(7, 53), torch.randn(7, 53)
    weights = []
    for optimizer in ("adamw", name):
        weight = torch.nn.Parameter(start.clone())
        weight.grad = gradient.clone()
        make_optimizer(optimizer, [("weight", weight)], 0.01, 0.1).step()
        weights.append(weight.detach())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", COMPACT)
def test_large_tensors_go_in_chunks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Random rounding draws other numbers in chunks, so that the second step is only close."""
    torch.manual_seed(0)
    gradients, ends = torch.randn(2, 1100), []
    for chunk in (4096, 2 * BLOCK):
        monkeypatch.setattr("training.trainer.optimizer.CHUNK", chunk)
        weight = torch.nn.Parameter(torch.zeros(1100))
        optimizer = make_optimizer(name, [("weight", weight)], 0.01, 0.1)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(*ends, rtol=0, atol=0 if name == "adamw_8bit" else 1e-4)


@pytest.mark.parametrize("kind", [AdamWBf16, AdamW8bit])
def test_a_restored_state_continues_with_the_same_bits(kind: type[CompactAdamW]) -> None:
    torch.manual_seed(0)
    gradients = torch.randn(6, 600)

    def run(weight: torch.nn.Parameter, optimizer: CompactAdamW, rows: torch.Tensor) -> None:
        for row in rows:
            weight.grad = row.clone()
            optimizer.step()

    whole = torch.nn.Parameter(torch.zeros(600))
    run(whole, kind([whole], 0.01, 0.0), gradients)
    first = torch.nn.Parameter(torch.zeros(600))
    before = kind([first], 0.01, 0.0)
    run(first, before, gradients[:3])
    second = torch.nn.Parameter(first.detach().clone())
    after = kind([second], 0.01, 0.0)
    after.load_state_dict(before.state_dict())
    run(second, after, gradients[3:])
    assert torch.equal(whole, second)
    kept = {name: value.dtype for name, value in after.state[second].items()}
    byte = torch.bfloat16 if kind is AdamWBf16 else torch.uint8
    assert kept["exp_avg"] == kept["exp_avg_sq"] == byte
    size = sum(value.nbytes for name, value in after.state[second].items() if name != "step")
    assert size == 600 * (4 if kind is AdamWBf16 else 2) + (0 if kind is AdamWBf16 else 2 * 3 * 4)


DECAYED = {"layer.up_proj.weight": (8, 4), "lora_A.default.weight": (2, 4)}
KEPT = {"layer.up_proj.bias": (8,), "model.norm.weight": (4,), "experts.gate_up_proj_bias": (3, 8)}
KEPT |= {"q_norm.weight": (2, 4), "lora_magnitude_vector.default.weight": (8,)}


@pytest.mark.parametrize("name", ["adamw", *COMPACT])
def test_weight_decay_shrinks_matrices_and_neither_biases_nor_norms(name: str) -> None:
    weights = {key: torch.nn.Parameter(torch.ones(shape)) for key, shape in {**DECAYED, **KEPT}.items()}
    optimizer = make_optimizer(name, weights.items(), 0.1, 0.5)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    found = {key: weight.detach().unique().tolist() for key, weight in weights.items()}
    assert found == {**{key: [pytest.approx(0.95)] for key in DECAYED}, **{key: [1.0] for key in KEPT}}


@pytest.mark.parametrize("name", ALL)
def test_the_parameters_with_weight_decay_are_those_of_transformers_trainer(name: str) -> None:
    """Except vectors without the name of a norm or bias, such as the decay rates of recurrent layers."""
    model = make_model(name, torch.float32)
    parameters = dict(model.named_parameters())
    theirs = parameters.keys() & Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    assert {key for key, p in parameters.items() if decays(key, p)} == {k for k in theirs if parameters[k].dim() > 1}
