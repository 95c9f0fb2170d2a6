"""Tensor parallelism: the ranks of a group compute the same rows, each with a part of the weights of every layer.

transformers' plan of an architecture says which linear layers are split by their outputs ("colwise") and which by their
inputs ("rowwise"). A layer of the first kind gets the whole input and gives this rank's part of the output, which a
layer of the second kind takes; the sum of its outputs over the ranks is the whole output. Embeddings, norms and the
vocabulary head are whole on every rank: with the same inputs and gradients they stay equal. Each layer restores the
gradient of its own input, so a layer with an adapter is only three linear layers: A and B are split as the plan says.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.distributed.data_parallel import set_group_size

Exchange = Callable[[Tensor], Tensor]
collectives = torch.ops._c10d_functional  # torch can compile them
COLUMN, ROW = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
_USE_ZERO_3 = "Set it to 1, and actor_train.zero_stage to 3 if the model is too large for a GPU"
PARTIAL_GRADIENT = "replicated_with_grad_allreduce"  # norms of single heads, of which each rank has only its own


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share every layer, and this rank's number among them. DeepSpeed reads it as its `mpu`."""

    group: dist.ProcessGroup
    peers: dist.ProcessGroup  # ranks with the same part of the weights: over them gradients are averaged
    rank: int
    size: int

    def sum(self, values: Tensor) -> Tensor:
        name = self.group.group_name
        return collectives.wait_tensor(collectives.all_reduce(values.contiguous(), "sum", name))

    def gather(self, part: Tensor, dim: int = -1) -> Tensor:
        name = self.group.group_name
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(part.contiguous(), self.size, name))
        return torch.cat(gathered.chunk(self.size), dim)

    def own(self, whole: Tensor, dim: int = -1) -> Tensor:
        return whole.chunk(self.size, dim)[self.rank].contiguous()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_model_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.peers

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.peers)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.peers)


_group: TensorGroup | None = None


def start_tensor_groups(size: int) -> None:
    """Let every `size` consecutive ranks share the layers of a policy from now on. A collective."""
    global _group
    _group = None
    set_group_size("tensor_parallel", size)
    if size > 1:
        group, _ = dist.new_subgroups(size)
        peers, _ = dist.new_subgroups_by_enumeration(
            [list(range(first, dist.get_world_size(), size)) for first in range(size)]
        )
        _group = TensorGroup(group, peers, dist.get_rank() % size, size)


def tensor_group() -> TensorGroup | None:
    """This rank's group; None if each rank computes whole layers."""
    return _group


class _Exchange(torch.autograd.Function):
    """`forward` of the values, and `backward` of their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.exchange = backward
        return forward(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange(gradient), None, None


def _same(values: Tensor) -> Tensor:
    return values.view_as(values)


class ColumnLinear(nn.Linear):
    """This rank's part of the outputs of a linear layer, or all of them, gathered."""

    group: TensorGroup
    is_whole_outside: bool

    def forward(self, values: Tensor) -> Tensor:
        group = self.group
        out = super().forward(_Exchange.apply(values, _same, group.sum))  # all parts of the layer have this input
        return _Exchange.apply(out, group.gather, group.own) if self.is_whole_outside else out


class RowLinear(nn.Linear):
    """The sum over this rank's part of the inputs, and over the ranks. The input may be whole."""

    group: TensorGroup
    is_whole_outside: bool

    def forward(self, values: Tensor) -> Tensor:
        group = self.group
        if self.is_whole_outside:
            values = _Exchange.apply(values, group.own, group.gather)
        out = _Exchange.apply(nn.functional.linear(values, self.weight), group.sum, _same)
        return out if self.bias is None else out + self.bias


def split_layers(causal: Any, group: TensorGroup) -> None:
    """Keep this rank's part of a transformers model, which may have an adapter inside. ValueError if it has no plan."""
    _check_heads(causal, group)
    planned = _planned_modules(causal)
    _check_plan(causal, planned)
    for path, (module, style, _) in planned.items():
        if style == PARTIAL_GRADIENT:
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    parameter.register_hook(group.sum)
        elif f".lora_{'A' if style in COLUMN else 'B'}." not in path:  # those compute whole outputs of whole inputs
            _split(path, module, style, group)


