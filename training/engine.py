"""DeepSpeed: the only file that knows it. One plain function builds its configuration."""

import gc
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

BUCKET = 10**8  # gradients that travel together, at most; there are two buckets, beside the gradients
LIVE = 10**9  # parameters that a rank of ZeRO-3 inference has whole, at most
# Dynamic loss scaling of float16: start at 2**16, halve at every overflow, double after 1000 steps without one.
LOSS_SCALING = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1, "min_loss_scale": 1}
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def deepspeed_config(
    zero_stage: int, offload: str, dtype: str, max_grad_norm: float, universal: bool = False
) -> dict[str, Any]:
    """Accumulation is 1 here: the loop scales its losses and says itself which backward pass ends a step."""
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
        # AdamW comes from torch: nothing has to be compiled before the first step.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},  # it waits for the device at every pass
        "checkpoint": {"load_universal": universal},  # what it loads was made by another number of ranks
    }


def start_distributed(deterministic: bool) -> tuple[int, int]:
    """Join the process group that the launcher (Ray Train, torchrun) described, or be a group of one."""
    on_gpu = torch.cuda.is_available()
    _set_deterministic(deterministic)
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    elif not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # The stages set it in the environment; other launchers may have initialised CUDA by now, so not by variable.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if "RANK" not in os.environ and not dist.is_initialized():
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
    import deepspeed

    if not on_gpu:  # otherwise minutes of g++ for a shared-memory kernel
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed asks for a CPU with float16 instructions; torch computes float16 on any CPU, only slower.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", auto_mpi_discovery=False, verbose=False)
    return dist.get_rank(), dist.get_world_size()


def join(meeting: str, rank: int, world: int) -> None:
    """Form a process group at a meeting point, file:// or tcp://, for workers that no launcher has described."""
    on_gpu = torch.cuda.is_available()
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world))  # Ray shows a worker its own GPU alone
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=meeting, rank=rank, world_size=world)
    start_distributed(deterministic=False)


def _set_deterministic(wanted: bool) -> None:
    """Only sums whose order is fixed, FlashAttention's gradients included; an operation that has none raises."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA multiplies for the first time
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time


@contextmanager
def sharded_from_birth(config: dict[str, Any]) -> Iterator[None]:
    """Under ZeRO-3 transformers loads each weight as this rank's shard alone: the whole need not fit anywhere."""
    if config["zero_optimization"]["stage"] < 3:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    kept = HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del kept


def initialize(model: nn.Module, config: dict[str, Any], learning_rate: float, weight_decay: float) -> Any:
    """The engine around the model, with AdamW on its trainable parameters."""
    import deepspeed

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config["zero_optimization"]["stage"] < 3:  # an adapter needs no larger buckets than itself
        size = min(BUCKET, sum(parameter.numel() for parameter in trainable))
        config = {**config, "zero_optimization": {**config["zero_optimization"], "reduce_bucket_size": size}}
    fused = next(model.parameters()).is_cuda
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=weight_decay, fused=fused)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if config["zero_optimization"]["stage"] < 3 and "offload_optimizer" not in config["zero_optimization"]:
        _look_once_at_gradients(engine.optimizer)
    # DeepSpeed would update the scale before it divides the gradients by it: a step that doubles the scale would
    # halve its gradients, and a loss that is not finite would lower the scale. The loop calls update_loss_scale.
    engine.optimizer._update_scale = lambda overflow: None
    assert engine.optimizer.loss_scaler.dynamic == config["fp16"]["enabled"], "float16 without loss scaling"
    return engine


