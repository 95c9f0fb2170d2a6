"""The same algorithm: our loss, reward margin and gradient norm beside TRL's, step by step, on real pairs.

    python -m tests.benchmarks.convergence PAIRS.jsonl MODEL_FOLDER --steps 20 --batch 4 --plot curves.png

Both start from the same weights and see the same pairs in the same order, with the same loss, schedule, AdamW and
clipping, in float32 (bf16 with --dtype). Each computes its own reference. Ends with 1 where they part.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.job import SIDES, Job, check_peer, run
from tests.benchmarks.table import markdown

COMPARED = {"loss": "loss", "margin": "rewards/margins", "norm": "grad_norm"}


def main() -> None:
    given = _arguments()
    check_peer(list(SIDES))
    for path in (given.pairs, given.model):
        if not path.exists():
            sys.exit(f"error: there is no {path}: give a file of pairs and a folder with a model.")
    courses = {}
    for variant in given.variants:
        courses[variant] = ours, peer = _courses(given, variant)
        print(f"\n{variant}\n\n{table(ours, peer)}\n\n{_apart(ours, peer)}", flush=True)
    if given.plot:
        plot(courses, given.plot)
    parted = [name for name, (ours, peer) in courses.items() if largest(ours, peer, "loss") > given.tolerance]
    if parted:
        sys.exit(f"error: the losses of {', '.join(parted)} differ by more than {given.tolerance}.")


def _courses(given: argparse.Namespace, variant: str) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """What our run and the peer's logged at each step."""
    from tests.benchmarks.workload import read_rows, tokenised, write_pairs

    with tempfile.TemporaryDirectory(prefix="bench-convergence-") as folder:
        pairs = tokenised(read_rows(given.pairs), given.model, given.steps * given.batch, given.longest)
        path = write_pairs(pairs, Path(folder) / "pairs")
        results = [run(_job(given, variant, side, path), given.limit) for side in SIDES]
    for side, result in zip(SIDES, results, strict=True):
        if "error" in result:
            sys.exit(f"error: {side}: {result['error']}")
        print(f"{variant}, {side}: {result['pairs_per_second']:.2f} pairs/s", flush=True)
    return results[0]["course"], results[1]["course"]


def _job(given: argparse.Namespace, variant: str, side: str, pairs: Path) -> Job:
    return Job(
        side=side,
        model=str(given.model.resolve()),
        pairs=str(pairs),
        batch=given.batch,
        warmup=0,
        steps=given.steps,
        row_tokens=given.row_tokens,
        micro_batch=given.micro_batch or given.batch,
        dtype=given.dtype,
        lora=variant == "lora",
        beta=given.beta,
        learning_rate=given.learning_rate * (10 if variant == "lora" else 1),
        schedule=given.schedule,
        logging_steps=1,
        threads=given.threads,
    )


def table(ours: list[dict[str, float]], peer: list[dict[str, float]]) -> str:
    rows: list[list[Any]] = []
    for a, b in zip(ours, peer, strict=True):
        assert a["step"] == b["step"]
        figures = [[f"{a[name]:.6f}", f"{b[name]:.6f}", f"{a[name] - b[name]:+.1e}"] for name in COMPARED.values()]
        rows.append([int(a["step"]), *(cell for cells in figures for cell in cells)])
    return markdown(["step", *(f"{name}{side}" for name in COMPARED for side in ("", " TRL", " -"))], rows)


def largest(ours: list[dict[str, float]], peer: list[dict[str, float]], name: str) -> float:
    return max(abs(a[name] - b[name]) for a, b in zip(ours, peer, strict=True))


def _apart(ours: list[dict[str, float]], peer: list[dict[str, float]]) -> str:
    each = (f"{shown} {largest(ours, peer, name):.1e}" for shown, name in COMPARED.items())
    return f"{len(ours)} steps; largest difference: {', '.join(each)}"


def plot(courses: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(courses), 2, figsize=(10, 3.4 * len(courses)), squeeze=False)
    for row, (variant, (ours, peer)) in zip(axes, courses.items(), strict=True):
        for axis, (shown, name) in zip(row, COMPARED.items(), strict=False):
            steps = [line["step"] for line in ours]
            axis.plot(steps, [line[name] for line in peer], linewidth=4, alpha=0.4, label="TRL 1.16")
            axis.plot(steps, [line[name] for line in ours], linewidth=1.2, color="black", label="ours")
            axis.set(title=f"{variant}: {shown}", xlabel="step")
            axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("pairs", type=Path, help="a file of preference pairs, in any shape that the pipeline reads")
    add("model", type=Path, help="a model folder")
    add("--variants", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    add("--steps", type=int, default=20)
    add("--batch", type=int, default=4, help="pairs of one update")
    add("--micro-batch", type=int, help="TRL: pairs of a micro-batch; the batch unless given")
    add("--row-tokens", type=int, default=1024)
    add("--longest", type=int, default=256, help="tokens of a prompt and its longer answer; longer pairs are left out")
    add("--learning-rate", type=float, default=5e-6, help="ten times that for LoRA")
    add("--schedule", default="cosine", choices=["cosine", "linear", "constant"])
    add("--beta", type=float, default=0.1)
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--tolerance", type=float, default=1e-3, help="of the loss, at every step")
    add("--threads", type=int, default=1)
    add("--limit", type=float, default=3000.0, help="seconds for one run")
    add("--plot", type=Path, help="write curves to this PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
