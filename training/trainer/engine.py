"""The DeepSpeed engine of a training: its configuration, optimizer, loss scaling, and access to sharded parameters."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from training.distributed.tensor_parallel import gather_full, is_counted, own_part, parts, tensor_group
from training.trainer.optimizer import DECAYS, LR_SCALE, make_optimizer

BUCKET = 10**8  # gradients reduced together, at most; DeepSpeed allocates two buckets besides the gradients
# Dynamic loss scaling of float16: start at 2**16, halve at each overflow, double after 1000 steps without one.
LOSS_SCALING = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1, "min_loss_scale": 1}
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def deepspeed_config(
    zero_stage: int, offload: str, dtype: str, max_grad_norm: float, universal: bool = False
) -> dict[str, Any]:
    """Gradient accumulation is 1: the loop scales its losses and marks the backward pass that ends a step."""
    zero: dict[str, Any] = {"stage": zero_stage, "overlap_comm": torch.cuda.is_available()}
    if zero_stage < 3:
        zero["reduce_bucket_size"] = BUCKET
    if offload in ("optimizer", "all"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16", **LOSS_SCALING},
        # AdamW comes from torch, so that nothing has to be compiled before the first step.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the device at every pass
        "checkpoint": {"load_universal": universal},  # for a checkpoint of another number of ranks
    }


def initialize(
    model: nn.Module,
    config: dict[str, Any],
    learning_rate: float,
    weight_decay: float,
    optimizer: str = "adamw",
    lora_plus_ratio: float = 1.0,
) -> Any:
    """The engine around the model, with an optimizer of its trainable parameters."""
    import deepspeed

    _import_muon_uncompiled()
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    zero = dict(config["zero_optimization"])
    if zero["stage"] < 3:  # an adapter needs no buckets larger than itself
        zero["reduce_bucket_size"] = min(BUCKET, sum(parameter.numel() for _, parameter in trainable))
    config = {**config, "zero_optimization": zero}
    universal = config["checkpoint"]["load_universal"]
    stepper = make_optimizer(optimizer, trainable, learning_rate, weight_decay, lora_plus_ratio, universal)
    # A loaded checkpoint replaces the groups' options.
    scales, decays = ([group[name] for group in stepper.param_groups] for name in (LR_SCALE, DECAYS))
    deepspeed.utils.groups.mpu = mpu = tensor_group()  # also None, after another training in this process
    engine, *_ = deepspeed.initialize(model=model, optimizer=stepper, config=config, mpu=mpu)
    engine.lr_scales, engine.decays = scales, decays
    if zero["stage"] < 3 and "offload_optimizer" not in zero:
        _use_fused_grad_norm(engine.optimizer)
    # DeepSpeed would update the scale before it divides the gradients by it: a step that doubles the scale would
    # halve its gradients, and a nonfinite loss would lower the scale. The loop calls update_loss_scale instead.
    engine.optimizer._update_scale = lambda overflow: None
    assert engine.optimizer.loss_scaler.dynamic == config["fp16"]["enabled"], "float16 without loss scaling"
    return engine


def _import_muon_uncompiled() -> None:
    """DeepSpeed imports its Muon for any optimizer. Loading torch's compiler for its functions would take 3 s."""
    from deepspeed.runtime import compiler

    compiled, compiler.compile = compiler.compile, lambda: lambda function: function
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    compiler.compile = compiled


def _use_fused_grad_norm(optimizer: Any) -> None:
    """Compute the gradient norm by one launch for many gradients.

    DeepSpeed launches a dozen kernels for each gradient to check that it is finite and to compute its norm. The
    separate check is unnecessary: DeepSpeed skips an update whose norm is not finite anyway.
    """

    def norm(gradients: list[Tensor], params: list[nn.Parameter]) -> Tensor:
        counted = _counted(gradients, params)
        # A rank's partition may contain only padding.
        norms = torch._foreach_norm(counted, 2, dtype=torch.float32) if counted else []
        total = torch.stack([torch.zeros((), device=optimizer.device), *norms]).double().square().sum()
        dist.all_reduce(total)
        whole = total.sqrt().float()
        return torch.where(torch.isfinite(whole), whole, -1.0)  # -1 marks a nonfinite norm for DeepSpeed

    optimizer.get_grad_norm_direct = norm
    optimizer.check_overflow = lambda **_: None


