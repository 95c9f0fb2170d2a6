"""Run one measurement in its own process, so that memory peaks are separate and an out-of-memory error ends one job.

run(job) starts the process `python -m tests.benchmarks.job JOB RESULT` and returns its result.
"""

import argparse
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
# TRL with pairs in random order, which is its default, and with micro-batches of similar lengths, which is faster.
PEERS = {"trl": "TRL", "trl-grouped": "TRL grouped by length"}
SIDES = ("ours", *PEERS)


@dataclass(frozen=True)
class Job:
    side: str  # one of SIDES
    model: str  # folder
    pairs: str  # a pickled list of exactly (warmup + steps) x batch pairs
    batch: int  # pairs per update
    warmup: int  # steps before the measured ones
    steps: int  # measured steps
    row_tokens: int  # ours
    micro_batch: int  # TRL, in pairs
    dtype: str = "float32"
    lora: bool = False
    checkpointing: bool | str = False  # "offload", ours: inputs of layers in host memory
    tile: int | None = None  # ours: tokens that an MLP computes at a time
    deterministic: bool = False
    optimizer: str = "adamw"  # ours
    quantization: str | None = None  # ours
    loss: tuple[str, ...] = ("sigmoid",)
    beta: float = 0.1
    learning_rate: float = 1e-6
    schedule: str = "constant"
    logging_steps: int = 2
    zero_stage: int = 1
    threads: int | None = None
    seed: int = 0
    profile_memory: bool = False  # ours: list the allocations at the peak
    profile: bool = False  # ours: the kernels of the measured steps

    @property
    def total(self) -> int:
        return self.warmup + self.steps


def job_of(args: argparse.Namespace, side: str, size: int, model: Path, pairs: Path, **more: Any) -> Job:
    """A job with the arguments that both benchmarks share; `size` is our row tokens or TRL's micro-batch."""
    steps = {"batch": args.batch, "warmup": args.warmup, "steps": args.steps, "logging_steps": args.warmup or 1}
    return Job(side, str(model), str(pairs), row_tokens=size, micro_batch=size, **steps, **more)


class Stopwatch:
    """Wall-clock and CPU time; on a busy machine, CPU time says more."""

    def __init__(self) -> None:
        self.begun = self.ended = (0.0, 0.0)

    def start(self) -> None:
        self.begun = self._read()

    def stop(self) -> None:
        self.ended = self._read()

    def speed(self, pairs: int, prefix: str = "") -> dict[str, float]:
        seconds, cpu = (b - a for a, b in zip(self.begun, self.ended, strict=True))
        return {f"{prefix}pairs_per_second": pairs / seconds, f"{prefix}pairs_per_cpu_second": pairs / cpu}

    @staticmethod
    def _read() -> tuple[float, float]:
        return now(), time.process_time()


def now() -> float:
    """The time after the device has finished its queued work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Steps:
    """Times the measured steps; each side calls `done` after each logged step."""

    def __init__(self, job: Job) -> None:
        self.first, self.last, self.pairs = job.warmup, job.total, job.steps * job.batch
        self.watch, self.begun, self.first_seconds = Stopwatch(), now(), 0.0
        self.done(0)

    def done(self, step: int) -> bool:
        """Whether this was the last step."""
        if step == 1:
            self.first_seconds = now() - self.begun
        if step == self.first:
            self.watch.start()
        if step == self.last:
            self.watch.stop()
        return step == self.last

    def speed(self) -> dict[str, float]:
        return {**self.watch.speed(self.pairs), "first_step_seconds": self.first_seconds}


def matrix_peak() -> float:
    """Measured TFLOP/s of a matrix product: large and bf16 on a GPU, small and float32 on a CPU."""
    import torch

    on_gpu = torch.cuda.is_available()
    size, times = (8192, 50) if on_gpu else (1024, 3)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    a, b = torch.randn(size, size, **options), torch.randn(size, size, **options)
    for _ in range(times // 3):
        a @ b
    begun = now()
    for _ in range(times):
        a @ b
    return 2 * size**3 * times / (now() - begun) / 1e12


def check_peer(sides: list[str]) -> None:
    """Exit before any measurement if TRL is missing."""
    if PEERS.keys() & set(sides) and importlib.util.find_spec("trl") is None:
        sys.exit(
            "error: TRL is not installed. Run `pip install -r tests/benchmarks/requirements.txt`, or measure only our "
            "side with `--sides ours` (GPU benchmark)."
        )


def run(job: Job, limit: float = 600.0) -> dict[str, Any]:
    """The result of the job's process, or {"error": reason}."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        command = [sys.executable, "-m", "tests.benchmarks.job", json.dumps(asdict(job)), str(result)]
        with log.open("w") as output:
            try:
                subprocess.run(command, cwd=PROJECT, env=_env(job), stdout=output, stderr=output, timeout=limit)
            except subprocess.TimeoutExpired:
                return {"error": f"no result within {limit:.0f} s"}
        return json.loads(result.read_text()) if result.exists() else {"error": _reason(log.read_text())}


def _env(job: Job) -> dict[str, str]:
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # for both sides, as in our stages
    threads = {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
    return {**env, **threads}


def _reason(output: str) -> str:
    if "out of memory" in output.lower():
        return "out of memory"
    print(output[-3000:], file=sys.stderr)
    return output.strip().splitlines()[-1] if output.strip() else "the process ended without output"


def _measure(job: Job) -> dict[str, Any]:
    import torch

    from tests.benchmarks import ours, peer

    if job.threads:
        torch.set_num_threads(job.threads)
    peak = matrix_peak()
    pairs = pickle.loads(Path(job.pairs).read_bytes())
    assert len(pairs) == job.total * job.batch, f"{len(pairs)} pairs for {job.total} steps of {job.batch}"
    result = (ours if job.side == "ours" else peer).measure(job, pairs)
    # Per weight and token: forward 2, backward 4, of which frozen weights (LoRA) need only half.
    flops = (4 if job.lora else 6) * result["parameters"] * result["tokens_per_pair"]
    memory = {}
    if torch.cuda.is_available():
        memory = {
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        }
    return {**result, "tflops": flops * result["pairs_per_second"] / 1e12, "matrix_tflops": peak, **memory}


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    content = json.dumps(_measure(Job(**{**fields, "loss": tuple(fields["loss"])})))
    Path(sys.argv[2]).write_text(content)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter
