"""`make gpu-check`: run every stage on this machine's GPUs, without network, and print a table of times and rates.

python -m tests.gpu_check [--shape 0.5b] [--pairs 512] [--full] [--compile]

Random weights of the shape, random words with UltraFeedback's lengths. Training runs twice, and the second run loses a
worker: with `train.deterministic` both must end with bit-identical weights. Evaluation and export run in parallel with
the second run. Two or more GPUs train as one group with ZeRO-2 and once more with ZeRO-3. `--cpu` tries the script out
on any machine, with two workers.
"""

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tasks.artifacts import demo
from tasks.artifacts.pairs import read_pairs
from tasks.system.files import sha256
from tasks.tracking.journal_reader import read_lines
from tests.benchmarks.table import markdown
from tests.benchmarks.workload import LENGTHS, SHAPES, make_model_in_subprocess
from tests.support.workspaces import make_workspace, start, wait_for, workers, write_cluster, write_data
from training.models import tiny
from training.models.tokenizer import load_tokenizer

BATCH, SAVES = 32, 2  # pairs per update, checkpoints per training
LONGEST = 1024  # tokens of a sequence
FIGURES = {"pairs/s": "pairs_per_second", "MFU": "mfu", "GiB": "peak_memory_gib", "checkpoint s": "checkpoint_seconds"}
HEADS = ["stage", "seconds", *FIGURES]


def main() -> None:
    args = _arguments()
    gpus = torch.cuda.device_count()
    if not gpus and not args.cpu:
        sys.exit("error: no NVIDIA GPU, or torch does not see it. Check `nvidia-smi` and `dpo doctor`.")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        rows, equal = check(args, gpus, Path(folder))
    print("\n" + markdown(HEADS, rows))
    if not equal:
        sys.exit("error: the run with the killed worker ended with other weights than the uninterrupted run.")
    print("\nThe run with a killed worker resumed and ended with bit-identical weights.")


def check(args: argparse.Namespace, gpus: int, folder: Path) -> tuple[list[list[Any]], bool]:
    """The table's rows, and whether the interrupted training ended with the weights of the other."""
    print(
        f"gpu-check: {_hardware(gpus)}; {args.shape} {'full' if args.full else 'LoRA'}, {args.pairs} pairs",
        flush=True,
    )
    first = make(args, gpus, folder)
    rows = [measure(first, stage) for stage in ("source", "prepare", "reference", "train")]
    others = shutil.ignore_patterns("train", "policy")
    interrupted = Path(shutil.copytree(first, folder / "interrupted", ignore=others))
    with ThreadPoolExecutor() as pool:  # most of the time goes to starting processes, without the GPU
        killed = pool.submit(measure, interrupted, "train", "train with a killed worker", kill=True)
        rows += [measure(first, stage) for stage in ("evaluate", "export")]
        rows.append(killed.result())
    if gpus > 1:
        third = Path(shutil.copytree(interrupted, folder / "zero3", ignore=others))
        write_cluster(third, {**cluster(gpus), "actor_train.zero_stage": 3})
        rows.append(measure(third, "train", "train, ZeRO-3"))
    return rows, weights(first) == weights(interrupted)


