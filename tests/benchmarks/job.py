"""One measurement in a process of its own: its memory peak is its own, and running out of memory costs one line only.

run(job) starts it and returns what it found; the process itself is `python -m tests.benchmarks.job JOB RESULT`.
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
SIDES = ("ours", "trl")


@dataclass(frozen=True)
class Job:
    side: str  # ours | trl
    model: str  # folder
    pairs: str  # a pickled list of exactly (warmup + steps) x batch pairs
    batch: int  # pairs of one update
    warmup: int  # steps that are not measured
    steps: int  # steps that are
    row_tokens: int  # of ours
    micro_batch: int  # pairs, of TRL
    dtype: str = "float32"
    lora: bool = False
    checkpointing: bool = False
    deterministic: bool = False
    loss: tuple[str, ...] = ("sigmoid",)
    beta: float = 0.1
    learning_rate: float = 1e-6
    schedule: str = "constant"
    logging_steps: int = 2
    zero_stage: int = 1
    threads: int | None = None
    seed: int = 0
    alive: bool = False  # tell what is alive at the peak

    @property
    def total(self) -> int:
        return self.warmup + self.steps


def job_of(given: argparse.Namespace, side: str, size: int, model: Path, pairs: Path, **more: Any) -> Job:
    """What both benchmarks take from their arguments; `size` is a row's tokens, or TRL's micro-batch."""
    steps = {"batch": given.batch, "warmup": given.warmup, "steps": given.steps, "logging_steps": given.warmup or 1}
    return Job(side, str(model), str(pairs), row_tokens=size, micro_batch=size, **steps, **more)


class Stopwatch:
    """Speed over what is measured. CPU seconds tell more than the clock where other programs run beside."""

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
    """The time at which everything that was asked of the device is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Steps:
    """What a side tells of its steps: both call `done` after each of them that they log."""

    def __init__(self, job: Job) -> None:
        self.first, self.last, self.pairs = job.warmup, job.total, job.steps * job.batch
        self.watch = Stopwatch()
        self.done(0)

    def done(self, step: int) -> bool:
        """Whether that was the last."""
        if step == self.first:
            self.watch.start()
        if step == self.last:
            self.watch.stop()
        return step == self.last

    def speed(self) -> dict[str, float]:
        return self.watch.speed(self.pairs)


def matrix_peak() -> float:
    """TFLOP/s of a large matrix product here and now: bf16 on a GPU, a small float32 one elsewhere."""
    import torch

    on_gpu = torch.cuda.is_available()
    size, times = (8192, 50) if on_gpu else (1024, 3)
    how: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    a, b = torch.randn(size, size, **how), torch.randn(size, size, **how)
    for _ in range(times // 3):
        a @ b
    begun = now()
    for _ in range(times):
        a @ b
    return 2 * size**3 * times / (now() - begun) / 1e12


def check_peer(sides: list[str]) -> None:
    """A missing peer ends the run before anything is measured."""
    if "trl" in sides and importlib.util.find_spec("trl") is None:
        sys.exit(
            "error: TRL, which this compares with, is not installed: run `pip install -r "
            "tests/benchmarks/requirements.txt` (the GPU benchmark can measure ours alone with `--sides ours`)."
        )


def run(job: Job, limit: float = 600.0) -> dict[str, Any]:
    """What the job's process found, or {"error": why it found nothing}."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "said.txt"
        command = [sys.executable, "-m", "tests.benchmarks.job", json.dumps(asdict(job)), str(result)]
        with said.open("w") as output:
            try:
                subprocess.run(command, cwd=PROJECT, env=_env(job), stdout=output, stderr=output, timeout=limit)
            except subprocess.TimeoutExpired:
                return {"error": f"no result within {limit:.0f} s"}
        return json.loads(result.read_text()) if result.exists() else {"error": _reason(said.read_text())}


def _env(job: Job) -> dict[str, str]:
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # both sides, as our stages set it
    threads = {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
    return {**env, **threads}


def _reason(said: str) -> str:
    if "out of memory" in said.lower():
        return "out of memory"
    print(said[-3000:], file=sys.stderr)
    return said.strip().splitlines()[-1] if said.strip() else "the process ended without a word"


def _measure(job: Job) -> dict[str, Any]:
    import torch

    from tests.benchmarks import ours, peer

    if job.threads:
        torch.set_num_threads(job.threads)
    peak = matrix_peak()
    pairs = pickle.loads(Path(job.pairs).read_bytes())
    assert len(pairs) == job.total * job.batch, f"{len(pairs)} pairs for {job.total} steps of {job.batch}"
    found = {"ours": ours, "trl": peer}[job.side].measure(job, pairs)
    # Forward 2, backward 4, of which half is for gradients of weights, which LoRA's frozen ones have none of.
    flops = (4 if job.lora else 6) * found["parameters"] * found["tokens_per_pair"]
    memory = {}
    if torch.cuda.is_available():
        memory = {
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        }
    return {**found, "tflops": flops * found["pairs_per_second"] / 1e12, "matrix_tflops": peak, **memory}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    answer = json.dumps(_measure(Job(**{**given, "loss": tuple(given["loss"])})))
    Path(sys.argv[2]).write_text(answer)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter
