"""Ranks that share the weights of each layer: values and gradients of one rank, equal copies, and what is refused."""

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from tests.distributed.test_sequence_parallel import GROUPED, difference, make_pairs, results
from tests.support.scoring import make_scorer
from training.distributed.tensor_parallel import (
    TensorGroup,
    gather_full,
    split_dim,
    split_layers,
    start_tensor_groups,
    tensor_group,
)
from training.models import adapters
from training.pairs.packing import build_row
from training.scoring.logps import Scorer
from training.trainer.split_model import check_split, make_probe, probe_logps

CPU = torch.device("cpu")
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "lora": LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "lora, norms of heads": Qwen3Config(**GROUPED, head_dim=12),
    "checkpointed": LlamaConfig(**GROUPED),
    "compiled": Qwen3Config(**GROUPED, head_dim=12),
    "tied, biases": Qwen2Config(**{**GROUPED, "tie_word_embeddings": True}),
    "norms of heads": Qwen3Config(**GROUPED, head_dim=12),
    "biases of outputs": Starcoder2Config(**GROUPED, use_bias=True),
    "soft caps": Gemma2Config(**GROUPED, head_dim=12, sliding_window=4),
    "windows, norms of heads": Gemma3TextConfig(**GROUPED, head_dim=12, sliding_window=4),
    "norms of all heads": Olmo2Config(**GROUPED),
    "fused layers": Phi3Config(**GROUPED, pad_token_id=0),
    "lora, fused layers": Phi3Config(**GROUPED, pad_token_id=0),
}


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]))
    for parameter_name, parameter in model.named_parameters():
        if "bias" in parameter_name or "norm" in parameter_name:  # as in trained models: unequal
            parameter.data += 0.1 * torch.randn_like(parameter)
    if "lora" in name:
        model = adapters.add_adapter(model, 3, 8.0, "all-linear", False, False, seed=0, modules_to_save=["lm_head"])
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.data.normal_(0.0, 0.1)
    if name == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def compare(rank: int, size: int, root: str) -> None:
    """One rank: each model whole, and then split."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=size)
    start_tensor_groups(size)
    group, pairs, found = tensor_group(), make_pairs(), {}
    assert group is not None
    row, probe = build_row(pairs, range(4)), make_probe(pairs)
    for name in CONFIGS:
        alone, model = make_model(name), make_model(name)
        expected = probe_logps(alone, probe, CPU)
        expected_metrics, expected_gradients = results(make_scorer(alone.train(), pairs, CPU), row)
        split_layers(Scorer(model).causal, group)
        check_split(model, group, probe, expected, CPU)
        scorer = make_scorer(model, pairs, CPU)
        assert scorer.path == "fused"
        if name == "compiled" and rank == 0:  # slow
            scorer.causal.base_model.layers[1].compile(dynamic=True, fullgraph=True, backend="eager")
        metrics, gradients = results(scorer, row)
        parameters = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
        gathered = {name: as_whole(gradient, parameters[name], group) for name, gradient in gradients.items()}
        originals = dict(alone.named_parameters())
        assert all(torch.equal(gather_full(parameter), originals[n]) for n, parameter in model.named_parameters())
        found[name] = [
            difference(metrics, expected_metrics),
            difference(gathered, expected_gradients),
            max(apart(gradient, group) for name, gradient in gradients.items() if split_dim(parameters[name]) is None),
        ]
    share = sum(p.numel() for p in make_split("llama", group).base_model.layers.parameters())
    found["share"] = share / sum(p.numel() for p in make_model("llama").base_model.layers.parameters())
    Path(root, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # gloo's threads may outlive the interpreter


def as_whole(gradient: Tensor, parameter: Tensor, group: Any) -> Tensor:
    dim = split_dim(parameter)
    return gradient if dim is None else group.gather(gradient, dim)


def apart(gradient: Tensor, group: Any) -> float:
    """The largest difference between the ranks' gradients of a parameter that each has whole."""
    both = group.gather(gradient.flatten()[None], 0)
    return (both - both[0]).abs().max().item()


def make_split(name: str, group: Any) -> Any:
    model = make_model(name)
    split_layers(model, group)
    return model


@pytest.mark.slow
def test_ranks_that_share_layers_compute_the_values_and_gradients_of_the_whole_model(tmp_path):
    multiprocessing.start_processes(compare, (2, str(tmp_path)), nprocs=2, start_method="spawn")
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert 0.5 < found.pop("share") < 0.51  # all but the norms
        assert found.keys() == CONFIGS.keys()
        for name, (values, gradients, copies) in found.items():
            assert max(values, gradients) < 2e-5, name
            assert copies == 0.0, name  # or the ranks' copies of norms and embeddings would drift apart


def split(config: Any, size: int) -> None:
    with torch.device("meta"):
        split_layers(AutoModelForCausalLM.from_config(config), TensorGroup(None, None, 0, size))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (LlamaConfig(**GROUPED), 3, r"is 3, but LlamaForCausalLM has 4 attention heads.*divisor of 4"),
        (LlamaConfig(**GROUPED), 4, r"is 4, but LlamaForCausalLM has 2 key heads.*divisor of 2"),
        (
            LlamaConfig(**GROUPED | {"intermediate_size": 81}),
            2,
            r"2, which does not divide the 81 out_features of .*gate",
        ),
        (
            MixtralConfig(**GROUPED, num_local_experts=4),
            2,
            r"cannot split layers.0.mlp.experts of Mixtral.*zero_stage to 3",
        ),
        (BloomConfig(vocab_size=61, hidden_size=48, n_layer=2, n_head=4), 2, "no plan to split the layers of Bloom"),
        (CohereConfig(**GROUPED, use_qk_norm=True), 2, "plan to split Cohere.* is wrong for layers.0.self_attn.q_norm"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_before_it_is_loaded(config, size, message):
    with pytest.raises(ValueError, match=message):
        split(config, size)


def test_a_group_that_does_not_divide_the_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(ValueError, match="tensor_parallel 2 does not divide the number of workers, 3"):
        start_tensor_groups(2)
