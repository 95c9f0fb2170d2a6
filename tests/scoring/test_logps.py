"""Packed rows equal separate passes to the last digits, for every architecture, or fall back to them; the work they
cost is counted."""

import random
from copy import deepcopy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.scoring import make_scorer, score_pairs
from training.models import adapters
from training.pairs.packing import build_row
from training.pairs.pair import Pair
from training.scoring import head
from training.scoring.logps import plain_logps, row_logps

CPU = torch.device("cpu")
SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BASE = {**SMALL, **HEADS}
SLIDING = {"sliding_window": 4}  # the pairs are longer
ARCHITECTURES = {
    "llama": LlamaConfig(**BASE),
    "llama-tied": LlamaConfig(**BASE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**BASE),
    "qwen2-sliding": Qwen2Config(**BASE, **SLIDING, use_sliding_window=True, max_window_layers=1),
    "qwen3": Qwen3Config(**BASE, head_dim=8),
    "mistral": MistralConfig(**BASE, **SLIDING),
    "phi3": Phi3Config(**BASE, **SLIDING, pad_token_id=0),
    "gemma": GemmaConfig(**BASE, head_dim=8),
    "gemma2": Gemma2Config(**BASE, **SLIDING, head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**BASE, **SLIDING, head_dim=8),
    "granite": GraniteConfig(**BASE, logits_scaling=3.0),
    "cohere": CohereConfig(**BASE),
    "gpt2": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0),
}


def make_pairs(count: int, seed: int = 0) -> list[Pair]:
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(61) for _ in range(rng.randint(low, high))]

    rows = [(tokens(1, 9), tokens(1, 7), tokens(1, 7)) for _ in range(count)]
    # Every other pair's responses begin alike.
    rows[1::2] = [(p, start + c, start + r) for p, c, r in rows[1::2] for start in [tokens(1, 5)]]
    return [Pair(str(n), p, c, r, [1] * len(c), [1] * len(r)) for n, (p, c, r) in enumerate(rows)]


def make_model(name: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(ARCHITECTURES[name])).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # distributions that are not flat
    return model


def plainly(model: torch.nn.Module, pairs: list[Pair]) -> torch.Tensor:
    return torch.cat([plain_logps(model, p.prompt_ids, r, CPU) for p in pairs for r in (p.chosen_ids, p.rejected_ids)])


