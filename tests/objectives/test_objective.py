"""Combinations of losses, rewards, and the refusal of everything that would be ignored."""

import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.objectives.test_losses import pairs, value
from training.objectives.losses import LOSSES
from training.objectives.metrics import pair_logps
from training.objectives.objective import Objective
from training.objectives.options import LOSS_OPTIONS, LossOptions, check
from training.pairs.packing import build_row
from training.pairs.pair import Pair
from training.scoring.logps import TokenLogps

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_options_is_what_the_functions_take():
    taken = {}
    for name, loss in LOSSES.items():
        parameters = list(inspect.signature(loss).parameters.values())[1:]
        needs = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
        may = [parameter.name for parameter in parameters if parameter.default is not inspect.Parameter.empty]
        taken[name] = LossOptions(tuple(needs), tuple(may))
    assert taken == LOSS_OPTIONS


def test_a_configuration_is_read_without_torch():
    """Every command begins with it."""
    code = "import sys, tasks.config.params, flows.parameters; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_combination_is_the_weighted_sum_of_its_components():
    parts = Objective({"sigmoid": 0.8, "sft": 0.2}, {"beta": 0.1}).losses(pairs())
    assert parts["loss"].item() == pytest.approx(0.8 * value("sigmoid", beta=0.1) + 0.2 * 2.5)
    assert parts["loss/sft"].item() == pytest.approx(2.5)
    assert "loss/sigmoid" not in Objective({"sigmoid": 1.0}, {"beta": 0.1}).losses(pairs())


def test_wpo_weighs_the_total_and_only_when_asked():
    given = pairs(wpo_weight=torch.tensor([0.25], dtype=torch.float64))
    asked = Objective({"sigmoid": 1.0}, {"beta": 0.1, "wpo": True}).losses(given)["loss"]
    not_asked = Objective({"sigmoid": 1.0}, {"beta": 0.1}).losses(given)["loss"]
    assert asked.item() == pytest.approx(0.25 * not_asked.item())


def test_rewards_are_beta_times_the_ratio_or_what_there_is_without_a_reference():
    def rewards(name: str, **options):
        return [x.item() for x in Objective({name: 1.0}, options).rewards(pairs())]

    assert rewards("sigmoid", beta=0.1) == pytest.approx([0.2, -0.1])
    assert rewards("simpo", beta=2.0) == pytest.approx([2 * -2.5, 2 * -4.0])
    assert rewards("simpo", beta=2.0, reference=True) == pytest.approx([4.0, -2.0])
    assert rewards("orpo", beta=0.1) == pytest.approx([-0.25, -0.4])
    assert rewards("cpo", beta=0.1) == pytest.approx([-1.0, -0.8])


@pytest.mark.parametrize(
    ("weights", "options", "needs"),
    [
        ({"sigmoid": 1.0}, {"beta": 0.1}, True),
        ({"simpo": 1.0}, {"beta": 0.1}, False),
        ({"simpo": 1.0}, {"beta": 0.1, "reference": True}, True),
        ({"orpo": 1.0, "sft": 1.0}, {"beta": 0.1}, False),
        ({"orpo": 1.0, "hinge": 1.0}, {"beta": 0.1}, True),
    ],
)
def test_a_reference_is_needed_where_a_loss_reads_one(weights, options, needs):
    check(weights, options)
    assert Objective(weights, options).needs_reference is needs


BETA = {"beta": 0.1}