def _planned_modules(causal: Any) -> dict[str, tuple[nn.Module, str, str]]:
    """The modules in the architecture's plan by their path in the decoder, how to split them, and in which block."""
    entries = (getattr(causal.config.get_text_config(), "base_model_tp_plan", None) or {}).items()
    patterns = [(re.compile(f"({re.escape(key)})(\\..*)?".replace(r"\*", r"\d+")), style) for key, style in entries]
    planned = {}
    for path, module in causal.get_decoder().named_modules():
        for name, _ in module.named_parameters(recurse=False):
            for pattern, style in patterns:
                if match := pattern.fullmatch(f"{path}.{name}"):  # of a layer, also of an adapter inside it
                    planned[path] = (module, style, match[1].rpartition(".")[0])
    return planned


def split_features(causal: Any) -> dict[nn.Linear, int]:
    """The linear layers that the plan splits, and the number of outputs or inputs that the ranks share."""
    planned = _planned_modules(causal).values()
    linears = [(m, style) for m, style, _ in planned if isinstance(m, nn.Linear) and style in (*COLUMN, *ROW)]
    return {m: m.out_features if style in COLUMN else m.in_features for m, style in linears}


def _check_heads(causal: Any, group: TensorGroup) -> None:
    config = causal.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 0  # recurrent models may have none
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    for count, kind in ((heads, "attention"), (key_heads, "key")):
        if count % group.size:
            raise ValueError(
                f"actor_train.tensor_parallel is {group.size}, but {type(causal).__name__} has {count} {kind} heads, "
                f"which so many ranks cannot share: set it to a divisor of {count}"
            )


def _check_plan(causal: Any, planned: dict[str, tuple[nn.Module, str, str]]) -> None:
    option, name = "actor_train.tensor_parallel", type(causal).__name__
    if not any(style in COLUMN for _, style, _ in planned.values()):
        raise ValueError(f"{option}: transformers has no plan to split the layers of {name}. {_USE_ZERO_3}")
    for path, (module, style, _) in planned.items():
        if style != PARTIAL_GRADIENT and (style not in (*COLUMN, *ROW) or type(module) is not nn.Linear):
            raise ValueError(
                f"{option} cannot split {path} of {name}, {type(module).__name__} in the style {style}: only linear "
                f"layers, not experts, for example. {_USE_ZERO_3}"
            )
    # The parameters among a block's split layers, and no others, have partial gradients: the plan must name them.
    blocks = {block for _, style, block in planned.values() if style == COLUMN[0]}
    for path, module in causal.get_decoder().named_modules():
        wrong = None if any(f"{path}.".startswith(f"{block}.") for block in blocks) else PARTIAL_GRADIENT
        has_parameters = next(module.parameters(recurse=False), None) is not None
        if has_parameters and planned.get(path, (module, None, None))[1] == wrong:
            raise ValueError(f"{option}: transformers' plan to split {name} is wrong for {path}. {_USE_ZERO_3}")


def _split(path: str, module: Any, style: str, group: TensorGroup) -> None:
    column = style in COLUMN
    feature = "out_features" if column else "in_features"
    if (count := getattr(module, feature)) % group.size:
        raise ValueError(
            f"actor_train.tensor_parallel is {group.size}, which does not divide the {count} {feature} of {path}. "
            f"{_USE_ZERO_3}"
        )
    module.weight = _part(module.weight, 0 if column else 1, group)
    if column and module.bias is not None:
        module.bias = _part(module.bias, 0, group)
    setattr(module, feature, count // group.size)
    module.__class__ = ColumnLinear if column else RowLinear
    module.group, module.is_whole_outside = group, style in (COLUMN[1], ROW[1])


def _part(parameter: nn.Parameter, dim: int, group: TensorGroup) -> nn.Parameter:
    part: Any = nn.Parameter(group.own(parameter.detach(), dim).clone(), parameter.requires_grad)
    part.split_dim = dim
    part.tensor_model_parallel = True  # DeepSpeed counts the gradients of all ranks in their norm
    return part


def split_dim(parameter: Tensor) -> int | None:
    """The dimension by which ranks share a parameter; None if each rank of a group has all of it."""
    return getattr(parameter, "split_dim", None)


def parts(parameter: Tensor) -> int:
    """The number of ranks that share a parameter."""
    return _group.size if _group and split_dim(parameter) is not None else 1


def is_counted(parameter: Tensor) -> bool:
    """Whether this rank counts a parameter in sums over ranks: each part once, and a copy on the first rank alone."""
    return _group is None or _group.rank == 0 or split_dim(parameter) is not None


def gather_full(parameter: Tensor) -> Tensor:
    """A parameter from the parts of all ranks. A collective if they share it."""
    dim = split_dim(parameter)
    return parameter.detach() if _group is None or dim is None else _group.gather(parameter.detach(), dim)


def own_part(values: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of whole values for a parameter."""
    dim = split_dim(parameter)
    return values if _group is None or dim is None else _group.own(values, dim)
