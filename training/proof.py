"""What a run proves before it spends hours: that rows give the model's own numbers, and that the policy starts as the
reference."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from training.attention import use_rows
from training.logps import ROUNDING, Scorer, plain_logps, row_logps
from training.metrics import row_pairs
from training.objective import Objective
from training.packing import Pair, build_row
from training.settings import Mismatch

START = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float64: 1e-6}  # of the first loss and rewards, at least
_SLOWER = {
    "fused": "",
    "packed": "its vocabulary head is not fused, so each row's logits are kept whole",
    "plain": "each response is computed alone, the prompt twice: its layers do not follow a packed row's mask",
}


def make_scorer(model: nn.Module, pairs: Sequence[Pair], device: torch.device) -> Scorer:
    """A scorer in the fastest way that gives the model's own numbers; a slower one is said."""
    scorer = Scorer(model)
    note = find_way(scorer, pairs, device)
    if note:
        print(f"note: {note}", file=sys.stderr)
    return scorer


@contextmanager
def scoring(model: nn.Module, pairs: Sequence[Pair], device: torch.device) -> Iterator[Scorer]:
    """A scorer for a while: afterwards the model is as it was, ready to generate."""
    causal = Scorer(model).causal
    own, training = causal.config._attn_implementation, model.training
    try:
        yield make_scorer(model.eval(), pairs, device)
    finally:
        causal.set_attn_implementation(own)
        model.train(training)


def find_way(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> str | None:
    """Set the fastest way that gives the model's own numbers on a sample; what is slow about it, if it is.

    An architecture whose layers ignore the mask (recurrent ones, say) must never train on wrong numbers. The passes
    are collectives under ZeRO-3.
    """
    model = scorer.model
    causal, sample = scorer.causal, [min(pairs, key=len), max(pairs, key=len)]  # the longest may pass a window
    own = causal.config._attn_implementation
    training = model.training
    model.eval()
    expected = _plainly(model, sample, device)
    for scorer.how in ("fused", "packed"):
        if same(_packed(scorer, sample, device), expected, causal.dtype):
            break
    else:
        scorer.how = "plain"
        causal.set_attn_implementation(own)
    model.train(training)
    slow = _SLOWER[scorer.how]
    return f"{type(causal).__name__} is computed the slower way: {slow}" if slow else None


@torch.no_grad()
def _plainly(model: nn.Module, pairs: Sequence[Pair], device: torch.device) -> Tensor:
    responses = [(pair.prompt, response) for pair in pairs for response in (pair.chosen, pair.rejected)]
    return torch.cat([plain_logps(model, prompt, response, device) for prompt, response in responses])


@torch.no_grad()
def _packed(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> Tensor | None:
    """None where the model cannot do it this way at all."""
    try:
        use_rows(scorer.causal)
        return row_logps(scorer, build_row(pairs, range(len(pairs))).to(device)).logps
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError):
        return None


def same(given: Tensor | None, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether log-probabilities differ by no more than rounding does, in the mean and at the most."""
    if given is None or not torch.isfinite(given).all():
        return False
    difference = (given - expected).abs()
    return difference.mean().item() <= ROUNDING[dtype] and difference.max().item() <= 20 * ROUNDING[dtype]


@torch.no_grad()
def prove_start(
    policy: nn.Module, objective: Objective, pairs: Sequence[Pair], row_tokens: int, device: torch.device
) -> dict[str, float]:
    """Before the first update the policy is the reference: the stored values must be those computed live.

    On a sample: every token within rounding, rewards near 0 and the sigmoid loss near ln 2. A collective under ZeRO-3.
    """
    sample = spread(pairs, 8, row_tokens)
    row = build_row(sample, range(len(sample))).to(device)
    tokens = row_logps(policy, row)
    given = row_pairs(row, tokens, objective)
    beta = float(objective.options.get("beta", 1.0))
    margin = beta * (given.chosen_ratio - given.rejected_ratio)
    found = {
        "token": (tokens.logps - row.reference).abs().max().item(),
        "reward": beta * torch.cat([given.chosen_ratio, given.rejected_ratio]).abs().mean().item(),
        "loss": abs(-logsigmoid(margin).mean().item() - math.log(2)),
    }
    dtype = next(policy.parameters()).dtype
    # Rounding is as often up as down, so that its sum over a response grows with the root of the tokens.
    walk = ROUNDING[dtype] * math.sqrt(len(row.response) / (2 * len(sample)))
    near = max(found["reward"], found["loss"]) <= max(START[dtype], beta * walk)
    if not (near and same(tokens.logps, row.reference, dtype)):
        raise Mismatch(
            f"the stored reference log-probabilities differ by up to {found['token']:.3g} from those of the model that "
            f"is about to be trained, and its first rewards by {found['reward']:.3g} from 0 (pairs "
            f"{', '.join(pair.id for pair in sample)}): another base model, template or precision made them"
        )
    return found


def spread(pairs: Sequence[Pair], count: int, row_tokens: int) -> list[Pair]:
    """Some pairs from all over the set that fit into a row together; at least the shortest of all."""
    chosen: list[Pair] = []
    for pair in pairs[:: max(1, len(pairs) // (4 * count))]:
        if len(chosen) < count and sum(map(len, chosen)) + len(pair) <= row_tokens:
            chosen.append(pair)
    return chosen or [min(pairs, key=len)]