def test_a_plain_pass_projects_no_prompt_token_to_the_vocabulary():
    """At 36,000 tokens of prompt their logits took 10 GiB, more than training itself."""
    model, projected = make_model("llama"), []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: projected.append(logits.shape[1]))
    plain_logps(model, range(50), range(3), CPU)
    assert projected == [4]  # the last is not used: it predicts what comes after the response


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_rows_equal_separate_passes(name, dtype):
    model, pairs = make_model(name, dtype), make_pairs(6)
    plain = plainly(model, pairs)
    scorer = make_scorer(model, pairs, CPU)
    assert scorer.path == "fused"
    packed = row_logps(scorer, build_row(pairs, range(6))).logps
    # gemma2 computes its softmax in float32, whatever the model is.
    close = 1e-10 if dtype == torch.float64 and name != "gemma2" else 2e-5
    torch.testing.assert_close(packed, plain, atol=close, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_of_packed_rows_equal_those_of_separate_passes(name):
    model, pairs = make_model(name), make_pairs(5)
    plainly(model, pairs).sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    scorer = make_scorer(model, pairs, CPU)
    model.zero_grad()
    scorer(build_row(pairs, range(5)))[0].sum().backward()
    for ours, theirs in zip((parameter.grad for parameter in model.parameters()), plain, strict=True):
        # Norms and rotary angles are float32 inside, whatever the model is.
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_a_model_that_ignores_the_mask_falls_back():
    class Deaf(type(make_model("llama"))):
        """Sees every earlier token, whatever the row says."""

        def forward(self, **given):
            return super().forward(input_ids=given["input_ids"], use_cache=False)

        @property
        def base_model(self):
            return lambda **given: self.model(input_ids=given["input_ids"], use_cache=False)

    torch.manual_seed(0)
    model, pairs = Deaf(deepcopy(ARCHITECTURES["llama"])).eval(), make_pairs(3)
    plain = plainly(model, pairs)
    scorer = make_scorer(model, pairs, CPU)
    assert scorer.path == "padded"
    torch.testing.assert_close(scorer(build_row(pairs, range(3)))[0], plain)


def test_an_unknown_treatment_of_logits_leaves_the_head_to_the_model(capsys):
    class Louder(type(make_model("llama"))):
        def forward(self, **given):
            output = super().forward(**given)
            output.logits = output.logits * 1.5
            return output

    torch.manual_seed(0)
    model, pairs = Louder(deepcopy(ARCHITECTURES["llama"])).eval(), make_pairs(3)
    plain = plainly(model, pairs)
    scorer = make_scorer(model, pairs, CPU)
    assert scorer.path == "packed"
    assert "the model's own vocabulary head is used" in capsys.readouterr().err
    torch.testing.assert_close(scorer(build_row(pairs, range(3)))[0], plain)


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["q_proj", "lm_head"]], ids=["layers", "head"])
def test_adapted_models_are_packed_too(targets):
    pairs = make_pairs(5)
    policy = adapters.add_adapter(make_model("llama", torch.float32), 4, 8.0, targets, False, False, seed=0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    plain = plainly(policy, pairs)
    scorer = make_scorer(policy, pairs, CPU)
    assert scorer.path == "fused"
    torch.testing.assert_close(scorer(build_row(pairs, range(5)))[0], plain, atol=2e-4, rtol=0)


def test_entropy_and_collision_are_those_of_the_predicting_distribution():
    model, pairs = make_model("llama"), make_pairs(1)
    logits = model(input_ids=torch.tensor([pairs[0].prompt_ids])).logits[0, -1]
    tokens = row_logps(make_scorer(model, pairs, CPU), build_row(pairs, [0]))
    torch.testing.assert_close(tokens.entropy[0], torch.distributions.Categorical(logits=logits).entropy())
    torch.testing.assert_close(tokens.collision[0].exp(), (logits.softmax(-1) ** 2).sum())


def test_scores_do_not_depend_on_the_row_budget():
    model, pairs = make_model("llama", torch.float32), make_pairs(12)
    scorer = make_scorer(model, pairs, CPU)
    wide, narrow = (score_pairs(scorer, pairs, budget, CPU) for budget in (500, 20))
    for (chosen, rejected), (chosen_too, rejected_too) in zip(wide, narrow, strict=True):
        assert chosen == pytest.approx(chosen_too, abs=1e-4)
        assert rejected == pytest.approx(rejected_too, abs=1e-4)


def beginnings(response: list[int]) -> set[tuple[int, ...]]:
    return {tuple(response[:end]) for end in range(1, len(response) + 1)}


def test_every_token_is_computed_once_and_only_responses_reach_the_vocabulary(monkeypatch):
    """The work that a row costs, counted: calls of the model, its tokens, and positions in the head."""
    model, pairs = make_model("llama"), make_pairs(8)
    scorer = make_scorer(model, pairs, CPU)
    tokens, projected = [], []
    model.model.layers[0].register_forward_hook(lambda m, args, out: tokens.append(out.shape[1]))
    project = head._project
    monkeypatch.setattr(head, "_project", lambda hidden, *more: projected.append(len(hidden)) or project(hidden, *more))
    scorer(build_row(pairs, range(8)))[0].sum().backward()
    distinct = [len(beginnings(p.chosen_ids) | beginnings(p.rejected_ids)) for p in pairs]
    assert sum(distinct) < sum(len(p.chosen_ids) + len(p.rejected_ids) for p in pairs)
    assert tokens == [sum(distinct) + sum(len(p.prompt_ids) for p in pairs)]
    assert projected == [sum(distinct)]  # once: kept for the backward pass
