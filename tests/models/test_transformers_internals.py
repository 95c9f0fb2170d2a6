"""What training/models/transformers_internals.py, and adapters.py of peft, need of the installed versions."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from training.models import transformers_internals as internals

TRAINING = Path(__file__).parents[2] / "training"


@pytest.fixture
def model(tiny_base: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_base)


def test_attention_is_set_by_a_public_method_and_read_back(model: PreTrainedModel) -> None:
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert internals.attention_of(model) == name


def test_decoder_layers_are_found_by_their_class(model: PreTrainedModel) -> None:
    found = [module for module in model.modules() if type(module).__name__ in internals.unsplit_modules(model)]
    assert len(found) == model.config.num_hidden_layers


def test_modules_that_stay_in_float32_do_so_when_transformers_loads_a_model(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    small = T5Config(d_model=8, d_ff=8, d_kv=4, num_heads=2, num_layers=1, vocab_size=8)
    T5ForConditionalGeneration(small).save_pretrained(tmp_path)
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    kept = internals.float32_modules(loaded, torch.float16)
    assert kept == {"wo"}
    for name, parameter in loaded.named_parameters():
        assert (parameter.dtype == torch.float32) == bool(kept.intersection(name.split("."))), name
    assert internals.float32_modules(loaded, torch.bfloat16) == set()


def test_each_layer_is_recomputed_by_the_function_that_is_set(model: PreTrainedModel) -> None:
    calls: list[object] = []

    def recompute(layer, *inputs):
        calls.append(layer)
        return layer(*inputs)

    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    internals.checkpoint_layers_with(model, recompute)
    model(input_ids=torch.tensor([[1, 2]]))
    assert len(calls) == model.config.num_hidden_layers


def test_weights_convert_back_to_the_names_of_the_files(model: PreTrainedModel) -> None:
    state = model.state_dict()
    assert internals.revert_weight_conversion(model, state).keys() == state.keys()  # this architecture has none
    assert isinstance(internals.get_model_conversion_mapping(model), list)
    parameters = inspect.signature(internals.rename_source_key).parameters
    assert list(parameters)[:3] == ["source_key", "weight_renamings", "weight_converters"]


def test_known_values_are_lists_of_names() -> None:
    assert {"static", "dynamic"} <= set(internals.known_caches())
    assert {"gptq", "awq", "bitsandbytes_4bit"} <= set(internals.known_quantizations())


def test_loading_in_shards_ends_when_we_say_so() -> None:
    reference = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert is_deepspeed_zero3_enabled()
    internals.forget_deepspeed_config()
    assert not is_deepspeed_zero3_enabled()
    del reference


def test_peft_refuses_output_layers_of_mamba() -> None:
    class Mamba(nn.Module):
        config = AutoConfig.for_model("mamba")

    with pytest.raises(ValueError, match="out_proj"):
        _check_lora_target_modules_mamba(LoraConfig(), Mamba(), "out_proj")
    _check_lora_target_modules_mamba(LoraConfig(), Mamba(), "x_proj")


def test_nothing_else_reaches_into_transformers() -> None:
    """Private attributes of models, and modules that transformers does not document."""
    undocumented = (
        r"conversion_mapping|core_model_loading|quantizers\.auto|generation\.\w+|integrations\.\w+|modeling_\w+"
    )
    private = r"\._(attn_implementation|no_split_modules|keep_in_fp32\w*|gradient_checkpointing_func|model_mapping)\b"
    reaches = re.compile(rf"(?m)^\s*from transformers\.({undocumented}) import|{private}")
    found = [path.name for path in TRAINING.rglob("*.py") if reaches.search(path.read_text())]
    assert found == ["transformers_internals.py"]
