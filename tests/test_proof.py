"""Before the first step: rounding passes as the reference, anything else does not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from training.logps import score_pairs
from training.objective import Objective
from training.packing import Pair
from training.proof import make_scorer, prove_start
from training.settings import Mismatch

CPU = torch.device("cpu")
LENGTH = 200


@pytest.fixture(scope="module")
def scored():
    """A bfloat16 model and pairs with its own values as their reference."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2)
    scorer = make_scorer_of(AutoModelForCausalLM.from_config(config).bfloat16().eval())
    rng, ones = np.random.default_rng(0), np.ones(LENGTH)
    parts = [[rng.integers(0, 50, size) for size in (5, LENGTH, LENGTH)] for _ in range(4)]
    pairs = [Pair(str(number), *part, ones, ones) for number, part in enumerate(parts)]
    values = score_pairs(scorer, pairs, 2048, CPU)
    return scorer, [replace(p, ref_chosen=c, ref_rejected=r) for p, (c, r) in zip(pairs, values, strict=True)]


def make_scorer_of(model):
    rng, ones = np.random.default_rng(1), np.ones(9)
    return make_scorer(model, [Pair("0", *rng.integers(0, 50, (3, 9)), ones, ones)], CPU)


def shifted(pair: Pair, by: np.ndarray) -> Pair:
    return replace(pair, ref_chosen=np.asarray(pair.ref_chosen) + by, ref_rejected=np.asarray(pair.ref_rejected) - by)


def proof(scored, by, beta=0.1):
    scorer, pairs = scored
    objective = Objective({"sigmoid": 1.0}, {"beta": beta})
    return prove_start(scorer, objective, [shifted(pair, by) for pair in pairs], 2048, CPU)


def test_the_same_numbers_are_a_proof(scored):
    found = proof(scored, np.zeros(LENGTH))
    assert found["token"] < 0.05
    assert found["loss"] < 1e-3


def test_rounding_adds_up_like_a_walk_and_passes(scored):
    # 0.03 a token, up as often as down but for 10 tokens: a sum of 0.3, a margin of 2 x 0.3 x beta = 0.06.
    # The least tolerance of bfloat16 is 0.02; 200 tokens of 0.05 walk 0.05 x sqrt(200) x beta = 0.07.
    signs = np.where(np.arange(LENGTH) < 105, 1.0, -1.0)
    assert proof(scored, 0.03 * signs)["reward"] == pytest.approx(0.1 * 0.3, abs=0.01)


def test_the_same_error_at_every_token_is_no_rounding(scored):
    with pytest.raises(Mismatch, match="another base model, template or precision"):
        proof(scored, np.full(LENGTH, 0.03))  # 200 x 0.03 x beta = 0.6


def test_a_few_tokens_of_another_model_are_noticed(scored):
    other = np.zeros(LENGTH)
    other[:5] = 2.0
    with pytest.raises(Mismatch, match="differ by up to 2"):
        proof(scored, other)
