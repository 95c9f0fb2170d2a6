"""How our cost grows, as a figure: with pairs, tokens per pair, vocabulary and ranks.

    make bench BENCH=growth ARGS="docs/growth.svg"

CPU seconds of a small model on one thread, since CPU time says more than seconds on a busy machine. Each curve's label
has its slope between the last two points: 1 is linear. Ranks count work, not time: the tokens of the busiest rank.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import loading, prepare
from tests.benchmarks.job import Job, run
from tests.benchmarks.table import markdown
from tests.benchmarks.workload import make_pairs, write_pairs
from training.models import tiny
from training.pairs import batches
from training.pairs.pair import Pair

Curve = Mapping[int, float]
ROWS = (1_000, 10_000, 100_000)
PAIRS = (1_000, 10_000, 100_000, 1_000_000)
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
VOCABULARY = (1_000, 4_000, 16_000, 64_000, 256_000)
RANKS = (1, 2, 4, 8, 16, 32, 64)
GLOBAL_BATCH, ROW_TOKENS, HIDDEN = 512, 8192, 2048


def by_rows(model: Path, scratch: Path) -> Curve:
    """CPU seconds of the stage `prepare`."""
    curve = {}
    for count in ROWS:
        prepare.write_rows(rows := scratch / f"rows-{count}.jsonl", count)
        curve[count] = prepare.watched("ours", rows, model, 2)["cpu_seconds"]
    return curve


def by_pairs(scratch: Path) -> tuple[Curve, Curve]:
    """CPU seconds until a training rank has its first step, and CPU seconds of the next steps' batches."""
    start, step = {}, {}
    for count in PAIRS:
        loading.write_pairs(root := scratch / f"pairs-{count}", count)
        command = [sys.executable, "-m", "tests.benchmarks.loading", "--measure", str(root)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        start[count], step[count] = result["start CPU s"], result["CPU ms per step"] / 1000
    return start, step


def by_tokens(scratch: Path) -> tuple[Curve, Curve]:
    """CPU seconds of a pair in training and in the reference pass; half of its tokens are the prompt."""
    model = random_model(scratch, 1000)
    results = {}
    for tokens in TOKENS:
        batch = max(1, 2048 // tokens)
        rng = random.Random(0)
        pairs = [_pair(rng, number, tokens) for number in range(4 * batch)]
        results[tokens] = _measure(scratch, model, pairs, batch, row_tokens=max(2048, tokens))
    return _curves(results)


def by_vocabulary(scratch: Path) -> tuple[Curve, Curve]:
    """The same by size of the vocabulary, with short pairs."""
    results = {}
    for size in VOCABULARY:
        pairs = make_pairs("short", 4 * 8, 1000)
        results[size] = _measure(scratch, random_model(scratch, size), pairs, 8, row_tokens=512)
    return _curves(results)


def by_ranks() -> Curve:
    """Tokens of the busiest rank over the mean of all: 1 is a perfect split."""
    pairs = make_pairs("ultrafeedback", GLOBAL_BATCH, 1000)
    lengths, costs = np.array([len(pair) for pair in pairs]), batches.pair_costs(pairs, HIDDEN)
    numbers, curve = list(range(GLOBAL_BATCH)), {}
    for world in RANKS:
        loads = [0] * world
        for rank in range(world):
            rows = batches.rank_rows(numbers, lengths, costs, ROW_TOKENS, rank, world)
            loads[rank] = sum(
                int(lengths[number]) for indices, is_filler in rows if not is_filler for number in indices
            )
        curve[world] = max(loads) * world / sum(loads)
    return curve


def random_model(scratch: Path, vocabulary: int) -> Path:
    from transformers import AutoModelForCausalLM

    from tests.benchmarks.workload import qwen_config

    folder = scratch / f"model-{vocabulary}"
    if not folder.exists():
        config = qwen_config("tiny")
        config.vocab_size = vocabulary
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _pair(rng: random.Random, number: int, tokens: int) -> Pair:
    prompt, chosen, rejected = (rng.choices(range(1, 1000), k=size) for size in (tokens // 2, tokens // 4, tokens // 4))
    return Pair(str(number), prompt, chosen, rejected, [1] * len(chosen), [1] * len(rejected))


def _curves(results: Mapping[int, tuple[float, float]]) -> tuple[Curve, Curve]:
    """Training and reference pass."""
    return {x: result[0] for x, result in results.items()}, {x: result[1] for x, result in results.items()}


def _measure(scratch: Path, model: Path, pairs: list[Pair], batch: int, row_tokens: int) -> tuple[float, float]:
    path = write_pairs(pairs, scratch / "pairs.pickle")
    job = Job("ours", str(model), str(path), batch, 1, 3, row_tokens, 0, logging_steps=1, threads=1)
    result = run(job, 600)
    if "error" in result:
        raise SystemExit(f"error: {result['error']}")
    return 1 / result["pairs_per_cpu_second"], 1 / result["reference_pairs_per_cpu_second"]


def slope(curve: Curve) -> float:
    (x1, y1), (x2, y2) = list(curve.items())[-2:]
    return math.log(y2 / y1) / math.log(x2 / x1)


def draw(panels: Mapping[tuple[str, str], Mapping[str, Curve]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "dpo", "font.size": 9}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, ((x_label, y_label), curves) in zip(axes.flat, panels.items(), strict=True):
        for name, curve in curves.items():
            axis.loglog(list(curve), list(curve.values()), marker="o", label=f"{name} (slope {slope(curve):.2f})")
        axis.set(xlabel=x_label, ylabel=y_label)
        axis.margins(y=0.3)  # for the legend
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, loc="upper left")
    axes.flat[-1].set(yscale="linear", ylim=(0, 1.5))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    picture = parser.parse_args().picture
    panels: dict[tuple[str, str], dict[str, Curve]] = {}
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        scratch = Path(folder)
        panels["ranks", "tokens of the busiest rank / mean"] = {"global batch of 512 pairs": by_ranks()}
        _print(panels)
        panels["vocabulary", "CPU s per pair"] = dict(
            zip(("training step", "reference pass"), by_vocabulary(scratch), strict=True)
        )
        _print(panels)
        panels["tokens per pair", "CPU s per pair"] = dict(
            zip(("training step", "reference pass"), by_tokens(scratch), strict=True)
        )
        _print(panels)
        tiny.make(scratch / "demo", _texts(), seed=0, steps=5)
        start, step = by_pairs(scratch)
        panels["pairs", "CPU s"] = {
            "stage prepare": by_rows(scratch / "demo", scratch),
            "start of a training rank": start,
            "batch of a step": step,
        }
        _print(panels)
    draw(dict(reversed(panels.items())), picture)


def _texts() -> list[Any]:
    from tasks.artifacts import demo

    return list(demo.conversations(0)[:300])


def _print(panels: Mapping[tuple[str, str], Mapping[str, Curve]]) -> None:
    """The newest panel as a table."""
    (x_label, y_label), curves = list(panels.items())[-1]
    xs: Iterable[int] = sorted({x for curve in curves.values() for x in curve})
    rows = [[f"{x:,}", *(curve.get(x) for curve in curves.values())] for x in xs]
    rows.append(["slope", *(slope(curve) for curve in curves.values())])
    print(f"\n{y_label}\n" + markdown([x_label, *curves], rows), flush=True)


if __name__ == "__main__":
    main()
