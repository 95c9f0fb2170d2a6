"""Combinations of losses, rewards, and the refusal of everything that would be ignored."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.objectives.test_losses import pairs, value
from training.objectives.metrics import pair_logps
from training.objectives.mixture import check, check_shared, weights_of
from training.objectives.objective import Objective
from training.pairs.packing import build_row
from training.pairs.pair import Pair
from training.scoring.logps import TokenLogps

ROOT = Path(__file__).resolve().parents[2]


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
        own = {"reference": options.pop("reference")} if "reference" in options else {}
        return [x.item() for x in Objective({name: {"weight": 1.0, **own}}, options).rewards(pairs())]

    assert rewards("sigmoid", beta=0.1) == pytest.approx([0.2, -0.1])
    assert rewards("simpo", beta=2.0) == pytest.approx([2 * -2.5, 2 * -4.0])
    assert rewards("simpo", beta=2.0, reference=True) == pytest.approx([4.0, -2.0])
    assert rewards("orpo", beta=0.1) == pytest.approx([-0.25, -0.4])
    assert rewards("cpo", beta=0.1) == pytest.approx([-1.0, -0.8])


@pytest.mark.parametrize(
    ("loss", "needs"),
    [
        ({"sigmoid": 1.0}, True),
        ({"simpo": 1.0}, False),
        ({"simpo": {"weight": 1.0, "reference": True}}, True),
        ({"orpo": 1.0, "sft": 1.0}, False),
        ({"orpo": 1.0, "hinge": 1.0}, True),
    ],
)
def test_a_reference_is_needed_where_a_loss_reads_one(loss, needs):
    assert Objective(check(loss), {"beta": 0.1}).needs_reference is needs


def test_each_loss_of_a_mixture_has_its_own_options():
    objective = Objective({"sigmoid": {"weight": 0.5, "gamma": 0.2}, "simpo": {"weight": 2.0, "gamma": 0.7}}, BETA)
    parts = objective.losses(pairs())
    assert parts["loss/sigmoid"].item() == value("sigmoid", beta=0.1, gamma=0.2)
    assert parts["loss/simpo"].item() == value("simpo", beta=0.1, gamma=0.7)
    assert parts["loss"].item() == 0.5 * parts["loss/sigmoid"].item() + 2.0 * parts["loss/simpo"].item()


def test_the_short_form_is_the_weight():
    long = {"sigmoid": {"weight": 1, "gamma": 2}, "sft": {"weight": 0.5}}
    assert check(long) == {"sigmoid": {"weight": 1.0, "gamma": 2.0}, "sft": 0.5}
    assert weights_of(long) == {"sigmoid": 1.0, "sft": 0.5}


BETA = {"beta": 0.1}


def only(loss: str, **options: object) -> dict[str, object]:
    return {loss: {"weight": 1.0, **options}}


@pytest.mark.parametrize(
    ("loss", "shared", "sentence"),
    [
        ({"dpo": 1.0}, BETA, "there is no loss 'dpo'"),
        ({}, {}, "it is empty"),
        ({"sigmoid": 0.0}, BETA, "must be above 0"),
        ({"sigmoid": "1"}, BETA, "`sigmoid.weight`: Input should be a valid number, but it is '1'"),
        ({"sigmoid": {"gamma": 0.5}}, BETA, r"`sigmoid.weight` is missing: write \{sigmoid: \{weight: 1.0"),
        ({"sigmoid": 1.0}, {}, "needs `beta`"),
        (
            only("hinge", label_smoothing=0.1),
            BETA,
            "`label_smoothing` has no effect on loss hinge, whose opt",
        ),
        (only("hinge", gamma=0.5), BETA, "losses with it are sigmoid, sigmoid_norm, simpo"),
        (only("sigmoid", dpop_lambda=5.0), BETA, "`dpop_lambda` has no effect"),
        (only("sigmoid", beta=0.2), BETA, "`beta` has no effect on loss sigmoid, .*; set it as train.beta"),
        (only("hinge", margin_scale=0.1), BETA, "`margin_scale` has no effect on loss hinge"),
        (
            only("sigmoid", margin_scale=0.0),
            BETA,
            "`sigmoid.margin_scale`: Input should be greater than 0",
        ),
        ({"sft": 1.0}, BETA, "`beta` has no effect"),
        (only("sigmoid", reference=True), BETA, "`reference` has no effect"),
        (only("simpo", reference="yes"), BETA, "`simpo.reference`: Input should be a valid boolean"),
        ({"orpo": 1.0}, {**BETA, "ld_alpha": 0.5}, "`ld_alpha` has no effect"),
        ({"simpo": 1.0}, {**BETA, "ld_alpha": 0.5}, "`ld_alpha` has no effect"),
        ({"simpo": 1.0, "sft": 1.0}, {**BETA, "ld_alpha": 0.5}, "`ld_alpha` has no effect"),
        ({"kto": 1.0}, {**BETA, "wpo": True}, "`wpo` has no effect"),
        ({"kto": 1.0, "sft": 1.0}, BETA, "loss kto is for unpaired rows and sft for pairs"),
        (only("apo_zero", f_divergence="js"), BETA, "`f_divergence` has no effect"),
        (only("sigmoid", f_divergence="tv"), BETA, "`sigmoid.f_divergence`: Input should be 'reverse_kl'"),
        (only("sigmoid", f_divergence="alpha"), BETA, "`sigmoid.f_alpha` belongs to"),
        (only("sigmoid", f_divergence="js", f_alpha=0.5), BETA, "`sigmoid.f_alpha` belongs to"),
        ({"exo_pair": 1.0}, BETA, r"needs `label_smoothing`: write \{exo_pair: \{weight: 1.0, label_smoothing"),
        (only("exo_pair", label_smoothing=0.0), BETA, "greater than 0"),
        (only("robust", label_smoothing=0.5), BETA, "less than 0.5"),
    ],
)
def test_what_would_be_ignored_is_refused(loss, shared, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_shared(check(loss), shared)


@pytest.mark.parametrize(
    "loss", [{"cpo": 1.0}, only("simpo", reference=True), {"sigmoid": 1.0, "sft": 1.0}, {"aot": 1.0}]
)
def test_ld_alpha_is_for_losses_of_sums(loss):
    check_shared(check(loss), {**BETA, "ld_alpha": 0.5})


def pair(**change) -> Pair:
    return Pair("a", [1], [2], [3], [1], [1], **change)


def test_a_label_that_no_loss_reads_is_refused():
    Objective({"sigmoid": 1.0}, BETA).check_pairs([pair(label=0.7)])
    with pytest.raises(ValueError, match="the pairs have labels, and loss apo_zero ignores them"):
        Objective({"apo_zero": 1.0}, BETA).check_pairs([pair(label=0.7)])


SCORES = only("sigmoid", margin_scale=0.1)


def test_scores_are_a_margin_only_when_asked_for():
    """Scores 8.0 and 3.5: ignored, with a note, or a margin of 0.1 * 4.5 inside the sigmoid."""
    row = build_row([pair(margin=8.0 - 3.5, ref_chosen_logps=[-1.0], ref_rejected_logps=[-2.0])], [0])
    same = TokenLogps(row.ref_logps, row.ref_logps, row.ref_logps)  # the policy is the reference: h = 0

    def loss(mixture: dict) -> float:
        objective = Objective(mixture, BETA)
        return objective.losses(pair_logps(row, same, objective))["loss"].item()

    assert loss({"sigmoid": 1.0}) == pytest.approx(math.log(2))
    assert loss(SCORES) == pytest.approx(math.log(1 + math.exp(0.1 * 4.5)))


def test_scores_that_the_loss_ignores_are_noted_and_missing_ones_refused():
    note = Objective({"hinge": 1.0}, BETA).check_pairs([pair(), pair(margin=4.5)])
    assert "the pairs have scores, but the loss ignores them. To train with a margin, set `margin_scale`" in note
    assert Objective({"hinge": 1.0}, BETA).check_pairs([pair()]) is None
    assert Objective(SCORES, BETA).check_pairs([pair(), pair(margin=4.5)]) is None
    with pytest.raises(ValueError, match=r"`margin_scale` of train.loss \(sigmoid\) scales .*, but no pair has scores"):
        Objective(SCORES, BETA).check_pairs([pair()])
