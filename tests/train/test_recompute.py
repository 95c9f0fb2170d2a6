"""Recomputed activations: offloaded inputs of layers, and MLPs that compute a row by tiles."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from training.models import adapters
from training.scoring.attention import LONG_ATTENTION
from training.trainer.recompute import recompute_layers, tile_mlps

SHAPE = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, head_dim=8),
    "phi3": Phi3Config(**SHAPE),
    "qwen2-moe": Qwen2MoeConfig(**SHAPE, **EXPERTS),
    "bloom": BloomConfig(vocab_size=60, hidden_size=16, n_layer=2, n_head=2),  # its MLP has a second input
}
IDS = torch.arange(1, 38).remainder(60)[None]
TILE = 10


def make(family: str, lora: bool) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager").train()
    if lora:
        model = adapters.add_adapter(model, 2, 4.0, "all-linear", False, False, seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        model.enable_input_require_grads()
    return model


def gradients(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    logits = model(input_ids=IDS, use_cache=False, **options).logits
    logits.log_softmax(-1).square().mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": logits.detach(), **found}


def change(model: nn.Module, how: str) -> None:
    if "layers" in how:
        recompute_layers(model, offload="offload" in how)
    if "tiles" in how:
        assert tile_mlps(model, TILE) >= 2


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("how", ["layers", "layers, offload", "tiles", "layers, offload, tiles"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_a_plain_pass(family: str, how: str, lora: bool) -> None:
    expected = gradients(make(family, lora))
    model = make(family, lora)
    change(model, how)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6), name


@pytest.mark.parametrize("how", ["tiles", "layers, tiles"])
def test_an_mlp_never_computes_more_than_a_tile_and_keeps_none_of_it(how: str) -> None:
    model, tokens, kept = make("llama", lora=False), [], []
    change(model, how)
    wide = FAMILIES["llama"].intermediate_size
    for name, module in model.named_modules():
        if name.endswith("up_proj"):
            module.register_forward_hook(lambda _, inputs, output: tokens.append(output.shape[-2]))

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == wide and tensor.dim() == 3:
            kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=IDS, use_cache=False).logits.square().mean()
    assert max(tokens) == TILE
    assert kept == []
    before = len(tokens)
    loss.backward()
    assert len(tokens) >= 2 * before  # computed again


def test_offload_takes_the_input_of_each_layer() -> None:
    """The hooks that move it to the host are inside of ours, which see the rest: one input per layer less."""

    def kept_on_device(how: str) -> int:
        shapes: list[torch.Size] = []
        model = make("llama", lora=False)
        change(model, how)

        def keep(tensor: Tensor) -> Tensor:
            shapes.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model(input_ids=IDS, use_cache=False)
        return shapes.count(torch.Size([1, IDS.shape[1], FAMILIES["llama"].hidden_size]))

    assert kept_on_device("layers") - kept_on_device("layers, offload") == FAMILIES["llama"].num_hidden_layers


CALLS: list[torch.Size] = []


@torch.library.custom_op("tests::attention", mutates_args=())
def counted_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    CALLS.append(query.shape)
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def attention_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
    with torch.enable_grad():
        return torch.autograd.grad(scaled_dot_product_attention(*inputs, is_causal=True), inputs, gradient)


counted_attention.register_autograd(
    attention_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@torch.compiler.disable
def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return counted_attention(query, key, value).transpose(1, 2), None


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["eager", "compiled"]
)
def test_kept_attention_is_not_computed_again(compiled: bool) -> None:
    """An operation of ours in place of cuDNN's; in a compiled layer it runs between two graphs."""
    AttentionInterface.register("counted", attend)
    expected = gradients(make("llama", lora=False))
    ours = torch.ops.tests.attention.default
    for kept, row_calls, times in ((ours, ["a long one"], 1), (ours, None, 2), (LONG_ATTENTION, ["a long one"], 2)):
        model = make("llama", lora=False)
        model.set_attn_implementation("counted")
        recompute_layers(model, offload=False, kept=kept)
        if compiled:
            for layer in model.model.layers:
                layer.compile(dynamic=True, backend="aot_eager")
        CALLS.clear()
        found = gradients(model, row_calls=row_calls)
        assert len(CALLS) == times * FAMILIES["llama"].num_hidden_layers
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-6), name
