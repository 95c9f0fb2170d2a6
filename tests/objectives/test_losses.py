"""Each loss against a number derived in view, and the checks that need no number."""

import math
from dataclasses import replace

import pytest
import torch

from tests.objectives import losses_table
from training.objectives.losses.aot import order_statistics
from training.objectives.losses.orpo import log1mexp
from training.objectives.metrics import pair_logps
from training.objectives.objective import Objective
from training.objectives.pair_logps import PairLogps
from training.objectives.registry import LOSSES
from training.objectives.terms import divergence_score
from training.pairs.packing import build_row
from training.pairs.pair import Pair

# One pair: a = c - c0 = 2, b = r - r0 = -1, so h = 3; 4 and 2 tokens.
C, R, C0, R0, NW, NL = -10.0, -8.0, -12.0, -7.0, 4.0, 2.0
A, B, H = 2.0, -1.0, 3.0


def pairs(c=C, r=R, c0=C0, r0=R0, nw=NW, nl=NL, dtype=torch.float64, **more) -> PairLogps:
    sums = {"chosen_logps": c, "rejected_logps": r, "ref_chosen_logps": c0, "ref_rejected_logps": r0}
    means = {"chosen_mean_logps": c / nw, "rejected_mean_logps": r / nl, "chosen_tokens": nw, "rejected_tokens": nl}
    return PairLogps(**{n: torch.tensor([v], dtype=dtype) for n, v in (sums | means).items()}, **more)


def value(name: str, given: PairLogps | None = None, **options) -> float:
    return LOSSES[name](given or pairs(), **options).item()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


L, s = log_sigmoid, sigmoid


def odds(mean: float) -> float:
    return math.exp(mean) / (1 - math.exp(mean))


