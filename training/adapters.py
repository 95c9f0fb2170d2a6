"""LoRA by peft: put on, saved, loaded, and merged with proof that merging changed nothing."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


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


def merge(model: PeftModel) -> PreTrainedModel:
    """Fold the adapter into the weights; NaN in an adapter is an error."""
    return model.merge_and_unload(safe_merge=True)


def merge_folders(model: Path, adapter: Path, target: Path) -> None:
    """A model with an adapter folded in, as a model of its own with the same tokenizer, in its own precision."""
    whole = AutoModelForCausalLM.from_pretrained(
        model, dtype="auto", use_safetensors=True, local_files_only=True, trust_remote_code=False
    )
    merge(load_adapter(whole, adapter)).save_pretrained(target)
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
