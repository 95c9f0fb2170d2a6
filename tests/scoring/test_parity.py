"""Checks before the first step: rounding differences pass, any other difference fails."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.objectives.test_losses import START
from tests.support.scoring import make_scorer, score_pairs
from training.objectives.objective import Objective
from training.objectives.pair_logps import PairLogps
from training.objectives.registry import LOSSES
from training.pairs.pair import Pair
from training.trainer.settings import ReferenceMismatch
from training.trainer.start_checks import check_start

CPU = torch.device("cpu")
LENGTH = 200


@pytest.fixture(scope="module")
def scored():
    """A bfloat16 model, and pairs with its own log-probabilities as their reference."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2)
    scorer = make_scorer_of(AutoModelForCausalLM.from_config(config).bfloat16().eval())
    rng, ones = np.random.default_rng(0), np.ones(LENGTH)
    parts = [[rng.integers(0, 50, size) for size in (5, LENGTH, LENGTH)] for _ in range(4)]
    pairs = [Pair(str(number), *part, ones, ones) for number, part in enumerate(parts)]
    values = score_pairs(scorer, pairs, 2048, CPU)
    return scorer, [
        replace(p, ref_chosen_logps=c, ref_rejected_logps=r) for p, (c, r) in zip(pairs, values, strict=True)
    ]


def make_scorer_of(model):
    rng, ones = np.random.default_rng(1), np.ones(9)
    return make_scorer(model, [Pair("0", *rng.integers(0, 50, (3, 9)), ones, ones)], CPU)


def shifted(pair: Pair, by: np.ndarray) -> Pair:
    return replace(
        pair,
        ref_chosen_logps=np.asarray(pair.ref_chosen_logps) + by,
        ref_rejected_logps=np.asarray(pair.ref_rejected_logps) - by,
    )


def proof(scored, by, beta=0.1):
    scorer, pairs = scored
    objective = Objective({"sigmoid": 1.0}, {"beta": beta})
    return check_start(scorer, objective, [shifted(pair, by) for pair in pairs], 2048, CPU)


def test_equal_log_probabilities_pass(scored):
    found = proof(scored, np.zeros(LENGTH))
    assert found["token"] < 0.05
    assert found["loss"] < 1e-3


def test_rounding_sums_like_a_random_walk_and_passes(scored):
    # 0.03 a token, up as often as down but for 10 tokens: a sum of 0.3, a margin of 2 x 0.3 x beta = 0.06.
    # The least tolerance of bfloat16 is 0.02; 200 tokens of 0.05 walk 0.05 x sqrt(200) x beta = 0.07.
    signs = np.where(np.arange(LENGTH) < 105, 1.0, -1.0)
    assert proof(scored, 0.03 * signs)["reward"] == pytest.approx(0.1 * 0.3, abs=0.01)


def test_a_constant_error_at_every_token_fails(scored):
    with pytest.raises(ReferenceMismatch, match="another base model, template or precision"):
        proof(scored, np.full(LENGTH, 0.03))  # 200 x 0.03 x beta = 0.6


def test_a_few_tokens_of_another_model_fail(scored):
    other = np.zeros(LENGTH)
    other[:5] = 2.0
    with pytest.raises(ReferenceMismatch, match="differ by up to 2"):
        proof(scored, other)


def test_every_loss_starts_at_its_theoretical_value(scored):
    """All losses with a reference at once, on pairs with soft labels and scores, with rounding like the walk above."""
    scorer, pairs = scored
    signs = np.where(np.arange(LENGTH) < 105, 1.0, -1.0)
    given = [replace(shifted(p, 0.03 * signs), label=0.5 + 0.1 * n, margin=float(n)) for n, p in enumerate(pairs)]
    options = {"label_smoothing": 0.2, "gamma": 0.5, "reference": True, "margin_scale": 0.1}
    own = {name: {key: v for key, v in options.items() if key in LOSSES[name].options} for name in START}
    loss = {name: {"weight": 1.0, **options} for name, options in own.items()}
    check_start(scorer, Objective(loss, {"beta": 0.1}), given, 2048, CPU)


def test_an_unconfigured_margin_is_rejected_before_the_first_update(scored, monkeypatch):
    """As it was: the difference of the scores 8.0 and 3.5 in the sigmoid, a first loss of 4.5 instead of 0.69."""
    scorer, pairs = scored
    sigmoid = LOSSES["sigmoid"]

    def with_margin(pairs: PairLogps, *, beta: float) -> torch.Tensor:
        return sigmoid(replace(pairs, margin=4.5), beta=beta, margin_scale=1.0)

    wrong = replace(sigmoid, function=with_margin, at_reference=lambda **_: math.log(2))
    monkeypatch.setitem(LOSSES, "sigmoid", wrong)
    with pytest.raises(
        ValueError, match=r"the first loss `sigmoid` is 4\.5.* on pairs 0, 1, 2, 3, but theory gives 0\.693"
    ):
        check_start(scorer, Objective({"sigmoid": 1.0}, {"beta": 0.1}), pairs, 2048, CPU)


@pytest.fixture
def sensitive():
    """A model of the `scored` pairs' vocabulary in which one rounding of the embeddings changes much."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8}
    config = LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.4)
    return AutoModelForCausalLM.from_config(config).bfloat16().eval()


def test_a_difference_within_the_rounding_noise_of_a_model_passes(scored, sensitive):
    by = np.where(np.random.default_rng(0).random(LENGTH) < 0.5, -0.1, 0.1)
    with pytest.raises(ReferenceMismatch):
        proof(scored, by)
    pairs = scored[1]
    scorer = make_scorer(sensitive, pairs, CPU)
    values = score_pairs(scorer, pairs, 2048, CPU)
    own = [replace(p, ref_chosen_logps=c, ref_rejected_logps=r) for p, (c, r) in zip(pairs, values, strict=True)]
    proof((scorer, own), by)
    with pytest.raises(ReferenceMismatch):
        proof((scorer, own), 4 * by)


@pytest.mark.parametrize(("roundings", "path"), [(1, "fused"), (16, "padded")])
def test_packed_rows_that_round_otherwise_are_used_unless_they_differ_by_more(scored, sensitive, roundings, path):
    """A quarter of the embeddings of packed rows, which alone have position_ids, are moved by so many roundings."""
    is_packed = False

    def remember(_: nn.Module, __: object, options: dict[str, object]) -> None:
        nonlocal is_packed
        is_packed = options.get("position_ids") is not None

    def move(_: nn.Module, __: object, embedded: Tensor) -> Tensor:
        is_moved = torch.rand(embedded.shape, generator=torch.Generator().manual_seed(1)) < 0.25
        return (embedded.float() * (1 + is_packed * is_moved * roundings * 2**-8)).bfloat16()

    sensitive.base_model.register_forward_pre_hook(remember, with_kwargs=True)
    sensitive.get_input_embeddings().register_forward_hook(move)
    said: list[str] = []
    scorer = make_scorer(sensitive, scored[1], CPU, said.append)
    assert 0.1 < scorer.noise < 0.5
    assert scorer.path == path, said