EXPECTED = {
    "sigmoid": (-L(0.1 * H), {"beta": 0.1}),
    "sigmoid_norm": (-L(0.1 * (A / NW - B / NL)), {"beta": 0.1}),
    "hinge": (1 - 0.1 * H, {"beta": 0.1}),
    "ipo": ((A / NW - B / NL - 1 / 0.2) ** 2, {"beta": 0.1}),
    "ipo_sum": ((H - 1 / 0.2) ** 2, {"beta": 0.1}),
    "robust": ((-0.9 * L(0.3) + 0.1 * L(-0.3)) / 0.8, {"beta": 0.1, "label_smoothing": 0.1}),
    "exo_pair": (
        s(0.3) * (L(0.3) - math.log(0.9)) + s(-0.3) * (L(-0.3) - math.log(0.1)),
        {"beta": 0.1, "label_smoothing": 0.1},
    ),
    "nca_pair": (-L(0.2) - 0.5 * L(-0.2) - 0.5 * L(0.1), {"beta": 0.1}),
    "bco_pair": (-L(0.2) - L(0.1), {"beta": 0.1}),
    "sppo_hard": ((A - 5) ** 2 + (B + 5) ** 2, {"beta": 0.1}),
    # A batch of one: nothing to sort, so both are sigmoid's.
    "aot": (-L(0.3), {"beta": 0.1}),
    "aot_unpaired": (-L(0.3), {"beta": 0.1}),
    "apo_zero": (1 - s(0.2) + s(-0.1), {"beta": 0.1}),
    "apo_down": (s(0.2) + 1 - s(0.3), {"beta": 0.1}),
    "discopop": ((1 - s(6)) * -L(0.3) + s(6) * math.exp(-0.3), {"beta": 0.1, "tau": 0.05}),
    "dpop": (-L(0.3), {"beta": 0.1, "dpop_lambda": 50.0}),  # a = 2 is above 0: no penalty
    # A batch of one desirable row: the mismatched log-ratio is -1, so the KL is 0.
    "kto": (1.5 * (1 - s(0.2)), {"beta": 0.1, "desirable_weight": 1.5}),
    "apo_zero_unpaired": (1 - s(0.2), {"beta": 0.1, "undesirable_weight": 3.0}),
    "simpo": (-L(2.0 * (C / NW - R / NL) - 0.5), {"beta": 2.0, "gamma": 0.5}),
    "cpo": (-L(0.1 * (C - R)) - 0.7 * C / NW, {"beta": 0.1, "cpo_alpha": 0.7}),
    "orpo": (2.5 - 0.1 * L(math.log(odds(C / NW) / odds(R / NL))), {"beta": 0.1}),
    "sft": (-C / NW, {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_its_formula(name):
    expected, options = EXPECTED[name]
    assert value(name, **options) == pytest.approx(expected)


def test_every_loss_is_expected():
    assert EXPECTED.keys() == LOSSES.keys()


def test_the_table_of_the_documentation_is_what_the_losses_declare():
    page = losses_table.PAGE.read_text()
    assert losses_table.of_page(page) == losses_table.table(), "run python -m tests.objectives.losses_table"


def reads(name: str, **fields: object) -> bool:
    """Whether other fields of the pairs change the loss."""
    options = EXPECTED[name][1] | ({"margin_scale": 1.0} if "margin_scale" in LOSSES[name].options else {})
    return value(name, pairs(**fields), **options) != value(name, **options)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_declares_what_it_reads(name):
    declared = LOSSES[name]
    other = torch.tensor([0.7])
    assert reads(name, label=other) == declared.reads_label
    assert reads(name, margin=other) == ("margin_scale" in declared.options)
    assert reads(name, c0=-13.0) == declared.needs_reference
    assert reads(name, batch_kl=other) == declared.reads_kl
    assert reads(name, sign=-torch.ones(1)) == declared.unpaired
    sums = replace(pairs(), chosen_logps=torch.tensor([-9.0], dtype=torch.float64))
    options = EXPECTED[name][1]
    assert (value(name, sums, **options) != value(name, **options)) == declared.reads_sums


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_sorts_the_batch_declares_it(name):
    """Its value of a pair depends on the other pairs; KTO's reads them as the KL."""
    options, given = EXPECTED[name][1], many(4)
    alone = replace(given, **{n: v[:1] for n, v in vars(given).items() if isinstance(v, torch.Tensor)})
    if LOSSES[name].reads_kl:
        given, alone = (replace(one, batch_kl=torch.tensor(0.1)) for one in (given, alone))
    depends = LOSSES[name](given, **options)[0].item() != pytest.approx(LOSSES[name](alone, **options)[0].item())
    assert depends == LOSSES[name].sorts_batch


ALL_OPTIONS = [(name, key) for name, loss in LOSSES.items() for key in loss.options]


@pytest.mark.parametrize(("name", "key"), ALL_OPTIONS)
def test_every_option_has_an_effect(name, key):
    before = EXPECTED[name][1] | ({"f_divergence": "alpha"} if key == "f_alpha" else {})
    default = LOSSES[name].options[key].default
    other = not default if isinstance(default, bool) else "js" if isinstance(default, str) else 0.3
    either_row = [pairs(c0=-9.5, margin=torch.ones(1), sign=sign * torch.ones(1)) for sign in (1, -1)]
    assert any(value(name, row, **{**before, key: other}) != value(name, row, **before) for row in either_row)


def test_label_smoothing_mixes_in_the_swapped_label():
    expected = -0.9 * L(0.3) - 0.1 * L(-0.3)
    assert value("sigmoid", beta=0.1, label_smoothing=0.1) == pytest.approx(expected)
    assert value("aot", beta=0.1, label_smoothing=0.1) == pytest.approx(expected)


def test_length_normalization_is_sigmoid_norm():
    assert value("sigmoid", beta=0.1, length_normalization=True) == value("sigmoid_norm", beta=0.1)


def test_gamma_is_the_margin_of_colossalai():
    """Its DpoLoss takes gamma / beta from the log-ratios and then multiplies by beta; length_normalization divides each
    log-probability by its response's tokens before."""
    summed, per_token = H, A / NW - B / NL
    assert value("sigmoid", beta=0.1, gamma=0.5) == pytest.approx(-L(0.1 * (summed - 0.5 / 0.1)))
    for name, options in (("sigmoid", {"length_normalization": True}), ("sigmoid_norm", {})):
        assert value(name, beta=0.1, gamma=0.5, **options) == pytest.approx(-L(0.1 * (per_token - 0.5 / 0.1)))


def test_dpop_penalises_a_chosen_response_below_the_reference():
    # c = -10 and c0 = -9.5: a = -0.5, h = -0.5 + 1 = 0.5, penalty 5 * 0.5 = 2.5, and beta multiplies both.
    assert value("dpop", pairs(c0=-9.5), beta=0.1, dpop_lambda=5.0) == pytest.approx(-L(0.1 * (0.5 - 2.5)))


def test_what_a_number_means_is_said_by_name():
    with pytest.raises(TypeError):
        PairLogps(*(torch.zeros(1) for _ in range(8)))
    with pytest.raises(TypeError):
        LOSSES["sigmoid"](pairs(), 0.1, 0.1)
    with pytest.raises(TypeError):
        Pair("a", [1], [2], [3], [1], [1], [-1.0], [-1.0])
    with pytest.raises(TypeError):
        pair_logps(build_row([Pair("a", [1], [2], [3], [1], [1])], [0]), None, None, 0.0)


def test_hinge_is_never_negative():
    assert value("hinge", beta=1.0) == 0.0


def test_simpo_reads_a_reference_when_told_to():
    without = value("simpo", pairs(c0=99.0, r0=-99.0), beta=2.0, gamma=0.5)
    assert without == value("simpo", beta=2.0, gamma=0.5)
    assert value("simpo", beta=2.0, gamma=0.5, reference=True) == pytest.approx(-L(2.0 * (A / NW - B / NL) - 0.5))


def test_a_soft_label_takes_the_place_of_certainty():
    soft = pairs(label=torch.tensor([0.7], dtype=torch.float64))
    assert value("sigmoid", soft, beta=0.1) == pytest.approx(-0.7 * L(0.3) - 0.3 * L(-0.3))
    assert value("hinge", soft, beta=0.1) == pytest.approx(0.7 * 0.7 + 0.3 * 1.3)
    assert value("ipo_sum", soft, beta=0.1) == pytest.approx(0.7 * (3 - 5) ** 2 + 0.3 * (-3 - 5) ** 2)
    # Smoothing on top: the label itself may be wrong. p = 0.7 * 0.9 + 0.3 * 0.1 = 0.66.
    smoothed = value("sigmoid", soft, beta=0.1, label_smoothing=0.1)
    assert smoothed == pytest.approx(-0.66 * L(0.3) - 0.34 * L(-0.3))


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.reads_label])
def test_a_tie_does_not_see_a_swap_of_the_preference(name):
    tie = torch.tensor([0.5], dtype=torch.float64)
    straight = value(name, pairs(nw=4.0, nl=4.0, label=tie), beta=0.1)
    swapped = pairs(c=R, r=C, c0=R0, r0=C0, nw=4.0, nl=4.0, label=tie)
    sft = {"cpo": 1.0, "orpo": 1.0}.get(name, 0.0) * (C - R) / 4  # the supervised part does see it
    assert straight == pytest.approx(value(name, swapped, beta=0.1) - sft)


def test_a_margin_is_subtracted_inside_the_sigmoid():
    wide = pairs(margin=torch.tensor([0.5], dtype=torch.float64))
    assert value("sigmoid", wide, beta=0.1, margin_scale=0.5) == pytest.approx(-L(0.3 - 0.25))
    assert value("simpo", wide, beta=2.0, margin_scale=0.5) == pytest.approx(-L(2.0 * (C / NW - R / NL) - 0.25))
    assert value("sigmoid", wide, beta=0.1) == pytest.approx(-L(0.3))


def test_bco_shifts_by_the_mean_of_earlier_rewards():
    assert value("bco_pair", pairs(reward_mean=0.05), beta=0.1) == pytest.approx(-L(0.15) - L(0.15))


@pytest.mark.parametrize(
    ("divergence", "alpha", "expected"),
    [
        ("reverse_kl", 0.0, A),
        ("forward_kl", 0.0, 1 - math.exp(-A)),
        ("js", 0.0, math.log(2) + L(A)),
        ("alpha", 0.5, (math.exp(-0.5 * A) - 1) / -0.5),
        ("alpha", 1.0, A),
    ],
)
def test_divergences_score_the_ratio(divergence, alpha, expected):
    assert divergence_score(torch.tensor(A, dtype=torch.float64), divergence, alpha).item() == pytest.approx(expected)


def test_a_divergence_scores_both_ratios_of_h():
    expected = -L(0.1 * ((1 - math.exp(-A)) - (1 - math.exp(-B))))
    assert value("sigmoid", beta=0.1, f_divergence="forward_kl") == pytest.approx(expected)


def many(count: int, seed: int = 0) -> PairLogps:
    rng = torch.Generator().manual_seed(seed)
    c, r, c0, r0 = (-10 * torch.rand(count, dtype=torch.float64, generator=rng) for _ in range(4))
    tokens = torch.full((count,), 3.0, dtype=torch.float64)
    return PairLogps(
        chosen_logps=c.requires_grad_(),
        rejected_logps=r.requires_grad_(),
        ref_chosen_logps=c0,
        ref_rejected_logps=r0,
        chosen_mean_logps=c / 3,
        rejected_mean_logps=r / 3,
        chosen_tokens=tokens,
        rejected_tokens=tokens,
    )


def test_aot_compares_sorted_gaps():
    given = many(5)
    x = (given.chosen_logps - given.rejected_logps).sort().values - (
        given.ref_chosen_logps - given.ref_rejected_logps
    ).sort().values
    assert LOSSES["aot"](given, beta=0.1).mean().item() == pytest.approx(
        (-torch.nn.functional.logsigmoid(0.1 * x)).mean().item()
    )


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_sorted_losses_of_parts_are_those_of_the_whole(name):
    """Each part is told the ranks of its pairs in the whole batch: same value, same gradient."""
    whole = many(6)
    LOSSES[name](whole, beta=0.1).sum().backward()
    places = order_statistics(whole)
    parts = many(6)
    total = 0.0
    for some in ([0, 3], [1], [2, 4, 5]):
        fields = {n: v[some] for n, v in vars(parts).items() if isinstance(v, torch.Tensor)}
        statistics = replace(places, **{n: v[some] for n, v in vars(places).items()})
        loss = LOSSES[name](PairLogps(**fields, order_statistics=statistics), beta=0.1).sum()
        loss.backward(retain_graph=True)
        total += loss.item()
    assert total == pytest.approx(LOSSES[name](whole, beta=0.1).sum().item())
    torch.testing.assert_close(parts.chosen_logps.grad, whole.chosen_logps.grad)
    torch.testing.assert_close(parts.rejected_logps.grad, whole.rejected_logps.grad)


def test_the_unpaired_gradient_is_that_of_the_sorted_formula():
    given, other = many(6), many(6)
    LOSSES["aot_unpaired"](given, beta=0.1).sum().backward()
    x = (other.chosen_logps - other.ref_chosen_logps).sort().values - (
        other.rejected_logps - other.ref_rejected_logps
    ).sort().values
    formula = -torch.nn.functional.logsigmoid(0.1 * x).sum()
    formula.backward()
    assert LOSSES["aot_unpaired"](given, beta=0.1).sum().item() == pytest.approx(formula.item())
    torch.testing.assert_close(given.chosen_logps.grad, other.chosen_logps.grad)
    torch.testing.assert_close(given.rejected_logps.grad, other.rejected_logps.grad)


LN2 = math.log(2)
START = {  # beta 0.1: 1 / (4 * 0.1^2) = 25
    "sigmoid": (LN2, {"beta": 0.1, "label_smoothing": 0.2}),
    "sigmoid_norm": (LN2, {"beta": 0.1, "f_divergence": "js"}),
    "hinge": (1.0, {"beta": 0.1}),
    "ipo": (25.0, {"beta": 0.1}),
    "ipo_sum": (25.0, {"beta": 0.1, "f_divergence": "forward_kl"}),
    "robust": (LN2, {"beta": 0.1, "label_smoothing": 0.2}),
    "exo_pair": (0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2), {"beta": 0.1, "label_smoothing": 0.2}),
    "nca_pair": (2 * LN2, {"beta": 0.1}),
    "bco_pair": (2 * LN2, {"beta": 0.1}),
    "sppo_hard": (50.0, {"beta": 0.1}),
    "aot": (LN2, {"beta": 0.1}),
    "aot_unpaired": (LN2, {"beta": 0.1}),
    "apo_zero": (1.0, {"beta": 0.1}),
    "apo_down": (1.0, {"beta": 0.1}),
    "discopop": (0.5 * LN2 + 0.5, {"beta": 0.1}),
    "dpop": (LN2, {"beta": 0.1}),
    "kto": (0.75, {"beta": 0.1, "desirable_weight": 1.5}),
    "apo_zero_unpaired": (0.5, {"beta": 0.1}),
    "simpo": (-L(-0.5), {"beta": 2.0, "gamma": 0.5, "reference": True}),
}


