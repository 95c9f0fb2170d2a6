"""Throughput of a run: tokens and pairs per second, model FLOPs utilization (MFU), and peak memory."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.distributed.tensor_parallel import parts
from training.trainer.step_loader import StepBatch

# Dense bfloat16 FLOP/s of GPUs, from their datasheets, by a part of the name that CUDA gives them.
DATASHEET = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


@dataclass(frozen=True)
class Flops:
    """FLOPs of a training step: the matrix products of the layers, of the head, and of attention.

    Recomputed activations do not count, and of a mixture of experts only those that a token visits. A weight takes 2
    in the forward pass, 2 in the backward pass to the input, and 2 more if it is trainable.
    """

    per_token: float
    per_target: float
    per_attended_token: float

    def of(self, batch: StepBatch) -> float:
        products = self.per_token * batch.tokens + self.per_target * batch.targets
        return products + self.per_attended_token * batch.attended_tokens


def model_flops(model: Any) -> Flops:
    """Of a causal language model of transformers, with or without an adapter inside."""
    config = model.config.get_text_config()
    head, inputs = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    heads = getattr(config, "num_attention_heads", None) or 0  # recurrent models may have none
    per_token = 0.0
    for name, parameter in model.named_parameters():
        is_layer = parameter is not head and parameter is not inputs and "original_module" not in name
        if is_layer and len(_shape(parameter)) > 1:  # norms and biases have one dimension
            share = _active_share(config) if ".experts." in name else 1.0
            per_token += _size(parameter) * _per_weight(parameter) * share
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attention_layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    size = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    return Flops(
        per_token=per_token,
        per_target=_size(head) * _per_weight(head),
        per_attended_token=12.0 * size * heads * attention_layers,
    )


def _per_weight(parameter: nn.Parameter) -> int:
    return 6 if parameter.requires_grad else 4


def _active_share(config: Any) -> float:
    """The share of its experts that a token visits."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    return (getattr(config, "num_experts_per_tok", None) or total) / total


class Speed:
    """Rates since the last call, without pauses (evaluation, checkpoints).

    `before` holds the tokens and pairs in a resumed run's window, which an earlier process computed.
    """

    def __init__(self, model: nn.Module, device: torch.device, world: int, before: Mapping[str, float]) -> None:
        self.on_gpu, self.world, self.before = device.type == "cuda", world, before
        self.flops_of = model_flops(model).of
        self.flops = 0.0
        self.peaks: dict[str, float] = peaks(device) if self.on_gpu else {}
        self.begun = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        pause = time.monotonic()
        yield
        self.begun += time.monotonic() - pause

    def count(self, batch: StepBatch) -> None:
        self.flops += self.flops_of(batch)

    def since(self, values: Mapping[str, float]) -> dict[str, float]:
        now = time.monotonic()
        seconds, self.begun = max(now - self.begun, 1e-9), now
        flops, self.flops = self.flops, 0.0
        tokens, pairs = (values[name] - self.before.get(name, 0.0) for name in ("tokens", "pairs"))
        self.before = {}
        rates = {"tokens_per_second": tokens / seconds, "pairs_per_second": pairs / seconds}
        rates |= {name: flops / seconds / self.world / peak for name, peak in self.peaks.items()}
        if self.on_gpu:
            rates["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return rates


def peaks(device: torch.device) -> dict[str, float]:
    """FLOP/s that a metric is relative to: measured, and of the datasheet where we know it."""
    name = torch.cuda.get_device_name(device)
    datasheet = next((flops for part, flops in DATASHEET.items() if part in name), None)
    return {"mfu": matrix_peak(device)} | ({"mfu_datasheet": datasheet} if datasheet else {})


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Of the whole parameter: under ZeRO-3 the tensor is empty, and with 4 bits a byte holds two weights."""
    packed = getattr(parameter, "quant_state", None)
    return packed.shape if packed is not None else getattr(parameter, "ds_shape", parameter.shape)


def _size(parameter: nn.Parameter) -> int:
    """Number of weights of all ranks."""
    return parts(parameter) * _shape(parameter).numel()


def matrix_peak(device: torch.device, size: int = 8192) -> float:
    """Measured FLOP/s of a large bfloat16 matrix product on this device."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(10):
        a @ a
    torch.cuda.synchronize(device)
    return 10 * 2 * size**3 / (time.perf_counter() - begun)
