"""Own memory and start of a training rank, by number of pairs: it opens pairs and reference and builds its first step.

    make bench BENCH=loading ARGS="1000 100000 1000000"

The pairs are random, about 575 tokens each, and on disk in the format of `prepare` and `reference`. Own memory is
anonymous memory: pages of the mapped files belong to the system's cache, and all ranks of a host share them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from tasks.artifacts.pairs import PAIR_SCHEMA, REFERENCE_SCHEMA, PairTable, open_table, pairs_file, reference_file

BATCH = 8192
STEPS = 50


def write_pairs(root: Path, count: int) -> None:
    rng = np.random.default_rng(0)

    def lists(lengths: np.ndarray, kind: type) -> pa.ListArray:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        values = rng.integers(1, 2 if kind is np.int8 else 32_000, offsets[-1])
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(kind)))

    for file in (pairs_file("train", root), reference_file("train", root)):
        file.parent.mkdir(parents=True)
    with (
        pa.ipc.new_stream(pairs_file("train", root), PAIR_SCHEMA) as pairs,
        pa.ipc.new_stream(reference_file("train", root), REFERENCE_SCHEMA) as reference,
    ):
        for start in range(0, count, BATCH):
            rows = min(BATCH, count - start)
            ids = pa.array([f"{number:016x}" for number in range(start, start + rows)])
            prompt, chosen, rejected = (rng.integers(50, 300 + extra, rows) for extra in (0, 50, 50))
            columns = {
                "id": ids,
                "prompt": pa.array(["?"] * rows),
                "prompt_ids": lists(prompt, np.int32),
                "prompt_mask": lists(np.zeros(rows, int), np.int8),
                "chosen_ids": lists(chosen, np.int32),
                "chosen_mask": lists(chosen, np.int8),
                "rejected_ids": lists(rejected, np.int32),
                "rejected_mask": lists(rejected, np.int8),
                "shared_prefix": pa.array(np.zeros(rows), pa.int32()),
                **{name: pa.array(np.ones(rows), pa.float32()) for name in ("label", "margin", "weight")},
                "sign": pa.array(np.zeros(rows), pa.int8()),
                "source": pa.array(["web"] * rows),
            }
            pairs.write_table(pa.table([columns[name] for name in PAIR_SCHEMA.names], schema=PAIR_SCHEMA))
            logps = [lists(lengths, np.float32) for lengths in (chosen, rejected)]
            reference.write_table(pa.table([ids, *logps], schema=REFERENCE_SCHEMA))


def measure(root: Path) -> dict[str, float]:
    import torch

    from training.trainer.step_loader import StepLoader

    before, begun, cpu = own_memory(), time.monotonic(), time.process_time()
    pairs = PairTable(open_table(pairs_file("train", root)))
    pairs = pairs.with_reference(open_table(reference_file("train", root)))
    loader = StepLoader(pairs, hidden_size=2048, global_batch_size=64, row_tokens=8192, seed=0)
    steps = loader.steps(0, 2 * STEPS, rank=0, world=8, device=torch.device("cpu"))
    next(steps)
    start = {"start s": time.monotonic() - begun, "start CPU s": time.process_time() - cpu}
    cpu = time.process_time()
    for _ in range(STEPS):
        next(steps)
    per_step = {"CPU ms per step": (time.process_time() - cpu) / STEPS * 1000}
    return {"pairs": len(pairs), **start, **per_step, "own GiB": own_memory() - before}


def own_memory() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", type=int, nargs="*", default=[1000, 100_000])
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        sys.exit()
    for count in arguments.counts:
        with tempfile.TemporaryDirectory() as folder:
            write_pairs(Path(folder), count)
            command = [sys.executable, "-m", "tests.benchmarks.loading", "--measure", folder]  # in a fresh process
            result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(", ".join(f"{name} {value:.3g}" for name, value in result.items()), flush=True)
