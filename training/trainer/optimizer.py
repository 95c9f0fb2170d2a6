"""AdamW, with its two moments in float32 (torch's) or in bfloat16, which takes four bytes less per parameter.

Moments change by less than a bfloat16 can tell: the second one by a thousandth per step. Rounded to the nearest value
they would stand still. Rounded up or down at random, in proportion to the distance, they are right on average.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

LR_SCALE = "lr_scale"  # of a parameter group: its learning rate is this times the run's
MOMENTS = ("exp_avg", "exp_avg_sq")
CHUNK = 1 << 26  # values that are updated at once: float32 copies of all moments would cost what bfloat16 saves


def make_optimizer(
    name: str,
    parameters: Iterable[tuple[str, Tensor]],
    learning_rate: float,
    weight_decay: float,
    lora_plus_ratio: float = 1.0,
) -> Any:
    """An optimizer of named parameters. LoRA+: matrices B learn `lora_plus_ratio` times as fast as the others."""
    trainable = list(parameters)
    by_scale: dict[float, list[Tensor]] = {}
    for parameter_name, parameter in trainable:
        by_scale.setdefault(lora_plus_ratio if "lora_B" in parameter_name else 1.0, []).append(parameter)
    groups = [{"params": parameters, LR_SCALE: scale} for scale, parameters in by_scale.items()]
    if name == "adamw_bf16":
        return AdamWBf16(groups, lr=learning_rate, weight_decay=weight_decay)
    fused = trainable[0][1].is_cuda
    return torch.optim.AdamW(groups, lr=learning_rate, weight_decay=weight_decay, fused=fused)


class AdamWBf16(torch.optim.Optimizer):
    """torch.optim.AdamW with bfloat16 moments. The rounding of a step depends on the step alone: runs repeat it."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradients: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        for name in MOMENTS:
            state[name] = state[name].bfloat16()  # torch loads a checkpoint's states in the parameter's dtype
        state["step"] += 1
        step = int(state["step"])
        generator = torch.Generator(parameter.device).manual_seed(step)
        first, second = group["betas"]
        rate, root = group["lr"] / (1 - first**step), (1 - second**step) ** 0.5
        tensors = (parameter, gradients, state["exp_avg"], state["exp_avg_sq"])
        for weight, gradient, mean, square in zip(*(t.view(-1).split(CHUNK) for t in tensors), strict=True):
            gradient = gradient.float()
            new_mean = mean.float().lerp_(gradient, 1 - first)
            new_square = square.float().mul_(second).addcmul_(gradient, gradient, value=1 - second)
            mean.copy_(round_stochastically(new_mean, generator))
            square.copy_(round_stochastically(new_square, generator))
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.addcdiv_(new_mean, new_square.sqrt_().div_(root).add_(group["eps"]), value=-rate)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """float32 to bfloat16, up or down at random: right on average. The values must be finite."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    return noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()
