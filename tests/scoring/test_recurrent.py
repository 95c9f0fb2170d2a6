"""Recurrent layers on packed rows equal separate passes, and compute the tokens of a prompt once."""

import re
from collections import Counter
from copy import deepcopy
from functools import wraps
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.models.test_architectures import BASE, EXPERTS, LINEAR, RECURRENT, SMALL, make_pair
from tests.support.scoring import make_scorer
from training.models import adapters
from training.models.compiling import compile_layers
from training.pairs.packing import build_row
from training.scoring import parity, recurrent
from training.scoring.logps import Scorer, plain_logps, row_logps

CPU = torch.device("cpu")
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {  # transformers' configuration class, and its arguments
    **RECURRENT,
    "OlmoHybrid": {
        **BASE,
        **LINEAR,
        "layer_types": ["linear_attention", "full_attention"],
        "pad_token_id": 0,
    },
    "KimiLinear": {
        **BASE,
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "pad_token_id": 0,
    },
    "Bamba": {**BASE, **MAMBA, "attn_layer_indices": [1]},
    "Bamba with biases": {**BASE, **MAMBA, "attn_layer_indices": [1], "mamba_proj_bias": True},
    "Bamba with long chunks": {**BASE, **MAMBA, "attn_layer_indices": [1], "mamba_chunk_size": 256},
    "Zamba2": {
        **SMALL,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
    "Mamba2": {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "Lfm2Moe": {**RECURRENT["Lfm2"], "num_dense_layers": 1, **EXPERTS},
    "Lfm2 with biases": {**RECURRENT["Lfm2"], "conv_bias": True},
}


def make_config(name: str) -> Any:
    return getattr(transformers, f"{name.partition(' ')[0]}Config")(**deepcopy(FAMILIES[name]))


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(name)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(-3.0)  # states last for the whole sequence
        elif name.endswith("bias"):
            parameter.data.normal_(0.0, 0.3)
        elif parameter.dim() > 1:
            parameter.data.mul_(3)
    return model


def tokens(*lengths: int) -> list[list[int]]:
    return [[1 + (7 * n + 11 * length + n * n) % 60 for n in range(length)] for length in lengths]


# Of one token, shorter than the convolution's window, longer than a chunk; the third pair's responses begin alike.
PAIRS = [
    make_pair("0", *tokens(1, 2, 9)),
    make_pair("1", *tokens(2, 1, 1)),
    make_pair("2", *tokens(13), *([5, 6, 7, *rest] for rest in tokens(8, 3))),
    make_pair("3", *tokens(31, 17, 6)),
]


def plain(model: nn.Module) -> Tensor:
    return torch.cat(
        [plain_logps(model, p.prompt_ids, part, CPU) for p in PAIRS for part in (p.chosen_ids, p.rejected_ids)]
    )


def gradients(model: nn.Module, logps: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(model: nn.Module, expected: Tensor, expected_gradients: dict[str, Tensor]) -> Scorer:
    scorer = make_scorer(model, PAIRS, CPU)
    assert scorer.path == "fused"
    found = row_logps(scorer, build_row(PAIRS, range(len(PAIRS)))).logps
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    found_gradients = gradients(model, found)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        size = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(found_gradients[name], gradient, atol=1e-5 * size, rtol=0, msg=name)
    return scorer


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_equal_separate_passes_in_values_and_gradients(name):
    model = make_model(name)
    expected = plain(model)
    assert_equal(model, expected, gradients(model, expected))


@pytest.mark.parametrize("name", ["Qwen3Next", "GraniteMoeHybrid"])
def test_rows_equal_separate_passes_with_an_adapter_and_checkpointing(name):
    model = adapters.add_adapter(make_model(name), 3, 8.0, "all-linear", False, False, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.1)
    model.enable_input_require_grads()
    model.train()
    expected = plain(model)
    expected_gradients = gradients(model, expected)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_equal(model, expected, expected_gradients)


def joined(rule: Any) -> Any:
    """A rule with flash-linear-attention's arguments for sequences that are joined, by transformers' own function."""

    def by_sequence(
        *args: Tensor, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, initial_state: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        results = []
        for number, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            parts = [part[:, begin:end] for part in args]
            own = {name: options[name][:, begin:end] for name in ("g", "beta")}
            state = None if initial_state is None else initial_state[number : number + 1]
            results.append(rule(*parts, initial_state=state, **{**options, **own}))
        outputs, states = zip(*results, strict=True)
        return torch.cat(outputs, 1), torch.cat(states) if options["output_final_state"] else None

    return wraps(rule)(by_sequence)


RULES = [qwen3_next.torch_chunk_gated_delta_rule, kimi_linear.chunk_kimi_delta_attention]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_joined_sequences_equal_padded_ones(rule, monkeypatch):
    """As on a GPU, where kernels take sequences of different lengths. tests/train/test_gpu.py has the kernels."""
    row = build_row(PAIRS, range(len(PAIRS)))
    torch.manual_seed(0)
    shape = (1, len(row.input_ids), 2, 4)
    parts = [torch.randn(shape).requires_grad_() for _ in range(3)]
    decay = -torch.rand(shape if rule is RULES[1] else shape[:3])
    options = {"g": decay, "beta": torch.rand(shape[:3]), "use_qk_l2norm_in_kernel": True}

    def outputs(rule: Any) -> list[Tensor]:
        output, _ = recurrent._scan(rule, recurrent.RowSegments(row), *parts, **options)
        return [
            output,
            *torch.autograd.grad((output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum(), parts),
        ]

    padded = outputs(rule)
    monkeypatch.setattr(recurrent, "_takes_boundaries", lambda row: True)
    for found, expected in zip(outputs(joined(rule)), padded, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lost", ["state", "window"])
@pytest.mark.parametrize("name", ["Qwen3Next", "FalconH1"])
def test_a_layer_that_ignores_the_end_of_its_prompt_is_noticed(name, lost, monkeypatch):
    """So these tests would see a lost state, and a run would take the slower path."""
    if lost == "window":
        windows = recurrent.RowSegments._make_windows

        def all_empty(self: recurrent.RowSegments, before: int) -> tuple[np.ndarray, ...]:
            copied, empty, repeated, positions = windows(self, before)
            return copied, np.union1d(empty, repeated), repeated[:0], positions

        monkeypatch.setattr(recurrent.RowSegments, "_make_windows", all_empty)
    else:
        monkeypatch.setattr(recurrent, "_continued", lambda states, batch: states.index_select(0, batch.prompts) * 0)
    said: list[str] = []
    scorer = make_scorer(make_model(name), PAIRS, CPU, said.append)
    assert scorer.path == "padded"
    assert re.search("differ by up to|depends on its position", said[0])


@pytest.mark.parametrize(("name", "mixer"), [("Qwen3Next", "linear_attn.in_proj_qkvz"), ("Bamba", "mamba.in_proj")])
def test_no_token_is_computed_twice(name, mixer):
    model = make_model(name)
    scorer = make_scorer(model, PAIRS, CPU)
    counts: Counter[str] = Counter()

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Any, name: str) -> None:
        counts[name] += int(inputs[0].any(-1).sum())  # padding is 0

    for name, module in model.named_modules():
        if name.endswith((mixer, "self_attn.q_proj", "input_layernorm")):
            module.register_forward_hook(lambda *call, name=name: count(*call, name))
    row = build_row(PAIRS, range(len(PAIRS)))
    scorer(row)
    assert {name.rpartition(".")[2] for name in counts} == {mixer.rpartition(".")[2], "q_proj", "input_layernorm"}
    assert set(counts.values()) == {len(row.input_ids)} == {sum(map(len, PAIRS))}


def test_batches_have_little_padding():
    lengths = np.array([3, 100, 98, 4, 5, 99])
    assert [sorted(lengths[batch]) for batch in recurrent.padded_batches(lengths, 10)] == [[98, 99, 100], [3, 4, 5]]
    assert [len(batch) for batch in recurrent.padded_batches(lengths, 1000)] == [6]  # as expensive as the padding
    assert [len(batch) for batch in recurrent.padded_batches(lengths, 0)] == [1] * 6


def test_a_scored_model_generates_as_before():
    model = make_model("Qwen3Next")
    ids = torch.tensor([PAIRS[3].prompt_ids])

    def generate() -> list[int]:
        return model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()

    before = generate()
    with parity.scoring(model, PAIRS, CPU) as (scorer, _):
        row_logps(scorer, build_row(PAIRS, range(len(PAIRS))))
    assert generate() == before
    torch.testing.assert_close(plain(deepcopy(model)), plain(model), atol=0, rtol=0)


def test_layers_beside_recurrent_ones_are_not_compiled():
    model = make_model("Qwen3Next")
    compile_layers(model)
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)
