"""Join a torch.distributed process group through DeepSpeed, on GPUs (NCCL) or CPUs (gloo)."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)  # of a collective


def start_distributed(deterministic: bool) -> tuple[int, int]:
    """Join the process group that the launcher (Ray Train, torchrun) described, or start a group of one rank."""
    on_gpu = torch.cuda.is_available()
    _set_deterministic(deterministic)
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    elif not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # The stages set this in the environment. Other launchers may have initialised CUDA already, so set it directly.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if "RANK" not in os.environ and not dist.is_initialized():
        # Port 0 is any free port.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # DeepSpeed's tuner, which we do not use, imports MLflow if it can: a fifth of a worker's CPU time to start.
    mlflow = sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]  # an import fails
    import deepspeed

    if mlflow is None:
        del sys.modules["mlflow"]
    if not on_gpu:  # otherwise DeepSpeed compiles a shared-memory kernel for minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed requires float16 instructions of a CPU; torch computes float16 on any CPU, only slower.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", auto_mpi_discovery=False, verbose=False)
    return dist.get_rank(), dist.get_world_size()


def join_process_group(store: str, rank: int, world: int) -> None:
    """Form a process group of workers without a launcher, and prepare DeepSpeed."""
    os.environ.update(LOCAL_RANK="0")  # Ray shows each worker only its own GPU
    form_process_group(store, rank, world, on_gpu=torch.cuda.is_available())
    start_distributed(deterministic=False)


def form_process_group(store: str, rank: int, world: int, on_gpu: bool) -> None:
    """At `store` (file:// or tcp://), with the variables that DeepSpeed reads."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as Ray: a failed collective ends its process
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=TIMEOUT)


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def use_device(device: torch.device) -> None:
    """Of this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def has_process_group() -> bool:
    return dist.is_initialized()


def max_over_ranks(count: int) -> int:
    """The largest count of all ranks. A collective."""
    largest = torch.tensor(count, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _set_deterministic(deterministic: bool) -> None:
    """Allow only kernels with a fixed order of summation; an operation without one raises."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA reads it at the first matrix product
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time