@pytest.mark.parametrize(
    ("weights", "options", "sentence"),
    [
        ({"dpo": 1.0}, BETA, "there is no loss 'dpo'"),
        ({}, {}, "loss is empty"),
        ({"sigmoid": 0.0}, BETA, "must be above 0"),
        ({"sigmoid": 1.0}, {}, "needs `beta`"),
        ({"hinge": 1.0}, {**BETA, "label_smoothing": 0.1}, "`label_smoothing` has no effect on loss hinge"),
        ({"hinge": 1.0}, {**BETA, "gamma": 0.5}, "`gamma` has no effect"),
        ({"sigmoid": 1.0}, {**BETA, "dpop_lambda": 5.0}, "`dpop_lambda` has no effect"),
        ({"hinge": 1.0}, {**BETA, "margin": "scores", "margin_scale": 0.1}, "`margin` has no effect on loss hinge"),
        ({"sigmoid": 1.0}, {**BETA, "margin": "scores"}, "`margin_scale` belongs to `margin: scores`"),
        ({"sigmoid": 1.0}, {**BETA, "margin_scale": 0.1}, "`margin_scale` belongs to `margin: scores`"),
        ({"sft": 1.0}, BETA, "`beta` has no effect"),
        ({"sigmoid": 1.0}, {**BETA, "reference": True}, "`reference` has no effect"),
        ({"orpo": 1.0}, {**BETA, "ld_alpha": 0.5}, "`ld_alpha` has no effect"),
        ({"simpo": 1.0}, {**BETA, "ld_alpha": 0.5}, "`ld_alpha` has no effect"),
        ({"simpo": 1.0, "sft": 1.0}, {**BETA, "ld_alpha": 0.5}, "`ld_alpha` has no effect"),
        ({"apo_zero": 1.0}, {**BETA, "f_divergence": "js"}, "`f_divergence` has no effect"),
        ({"sigmoid": 1.0}, {**BETA, "f_divergence": "tv"}, "there is no `f_divergence` 'tv'"),
        ({"sigmoid": 1.0}, {**BETA, "f_divergence": "alpha"}, "`f_alpha` belongs to"),
        ({"sigmoid": 1.0}, {**BETA, "f_divergence": "js", "f_alpha": 0.5}, "`f_alpha` belongs to"),
        ({"exo_pair": 1.0}, BETA, "needs `label_smoothing`"),
        ({"exo_pair": 1.0}, {**BETA, "label_smoothing": 0.0}, "set it above 0"),
        ({"robust": 1.0}, {**BETA, "label_smoothing": 0.5}, "below 0.5"),
    ],
)
def test_what_would_be_ignored_is_refused(weights, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(weights, options)


def pair(**change) -> Pair:
    return Pair("a", [1], [2], [3], [1], [1], **change)


def test_a_label_that_no_loss_reads_is_refused():
    Objective({"sigmoid": 1.0}, BETA).check_pairs([pair(label=0.7)])
    with pytest.raises(ValueError, match="the pairs have labels, and loss apo_zero ignores them"):
        Objective({"apo_zero": 1.0}, BETA).check_pairs([pair(label=0.7)])


SCORES = {**BETA, "margin": "scores", "margin_scale": 0.1}


def test_scores_are_a_margin_only_when_asked_for():
    """Scores 8.0 and 3.5: ignored, with a note, or a margin of 0.1 * 4.5 inside the sigmoid."""
    row = build_row([pair(margin=8.0 - 3.5, ref_chosen_logps=[-1.0], ref_rejected_logps=[-2.0])], [0])
    same = TokenLogps(row.ref_logps, row.ref_logps, row.ref_logps)  # the policy is the reference: h = 0

    def loss(options: dict) -> float:
        objective = Objective({"sigmoid": 1.0}, options)
        return objective.losses(pair_logps(row, same, objective))["loss"].item()

    assert loss(BETA) == pytest.approx(math.log(2))
    assert loss(SCORES) == pytest.approx(math.log(1 + math.exp(0.1 * 4.5)))


def test_scores_that_the_loss_ignores_are_noted_and_missing_ones_refused():
    note = Objective({"hinge": 1.0}, BETA).check_pairs([pair(), pair(margin=4.5)])
    assert "the pairs have scores, but the loss ignores them (train.margin is null)" in note
    assert Objective({"hinge": 1.0}, BETA).check_pairs([pair()]) is None
    assert Objective({"sigmoid": 1.0}, SCORES).check_pairs([pair(), pair(margin=4.5)]) is None
    with pytest.raises(ValueError, match=r"train\.margin is `scores`, but no pair has scores"):
        Objective({"sigmoid": 1.0}, SCORES).check_pairs([pair()])
