"""Exports of models with a vision tower: read by both classes, every tensor that training does not touch as it was."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.models.test_adaptation import LORA, config_of
from training.exporting import merging
from training.models import adapters, base_tensors
from training.models.loading import load_config, load_model
from training.models.tokenizer import load_tokenizer

PROMPTS = [[1, 4, 30, 31, 32], [1, 4, *range(40, 60)]]
SMALL_VISION = {"hidden_size": 16, "intermediate_size": 64}
COMPOSITES = {
    "Qwen3_5": (
        "Qwen3_5Text",
        {**SMALL_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4},
    ),
    "Llama4": (
        "Llama4Text",
        {**SMALL_VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        | dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
    ),
}
PROCESSOR = {"preprocessor_config.json": "{}", "video_preprocessor_config.json": "{ }", "processor_config.json": "{  }"}
EXTRA = "mtp.fc.weight"  # a head for further tokens, which no class of transformers reads


@pytest.fixture(scope="module", params=COMPOSITES)
def base(request: Any, tmp_path_factory: Any, tiny_base: Path) -> Path:
    """A tiny random model of both parts, with the demo's tokenizer."""
    torch.manual_seed(0)
    folder, tokenizer = tmp_path_factory.mktemp("base"), load_tokenizer(tiny_base)
    text, vision = COMPOSITES[request.param]
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text_config = {**config_of(text).to_dict(), "vocab_size": len(tokenizer), **special}
    text_config.pop("model_type")
    made = getattr(transformers, f"{request.param}Config")
    model = AutoModelForImageTextToText.from_config(made(text_config=text_config, vision_config=deepcopy(vision)))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, EXTRA: torch.randn(4, 4).bfloat16()}, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)
    for name, content in PROCESSOR.items():
        (folder / name).write_text(content)
    return folder


def train(base: Path, folder: Path, how: str) -> Path:
    """The base model with random changes, written as the stage `train` does."""
    model: Any = load_model(base, "float32")
    if how == "lora":
        model = adapters.add_adapter(model, **LORA, seed=0)
    elif how == "whole modules":
        model = adapters.add_adapter(model, **{**LORA, "modules_to_save": ["lm_head"]}, seed=0)
    with torch.no_grad():
        trained = {name: p.add_(0.05 * torch.randn_like(p)) for name, p in model.named_parameters() if p.requires_grad}
    if how == "full":
        from training.trainer.policy import _save_model

        _save_model(model, iter(trained.items()), folder)
    else:
        adapters.save_adapter(model, trained, folder, "base")
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["full", "lora", "whole modules"])
def test_both_classes_read_an_export_and_the_vision_tower_is_the_bases(base: Path, tmp_path: Path, how: str):
    policy, out = train(base, tmp_path / "policy", how), tmp_path / "out"
    out.mkdir()
    checks, logits = merging.export(base, policy, how != "full", "float32", out, "100KB", PROMPTS)
    before = load_file(base / "model.safetensors")
    after = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert after.keys() == before.keys()
    vision = [name for name in before if "visual." in name or "vision_" in name or "multi_modal" in name]
    assert checks["untouched_tensors"] == len(vision) + 1
    assert all(torch.equal(before[name], after[name]) for name in [*vision, EXTRA])
    assert after[EXTRA].dtype == torch.bfloat16
    for auto, kind in ((AutoModelForImageTextToText, "ConditionalGeneration"), (AutoModelForCausalLM, "CausalLM")):
        model, info = auto.from_pretrained(out, output_loading_info=True)
        assert type(model).__name__.endswith(kind)
        assert not info["missing_keys"]
        found = [model.eval()(input_ids=torch.tensor([ids])).logits[0] for ids in PROMPTS]
        assert adapters.largest_difference(logits, found) < 1e-4
    plain = adapters.prompt_logits(load_model(base, "float32"), PROMPTS)
    assert adapters.largest_difference(plain, logits) > 1e-2
    assert {name: (out / name).read_text() for name in PROCESSOR} == PROCESSOR
    assert load_tokenizer(out).chat_template == load_tokenizer(base).chat_template


def test_another_precision_is_that_of_the_text_model_alone(base: Path, tmp_path: Path):
    policy, out = train(base, tmp_path / "policy", "full"), tmp_path / "out"
    out.mkdir()
    merging.export(base, policy, False, "bfloat16", out, "1GB", PROMPTS)
    after, untouched = load_file(out / "model.safetensors"), base_tensors.untouched(base)
    before = load_file(base / "model.safetensors")
    assert all(after[name].dtype == before[name].dtype for name in untouched)
    assert {t.dtype for name, t in after.items() if name not in untouched} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(out).get_text_config().dtype == torch.bfloat16


def test_a_merged_base_model_keeps_its_vision_tower(base: Path, tmp_path: Path):
    """As the stage `sft` and `source.adapter` write it: the base of DPO, whose export has it too."""
    adapters.merge_folders(base, train(base, tmp_path / "tuned", "full"), tmp_path / "sft")
    assert base_tensors.check_complete(base, tmp_path / "sft") > 1
    assert (tmp_path / "sft" / "processor_config.json").exists()
    adapters.merge_folders(base, train(base, tmp_path / "adapter", "lora"), tmp_path / "merged")
    assert base_tensors.check_complete(base, tmp_path / "merged") > 1


def test_a_folder_of_the_text_model_alone_says_so(base: Path, tmp_path: Path):
    """Its configuration may name the whole model: the other class would read random weights."""
    tensors = load_file(base / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in base_tensors.untouched(base)}
    tmp_path.joinpath("text").mkdir()
    save_file(kept, tmp_path / "text/model.safetensors", {"format": "pt"})
    load_config(base).save_pretrained(tmp_path / "text")
    adapters.write_config(tmp_path / "text", None, tmp_path / "text")
    config = AutoConfig.from_pretrained(tmp_path / "text")
    assert config.architectures[0].endswith("ForCausalLM")
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "text")
    found = adapters.prompt_logits(load_model(tmp_path / "text", "float32"), PROMPTS)
    assert adapters.largest_difference(adapters.prompt_logits(load_model(base, "float32"), PROMPTS), found) < 1e-5


def test_a_tensor_that_changed_or_is_missing_stops_the_export(base: Path, tmp_path: Path):
    tensors = load_file(base / "model.safetensors")
    save_file({**tensors, EXTRA: tensors[EXTRA] + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"does not hold the base model's tensor mtp\.fc\.weight as it was"):
        base_tensors.check_complete(base, tmp_path)
    del tensors[EXTRA]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight"):
        base_tensors.check_complete(base, tmp_path)
