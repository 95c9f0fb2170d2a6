"""Every architecture takes a path on which a response depends on nothing but its own prompt, without any dropout."""

import random
from copy import deepcopy

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.scoring import make_scorer
from training.models.adapters import write_config
from training.models.loading import disable_dropout, dropout_attributes, load_model
from training.pairs.packing import build_row
from training.pairs.pair import Pair
from training.scoring import parity
from training.scoring.attention import PACKED_ATTENTION
from training.scoring.logps import Scorer, length_batches, plain_logps, row_logps
from training.trainer.start_checks import check_determinism

CPU = torch.device("cpu")
VOCABULARY = 61
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BASE = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}
DEEPER = {**BASE, "num_hidden_layers": 4}  # every fourth layer is one of full attention
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
FUSED = {  # transformers' configuration class and its arguments
    "Qwen3": {**BASE, "head_dim": 8},
    "Qwen3Moe": {**BASE, "head_dim": 8, **EXPERTS},
    "Mixtral": {**BASE, "num_local_experts": 4},
    "Olmoe": {**BASE, "num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        **BASE,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "Gemma3Text": {**BASE, "sliding_window": 4, "head_dim": 8},
    "Gemma4Text": {
        **BASE,
        "sliding_window": 4,
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
    },
    "OPT": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "layerdrop": 0.2,
    },
}
RECURRENT = {
    "Qwen3Next": {**DEEPER, "head_dim": 8, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "Qwen3_5Text": {**DEEPER, "head_dim": 8, **LINEAR},
    "Lfm2": {**BASE, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "FalconH1": {
        **BASE,
        "head_dim": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "GraniteMoeHybrid": {
        **BASE,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "NemotronH": {
        **BASE,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
}
PADDED = {
    "Jamba": {  # Mamba-1 layers, which do not continue from a state
        **BASE,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    # Attention that a packed row's sequences cannot be handed to.
    "GptOss": {**BASE, "sliding_window": 4, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "Bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.2},
    "Falcon": {**SMALL, "num_attention_heads": 4, "hidden_dropout": 0.2, "attention_dropout": 0.2},
}
ALL = {**FUSED, **RECURRENT, **PADDED}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def make_model(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**deepcopy(ALL[name]))
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # a leak must move the numbers
    return model


def make_pairs(count: int, seed: int = 0) -> list[Pair]:
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    rows = [(tokens(4, 19), tokens(4, 17), tokens(4, 17)) for _ in range(count)]
    # Every other pair's responses begin alike.
    rows[1::2] = [(p, start + c, start + r) for p, c, r in rows[1::2] for start in [tokens(1, 5)]]
    return [make_pair(str(n), *row) for n, row in enumerate(rows)]


def make_pair(name: str, prompt: list[int], chosen: list[int], rejected: list[int]) -> Pair:
    masks = {"chosen_mask": [1] * len(chosen), "rejected_mask": [1] * len(rejected)}
    return Pair(id=name, prompt_ids=prompt, chosen_ids=chosen, rejected_ids=rejected, **masks)


def other_tokens(pair: Pair) -> Pair:
    """Of the same lengths."""
    return make_pair(
        "x",
        *(
            [(token + 7) % VOCABULARY for token in part]
            for part in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)
        ),
    )


@torch.no_grad()
def values_of(scorer: Scorer, pairs: list[Pair], number: int) -> torch.Tensor:
    """Log-probabilities of one pair's two responses, in a row of these pairs."""
    row = build_row(pairs, range(len(pairs)))
    return row_logps(scorer, row).logps[(row.response_index == 2 * number) | (row.response_index == 2 * number + 1)]


@DTYPES
@pytest.mark.parametrize("name", ALL)
def test_a_response_keeps_its_values_whatever_stands_beside_it(name, dtype):
    model, pairs = make_model(name, dtype), make_pairs(5)
    first, pair, last = pairs[0], pairs[1], pairs[2]
    with torch.no_grad():
        plain = torch.cat(
            [plain_logps(model, pair.prompt_ids, part, CPU) for part in (pair.chosen_ids, pair.rejected_ids)]
        )
    scorer = make_scorer(model, pairs, CPU)
    assert scorer.path == ("padded" if name in PADDED else "fused")
    given = values_of(scorer, [first, pair, last], 1)
    torch.testing.assert_close(given, plain, atol=2e-4 if dtype == torch.float32 else 0.05, rtol=0)
    rounding = 1e-5 if dtype == torch.float32 else 1e-3  # leaks were 0.015 and more
    for neighbours, place in (
        ([other_tokens(first), pair, other_tokens(last)], 1),
        ([pair, last, first], 0),
        ([last, first, first, pair], 3),
        ([pair], 0),
    ):
        torch.testing.assert_close(values_of(scorer, neighbours, place), given, atol=rounding, rtol=0)


@DTYPES
@pytest.mark.parametrize("name", ALL)
def test_the_check_sees_every_leak_and_no_other(name, dtype):
    """On packed rows, which recurrent layers without segments, and attention of a model's own, do not follow."""
    scorer = Scorer(make_model(name, dtype), "packed")
    scorer.causal.set_attn_implementation(PACKED_ATTENTION)
    leaks = name in RECURRENT or name in ("Jamba", "Bloom", "Falcon")  # gpt-oss loses its sinks, and sees no neighbour
    assert parity.depends_on_neighbours(scorer, make_pairs(3), CPU) == leaks


def test_positions_that_count_from_the_start_of_the_row_are_noticed():
    class Counting(type(make_model("OPT", torch.float32))):
        """Ignores the positions that it is given."""

        def forward(self, **given):
            return super().forward(**{**given, "position_ids": None})

    torch.manual_seed(0)
    config = transformers.OPTConfig(**ALL["OPT"])
    scorer = Scorer(Counting(config).eval(), "packed")
    scorer.causal.set_attn_implementation(PACKED_ATTENTION)
    assert not parity.depends_on_neighbours(scorer, make_pairs(3), CPU)
    assert parity.position_difference(scorer, make_pairs(3), CPU) > 0.01


def test_the_message_says_which_path_is_taken_and_why(capsys):
    make_scorer(make_model("Jamba", torch.bfloat16), make_pairs(3), CPU)
    said = capsys.readouterr().err
    assert "JambaForCausalLM takes a slower path: each response is computed after its own prompt" in said
    assert "a response depends on its neighbours in the row" in said


def test_padded_batches_stay_within_the_rows_tokens():
    # 9, 8, 8 padded to 9 are 27 of 27 tokens; 5 and 2 padded to 5 are 10.
    assert length_batches([8, 9, 2, 8, 5], batch_tokens=27) == [[1, 0, 3], [4, 2]]
    assert length_batches([3, 9], batch_tokens=0) == [[1], [0]]


def test_padded_batches_have_the_gradients_of_plain_passes():
    pairs = make_pairs(4)
    model = make_model("Jamba", torch.float32)
    scorer = make_scorer(model, pairs, CPU)
    scorer(build_row(pairs, range(4)))[0].sum().backward()
    given = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    sum(
        plain_logps(model, p.prompt_ids, r, CPU).sum() for p in pairs for r in (p.chosen_ids, p.rejected_ids)
    ).backward()
    for mine, plain in zip(given, (parameter.grad for parameter in model.parameters()), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-3 * plain.abs().max().item(), rtol=0)


@pytest.mark.parametrize("name", ["OPT", "Bloom", "Falcon", "GptOss", "Mixtral"])
def test_no_dropout_is_left_in_any_architecture(name, tmp_path):
    noise = {"attention_dropout": 0.2, "router_jitter_noise": 0.2}
    config = {**ALL[name], **(noise if name in ("GptOss", "Mixtral") else {})}
    original = getattr(transformers, f"{name}Config")(**config)
    AutoModelForCausalLM.from_config(original).save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32")
    check_determinism(make_scorer(model, make_pairs(3), CPU), make_pairs(3), CPU)
    assert not [name for module in model.modules() for name in dropout_attributes(module)]
    write_config(tmp_path, None, tmp_path / "export")
    exported = AutoConfig.from_pretrained(tmp_path / "export")
    assert {name: getattr(exported, name) for name in dropout_attributes(original)} == {
        name: getattr(original, name) for name in dropout_attributes(original)
    }


def test_dropout_that_could_not_be_switched_off_is_named():
    model = make_model("Qwen3", torch.float32)
    disable_dropout(model)
    pairs = make_pairs(3)
    scorer = make_scorer(model, pairs, CPU)
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, Hidden())
    with pytest.raises(ValueError, match=r"dropout is still active in Qwen3ForCausalLM.*config.json"):
        check_determinism(scorer, pairs, CPU)


class Hidden(nn.Module):
    """Dropout whose probability no attribute shows."""

    def forward(self, hidden):
        return nn.functional.dropout(hidden, 0.1, self.training)
