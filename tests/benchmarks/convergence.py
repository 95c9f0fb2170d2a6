"""Compare our loss, reward margin and gradient norm with TRL's, step by step, on real pairs.

    python -m tests.benchmarks.convergence PAIRS.jsonl MODEL_FOLDER --steps 20 --batch 4 --plot curves.png
    python -m tests.benchmarks.convergence PAIRS.jsonl MODEL_FOLDER --steps 100 --optimizers adamw adamw_bf16 adamw_8bit

The first command: both sides start from the same weights and see the same pairs in the same order, with the same loss,
schedule, AdamW and clipping, in float32 (bf16 with --dtype). Each computes its own reference. Exits with 1 if the
losses differ. The second compares our optimizers with each other.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.job import Job, check_peer, run
from tests.benchmarks.table import markdown

SIDES = ("ours", "trl")  # the same pairs in the same order
COMPARED = {"loss": "loss", "margin": "rewards/margins", "norm": "grad_norm"}


def main() -> None:
    args = _arguments()
    check_peer([] if args.optimizers else list(SIDES))
    for path in (args.pairs, args.model):
        if not path.exists():
            sys.exit(f"error: {path} does not exist. Pass a file of pairs and a model folder.")
    if args.optimizers:
        print(optimizers(args))
        return
    curves = {}
    for variant in args.variants:
        curves[variant] = ours, peer = _curves(args, variant)
        print(f"\n{variant}\n\n{table(ours, peer)}\n\n{_largest_differences(ours, peer)}", flush=True)
    if args.plot:
        plot(curves, args.plot)
    different = [name for name, (ours, peer) in curves.items() if largest(ours, peer, "loss") > args.tolerance]
    if different:
        sys.exit(f"error: the losses of {', '.join(different)} differ by more than {args.tolerance}.")


def _curves(args: argparse.Namespace, variant: str) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The values that our run and TRL's logged at each step."""
    ours, peer = _runs(args, {f"{variant}, {side}": {"side": side, "variant": variant} for side in SIDES})
    return ours, peer


def optimizers(args: argparse.Namespace) -> str:
    """A row per variant and optimizer: loss and margin of the last quarter of the steps."""
    jobs = {
        f"{variant}, {optimizer}": {"variant": variant, "optimizer": optimizer}
        for variant in args.variants
        for optimizer in args.optimizers
    }
    rows: list[list[Any]] = []
    for name, curve in zip(jobs, _runs(args, jobs), strict=True):
        last = curve[-(len(curve) // 4) :]
        rows.append(
            [name, *(f"{sum(line[key] for line in last) / len(last):.4f}" for key in ("loss", "rewards/margins"))]
        )
    return markdown(["", "loss", "margin"], rows)


def _runs(args: argparse.Namespace, jobs: dict[str, dict[str, str]]) -> list[list[dict[str, float]]]:
    """The values that each run logged at each step."""
    from tests.benchmarks.workload import read_rows, tokenised, write_pairs

    curves = []
    with tempfile.TemporaryDirectory(prefix="bench-convergence-") as folder:
        pairs = tokenised(read_rows(args.pairs), args.model, args.steps * args.batch, args.longest)
        path = write_pairs(pairs, Path(folder) / "pairs")
        for name, options in jobs.items():
            result = run(_job(args, path, **options), args.limit)
            if "error" in result:
                sys.exit(f"error: {name}: {result['error']}")
            print(f"{name}: {result['pairs_per_second']:.2f} pairs/s", flush=True)
            curves.append(result["curve"])
    return curves


def _job(args: argparse.Namespace, pairs: Path, variant: str, side: str = "ours", optimizer: str = "adamw") -> Job:
    return Job(
        side=side,
        optimizer=optimizer,
        model=str(args.model.resolve()),
        pairs=str(pairs),
        batch=args.batch,
        warmup=0,
        steps=args.steps,
        row_tokens=args.row_tokens,
        micro_batch=args.micro_batch or args.batch,
        dtype=args.dtype,
        lora=variant == "lora",
        beta=args.beta,
        learning_rate=args.learning_rate * (10 if variant == "lora" else 1),
        schedule=args.schedule,
        logging_steps=1,
        threads=args.threads,
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


def _largest_differences(ours: list[dict[str, float]], peer: list[dict[str, float]]) -> str:
    differences = (f"{shown} {largest(ours, peer, name):.1e}" for shown, name in COMPARED.items())
    return f"{len(ours)} steps; largest difference: {', '.join(differences)}"


def plot(curves: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(curves), 2, figsize=(10, 3.4 * len(curves)), squeeze=False)
    for row, (variant, (ours, peer)) in zip(axes, curves.items(), strict=True):
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
    add("--optimizers", nargs="+", default=[], help="compare these of ours instead of TRL")
    add("--steps", type=int, default=20)
    add("--batch", type=int, default=4, help="pairs per update")
    add("--micro-batch", type=int, help="TRL: pairs per micro-batch (default: the batch)")
    add("--row-tokens", type=int, default=1024)
    add(
        "--longest",
        type=int,
        default=256,
        help="most tokens of a prompt with an answer; longer pairs are skipped",
    )
    add("--learning-rate", type=float, default=5e-6, help="LoRA uses ten times this value")
    add("--schedule", default="cosine", choices=["cosine", "linear", "constant"])
    add("--beta", type=float, default=0.1)
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--tolerance", type=float, default=1e-3, help="largest difference of the losses at any step")
    add("--threads", type=int, default=1)
    add("--limit", type=float, default=3000.0, help="timeout of one run in seconds")
    add("--plot", type=Path, help="write curves to this PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