def test_every_loss_with_a_reference_has_a_loss_at_the_reference():
    free = {name for name, loss in LOSSES.items() if not loss.needs_reference}
    assert START.keys() == LOSSES.keys() - free | {"simpo"}
    assert all(LOSSES[name].start_value({"beta": 0.1}) is None for name in free)


@pytest.mark.parametrize("name", START)
@pytest.mark.parametrize("label", [1.0, 0.7])
def test_a_policy_that_is_the_reference_has_the_known_loss(name, label):
    expected, options = START[name]
    if label != 1.0 and not LOSSES[name].reads_label:
        label = 1.0
    if name == "simpo":
        expected = -label * L(-0.5) - (1 - label) * L(0.5)  # with a margin a label matters
    same = pairs(c0=C, r0=R, label=torch.tensor([label], dtype=torch.float64))
    assert value(name, same, **options) == pytest.approx(expected)
    assert LOSSES[name].start_value(options, label) == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name in START if "margin_scale" in LOSSES[name].options])
def test_a_margin_moves_the_loss_at_the_reference(name):
    options = {"beta": 0.1, "margin_scale": 0.5, **({} if name == "robust" else {"gamma": 0.5})}
    options |= {"label_smoothing": 0.2} if name != "simpo" else {"reference": True}
    z = -(options.get("gamma", 0.0) + 0.25)
    mixed = {"robust": -(0.8 * L(z) - 0.2 * L(-z)) / 0.6, "simpo": -L(z)}.get(name, -0.8 * L(z) - 0.2 * L(-z))
    same = pairs(c0=C, r0=R, margin=torch.tensor([0.5], dtype=torch.float64))
    assert value(name, same, **options) == pytest.approx(mixed)
    assert LOSSES[name].start_value(options, margin=0.5) == pytest.approx(mixed)