def _counted(gradients: Iterable[Tensor], params: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that this rank counts in a sum over ranks, without padding."""
    real = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
    return [gradient for gradient, parameter in zip(real, params, strict=False) if is_counted(parameter)]


def forget_gradients(engine: Any) -> None:
    """Drop the gradients of a check's backward pass: ZeRO-3 collects those of whole expert blocks in any case."""
    if engine.zero_optimization_stage() == 3:
        for bucket in engine.optimizer.ipg_buckets.values():
            for parameter in bucket.params:
                parameter.grad = None
            bucket.clear_params()


def set_learning_rate(engine: Any, learning_rate: float) -> None:
    for group, scale in zip(engine.optimizer.param_groups, engine.lr_scales, strict=True):
        group["lr"] = learning_rate * scale


def set_options(engine: Any, weight_decay: float, max_grad_norm: float) -> None:
    """Replace the options that a loaded checkpoint restored."""
    for group, decays in zip(engine.optimizer.param_groups, engine.decays, strict=True):
        group["weight_decay"] = weight_decay * decays
    for state in engine.optimizer.optimizer.state.values():
        # A universal checkpoint gives all parts of a ZeRO-3 model one counter, which each part would then increase.
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()
    engine.optimizer.clip_grad = max_grad_norm


def skipped(engine: Any) -> bool:
    """Whether all ranks skipped the last update, because a gradient was not finite on one of them."""
    return bool(engine.optimizer.overflow)


def loss_scale(engine: Any) -> float | None:
    """The scale of float16's dynamic loss scaling; None in other precisions."""
    scaler = engine.optimizer.loss_scaler
    return float(scaler.cur_scale) if scaler.dynamic else None


def update_loss_scale(engine: Any, step: int, overflow: bool) -> None:
    """Call after each update, taken or skipped. FloatingPointError if the smallest scale still overflows."""
    scaler = engine.optimizer.loss_scaler
    if not scaler.dynamic:
        return
    if overflow and scaler.cur_scale <= scaler.min_scale:
        raise FloatingPointError(
            f"step {step}: the gradients overflow float16 at the smallest loss scale, {scaler.min_scale:g}; the last "
            "checkpoint is kept. Set train.dtype to bfloat16 if the GPU has it, or to float32"
        )
    scaler.update_scale(overflow)


def loss_scale_state(engine: Any) -> dict[str, Any] | None:
    """The scaler's state for a checkpoint: DeepSpeed does not restore it from a universal checkpoint."""
    scaler = engine.optimizer.loss_scaler
    return {name: getattr(scaler, name) for name in _SCALER_STATE} if scaler.dynamic else None


def load_loss_scale(engine: Any, state: dict[str, Any] | None) -> None:
    if state and engine.optimizer.loss_scaler.dynamic:
        vars(engine.optimizer.loss_scaler).update(state)


def zero_gradients(engine: Any) -> float | None:
    """The number of zeros in the gradient, between backward and step; None if DeepSpeed keeps gradients elsewhere."""
    gradients = getattr(engine.optimizer, "averaged_gradients", None)
    if not gradients or any(part is None for part in gradients.values()):
        return None
    groups = getattr(
        engine.optimizer, "fp16_groups" if engine.zero_optimization_stage() == 3 else "params_in_partition"
    )
    counted = [part for key, group in gradients.items() for part in _counted(group, groups[key])]
    nonzero = count_nonzero([torch.zeros(1, device=engine.device), *counted])  # a rank may have none
    dist.all_reduce(nonzero)
    # Count elements by the parameters' sizes: the ranks' partitions have padding, which is 0 too.
    trainable = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
    sizes = (parts(parameter) * getattr(parameter, "ds_numel", parameter.numel()) for parameter in trainable)
    return sum(sizes) - nonzero.item()


def count_nonzero(tensors: Iterable[Tensor]) -> Tensor:
    """Exact in pieces of 2^24: float32, the only type that needs no copy of a gradient, counts no further."""
    pieces = (piece for tensor in tensors for piece in tensor.flatten().split(2**24))
    return torch.stack([torch.linalg.vector_norm(piece, 0, dtype=torch.float32) for piece in pieces]).double().sum()


def gathered(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters on the CPU of rank 0, one by one, under any ZeRO stage.

    Yields nothing on other ranks, which must exhaust it: gathering a parameter is a collective.
    """
    import deepspeed

    for name, parameter in parameters:
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            values = gather_full(parameter)
            copy = values.to("cpu", copy=True).contiguous() if dist.get_rank() == 0 else None
        if copy is not None:
            assert copy.numel(), f"{name} was not gathered"
            yield name, copy


def local_shard(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter: its shard under ZeRO-3, all of it otherwise."""
    return getattr(parameter, "ds_tensor", parameter)


def swap_values(engine: Any, parameters: Iterable[nn.Parameter], values: Iterable[Tensor]) -> list[Tensor]:
    """Give parameters other values without a copy; returns the old values. Not between backward and step."""
    if hasattr(engine.optimizer, "empty_partition_cache"):  # ZeRO-3: gathered parameters would keep their old values
        engine.optimizer.empty_partition_cache()
    before = []
    for parameter, value in zip(parameters, values, strict=True):
        before.append(local_shard(parameter).data)
        local_shard(parameter).data = value
    return before


def scatter(parameters: Mapping[str, nn.Parameter], path: Path) -> None:
    """Read whole parameters from a safetensors file into each rank's shard. A collective."""
    import deepspeed

    group = tensor_group()
    is_first = dist.get_rank() < (group.size if group else 1)  # of the ranks that share a parameter under ZeRO-3
    with safe_open(path, "pt") as file:
        for name, parameter in parameters.items():
            sharded = hasattr(parameter, "ds_id")
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=sharded):
                if not sharded or is_first:
                    parameter.data.copy_(own_part(file.get_tensor(name), parameter))
