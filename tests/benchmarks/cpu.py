"""Our training beside TRL's on this machine's CPU, with the demo's model, pairs, loss and batch.

    python -m tests.benchmarks.cpu

Both sides have the same number of threads. Their runs alternate, so that a machine that is busy for a while does not
decide, and the figures are medians over the rounds; with the fastest of the peer's micro-batches.
"""

import argparse
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.job import SIDES, Job, check_peer, run
from tests.benchmarks.table import markdown

LONGEST = 512  # tokens, as in params.yaml


def main() -> None:
    given = _arguments()
    check_peer(list(SIDES))
    with tempfile.TemporaryDirectory(prefix="bench-cpu-") as folder:
        jobs = _jobs(given, Path(folder))
        found: dict[tuple[str, str, int], list[dict[str, Any]]] = {name: [] for name in jobs}
        for turn, (name, job) in product(range(given.rounds), jobs.items()):
            result = run(job, given.limit)
            if "error" in result:
                raise SystemExit(f"error: {', '.join(map(str, name))}: {result['error']}")
            found[name].append(result)
            speed, reference = result["pairs_per_second"], result["reference_pairs_per_second"]
            print(f"round {turn + 1}: {name}: {speed:.1f} pairs/s, reference {reference:.1f} pairs/s", flush=True)
    print("\n" + table(found))


def _jobs(given: argparse.Namespace, folder: Path) -> dict[tuple[str, str, int], Job]:
    """(variant, side, row tokens or micro-batch) to job; the two sides take turns."""
    from tasks import demo
    from tests.benchmarks.workload import tokenised, write_pairs
    from training import tiny

    # Barely trained: how fast it is does not depend on what it knows.
    tiny.make(folder / "model", demo.conversations(0)[:300], seed=0, steps=5)
    count = (given.warmup + given.steps) * given.batch
    pairs = write_pairs(tokenised(demo.rows(0), folder / "model", count, LONGEST), folder / "pairs")
    sizes = [("ours", given.row_tokens), *(("trl", size) for size in given.micro_batches)]
    return {
        (variant, side, size): Job(
            side=side,
            model=str(folder / "model"),
            pairs=str(pairs),
            batch=given.batch,
            warmup=given.warmup,
            steps=given.steps,
            row_tokens=size,
            micro_batch=size,
            lora=variant == "lora",
            loss=("sigmoid", "sft"),
            learning_rate=1e-3,
            logging_steps=given.warmup,
            threads=given.threads,
        )
        for variant, (side, size) in product(given.variants, sizes)
    }


def table(found: dict[tuple[str, str, int], list[dict[str, Any]]]) -> str:
    rows = []
    for variant in dict.fromkeys(name[0] for name in found):
        for what, figure in (("training", "pairs_per_second"), ("reference", "reference_pairs_per_second")):
            medians = {
                name[1:]: median(result[figure] for result in results)
                for name, results in found.items()
                if name[0] == variant
            }
            ours = max(value for (side, _), value in medians.items() if side == "ours")
            peer, size = max((value, size) for (side, size), value in medians.items() if side == "trl")
            rows.append([variant, what, ours, peer, ours / peer, size])
    return markdown(["variant", "what", "pairs/s", "pairs/s TRL", "ratio", "TRL's best micro-batch"], rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=1)
    add("--batch", type=int, default=16, help="pairs of one update")
    add("--steps", type=int, default=16)
    add("--warmup", type=int, default=2, help="steps before the measured ones")
    add("--row-tokens", type=int, default=512, help="ours: token budget of a row")
    add("--micro-batches", nargs="+", type=int, default=[8, 16], help="TRL: pairs of a micro-batch to try")
    add("--limit", type=float, default=300.0, help="seconds for one run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
