"""LoRA by peft: put on, saved, loaded, and merged with proof that merging changed nothing."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
)
from peft.tuners.lora import LoraLayer
from peft.utils.save_and_load import load_peft_weights
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from training import weights

SHARD = "5GB"  # of weights that only we read
GENERATION = "generation_config.json"


class NotSeparable(ValueError):
    """An adapter that changes more than single weights of the base model's files."""


def add_adapter(
    model: PreTrainedModel,
    rank: int,
    alpha: float,
    targets: str | Sequence[str],
    use_rslora: bool,
    use_dora: bool,
    seed: int,
) -> PeftModel:
    """A fresh adapter: B is zero, so the policy starts as the reference. The same seed gives the same A on any rank."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # a float serves as well
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_rslora=use_rslora,
        use_dora=use_dora,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    # In the base's precision, as DeepSpeed trains it (with float32 master weights) under every ZeRO stage.
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def load_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(model, str(folder)).eval()


@contextmanager
def switched_off(model: PeftModel) -> Iterator[nn.Module]:
    """The base model, as long as the block lasts."""
    with model.disable_adapter():
        yield model


def merged_tensors(base: Path, adapter: Path | None, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model with the adapter folded in, one at a time, under the names that the base's files have.

    In `dtype`, or each in its own. peft merges each layer of a model on the meta device that gets one weight at a time.
    """
    config = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    wide = _float32_modules(model, dtype)
    layers = _layers(model, base, adapter) if adapter else {}
    for name, tensor in weights.read(base):
        if dtype and tensor.is_floating_point():
            tensor = tensor.to(torch.float32 if wide.intersection(name.split(".")) else dtype)
        yield name, layers[name](tensor) if name in layers else tensor


def _float32_modules(model: PreTrainedModel, dtype: torch.dtype | None) -> set[str]:
    """Parts that transformers keeps in float32 when it loads the rest in 16 bits."""
    names = set(model._keep_in_fp32_modules_strict or ())
    return names | set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else names


def _layers(model: PreTrainedModel, base: Path, adapter: Path) -> dict[str, Callable[[Tensor], Tensor]]:
    """What makes the merged weight of a base weight, by the name that it has in the base's files."""
    config = PeftConfig.from_pretrained(str(adapter))
    if not _plain_lora(config):
        raise NotSeparable(f"{adapter} is more than LoRA on the weights of layers")
    with torch.device("meta"):
        inject_adapter_in_model(config, model)
    state, held = load_peft_weights(str(adapter), device="cpu"), weights.locate(base)
    layers: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            prefix = f"base_model.model.{name}."
            own = {key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)}
            layers[_key(f"{name}.weight", held)] = partial(_merged, layer, own, prefix)
    if state:
        raise ValueError(f"the model has no layer for {min(state)} of the adapter")
    return layers


def _plain_lora(config: PeftConfig) -> bool:
    more = ("modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication")
    return isinstance(config, LoraConfig) and config.bias == "none" and not any(getattr(config, n, None) for n in more)


def _key(name: str, held: Mapping[str, object]) -> str:
    """Checkpoints may have a prefix more or less than the modules."""
    found = [key for key in held if key == name or key.endswith(f".{name}") or name.endswith(f".{key}")]
    if len(found) != 1:
        raise NotSeparable(f"the base model's files have no tensor of the name {name}")
    return found[0]


def _merged(layer: Any, state: dict[str, Tensor], prefix: str, weight: Tensor) -> Tensor:
    """In float32, rounded once. The layer's parts are on the meta device until now, and afterwards again."""
    parts = {"base_layer.weight": weight.float()}
    for name, _ in layer.named_parameters():
        if not name.startswith("base_layer."):
            key = name.replace(".default", "")
            value = state.get(key, state.get(key.removesuffix(".weight")))
            if value is None:
                raise ValueError(f"the adapter has no tensor {prefix}{key}")
            parts[name] = value.float()
    empty = {name: layer.get_parameter(name) for name in parts}
    _assign(layer, {name: nn.Parameter(value, requires_grad=False) for name, value in parts.items()})
    layer.merge(safe_merge=True)
    merged: Tensor = layer.base_layer.weight.data.to(weight.dtype)
    layer.merged_adapters.clear()
    _assign(layer, empty)
    return merged


def _assign(layer: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        owner, _, last = name.rpartition(".")
        setattr(layer.get_submodule(owner), last, parameter)


def write_merged(base: Path, adapter: Path | None, target: Path, dtype: torch.dtype | None, shard_size: str) -> None:
    """The weights alone, tensor by tensor; an adapter that does not allow it is merged in memory."""
    try:
        weights.write(merged_tensors(base, adapter, dtype), target, shard_size)
    except NotSeparable:
        assert adapter
        options = {"dtype": dtype or "auto", "use_safetensors": True, "local_files_only": True}
        whole = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False, **options)
        merged = load_adapter(whole, adapter).merge_and_unload(safe_merge=True)
        merged.save_pretrained(target, max_shard_size=shard_size)


def write_config(base: Path, dtype: str | None, target: Path) -> None:
    """The base model's, dropout and generation config included, but for the precision."""
    config = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config, trust_remote_code=False)).__name__]
    config.dtype = dtype or config.dtype
    config.save_pretrained(target)
    if (base / GENERATION).exists():
        shutil.copyfile(base / GENERATION, target / GENERATION)


def merge_folders(model: Path, adapter: Path, target: Path) -> None:
    """A model with an adapter folded in, as a model of its own with the same tokenizer, in its own precision."""
    target.mkdir(parents=True, exist_ok=True)
    write_merged(model, adapter, target, None, SHARD)
    write_config(model, None, target)
    AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False).save_pretrained(target)


@torch.no_grad()
def logits_of(model: nn.Module, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Next-token logits at every position of each prompt, float32, one unpadded pass each."""
    device = next(model.parameters()).device
    return [model(input_ids=torch.tensor([list(ids)], device=device)).logits[0].float().cpu() for ids in prompts]


def largest_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(before, after, strict=True))


def next_token_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> dict[str, float]:
    """Mean KL of the next-token distributions, and how often the most likely token is the same."""
    both = list(zip(ours, theirs, strict=True))
    kl = [_kl(a, b) for a, b in both]
    same = [(a.argmax(-1) == b.argmax(-1)).float() for a, b in both]
    return {"kl": torch.cat(kl).mean().item(), "same_next_token": torch.cat(same).mean().item()}


def _kl(ours: Tensor, theirs: Tensor) -> Tensor:
    first, second = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    return (first.exp() * (first - second)).sum(-1)  # (tokens,)


def save_adapter(model: PeftModel, state: dict[str, Tensor], folder: Path, base_name: str) -> None:
    """peft's own layout, but the same bytes on every machine: sorted keys and no local path."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"].to_dict()
    config.update(base_model_name_or_path=base_name, inference_mode=True)
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    (folder / "adapter_config.json").write_text(json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n")
    tensors = get_peft_model_state_dict(model, state_dict=state)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)  # safetensors leaves 0600: nobody else could serve it