def _look_once_at_gradients(optimizer: Any) -> None:
    """DeepSpeed launches a dozen kernels for each gradient, to see whether it is finite and how long.

    One launch for many of them tells the norm, and DeepSpeed skips an update whose norm is not finite anyway.
    """

    def norm(gradients: list[Tensor], params: list[nn.Parameter]) -> Tensor:
        real = [gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
        # A rank's share may be padding alone.
        lengths = torch._foreach_norm(real[: len(params)], 2, dtype=torch.float32) if real else []
        total = torch.stack([torch.zeros((), device=optimizer.device), *lengths]).double().square().sum()
        dist.all_reduce(total)
        length = total.sqrt().float()
        return torch.where(torch.isfinite(length), length, -1.0)  # DeepSpeed's sign of one that is not

    optimizer.get_grad_norm_direct = norm
    optimizer.check_overflow = lambda **_: None


def inference_config(dtype: str) -> dict[str, Any]:
    """ZeRO-3 without an optimizer: the ranks share one copy of the weights; a layer is whole while it computes."""
    zero = {
        "stage": 3,
        "stage3_max_live_parameters": LIVE,
        "stage3_max_reuse_distance": LIVE,
        "stage3_prefetch_bucket_size": LIVE // 10,
        "stage3_param_persistence_threshold": LIVE // 10**4,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
    }


def shard(model: nn.Module, config: dict[str, Any]) -> nn.Module:
    """A model that was loaded `sharded_from_birth`, for passes without gradients. A collective, as each pass is."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model.requires_grad_(False), config=config)
    engine.eval()
    return engine


def starts_a_pass(engine: Any, module: nn.Module) -> None:
    """DeepSpeed learns the order of layers, to gather weights ahead, from passes of the engine's own module alone."""
    coordinator = engine.optimizer.get_param_coordinator()
    module.register_forward_pre_hook(lambda *_: coordinator.reset_step())


def release(engine: Any) -> None:
    """Let go of a model that was split, so that another can be loaded."""
    engine.destroy()
    gc.collect()


def is_split(model: nn.Module) -> bool:
    """Whether ranks share one copy of the model, so that their passes must be as many."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def most(count: int) -> int:
    """The largest count of all ranks. A collective."""
    found = torch.tensor(count, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def forget_gradients(engine: Any) -> None:
    """After a backward pass of a check: ZeRO-3 collects gradients of whole expert blocks, asked for or not."""
    if engine.zero_optimization_stage() == 3:
        for bucket in engine.optimizer.ipg_buckets.values():
            for parameter in bucket.params:
                parameter.grad = None
            bucket.clear_params()


def set_learning_rate(engine: Any, learning_rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate


def set_options(engine: Any, weight_decay: float, max_grad_norm: float) -> None:
    """After a checkpoint was loaded, which brings the values that it was made with."""
    for group in engine.optimizer.param_groups:
        group["weight_decay"] = weight_decay
    engine.optimizer.clip_grad = max_grad_norm


def skipped(engine: Any) -> bool:
    """Whether the last update was left out, on all ranks, because a gradient was not finite on one of them."""
    return bool(engine.optimizer.overflow)


def loss_scale(engine: Any) -> float | None:
    """The scale of float16's dynamic loss scaling; None in other precisions."""
    scaler = engine.optimizer.loss_scaler
    return float(scaler.cur_scale) if scaler.dynamic else None


def update_loss_scale(engine: Any, step: int, overflow: bool) -> None:
    """After each update, taken or skipped. FloatingPointError where the smallest scale still overflows."""
    scaler = engine.optimizer.loss_scaler
    if not scaler.dynamic:
        return
    if overflow and scaler.cur_scale <= scaler.min_scale:
        raise FloatingPointError(
            f"step {step}: the gradients overflow float16 at the smallest loss scale, {scaler.min_scale:g}; the last "
            "checkpoint is kept. Set train.dtype to bfloat16 where the GPU has it, or to float32"
        )
    scaler.update_scale(overflow)


def loss_scale_state(engine: Any) -> dict[str, Any] | None:
    """For a checkpoint: DeepSpeed does not restore its scaler from a universal one."""
    scaler = engine.optimizer.loss_scaler
    return {name: getattr(scaler, name) for name in _SCALER_STATE} if scaler.dynamic else None


def load_loss_scale(engine: Any, state: dict[str, Any] | None) -> None:
    if state and engine.optimizer.loss_scaler.dynamic:
        vars(engine.optimizer.loss_scaler).update(state)


def zero_gradients(engine: Any) -> float | None:
    """How many elements of the gradient are 0, between backward and step; None where they lie elsewhere."""
    parts = getattr(engine.optimizer, "averaged_gradients", None)
    if not parts or any(part is None for part in parts.values()):
        return None
    others = count_nonzero(part for group in parts.values() for part in group)
    dist.all_reduce(others)
    # From the parameters' own sizes: the ranks' shares have padding, which is 0 too.
    trainable = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trainable) - others.item()


def count_nonzero(tensors: Iterable[Tensor]) -> Tensor:
    """Exact: float32, the one type that needs no copy of a gradient, counts no further than 2^24."""
    pieces = (piece for tensor in tensors for piece in tensor.flatten().split(2**24))
    return torch.stack([torch.linalg.vector_norm(piece, 0, dtype=torch.float32) for piece in pieces]).double().sum()


def gathered(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters on the CPU of rank 0, one by one, whichever way ZeRO has split them.

    Nothing comes on other ranks, which must exhaust it: each parameter is a collective.
    """
    import deepspeed

    for name, parameter in parameters:
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            whole = parameter.detach().to("cpu", copy=True).contiguous() if dist.get_rank() == 0 else None
        if whole is not None:
            assert whole.numel(), f"{name} was not gathered"
            yield name, whole


def held(parameter: nn.Parameter) -> Tensor:
    """What this rank has of a parameter: all of it, or its shard under ZeRO-3."""
    return _held_in(parameter).data


def _held_in(parameter: nn.Parameter) -> Tensor:
    return getattr(parameter, "ds_tensor", parameter)


def exchange(engine: Any, parameters: Iterable[nn.Parameter], values: Iterable[Tensor]) -> list[Tensor]:
    """Give parameters other values, without a copy; returns those that they had. Not between backward and step."""
    if hasattr(engine.optimizer, "empty_partition_cache"):  # ZeRO-3: gathered parameters would keep their old values
        engine.optimizer.empty_partition_cache()
    before = []
    for parameter, value in zip(parameters, values, strict=True):
        before.append(held(parameter))
        _held_in(parameter).data = value
    return before


def scatter(parameters: Mapping[str, nn.Parameter], path: Path) -> None:
    """Read whole parameters from a safetensors file, into each rank's shard under ZeRO-3. A collective."""
    import deepspeed

    with safe_open(path, "pt") as file:
        for name, parameter in parameters.items():
            sharded = hasattr(parameter, "ds_id")
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=sharded):
                if not sharded or dist.get_rank() == 0:
                    parameter.data.copy_(file.get_tensor(name))


def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])
