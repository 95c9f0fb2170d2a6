"""LoRA adapters with peft: add, save, load and merge them, and compare the logits before and after."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from training.models import base_tensors, weights
from training.models.adapter_config import adapter_options
from training.models.loading import empty_model, load_config, load_weights
from training.models.model_files import loadable_adapter
from training.models.tokenizer import read_tokenizer
from training.models.transformers_internals import float32_modules, revert_weight_conversion

SHARD_SIZE = "5GB"  # of weights that only this pipeline reads
GENERATION = "generation_config.json"
# Of the randomized singular value decomposition: iterations, as in PiSSA's paper, and components beyond the rank.
PISSA_ITERATIONS, PISSA_MORE = 16, 16


class NotMergeableByTensor(ValueError):
    """The adapter cannot be merged one tensor of the base model at a time."""


def add_adapter(
    model: PreTrainedModel,
    rank: int,
    alpha: float,
    targets: str | Sequence[str],
    use_rslora: bool,
    use_dora: bool,
    seed: int,
    dropout: float = 0.0,
    init: str = "zero",
    modules_to_save: Sequence[str] = (),
) -> PeftModel:
    """Add a new adapter. The policy starts as the reference; the seed gives all ranks the same weights.

    `init` is `zero` (B is zero, A random) or `pissa`. Dropout acts on the input of A alone and therefore not at the
    start. Evaluation and merging do without it. `modules_to_save` are trained whole; tied embeddings stay tied.
    """
    torch.manual_seed(seed)
    _check_modules(model, modules_to_save)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft accepts a float
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=unfit_layers(model) or None if targets == "all-linear" else None,
        use_rslora=use_rslora,
        use_dora=use_dora,
        lora_dropout=dropout,
        modules_to_save=list(modules_to_save) or None,
        ensure_weight_tying=bool(modules_to_save) and model.config.get_text_config().tie_word_embeddings,
        task_type="CAUSAL_LM",
    )
    # In the base model's precision: DeepSpeed keeps float32 master weights under every ZeRO stage.
    with warnings.catch_warnings():  # of patterns that peft itself makes for experts
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    if init == "pissa":
        adapted.initial_adapter = _split_principal_part(adapted)  # type: ignore[assignment]  # no parameter of the model
    return adapted


def unfit_layers(model: PreTrainedModel) -> list[str]:
    """Names of linear layers that an adapter does not fit around, which `all-linear` leaves out.

    A subclass with a forward of its own may return no tensor (Llama-4's router); kernels of Mamba layers read the
    weights of their output layer, so that peft refuses it.
    """
    layers = [(name.rpartition(".")[2], layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    config = LoraConfig()
    return sorted({name for name, layer in layers if _returns_no_tensor(layer) or _refuses(config, model, name)})


def _returns_no_tensor(layer: nn.Linear) -> bool:
    """Found with a copy of the layer on the meta device, because under ZeRO-3 the layer itself holds no weights."""
    if type(layer).forward is nn.Linear.forward or not type(layer).__module__.startswith("transformers.models."):
        return False
    empty = copy(layer)
    empty._parameters = {
        name: parameter if parameter is None else nn.Parameter(torch.empty(_shape(parameter), device="meta"))
        for name, parameter in layer._parameters.items()
    }
    return not isinstance(empty.forward(torch.empty(1, layer.in_features, device="meta")), Tensor)


def _shape(parameter: Tensor) -> Sequence[int]:
    return getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves an empty tensor


def _refuses(config: LoraConfig, model: PreTrainedModel, name: str) -> bool:
    try:
        _check_lora_target_modules_mamba(config, model, name)
    except ValueError:
        return True
    return False


def _check_modules(model: nn.Module, names: Sequence[str]) -> None:
    """ValueError for a name that peft would pass over in silence."""
    modules = [name for name, _ in model.named_modules()]
    for wanted in names:
        if not any(f".{name}".endswith(f".{wanted}") for name in modules):
            last_parts = {name.rpartition(".")[2] for name in modules}
            known = ", ".join(sorted(part for part in last_parts if part and not part.isdigit()))
            raise ValueError(f"train.adapter.modules_to_save: the model has no module {wanted}; it has {known}")


@torch.no_grad()
def _split_principal_part(model: nn.Module) -> dict[str, Tensor]:
    """PiSSA: move the largest singular components of each weight into its adapter; the layer's output stays the same.

    Returns the adapter's initial weights. The weight is reduced by what A and B are after rounding to their precision.
    """
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            _move_principal_part(layer)
    return {name: p.to("cpu", copy=True) for name, p in model.named_parameters() if "lora_" in name}


def _move_principal_part(layer: Any) -> None:
    base, scale = layer.get_base_layer(), layer.scaling["default"]
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight  # (rank, inputs), (outputs, rank)
    weight = base.weight.float().T if layer.fan_in_fan_out else base.weight.float()
    rank = down.shape[0]
    left, values, right = torch.svd_lowrank(weight, q=min(rank + PISSA_MORE, *weight.shape), niter=PISSA_ITERATIONS)
    root = (values[:rank] / scale).sqrt()
    down.copy_(root[:, None] * right[:, :rank].T)
    up.copy_(left[:, :rank] * root)
    weight = weight - scale * up.float() @ down.float()
    base.weight.copy_(weight.T if layer.fan_in_fan_out else weight)


def load_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """ValueError if the adapter asks for what is not done, or lacks a tensor, for which peft would keep its start."""
    config = LoraConfig(**adapter_options(folder))
    with loadable_adapter(folder) as files, warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        try:
            return PeftModel.from_pretrained(model, str(files), config=config).eval()
        except UserWarning as error:
            raise ValueError(f"{folder} is not a whole adapter of this model: {error}") from None


def check_targets(base: str, adapter: str) -> None:
    """ValueError if the model has no layers for the adapter. Its expressions may take for ever to match their names."""
    with torch.device("meta"):
        inject_adapter_in_model(LoraConfig(**adapter_options(Path(adapter))), empty_model(load_config(Path(base))))


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters of a model with an adapter."""
    parts = ("lora_", "modules_to_save.")
    return {name: parameter for name, parameter in model.named_parameters() if any(part in name for part in parts)}


class AdaptedWeight(NamedTuple):
    name: str  # in the model without the adapter
    rank: int
    experts: int  # that a single tensor holds; 0 for a linear layer
    size: int


def adapted_weights(model: nn.Module) -> Iterator[AdaptedWeight]:
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            owner, rank = path.removeprefix("base_model.model.").replace(".base_layer", ""), layer.r["default"]
            if isinstance(layer, ParamWrapper):  # of a layer with several tensors, one around another
                size = layer.get_param().numel()
                yield AdaptedWeight(f"{owner}.{layer.parameter_name}", rank, layer.num_experts, size)
            else:
                base: Any = layer.get_base_layer()
                yield AdaptedWeight(f"{owner}.weight", rank, 0, base.weight.numel())


def scale_adapter(model: nn.Module, factor: float) -> None:
    """Multiply what the adapter adds to each layer."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.scale_layer(factor)


def merged_tensors(base: Path, adapter: Path, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the model with the adapter merged, one at a time, under the names in the base model's files.

    In `dtype`, or each in its own precision. peft merges the layers of a model on the meta device; each layer gets its
    weight only while it is merged.
    """
    layers = _mergers(empty_model(load_config(base)), base, adapter)
    for name, tensor in _converted(base, weights.read(base), dtype):
        yield name, layers[name](tensor) if name in layers else tensor


def _converted(
    base: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the text model in another precision; what training does not touch keeps its own."""
    kept = set(base_tensors.untouched(base)) if dtype else set()
    in_float32 = float32_modules(empty_model(load_config(base)), dtype)
    for name, tensor in tensors:
        if dtype and tensor.is_floating_point() and name not in kept:
            tensor = tensor.to(torch.float32 if in_float32.intersection(name.split(".")) else dtype)
        yield name, tensor


def _mergers(model: PreTrainedModel, base: Path, adapter: Path) -> dict[str, Callable[[Tensor], Tensor]]:
    """For each weight that the adapter changes, by its name in the base model's files: a function that merges it."""
    config = LoraConfig(**adapter_options(adapter))
    if not _is_plain_lora(config):
        raise NotMergeableByTensor(f"{adapter} is not plain LoRA on the weights of layers")
    files = base_tensors.one_to_one(base_tensors.parameter_names(model, weights.locate(base)))
    with torch.device("meta"):
        inject_adapter_in_model(config, model)
    state = load_file(adapter / "adapter_model.safetensors")
    layers: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            prefix = f"base_model.model.{name}."
            own = {key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)}
            if f"{name}.weight" not in files:
                raise NotMergeableByTensor(f"the base model's files have no single tensor for {name}")
            layers[files[f"{name}.weight"]] = partial(_merged, layer, own, prefix)
    if state:
        raise ValueError(f"the model has no layer for the adapter's tensor {min(state)}")
    return layers


def _is_plain_lora(config: LoraConfig) -> bool:
    extras = ("modules_to_save", "target_parameters", "trainable_token_indices")
    return config.bias == "none" and not any(getattr(config, name) for name in extras)


@torch.no_grad()
def _merged(layer: Any, state: dict[str, Tensor], prefix: str, weight: Tensor) -> Tensor:
    """Merge in float32 and round once. Before and after, the layer's parameters are on the meta device."""
    parts = {"base_layer.weight": weight.float()}
    for name, _ in layer.named_parameters():
        if not name.startswith("base_layer."):
            key = name.replace(".default", "")
            value = state.get(key, state.get(key.removesuffix(".weight")))
            if value is None:
                raise ValueError(f"the adapter has no tensor {prefix}{key}")
            parts[name] = value.float()
    layer.load_state_dict(parts, strict=False, assign=True)
    layer.merge(safe_merge=True)
    merged: Tensor = layer.base_layer.weight.data.to(weight.dtype)
    layer.merged_adapters.clear()
    layer.to("meta")
    return merged


def write_merged(base: Path, policy: Path, target: Path, dtype: torch.dtype | None, shard_size: str) -> None:
    """Write all tensors of the base model with what training changed: `policy` is an adapter or a whole model.

    Tensor by tensor; in memory for an adapter that needs the whole model.
    """
    try:
        if is_adapter(policy):
            tensors = merged_tensors(base, policy, dtype)
        else:
            tensors = _converted(base, base_tensors.replaced(base, policy), dtype)
        weights.write(tensors, target, shard_size)
    except NotMergeableByTensor:
        whole = load_weights(AutoModelForCausalLM, base, dtype or "auto")
        merged = load_adapter(whole, policy).merge_and_unload(safe_merge=True)
        state = revert_weight_conversion(merged, merged.state_dict())
        weights.write(base_tensors.replaced(base, state), target, shard_size)


def is_adapter(policy: Path) -> bool:
    return (policy / "adapter_config.json").exists()


def write_config(base: Path, dtype: str | None, target: Path) -> None:
    """Write the base model's config and generation config with another precision."""
    config = base_tensors.exported_config(base)
    for part in (config, config.get_text_config()):
        part.dtype = dtype or part.dtype
    config.save_pretrained(target)
    copy_generation_config(base, target)


def copy_generation_config(base: Path, target: Path) -> None:
    if (base / GENERATION).is_file():
        shutil.copyfile(base / GENERATION, target / GENERATION)


def merge_folders(model: Path, policy: Path, target: Path) -> None:
    """Write the trained model with its tokenizer and processor, in the precision that it was trained or loaded in."""
    target.mkdir(parents=True, exist_ok=True)
    write_merged(model, policy, target, None, SHARD_SIZE)
    write_config(model, None if is_adapter(policy) else dtype_of(policy), target)
    read_tokenizer(model).save_pretrained(target)
    base_tensors.copy_processor(model, target)


def dtype_of(folder: Path) -> str:
    return str(load_config(folder).dtype).removeprefix("torch.")


@torch.no_grad()
def prompt_logits(model: nn.Module, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Next-token logits at each position of each prompt, in float32, from one unpadded pass per prompt."""
    device = next(model.parameters()).device
    return [model(input_ids=torch.tensor([list(ids)], device=device)).logits[0].float().cpu() for ids in prompts]


def largest_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(before, after, strict=True))


def next_token_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> dict[str, float]:
    """Mean KL of the next-token distributions, and the share of positions with the same most likely token."""
    both = list(zip(ours, theirs, strict=True))
    kl = [_kl(a, b) for a, b in both]
    same = [(a.argmax(-1) == b.argmax(-1)).float() for a, b in both]
    return {"kl": torch.cat(kl).mean().item(), "same_next_token": torch.cat(same).mean().item()}


def _kl(ours: Tensor, theirs: Tensor) -> Tensor:
    first, second = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    return (first.exp() * (first - second)).sum(-1)  # (tokens,)


def save_adapter(model: PeftModel, state: dict[str, Tensor], folder: Path, base_name: str) -> None:
    """Write peft's files with the same bytes on every machine: sorted keys and no local path."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"].to_dict()
    config.update(base_model_name_or_path=base_name, inference_mode=True)
    if initial := getattr(model, "initial_adapter", None):
        state = _relative_to_base(state, initial)
        rank, alpha = config["r"], config["lora_alpha"]
        config.update(r=2 * rank, lora_alpha=alpha * (2**0.5 if config["use_rslora"] else 2))
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    (folder / "adapter_config.json").write_text(json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n")
    tensors = get_peft_model_state_dict(model, state_dict=_with_tied(model, state))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)  # safetensors writes 0600, which other users cannot read


def _relative_to_base(state: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter of twice the rank on the unchanged base model: what was learnt since the initial weights."""
    twice = dict(state)
    for name, start in initial.items():
        if "lora_A" in name:
            twice[name] = torch.cat([state[name], start])
        else:
            twice[name] = torch.cat([state[name], -start], dim=1)
    return twice


def _with_tied(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tied parameters under their other names, which peft asks for."""
    names = {id(p): name for name, p in model.named_parameters()}
    aliases = model.named_parameters(remove_duplicate=False)
    return {**{name: state[names[id(p)]].clone() for name, p in aliases if names[id(p)] in state}, **state}
