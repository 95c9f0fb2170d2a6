"""What the losses are told of a row, what is logged of it, and that means do not depend on how pairs were packed."""

import math
from dataclasses import replace

import pytest
import torch

from tasks.config.metrics import of_training
from tasks.config.params import Params, overlay
from tasks.config.paths import ROOT
from tasks.config.strict import dotted, read_yaml, validate
from training.objectives.metrics import MetricWindow, pair_logps, row_metrics
from training.objectives.objective import Objective
from training.pairs.packing import build_row
from training.pairs.pair import Pair
from training.scoring.logps import TokenLogps

PAIR = Pair("a", [1], [2, 3, 4], [5], [1, 1, 1], [1], ref_chosen_logps=[-1.0, -2.0, -3.0], ref_rejected_logps=[-5.0])
LOGPS = torch.tensor([-0.5, -0.25, -1.0, -4.0])
SIGMOID = Objective({"sigmoid": 1.0}, {"beta": 0.1})


def tokens(logps: torch.Tensor = LOGPS, entropy: float = 1.0, collision: float = -2.0) -> TokenLogps:
    return TokenLogps(logps, torch.full_like(logps, entropy), torch.full_like(logps, collision))


def test_policy_and_reference_are_summed_alike():
    given = pair_logps(build_row([PAIR], [0]), tokens(), SIGMOID)
    assert (given.chosen_logps.item(), given.rejected_logps.item()) == (-1.75, -4.0)
    assert (given.ref_chosen_logps.item(), given.ref_rejected_logps.item()) == (-6.0, -5.0)
    assert (given.chosen_tokens.item(), given.rejected_tokens.item()) == (3.0, 1.0)
    assert given.chosen_mean_logps.item() == pytest.approx(-1.75 / 3)


def test_the_sums_of_131072_tokens_are_exact():
    """In float32 the log-ratios would be off by up to a nat; the gradients of the tokens stay in float32."""
    tokens_each = 2**17
    generator = torch.Generator().manual_seed(0)
    policy, reference = (-3 * torch.rand(2 * tokens_each, generator=generator) for _ in range(2))
    sides = [list(map(float, part)) for part in reference.split(tokens_each)]
    ids = range(tokens_each)
    masks, values = ([1] * tokens_each,) * 2, dict(zip(("ref_chosen_logps", "ref_rejected_logps"), sides, strict=True))
    pair = Pair("a", [1], ids, range(1, tokens_each + 1), *masks, **values)
    policy.requires_grad_()
    given = pair_logps(build_row([pair], [0]), tokens(policy), SIGMOID)
    for ratio, part in ((given.chosen_ratio, slice(0, tokens_each)), (given.rejected_ratio, slice(tokens_each, None))):
        exact = math.fsum([*policy[part].tolist(), *(-reference[part]).tolist()])
        assert ratio.item() == pytest.approx(exact, abs=1e-8)
    given.chosen_ratio.sum().backward()
    assert torch.equal(policy.grad, torch.cat([torch.ones(tokens_each), torch.zeros(tokens_each)]))


def test_tokens_beyond_the_shorter_response_count_ld_alpha_times():
    objective = Objective({"sigmoid": 1.0}, {"beta": 0.1, "ld_alpha": 0.5})
    given = pair_logps(build_row([PAIR], [0]), tokens(), objective)
    assert given.chosen_logps.item() == pytest.approx(-0.5 + 0.5 * (-0.25 - 1.0))  # one token is common
    assert given.ref_chosen_logps.item() == pytest.approx(-1.0 + 0.5 * (-2.0 - 3.0))
    assert given.rejected_logps.item() == -4.0
    assert given.chosen_mean_logps.item() == pytest.approx(-1.75 / 3)  # what is said of the response itself stays


def test_masked_tokens_do_not_count_for_ld_alpha():
    pair = Pair("a", [1], [2, 3, 4], [5], [0, 1, 1], [1])
    objective = Objective({"sigmoid": 1.0}, {"beta": 0.1, "ld_alpha": 0.0})
    assert pair_logps(build_row([pair], [0]), tokens(), objective).chosen_logps.item() == -0.25


