"""Packed, prefix-shared rows: what they look like, and that they equal separate passes to the last digits."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from training.attention import row_mask
from training.logps import check_packing, plain_logps, row_logps, score_pairs
from training.metrics import row_pairs
from training.packing import Pair, build_row, pack

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ARCHITECTURES = {
    "llama": LlamaConfig(**SMALL, **HEADS),
    "llama-tied": LlamaConfig(**SMALL, **HEADS, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL, **HEADS),
    "qwen3": Qwen3Config(**SMALL, **HEADS, head_dim=8),
    "gpt2": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


def make_pairs(count: int, seed: int = 0) -> list[Pair]:
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(61) for _ in range(rng.randint(low, high))]

    rows = [(tokens(1, 9), tokens(1, 7), tokens(1, 7)) for _ in range(count)]
    return [Pair(str(n), p, c, r, [1] * len(c), [1] * len(r)) for n, (p, c, r) in enumerate(rows)]


def make_model(name: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(ARCHITECTURES[name], attn_implementation="sdpa").to(dtype).eval()


def test_a_row_shares_the_prompt_and_restarts_positions():
    first = Pair("a", [1, 2], [3, 4], [5], [1, 1], [1])
    second = Pair("b", [6], [7], [8, 9], [1], [0, 1])
    row = build_row([first, second], [0, 1])
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 2, 0, 1, 1, 2]
    assert row.targets.tolist() == [3, 4, 5, 7, 8, 9]
    assert row.predict.tolist() == [1, 2, 1, 5, 5, 7]  # the prompt's last token predicts both first tokens
    assert row.response.tolist() == [0, 0, 1, 2, 3, 3]
    assert row.counts.tolist() == [1, 1, 1, 1, 0, 1]
    assert row_mask(row)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0, 0],  # rejected: the prompt, not the chosen response
        [0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 0, 1, 1],
    ]


def test_sums_count_only_counted_tokens():
    row = build_row([Pair("b", [6], [7], [8, 9], [1], [0, 1])], [0])
    chosen, rejected = row.sums(torch.tensor([1.0, 10.0, 100.0]))
    assert (chosen.tolist(), rejected.tolist()) == ([1.0], [100.0])


def test_packing_puts_every_item_in_one_row_within_the_budget():
    lengths = [random.Random(7).randint(1, 40) for _ in range(200)]
    rows = pack(lengths, 64)
    assert sorted(item for row in rows for item in row) == list(range(200))
    assert all(sum(lengths[item] for item in row) <= 64 for row in rows)
    assert sum(lengths) / (64 * len(rows)) > 0.9  # little is left empty


def test_an_item_above_the_budget_gets_a_row_of_its_own():
    assert pack([5, 100, 5], 10) == [[1], [0, 2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_rows_equal_separate_passes(name, dtype):
    model, pairs = make_model(name, dtype), make_pairs(6)
    packed = row_logps(model, build_row(pairs, range(6))).logps
    plain = torch.cat([plain_logps(model, p.prompt, r, packed.device) for p in pairs for r in (p.chosen, p.rejected)])
    torch.testing.assert_close(packed, plain, atol=1e-10 if dtype == torch.float64 else 2e-5, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_of_packed_rows_equal_those_of_separate_passes(name):
    model, pairs = make_model(name), make_pairs(5)
    row_logps(model, build_row(pairs, range(5))).logps.sum().backward()
    packed = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for pair in pairs:
        for response in (pair.chosen, pair.rejected):
            plain_logps(model, pair.prompt, response, packed[0].device).sum().backward()
    for ours, theirs in zip(packed, (parameter.grad for parameter in model.parameters()), strict=True):
        # Norms and rotary angles are float32 inside, whatever the model is.
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


def test_entropy_is_that_of_the_predicting_distribution():
    model, pairs = make_model("llama"), make_pairs(1)
    pair = pairs[0]
    entropy = row_logps(model, build_row(pairs, [0])).entropy[0]
    logits = model(input_ids=torch.tensor([pair.prompt])).logits[0, -1]
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())


def test_scores_do_not_depend_on_the_row_budget():
    model, pairs = make_model("llama", torch.float32), make_pairs(12)
    wide, narrow = (score_pairs(model, pairs, budget, torch.device("cpu")) for budget in (500, 20))
    for (chosen, rejected), (chosen_too, rejected_too) in zip(wide, narrow, strict=True):
        assert chosen == pytest.approx(chosen_too, abs=1e-4)
        assert rejected == pytest.approx(rejected_too, abs=1e-4)


def test_every_token_is_computed_once_and_only_responses_reach_the_vocabulary():
    """The work that a row costs, counted: tokens in the model, and positions in the head."""
    model, pairs = make_model("llama"), make_pairs(8)
    seen: list[tuple[int, int]] = []
    model.lm_head.register_forward_hook(lambda m, args, out: seen.append((args[0].shape[1], out.shape[-1])))
    row = build_row(pairs, range(8))
    row_logps(model, row)
    assert len(row.input_ids) == sum(len(p.prompt) + len(p.chosen) + len(p.rejected) for p in pairs)
    assert seen == [(sum(len(p.chosen) + len(p.rejected) for p in pairs), 61)]


def test_a_model_that_ignores_the_mask_is_refused():
    class Deaf(torch.nn.Module):
        """Sees every earlier token, whatever the mask says."""

        def __init__(self):
            super().__init__()
            self.inner = make_model("llama", torch.float32)

        def forward(self, attention_mask=None, position_ids=None, **rest):
            return self.inner(**rest)

    model = Deaf()
    with pytest.raises(ValueError, match="does not give the same log-probabilities in packed rows"):
        check_packing(model, make_pairs(3), torch.float32, torch.device("cpu"))
    assert check_packing(model.inner, make_pairs(3), torch.float32, torch.device("cpu")) < 1e-4


def test_row_pairs_sum_policy_and_reference_alike():
    pair = Pair("a", [1], [2, 3], [4], [1, 1], [1], ref_chosen=[-1.0, -2.0], ref_rejected=[-5.0])
    given = row_pairs(build_row([pair], [0]), torch.tensor([-0.5, -0.25, -4.0]))
    assert (given.chosen.item(), given.rejected.item()) == (-0.75, -4.0)
    assert (given.ref_chosen.item(), given.ref_rejected.item()) == (-3.0, -5.0)
    assert (given.chosen_tokens.item(), given.rejected_tokens.item()) == (2.0, 1.0)
