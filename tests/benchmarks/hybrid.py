"""Our scoring paths of a hybrid model beside each other on a CPU: CPU seconds of a pair, forward and backward.

    make bench BENCH=hybrid ARGS="--shape qwen3-next-tiny --lengths hh"

`fused` computes packed rows, in which both responses continue from the state after their prompt; `padded` computes each
response after its own prompt in padded batches, as before; `plain` does so one at a time. Rounds alternate.
`python -m tests.benchmarks.gpu --shape qwen3-next-tiny` compares whole training steps with TRL's.
"""

import argparse
import time
from statistics import median

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.benchmarks.table import markdown
from tests.benchmarks.workload import HYBRID_SHAPES, LENGTHS, hybrid_config, make_pairs
from tests.support.scoring import make_scorer
from training.models.recurrent_layers import recurrent_layers
from training.pairs.batches import rank_rows_of_all
from training.pairs.packing import PackedRow, build_row
from training.pairs.pair_columns import columns_of
from training.scoring.attention import PACKED_ATTENTION
from training.scoring.logps import Scorer, row_logps

PATHS = ("fused", "padded", "plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-next-tiny", choices=list(HYBRID_SHAPES))
    parser.add_argument("--lengths", default="hh", choices=list(LENGTHS))
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = hybrid_config(args.shape)
    pairs = make_pairs(args.lengths, args.pairs, config.vocab_size)
    scorer = make_scorer(AutoModelForCausalLM.from_config(config), pairs, torch.device("cpu"))
    groups = rank_rows_of_all(columns_of(pairs).lengths, args.row_tokens, 0, 1)
    rows = [build_row(pairs, indices) for group in groups for indices, _ in group]
    seconds: dict[str, list[float]] = {path: [] for path in PATHS}
    tokens = {}
    for _ in range(args.rounds + 1):
        for path in PATHS:
            tokens[path] = _run(scorer, path, rows, seconds[path])
    medians = {path: median(values[1:]) / len(pairs) for path, values in seconds.items()}  # the first warms up
    lines = [[path, tokens[path] / len(pairs), medians[path], medians[path] / medians["fused"]] for path in PATHS]
    print(
        markdown(["path", "tokens of a recurrent layer per pair, with padding", "CPU s per pair", "times fused"], lines)
    )


def _run(scorer: Scorer, path: str, rows: list[PackedRow], seconds: list[float]) -> int:
    """The tokens that the first recurrent layer computes, padding included."""
    scorer.path, computed = path, 0
    scorer.causal.set_attn_implementation(PACKED_ATTENTION if scorer.is_packed else "sdpa")

    def count(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal computed
        computed += inputs[0].shape[:-1].numel()

    projection = next(child for child in recurrent_layers(scorer)[0].children() if isinstance(child, nn.Linear))
    hook = projection.register_forward_pre_hook(count)
    begun = time.process_time()
    for row in rows:
        row_logps(scorer, row).logps.sum().backward()
    seconds.append(time.process_time() - begun)
    hook.remove()
    scorer.zero_grad()
    return computed


if __name__ == "__main__":
    main()
