"""Compare our training with TRL's on a CPU, with the demo's model, loss and batch, on its pairs or on --data.

    python -m tests.benchmarks.cpu [--data PAIRS]

Both sides have the same number of threads. Their runs alternate, and the figures are medians over the rounds, so that a
temporarily busy machine does not decide. Pairs per CPU second exclude the time of other processes. Each side uses its
best setting: ours of several row budgets, TRL of several micro-batches, in random order and grouped by length.
"""

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.job import PEERS, SIDES, Job, check_peer, job_of, run
from tests.benchmarks.table import markdown

NAME = ("variant", "side", "size")
METRICS = {
    "training, pairs/s": "pairs_per_second",
    "training, pairs/CPU s": "pairs_per_cpu_second",
    "reference, pairs/s": "reference_pairs_per_second",
    "reference, pairs/CPU s": "reference_pairs_per_cpu_second",
}
LONGEST = 512  # tokens, as in params.yaml


def main() -> None:
    args = _arguments()
    check_peer(list(SIDES))
    with tempfile.TemporaryDirectory(prefix="bench-cpu-") as folder:
        jobs = _jobs(args, Path(folder))
        results: dict[tuple[str, str, int], list[dict[str, Any]]] = {name: [] for name in jobs}
        for turn, (name, job) in product(range(args.rounds), jobs.items()):
            result = run(job, args.limit)
            if "error" in result:
                raise SystemExit(f"error: {', '.join(map(str, name))}: {result['error']}")
            results[name].append(result)
            print(json.dumps({"round": turn + 1, **dict(zip(NAME, name, strict=True)), **_figures(result)}), flush=True)
    print("\n" + table(results))


def _jobs(args: argparse.Namespace, folder: Path) -> dict[tuple[str, str, int], Job]:
    """Jobs by (variant, side, row tokens or micro-batch); the two sides alternate."""
    from tasks.artifacts import demo
    from tests.benchmarks.workload import read_rows, tokenised, write_pairs
    from training.models import tiny

    # Barely trained: the speed does not depend on the weights.
    tiny.make(folder / "model", demo.conversations(0)[:300], seed=0, steps=5)
    count = (args.warmup + args.steps) * args.batch
    rows = read_rows(args.data) if args.data else demo.rows(0)
    pairs = write_pairs(tokenised(rows, folder / "model", count, LONGEST), folder / "pairs")
    sizes = [("ours", size) for size in args.row_tokens] + list(product(PEERS, args.micro_batches))
    return {
        (variant, side, size): job_of(
            args,
            side,
            size,
            folder / "model",
            pairs,
            lora=variant == "lora",
            loss=("sigmoid", "sft"),
            learning_rate=1e-3,
            threads=args.threads,
        )
        for variant, (side, size) in product(args.variants, sizes)
    }


def table(results: dict[tuple[str, str, int], list[dict[str, Any]]]) -> str:
    rows = []
    for variant, what in product(dict.fromkeys(name[0] for name in results), METRICS):
        medians = {
            name[1:]: median(result[METRICS[what]] for result in repeats)
            for name, repeats in results.items()
            if name[0] == variant
        }
        best = {
            which: max((value, size) for (side, size), value in medians.items() if side == which) for which in SIDES
        }
        ours, row = best.pop("ours")
        for side, (peer, micro) in best.items():
            rows.append([variant, what, PEERS[side], ours, peer, ours / peer, row, micro])
    return markdown(["variant", "what", "peer", "ours", "peer's", "ratio", "row tokens", "peer's micro-batch"], rows)


def _figures(result: dict[str, Any]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in result.items() if "pairs" in name or name == "tokens_per_pair"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    add(
        "--data",
        type=Path,
        help="a file of preference pairs that the pipeline can read (default: the demo's)",
    )
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=1)
    add("--batch", type=int, default=16, help="pairs per update")
    add("--steps", type=int, default=16)
    add("--warmup", type=int, default=2, help="warm-up steps, not measured")
    add("--row-tokens", nargs="+", type=int, default=[256, 512], help="ours: row budgets in tokens to try")
    add("--micro-batches", nargs="+", type=int, default=[8, 16], help="TRL: micro-batches in pairs to try")
    add("--limit", type=float, default=300.0, help="timeout of one run in seconds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