def make(args: argparse.Namespace, gpus: int, folder: Path) -> Path:
    """A workspace with a model of random weights and pairs of random words."""
    dtype = "float32" if args.cpu else "bfloat16"
    base = make_model_in_subprocess(args.shape, dtype, folder)
    tiny.make(folder / "tiny", demo.conversations(0)[:300], seed=0, steps=1)
    load_tokenizer(folder / "tiny").save_pretrained(base)
    steps = args.pairs * 4 // 5 // BATCH
    params: dict[str, Any] = {
        **{f"{stage}.dtype": dtype for stage in ("reference", "train", "evaluate", "export")},
        "prepare.max_tokens": LONGEST,
        "prepare.over_length": "truncate_response",
        "train.global_batch_size": BATCH,
        "train.epochs": 1,
        "train.logging_steps": max(1, steps // 10),
        "train.deterministic": True,
        "train.learning_rate": 1e-6,
        "train.eval_steps": None,
        "evaluate.prompts": 16,
        "evaluate.max_new_tokens": 32,
        "evaluate.judge": "none",
    }
    if args.full:
        params["train.adapter"] = None
    settings = {**cluster(gpus), "actor_train.save_steps": max(1, steps // SAVES)}
    settings |= dict.fromkeys(("reference.compile", "actor_train.compile"), args.compile)
    workspace = make_workspace(folder / "workspace", base, cluster=settings, **params)
    write_data(workspace / "pairs.jsonl", texts(args.pairs))
    return workspace


def cluster(gpus: int) -> dict[str, Any]:
    """One worker per GPU; two CPU workers without GPUs."""
    groups = ("reference", "actor_train", "inference")
    count, tokens = gpus or 2, 16384 if gpus else 1024
    options = {"num_workers": count, "gpus_per_worker": int(gpus > 0), "row_tokens": tokens}
    return {f"{group}.{name}": value for group in groups for name, value in options.items()} | {"tensorboard": False}


def texts(count: int) -> list[dict[str, str]]:
    """Rows of random words, with UltraFeedback's lengths."""
    rng = random.Random(0)
    words = sorted({word for _, answer in demo.conversations(0)[:300] for word in answer.split()})

    def words_of(part: tuple[float, float]) -> str:
        return " ".join(rng.choices(words, k=max(1, min(LONGEST, round(rng.lognormvariate(*part)))) // 2 + 1))

    names = ("prompt", "chosen", "rejected")
    return [
        {name: words_of(part) for name, part in zip(names, LENGTHS["ultrafeedback"], strict=True)} for _ in range(count)
    ]


def measure(workspace: Path, stage: str, name: str | None = None, kill: bool = False) -> list[Any]:
    """Run a stage; its row of the table."""
    begun = time.monotonic()
    driver = start(workspace, stage)
    if kill:
        group = workers(driver, 1)
        wait_for(lambda: driver.poll() is not None or list(workspace.glob(".scratch/train/*/step-*")), 600)
        group[0].kill()
    output, _ = driver.communicate()
    if driver.returncode:
        sys.exit(f"{output}\nerror: the stage {stage} failed.")
    seconds = time.monotonic() - begun
    print(f"gpu-check: {name or stage} {seconds:.0f} s", flush=True)
    if kill and "restarting the workers" not in output:
        sys.exit(f"{output}\nerror: training ended before its worker was killed. Pass a larger --pairs.")
    figures = training(workspace) if stage == "train" else scoring(workspace) if stage == "reference" else {}
    return [name or stage, seconds, *(figures.get(figure) for figure in FIGURES.values())]


def training(workspace: Path) -> dict[str, float]:
    """Medians over the logged steps, without the first, which compiles; the longest checkpoint."""
    (journal,) = workspace.glob(".scratch/train/*/metrics.jsonl")
    values = [line["values"] for line in read_lines(journal)[0] if line["kind"] == "metrics"]
    logged: dict[str, list[float]] = {}
    for line in values:
        for name in FIGURES.values():
            if name in line:
                logged.setdefault(name, []).append(line[name])
    return {name: statistics.median(values[1:] or values) for name, values in logged.items()}


def scoring(workspace: Path) -> dict[str, float]:
    """Pairs per second of all workers, from the time of the shards alone."""
    (journal,) = workspace.glob(".scratch/runs/*/reference.jsonl")
    lines = read_lines(journal)[0]
    rates = [value for line in lines for name, value in line.get("values", {}).items() if "tokens_per_second" in name]
    lengths = [len(pair) for split in ("train", "eval") for pair in read_pairs(split, workspace)]
    return {"pairs_per_second": sum(rates) / statistics.mean(lengths)} if rates else {}


def weights(workspace: Path) -> list[str]:
    return [sha256(path) for path in sorted((workspace / "data/policy").glob("*.safetensors"))]


def _hardware(gpus: int) -> str:
    return f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "no GPU, two workers on CPUs"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", choices=SHAPES, help="Qwen2.5's shape of that size")
    parser.add_argument("--pairs", type=int, default=512)
    parser.add_argument("--full", action="store_true", help="train all weights: checkpoints take longer")
    parser.add_argument("--compile", action="store_true", help="compile layers as training does: a minute each time")
    parser.add_argument("--cpu", action="store_true", help="try the script out without a GPU, with --shape tiny")
    return parser.parse_args()


if __name__ == "__main__":
    main()
