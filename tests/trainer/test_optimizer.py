"""AdamW with bfloat16 moments: right on average, close to torch's AdamW, and the same after a restart."""

import pytest
import torch

from training.trainer.optimizer import AdamWBf16, make_optimizer, round_stochastically


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


def test_it_converges_like_torchs_adamw() -> None:
    (loss, weights), (torchs, expected) = fit("adamw_bf16"), fit("adamw")
    assert loss == pytest.approx(torchs, rel=0.02)
    assert (weights - expected).abs().max() < 0.02


def test_the_first_step_is_that_of_torchs_adamw_and_large_tensors_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.trainer.optimizer.CHUNK", 100)
    torch.manual_seed(0)
    start, gradient = torch.randn(7, 53), torch.randn(7, 53)
    weights = []
    for name in ("adamw", "adamw_bf16"):
        weight = torch.nn.Parameter(start.clone())
        weight.grad = gradient.clone()
        make_optimizer(name, [("weight", weight)], 0.01, 0.1).step()
        weights.append(weight.detach())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-7)


def test_a_restored_state_continues_with_the_same_bits() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(6, 64)

    def run(weight: torch.nn.Parameter, optimizer: AdamWBf16, rows: torch.Tensor) -> None:
        for row in rows:
            weight.grad = row.clone()
            optimizer.step()

    whole = torch.nn.Parameter(torch.zeros(64))
    run(whole, AdamWBf16([whole], 0.01, 0.0), gradients)
    first = torch.nn.Parameter(torch.zeros(64))
    before = AdamWBf16([first], 0.01, 0.0)
    run(first, before, gradients[:3])
    second = torch.nn.Parameter(first.detach().clone())
    after = AdamWBf16([second], 0.01, 0.0)
    after.load_state_dict(before.state_dict())
    run(second, after, gradients[3:])
    assert after.state[second]["exp_avg"].dtype == torch.bfloat16
    assert torch.equal(whole, second)
