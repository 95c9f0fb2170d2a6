"""KTO on unpaired rows: the loss against its formula, what is logged of rows of two kinds, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.objectives.test_losses import many, s
from training.evaluation.pair_scores import compared_rewards
from training.objectives.metrics import MetricWindow, pair_logps, row_metrics
from training.objectives.mixture import check, check_shared
from training.objectives.objective import Objective
from training.objectives.registry import LOSSES
from training.pairs.packing import build_row
from training.pairs.pair import Pair
from training.pairs.pair_columns import OneAnswer, columns_of
from training.scoring.logps import TokenLogps

KTO = Objective({"kto": {"weight": 1.0, "desirable_weight": 1.5, "undesirable_weight": 0.5}}, {"beta": 0.1})
APO = Objective({"apo_zero_unpaired": 1.0}, {"beta": 0.1})


def rows(*signs: float) -> list[Pair]:
    """Two tokens of prompt, two of the own answer, one of the mismatched answer; the reference is -1 a token."""
    reference = {"ref_chosen_logps": [-1.0, -1.0], "ref_rejected_logps": [-1.0]}
    return [Pair(str(n), [1, 2], [3, 4], [5], [1, 1], [1], sign=sign, **reference) for n, sign in enumerate(signs)]


def metrics(pairs: list[Pair], logps: list[float], objective: Objective, **shared) -> tuple[dict, dict]:
    """By name the values of one row with these policy log-probabilities, and the window's means."""
    row, values = build_row(pairs, range(len(pairs))), torch.tensor(logps)
    tokens = TokenLogps(values, torch.ones_like(values), torch.zeros_like(values))
    given = pair_logps(row, tokens, objective, **shared)
    found = row_metrics(row, tokens, given, objective.losses(given), objective)
    window = MetricWindow(torch.device("cpu"))
    window.add(found, row.weight, len(row.input_ids), False)
    window.end_step()
    return {"row": row, **found}, window.means()


@pytest.mark.parametrize("drift", [2.0, -2.0])
def test_kto_is_its_formula_and_the_kl_has_no_gradient(drift):
    given = many(6)
    sign = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    other = (given.ref_rejected_logps + drift + 0.1 * given.chosen_logps.detach()).requires_grad_()
    given = replace(given, sign=sign, rejected_logps=other, chosen_logps=given.chosen_logps.detach().requires_grad_())
    losses = LOSSES["kto"](given, beta=0.1, desirable_weight=1.5, undesirable_weight=0.5)
    kl = max(0.0, (other - given.ref_rejected_logps).mean().item())
    for n, a in enumerate((given.chosen_logps - given.ref_chosen_logps).tolist()):
        expected = 1.5 * (1 - s(0.1 * (a - kl))) if sign[n] > 0 else 0.5 * (1 - s(0.1 * (kl - a)))
        assert losses[n].item() == pytest.approx(expected)
    losses.sum().backward()
    assert other.grad is None
    assert given.chosen_logps.grad is not None
    part = replace(given, batch_kl=torch.tensor(kl, dtype=torch.float64))
    torch.testing.assert_close(LOSSES["kto"](part, beta=0.1, desirable_weight=1.5, undesirable_weight=0.5), losses)


def test_undesirable_rows_start_at_half_their_weight():
    assert LOSSES["kto"].start_value({"beta": 0.1, "undesirable_weight": 0.5}, sign=-1.0) == 0.25
    assert KTO.losses_at_reference(rows(1, -1, -1, -1)) == {"kto": (0.75 + 3 * 0.25) / 4}


