"""Optimizers: torch's AdamW, and AdamW with smaller moments.

Bytes of the two moments per parameter: `adamw` 8 (float32), `adamw_bf16` 4, `adamw_8bit` 2.

Moments change by less than a bfloat16 can tell: the second one by a thousandth per step. Rounded to the nearest value
they would stand still. Rounded up or down at random, in proportion to the distance, they are right on average. 8 bits
are too coarse for that, the noise would add up. Instead, 256 consecutive values share a float32 scale, their largest
magnitude, which changes freely; a byte is an index into a table of numbers up to 1 (Dettmers et al. 2022).
"""

import re
from abc import abstractmethod
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

LR_SCALE = "lr_scale"  # of a parameter group: its learning rate is this times the run's
DECAYS = "decays"  # of a parameter group: whether weight decay applies to it
# transformers' Trainer excludes these from weight decay; here also all other parameters with one dimension.
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
MOMENTS = ("exp_avg", "exp_avg_sq")
CHUNK = 1 << 26  # values that are updated at once: float32 copies of all moments would cost what compact ones save
BLOCK = 256  # values that share a scale


def make_optimizer(
    name: str,
    parameters: Iterable[tuple[str, Tensor]],
    learning_rate: float,
    weight_decay: float,
    lora_plus_ratio: float = 1.0,
    keeps_floats: bool = False,
) -> Any:
    """An optimizer of named parameters. LoRA+: matrices B learn `lora_plus_ratio` times as fast as the others.

    `keeps_floats`: adamw_8bit has float32 moments until `compress`, so that a checkpoint can be loaded into them.
    """
    trainable = list(parameters)
    by_kind: dict[tuple[float, bool], list[Tensor]] = {}
    for parameter_name, parameter in trainable:
        scale = lora_plus_ratio if "lora_B" in parameter_name else 1.0
        by_kind.setdefault((scale, decays(parameter_name, parameter)), []).append(parameter)
    groups = [
        {"params": parameters, LR_SCALE: scale, DECAYS: decay, "weight_decay": weight_decay * decay}
        for (scale, decay), parameters in by_kind.items()
    ]
    if name == "adamw_bf16":
        return AdamWBf16(groups, lr=learning_rate, weight_decay=weight_decay)
    if name == "adamw_8bit":
        return AdamW8bit(groups, lr=learning_rate, weight_decay=weight_decay, keeps_floats=keeps_floats)
    fused = trainable[0][1].is_cuda
    return torch.optim.AdamW(groups, lr=learning_rate, weight_decay=weight_decay, fused=fused)


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies to a parameter: to matrices, not to biases, norms and other vectors."""
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves an empty tensor
    return len(shape) > 1 and not NO_DECAY.search(name.lower())


class CompactAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW with moments of fewer bytes, which subclasses read and write."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @abstractmethod
    def _prepare(self, state: dict[str, Any], parameter: Tensor) -> None:
        """Add moments of 0 to an empty state; give loaded ones their form."""

    @abstractmethod
    def _read(self, state: dict[str, Any], name: str, part: slice) -> Tensor:
        """A part of a moment, in float32 of its own memory."""

    @abstractmethod
    def _write(self, state: dict[str, Any], name: str, part: slice, values: Tensor, step: torch.Generator) -> None: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradients: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state.setdefault("step", torch.tensor(0.0))
        self._prepare(state, parameter)
        state["step"] += 1
        step = int(state["step"])
        generator = torch.Generator(parameter.device).manual_seed(step)  # a repeated step rounds the same way
        first, second = group["betas"]
        rate, root = group["lr"] / (1 - first**step), (1 - second**step) ** 0.5
        weights, gradients = parameter.view(-1), gradients.view(-1)
        for begin in range(0, len(weights), CHUNK):
            part = slice(begin, begin + CHUNK)
            weight, gradient = weights[part], gradients[part].float()
            mean = self._read(state, "exp_avg", part).lerp_(gradient, 1 - first)
            square = self._read(state, "exp_avg_sq", part).mul_(second).addcmul_(gradient, gradient, value=1 - second)
            self._write(state, "exp_avg", part, mean, generator)
            self._write(state, "exp_avg_sq", part, square, generator)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.addcdiv_(mean, square.sqrt_().div_(root).add_(group["eps"]), value=-rate)


class AdamWBf16(CompactAdamW):
    """Moments in bfloat16, with stochastic rounding."""

    def _prepare(self, state: dict[str, Any], parameter: Tensor) -> None:
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state[name] = state[name].bfloat16()  # torch loads a checkpoint's states in the parameter's dtype

    def _read(self, state: dict[str, Any], name: str, part: slice) -> Tensor:
        return state[name].view(-1)[part].float()

    def _write(self, state: dict[str, Any], name: str, part: slice, values: Tensor, step: torch.Generator) -> None:
        state[name].view(-1)[part] = round_stochastically(values, step)


class AdamW8bit(CompactAdamW):
    """Moments as bytes with a scale for each block.

    Checkpoints contain float32 moments, which any number of ranks can load; compressed again, they are the same bytes.
    """

    def __init__(self, *args: Any, keeps_floats: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._keeps_floats = keeps_floats

    def compress(self) -> None:
        """Compress moments that were kept in float32."""
        self._keeps_floats = False
        for parameter, state in self.state.items():
            self._prepare(state, parameter)

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        return {**packed, "state": {key: _expanded(state) for key, state in packed["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if not self._keeps_floats:
            self.compress()

    def _prepare(self, state: dict[str, Any], parameter: Tensor) -> None:
        for name in MOMENTS:
            if name not in state and self._keeps_floats:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            elif name not in state:
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                blocks = -(-parameter.numel() // BLOCK)
                state[f"{name}_scale"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
            elif state[name].dtype != torch.uint8 and not self._keeps_floats:
                codes, state[f"{name}_scale"] = quantize(state[name].view(-1), name)
                state[name] = codes.view(parameter.shape)

    def _read(self, state: dict[str, Any], name: str, part: slice) -> Tensor:
        values = state[name].view(-1)[part]
        return values.clone() if self._keeps_floats else dequantize(values, state[f"{name}_scale"][_blocks(part)], name)

    def _write(self, state: dict[str, Any], name: str, part: slice, values: Tensor, step: torch.Generator) -> None:
        if self._keeps_floats:
            state[name].view(-1)[part] = values
            return
        state[name].view(-1)[part], state[f"{name}_scale"][_blocks(part)] = quantize(values, name)


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _expanded(state: dict[str, Any]) -> dict[str, Any]:
    """A state with float32 moments, on the host: the device has no room for them."""
    plain = {name: value for name, value in state.items() if not name.endswith("_scale")}
    for name in MOMENTS:
        if plain[name].dtype == torch.uint8:
            codes, scales = state[name].view(-1), state[f"{name}_scale"]
            values = torch.empty(len(codes), dtype=torch.float32)
            for begin in range(0, len(codes), CHUNK):
                part = slice(begin, begin + CHUNK)
                values[part] = dequantize(codes[part], scales[_blocks(part)], name)
            plain[name] = values.view(state[name].shape)
    return plain


@cache
def _table(name: str, device: torch.device) -> Tensor:
    """Numbers up to 1 in ascending order; each decade has half as many as the one above it.

    The second moment has no sign and no 0: divided by its root, an update would explode where it is rounded to 0.
    """
    signed = name == "exp_avg"
    counts = [64, 32, 16, 8, 4, 2] if signed else [128, 64, 32, 16, 8, 4, 2, 1]
    edges = [torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64) for count in counts]
    decades = [10.0**-number * (edge[1:] + edge[:-1]) / 2 for number, edge in enumerate(edges)]
    positive = torch.cat([*decades, torch.ones(1, dtype=torch.float64)])
    values = torch.cat([positive, -positive, torch.zeros(1, dtype=torch.float64)]) if signed else positive
    return values.sort().values.float().to(device)


def quantize(values: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Bytes and the scales of their blocks: the nearest number of the table for each value."""
    table = _table(name, values.device)
    blocks = pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    relative = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.bucketize(relative, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
    return codes.view(-1)[: len(values)], scales


def dequantize(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    values = _table(name, codes.device)[codes.int()]
    return values.mul_(scales.repeat_interleave(BLOCK)[: len(codes)])


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """float32 to bfloat16, up or down at random: right on average. The values must be finite."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    return noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()
