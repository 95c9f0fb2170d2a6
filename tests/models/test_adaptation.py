"""What an adapter trains, in every architecture: counted as by peft, trained and merged, or refused in a sentence."""

import warnings
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.models.test_architectures import ALL, BASE, EXPERTS, make_model
from training.models import adapters
from training.models.adaptation import Adaptation, examine
from training.models.loading import empty_model, load_model

FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
MORE = {
    "GraniteMoe": {**BASE, **FEW},
    "Llama4Text": {
        **BASE,
        "intermediate_size_mlp": 48,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 16,
    },
    "Qwen3_5MoeText": {**ALL["Qwen3_5Text"], **EXPERTS, "shared_expert_intermediate_size": 16},
}
ARCHITECTURES = {**ALL, **MORE}
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "targets": "all-linear", "use_rslora": False, "use_dora": False}
OPTIONS = {"lora": {}, "dropout": {"dropout": 0.1}, "dora": {"use_dora": True}, "pissa": {"init": "pissa"}}
WHOLE_TENSORS = {"Qwen3Moe", "Mixtral", "Olmoe", "DeepseekV3", "Qwen3Next"}  # experts that peft adapts
FROZEN_EXPERTS = {"GptOss", "GraniteMoe", "GraniteMoeHybrid", "Jamba", "Llama4Text", "Qwen3_5MoeText"}
IDS = torch.arange(12)[None]


def config_of(name: str) -> transformers.PreTrainedConfig:
    return getattr(transformers, f"{name}Config")(**deepcopy(ARCHITECTURES[name]))


def examined(name: str, **options: Any) -> Adaptation:
    return examine(empty_model(config_of(name)), {**LORA, **options})


def cases() -> Iterator[Any]:
    """The options other than plain LoRA are the same code for all linear layers."""
    for name, options in product(ARCHITECTURES, OPTIONS):
        often = options == "lora" or name in WHOLE_TENSORS or name in ("Llama4Text", "FalconH1", "GptOss")
        yield pytest.param(name, options, marks=() if often else pytest.mark.exhaustive)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "options"), cases())
def test_an_adapter_is_counted_trained_and_merged_or_refused_in_a_sentence(name, options, tmp_path):
    adapter = {**LORA, **OPTIONS[options]}
    if name in WHOLE_TENSORS and options != "lora":
        with pytest.raises(
            ValueError, match=r"does not work on the experts and routers.*: set it to .* \[.*q_"
        ) as error:
            examined(name, **OPTIONS[options])
        assert "\n" not in str(error.value)
        return
    torch.manual_seed(0)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(base)
    model = adapters.add_adapter(load_model(base, "float32"), **adapter, seed=0)
    found = examined(name, **OPTIONS[options])
    assert found.trainable == model.get_nb_trainable_parameters()[0]
    assert found.model == sum(p.numel() for p in load_model(base, "float32").parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    model.train()(input_ids=IDS, use_cache=False).logits.float().log_softmax(-1)[0, :, 7].mean().neg().backward()
    torch.nn.utils.clip_grad_norm_(trained, 0.3)
    optimizer.step()
    state = {key: value.detach().clone() for key, value in model.named_parameters() if value.requires_grad}
    adapters.save_adapter(model, state, tmp_path / "adapter", "base")
    expected = adapters.prompt_logits(model.eval(), IDS.tolist())
    (tmp_path / "merged").mkdir()
    adapters.write_merged(base, tmp_path / "adapter", tmp_path / "merged", torch.float32, "1GB")
    adapters.write_config(base, "float32", tmp_path / "merged")
    merged = adapters.prompt_logits(load_model(tmp_path / "merged", "float32"), IDS.tolist())
    assert adapters.largest_difference(expected, merged) < 1e-4
    unchanged = adapters.prompt_logits(load_model(base, "float32"), IDS.tolist())
    assert adapters.largest_difference(unchanged, merged) > 1e-3


@pytest.mark.parametrize("name", sorted(WHOLE_TENSORS | FROZEN_EXPERTS))
def test_experts_and_routers_are_said_to_be_adapted_or_frozen(name):
    found = examined(name)
    assert ("experts" in found.adapted, "experts" in found.frozen) == (name in WHOLE_TENSORS, name in FROZEN_EXPERTS)
    assert ("router" in found.adapted, "router" in found.frozen) == (name in WHOLE_TENSORS, name in FROZEN_EXPERTS)
    trained, frozen = str(found).split("; frozen: ")
    share = found.frozen.get("experts", 0) / found.model
    assert (f"experts ({share:.1%})" in frozen) == (name in FROZEN_EXPERTS)
    assert "q_" in trained
    assert f"{found.trainable:,} trained parameters, {found.trainable / found.model:.2%} of the model's" in trained


def test_peft_does_not_warn_of_the_patterns_that_it_makes_for_experts():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapters.add_adapter(make_model("Mixtral", torch.float32), 4, 8.0, "all-linear", False, False, seed=0)
    assert [str(warning.message) for warning in said if issubclass(warning.category, RuntimeWarning)] == []


def test_layers_that_no_adapter_fits_around_are_left_out_and_said_to_be_frozen():
    assert "router" in examined("Llama4Text").frozen  # it returns no tensor
    for name in ("FalconH1", "NemotronH"):  # kernels read the weights of these layers
        assert "out_proj" in examined(name).frozen


def test_targets_that_the_model_does_not_have_are_named_in_a_sentence():
    for targets in (["nope"], "(("):
        with pytest.raises(ValueError, match=r"train.adapter.targets: peft cannot adapt .* of Qwen3ForCausalLM: "):
            examined("Qwen3", targets=targets)


def test_modules_that_are_trained_whole_are_said_to_be():
    found = examined("Qwen3", modules_to_save=["embed_tokens"])
    assert found.copied == found.adapted["embed_tokens (whole)"] == 61 * 32
    assert "embed_tokens" not in found.frozen