def test_each_kind_of_row_has_its_mean_and_both_count_the_same():
    # Log-ratios: own 4, 2 and 0 with reference -2, mismatched 1 each: the KL is 1 and the zero reward 0.1.
    logps = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0, -1.0, 0.0]
    found, means = metrics(rows(1, 1, -1), logps, KTO)
    assert means["kl/mismatched"] == pytest.approx(1.0)
    assert means["rewards/chosen"] == pytest.approx(0.1 * (4 + 2) / 2)
    assert means["rewards/rejected"] == pytest.approx(0.0)
    assert means["rewards/margins"] == pytest.approx(0.3)
    assert means["logps/chosen"] == pytest.approx((2 + 0) / 2)
    assert means["logps/rejected"] == pytest.approx(-2.0)
    assert means["sft_loss"] == pytest.approx(-(1.0 + 0.0) / 2)  # of desirable answers alone
    assert means["rewards/accuracies"] == 1.0
    assert means["kl"] == pytest.approx(((2**2) / 2 + 1 / 2 + 0) / 3)
    high, low = compared_rewards(found["row"], found, KTO)
    assert (high - low).tolist() == pytest.approx([0.3, 0.1, 0.1])
    # Of the desirable rows both are right, of the undesirable rows none.
    _, wrong = metrics(rows(1, 1, -1), [*logps[:6], 1.0, 1.0, 0.0], KTO)
    assert wrong["rewards/accuracies"] == 0.5
    assert (wrong["rewards/accuracies/chosen"], wrong["rewards/accuracies/rejected"]) == (1.0, 0.0)


def test_a_window_of_one_kind_has_no_margin():
    _, means = metrics(rows(1, 1), [0.0] * 6, KTO)
    assert "rewards/margins" not in means
    assert "rewards/rejected" not in means
    assert means["rewards/accuracies"] == 1.0


def test_apo_compares_with_zero():
    found, means = metrics(rows(1, -1), [-0.5, -0.5, 9.0, -0.5, -0.5, 9.0], APO)
    assert "kl/mismatched" not in means
    assert means["rewards/accuracies"] == 0.5  # both rewards are 0.1
    assert [side.tolist() for side in compared_rewards(found["row"], found, APO)] == [
        pytest.approx([0.1, 0.0]),
        pytest.approx([0.0, 0.1]),
    ]


def test_one_answer_as_both_sides_of_a_pair_costs_a_token():
    given = rows(1, -1)
    for side, tokens in (("chosen", [3, 4]), ("rejected", [5])):
        view = OneAnswer(given, side)
        assert [view[0].chosen_ids, view[0].rejected_ids] == [tokens, tokens]
        assert view[1].sign == -1
        assert len(view[0]) == 2 + len(tokens) + 1
        expected = columns_of(list(view))
        for name in ("prompt", "chosen", "rejected", "shared_prefix", "sign"):
            np.testing.assert_array_equal(getattr(view.columns, name), getattr(expected, name))


@pytest.mark.parametrize(
    ("loss", "options", "sentence"),
    [
        ({"kto": 1.0, "sft": 0.1}, {"beta": 0.1}, "kto is for unpaired rows and sft for pairs"),
        ({"kto": 1.0}, {"beta": 0.1, "wpo": True}, "`wpo` has no effect on loss kto"),
        ({"kto": 1.0}, {"beta": 0.1, "ld_alpha": 0.5}, "`ld_alpha` has no effect on loss kto"),
        ({"sigmoid": {"weight": 1.0, "desirable_weight": 2.0}}, {}, "losses with it are apo_zero_unpaired, kto"),
        ({"kto": 1.0}, {}, "needs `beta`"),
    ],
)
def test_options_without_effect_are_refused(loss, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_shared(check(loss), options)


def test_data_of_the_other_kind_is_refused_and_unbalanced_kinds_are_noted():
    paired = Objective({"sigmoid": 1.0}, {"beta": 0.1})
    with pytest.raises(ValueError, match=r"rows are unpaired .* set train.loss to \{kto: 1.0\}"):
        paired.check_pairs(rows(1, -1))
    with pytest.raises(ValueError, match=r"the data has pairs: set prepare.format to unpaired"):
        KTO.check_pairs(rows(0, 0))
    # 1.5 * 1 over 0.5 * 3 is 1, the lower end of the range; over 0.5 * 2 it is 1.5, above 4/3.
    assert KTO.check_pairs(rows(1, -1, -1, -1)) is None
    note = KTO.check_pairs(rows(1, -1, -1))
    assert (
        "set train.loss.kto.desirable_weight to 1.00 to 1.33, or train.loss.kto.undesirable_weight to 0.56 to 0.75"
        in str(note)
    )