def test_half_label_smoothing_does_not_see_a_swap():
    swapped = pairs(c=R, r=C, c0=R0, r0=C0)
    straight = value("sigmoid", beta=0.1, label_smoothing=0.5)
    assert straight == pytest.approx(value("sigmoid", swapped, beta=0.1, label_smoothing=0.5))


def objective_of(name: str) -> Objective:
    """The loss alone, smoothed and with a margin where it has these options."""
    options = {**EXPECTED[name][1], "label_smoothing": 0.1, "gamma": 0.5}
    own = {key: option for key, option in options.items() if key in LOSSES[name].options}
    return Objective({name: {"weight": 1.0, **own}}, {"beta": 0.1})


# aot_unpaired carries part of its gradient without value: it is checked against the sorted formula above.
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "aot_unpaired"])
def test_gradients_are_those_of_finite_differences(name):
    objective = objective_of(name)
    fixed = pairs()
    partners = replace(order_statistics(fixed), ref_gap=torch.tensor([-5.0], dtype=torch.float64))

    def loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        given = replace(
            fixed,
            chosen_logps=chosen,
            rejected_logps=rejected,
            chosen_mean_logps=chosen / NW,
            rejected_mean_logps=rejected / NL,
        )
        return objective.losses(replace(given, order_statistics=partners if name == "aot" else None))["loss"]

    inputs = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (C, R)]
    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("c", "r"), [(-1e4, -1e-9), (-1e-9, -1e4), (-1e-9, -1e-9), (-1e4, -1e4)])
def test_extreme_log_probabilities_stay_finite(name, c, r):
    chosen = torch.tensor([c], requires_grad=True)
    rejected = torch.tensor([r], requires_grad=True)
    given = pairs(dtype=torch.float32)
    given = replace(
        given,
        chosen_logps=chosen,
        rejected_logps=rejected,
        chosen_mean_logps=chosen / NW,
        rejected_mean_logps=rejected / NL,
    )
    loss = objective_of(name).losses(given)["loss"]
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert all(torch.isfinite(x.grad).all() for x in (chosen, rejected) if x.grad is not None)


@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
@pytest.mark.parametrize("ratio", [-1e4, 1e4])
def test_extreme_ratios_stay_finite_under_divergences(divergence, ratio):
    given = torch.tensor([ratio], requires_grad=True)
    value = divergence_score(given, divergence, 0.5)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(given.grad).all()


def test_log1mexp_is_exact_near_both_ends():
    x = torch.tensor([-1e-5, -0.5, -0.7, -20.0], dtype=torch.float64)
    expected = [math.log(-math.expm1(v)) for v in x.tolist()]
    assert log1mexp(x).tolist() == pytest.approx(expected, rel=1e-12)
