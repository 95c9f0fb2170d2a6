"""Compare our training with TRL's on one GPU: pairs/s, memory, TFLOP/s and the reference pass.

    python -m tests.benchmarks.gpu --shape 0.5b 1.5b --lengths ultrafeedback hh > results.jsonl
    python -m tests.benchmarks.gpu --shape 1.5b 7b --variants lora --earlier results.jsonl
    python -m tests.benchmarks.gpu --sides ours --shape 1.5b --lengths long --variants lora-checkpointed \\
        --row-tokens 36000 --batch 8 --warmup 1 --steps 3
    python -m tests.benchmarks.gpu --shape tiny --lengths short --batch 8 --row-tokens 512 --micro-batches 4

Prints a JSON line per configuration, then a table of each side's best. `--earlier` adds the lines of earlier calls to
the table; `--sides none` measures nothing new. The last example is for a CPU.
"""

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from tests.benchmarks.job import PEERS, SIDES, check_peer, job_of, run
from tests.benchmarks.table import markdown, versus
from tests.benchmarks.workload import HYBRID_SHAPES, LENGTHS, SHAPES

MODES = ("full", "lora")
OPTIONS: dict[str, dict[str, Any]] = {  # after the mode, any number of them: lora-offloaded-tiled
    "checkpointed": {"checkpointing": True},
    "offloaded": {"checkpointing": "offload"},
    "tiled": {"tile": 8192},
    "deterministic": {"deterministic": True},
    "fp8": {"quantization": "fp8"},
    "bf16moments": {"optimizer": "adamw_bf16"},
    "8bit": {"optimizer": "adamw_8bit"},
}
SCRATCH = Path(tempfile.gettempdir()) / "dpo-benchmarks"


def main() -> None:
    args = _arguments()
    sides = [] if args.sides == ["none"] else args.sides
    check_peer(sides)
    lines = [json.loads(line) for path in args.earlier for line in path.open() if line.startswith("{")]
    for shape, lengths in product(args.shape, args.lengths) if sides else []:
        for name, job in _jobs(args, sides, shape, lengths):
            line = {**name, **run(job, args.limit)}
            line.pop("curve", None)
            lines.append(line)
            print(json.dumps(line), flush=True)
    print("\n" + table(lines) + "\n\n" + memory(lines))


def _jobs(args: argparse.Namespace, sides: list[str], shape: str, lengths: str) -> Any:
    """(name, job) of all measurements with one shape and one length distribution."""
    import torch

    from tests.benchmarks.workload import config_of, make_model_in_subprocess, make_pairs, write_pairs

    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    args.scratch.mkdir(parents=True, exist_ok=True)
    count = (args.warmup + args.steps) * args.batch
    drawn = make_pairs(lengths, count, config_of(shape).get_text_config().vocab_size)
    pairs = write_pairs(drawn, args.scratch / f"{shape}-{lengths}.pickle")
    model = make_model_in_subprocess(shape, dtype, args.scratch)
    sizes = {"ours": args.row_tokens, **dict.fromkeys(PEERS, args.micro_batches)}
    for variant, side in product(args.variants, sides):
        for size in sizes[side]:
            name = {"shape": shape, "lengths": lengths, "variant": variant, "side": side, "size": size}
            mode, *options = variant.split("-")
            kind: dict[str, Any] = {"lora": mode == "lora"}
            for option in options:
                kind |= OPTIONS[option]
            kind |= {"profile": args.profile, "profile_memory": args.profile_memory}
            yield name, job_of(args, side, size, model, pairs, dtype=dtype, **kind)


def table(lines: list[dict[str, Any]]) -> str:
    """One row per shape, lengths, variant and measured peer: the fastest result of each side, and their ratio."""
    figures = {
        "pairs/s": "pairs_per_second",
        "peak GiB": "peak_gib",
        "reference pairs/s": "reference_pairs_per_second",
        "tokens/pair": "tokens_per_pair",
        "TFLOP/s": "tflops",
    }
    rows = []
    keys = dict.fromkeys((line["shape"], line["lengths"], line["variant"]) for line in lines)
    for key, side in product(keys, [side for side in PEERS if any(line["side"] == side for line in lines)] or ["trl"]):
        ours, peer = _fastest(lines, key, "ours"), _fastest(lines, key, side)
        sizes = f"{ours.get('size', '-')} tokens / {peer.get('size', '-')} pairs"
        compared = [versus(ours.get(name), peer.get(name)) for name in figures.values()]
        share = versus(ours.get("tflops"), ours.get("matrix_tflops"))
        rows.append([", ".join(key), PEERS[side], *compared, share, sizes])
    heads = ["shape, lengths, variant", "peer", *figures, "of matrix peak", "rows"]
    return "ours / peer = ratio\n\n" + markdown(heads, rows)


def memory(lines: list[dict[str, Any]]) -> str:
    """Our memory estimate, without its allowance for the CUDA context, and the measured peaks."""
    rows = [
        [", ".join(str(line[name]) for name in ("shape", "lengths", "variant", "size")), *figures]
        for line in lines
        if "estimated_gib" in line
        for figures in [(line["estimated_gib"] - 1.0, line.get("peak_gib"), line.get("reserved_gib"))]
    ]
    return markdown(["memory (GiB)", "estimated", "peak allocated", "peak reserved"], rows)


def _fastest(lines: list[dict[str, Any]], key: tuple[str, ...], side: str) -> dict[str, Any]:
    results = [
        line
        for line in lines
        if (line["shape"], line["lengths"], line["variant"], line["side"]) == (*key, side) and "error" not in line
    ]
    return max(results, key=lambda line: line["pairs_per_second"], default={})


def _variant(name: str) -> str:
    mode, *options = name.split("-")
    if mode not in MODES or not OPTIONS.keys() >= set(options):
        raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(MODES)} with -{', -'.join(OPTIONS)}")
    return name


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", nargs="+", default=["0.5b", "1.5b"], choices=[*SHAPES, *HYBRID_SHAPES])
    add("--lengths", nargs="+", default=["ultrafeedback", "hh"], choices=list(LENGTHS))
    add("--sides", nargs="+", default=list(SIDES), choices=[*SIDES, "none"])
    add("--variants", nargs="+", default=["full"], type=_variant, help=f"full or lora, with -{', -'.join(OPTIONS)}")
    add("--row-tokens", nargs="+", type=int, default=[16384], help="ours: row budgets in tokens to try")
    add("--micro-batches", nargs="+", type=int, default=[4, 8, 16, 32], help="TRL: micro-batches in pairs to try")
    add("--batch", type=int, default=64, help="pairs per update")
    add("--steps", type=int, default=8)
    add("--warmup", type=int, default=2, help="warm-up steps, not measured")
    add("--profile", action="store_true", help="ours: milliseconds of a step by kind of kernel")
    add("--profile-memory", action="store_true", help="ours: list the allocations at the memory peak (slower)")
    add("--limit", type=float, default=300.0, help="timeout of one configuration in seconds")
    add("--scratch", type=Path, default=SCRATCH, help="folder that keeps random weights between calls")
    add("--earlier", nargs="+", type=Path, default=[], help="JSON lines of earlier calls, for the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