def test_wpo_weighs_by_likelihood_against_certainty():
    objective = Objective({"sigmoid": 1.0}, {"beta": 0.1, "wpo": True})
    given = pair_logps(build_row([PAIR], [0]), tokens(), objective)
    expected = math.exp((-1.75 / 3 + 2.0) + (-4.0 + 2.0))
    assert given.wpo_weight.item() == pytest.approx(expected)
    assert not given.wpo_weight.requires_grad


def test_a_tie_is_not_a_win_and_kl_is_half_the_squared_ratio():
    row = build_row([PAIR], [0])
    same = tokens(row.ref_logps.clone())
    given = pair_logps(row, same, SIGMOID)
    values = row_metrics(row, same, given, SIGMOID.losses(given), SIGMOID)
    assert values["rewards/accuracies"].item() == 0.0
    assert values["kl"].item() == 0.0
    assert values["loss"].item() == pytest.approx(math.log(2))
    moved = tokens()
    given = pair_logps(row, moved, SIGMOID)
    values = row_metrics(row, moved, given, SIGMOID.losses(given), SIGMOID)
    squares = [0.5**2, 1.75**2, 2.0**2, 1.0**2]
    assert values["kl"].item() == pytest.approx(sum(squares) / 2 / 4)
    assert values["entropy"].item() == 1.0
    assert values["rewards/accuracies"].item() == 1.0


def test_without_a_reference_there_is_no_kl():
    simpo = Objective({"simpo": 1.0}, {"beta": 2.0})
    row = build_row([PAIR], [0])
    given = pair_logps(row, tokens(), simpo)
    assert "kl" not in row_metrics(row, tokens(), given, simpo.losses(given), simpo)


@pytest.mark.parametrize(
    "loss", [{"sigmoid": 1.0}, {"sigmoid": 1.0, "sft": 0.1}, {"simpo": 1.0}, {"kto": 1.0}, {"apo_zero_unpaired": 1.0}]
)
def test_a_gate_may_name_every_metric_that_is_measured_and_no_other(loss):
    objective = Objective(loss, {"beta": 0.1})
    signs = (1.0, -1.0) if "kto" in loss or "apo_zero_unpaired" in loss else (0.0,)
    row = build_row([replace(PAIR, sign=sign) for sign in signs], range(len(signs)))
    logps = tokens(torch.full_like(row.ref_logps, -1.0))
    given = pair_logps(row, logps, objective)
    window = MetricWindow(torch.device("cpu"))
    window.add(
        row_metrics(row, logps, given, objective.losses(given), objective), row.weight, tokens=1, is_filler=False
    )
    window.end_step()
    content = overlay(read_yaml(ROOT / "params.yaml"), dotted({"train.loss": loss}))
    measured = {*of_training(validate(Params, content, ROOT / "params.yaml"))}
    assert window.means().keys() - {"pairs", "tokens"} == measured


def test_losses_are_weighted_means_and_the_rest_plain_ones():
    window = MetricWindow(torch.device("cpu"))
    values = {"loss": torch.tensor([1.0, 4.0]), "entropy": torch.tensor([1.0, 4.0])}
    window.add(values, torch.tensor([3.0, 1.0]), tokens=7, is_filler=False)
    window.add(values, torch.tensor([3.0, 1.0]), tokens=7, is_filler=True)
    window.end_step()
    assert window.means() == {"loss": (3 * 1.0 + 4.0) / 4, "entropy": 2.5, "pairs": 2.0, "tokens": 7.0}
    assert window.means() == {}


def test_a_skipped_step_leaves_no_trace():
    window = MetricWindow(torch.device("cpu"))
    window.add({"loss": torch.tensor([1.0])}, torch.ones(1), tokens=3, is_filler=False)
    window.end_step()
    window.add({"loss": torch.tensor([math.nan])}, torch.ones(1), tokens=3, is_filler=False)
    window.drop_step()
    assert window.means()["loss"] == 1.0
