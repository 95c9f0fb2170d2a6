"""What a run proves before it spends hours: that rows give the model's own numbers, and that the policy starts as the
reference."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from training.attention import NAME as ROWS
from training.logps import ROUNDING, Scorer, plain_logps, row_logps
from training.losses import Pairs
from training.metrics import row_pairs
from training.model import probabilities
from training.objective import Objective
from training.packing import CHOSEN, REJECTED, Pair, Row, build_row
from training.settings import Mismatch

# Of the first loss and rewards, at least.
START = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float64: 1e-6}
PROBE = 32  # tokens of each part of a pair in the checks that need a backward pass
_SLOWER = {
    "fused": "",
    "packed": "the model's own vocabulary head is used, which keeps each row's logits",
    "padded": "each response is computed after its own prompt in padded batches",
    "plain": "each response is computed alone, with the model's own vocabulary head",
}


def _to_stderr(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def make_scorer(
    model: nn.Module, pairs: Sequence[Pair], device: torch.device, say: Callable[[str], None] = _to_stderr
) -> Scorer:
    """A scorer (of a model, or one that is there) in the fastest way that gives the model's own numbers.

    A slower one is said.
    """
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    if note := find_way(scorer, pairs, device):
        say(note)
    return scorer


@contextmanager
def scoring(
    model: nn.Module, pairs: Sequence[Pair], device: torch.device, say: Callable[[str], None] = _to_stderr
) -> Iterator[Scorer]:
    """A scorer for a while: afterwards the model is as it was, ready to generate."""
    causal = (model if isinstance(model, Scorer) else Scorer(model)).causal
    own, training = causal.config._attn_implementation, model.training
    try:
        yield make_scorer(model.eval(), pairs, device, say)
    finally:
        causal.set_attn_implementation(own)
        model.train(training)


def find_way(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> str | None:
    """Set the fastest path that gives the model's own numbers; a sentence about it where it is a slower one.

    A packed path must not let a response depend on its neighbours in the row, nor on its place there. Recurrent and
    linear-attention layers carry their state across the boundaries of a row: such a model must never train on it. The
    passes are collectives under ZeRO-3.
    """
    model, causal = scorer.model, scorer.causal
    sample = [min(pairs, key=len), max(pairs, key=len)]  # the longest may pass a window
    own, training = causal.config._attn_implementation, model.training
    model.eval()
    expected = _plainly(model, sample, device)
    why = []
    for scorer.how in ("fused", "packed", "padded"):
        causal.set_attn_implementation(own if scorer.how == "padded" else ROWS)
        failure = _failure(scorer, sample, expected, pairs[len(pairs) // 2], device)
        if failure is None:
            break
        why.append(failure)
    else:
        scorer.how = "plain"
        causal.set_attn_implementation(own)
    model.train(training)
    slow = _SLOWER[scorer.how]
    return f"{type(causal).__name__} takes a slower path: {slow} ({'; '.join(dict.fromkeys(why))})" if slow else None


def _failure(
    scorer: Scorer, sample: Sequence[Pair], expected: Tensor, middle: Pair, device: torch.device
) -> str | None:
    """Why the scorer's path does not give the model's own numbers; None where it does."""
    probes, rounding = [_cut(pair) for pair in (sample[0], middle, sample[1])], ROUNDING[scorer.causal.dtype]
    try:
        if scorer.packs and depends_on_neighbours(scorer, probes, device):
            return "a response depends on its neighbours in the row"
        if scorer.packs and not place_difference(scorer, probes, device) <= rounding:  # NaN is no agreement
            return "a response depends on its place in the row"
        with torch.no_grad():
            values = row_logps(scorer, build_row(sample, range(len(sample))).to(device)).logps
        # The mean alone: a router that rounding tips to another expert moves single tokens far.
        if not (values - expected).abs().mean().item() <= rounding:
            return f"log-probabilities differ by up to {(values - expected).abs().max().item():.2g} from plain passes"
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, RuntimeError, LookupError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    return None


def _cut(pair: Pair) -> Pair:
    """The tokens around the place where the two responses part."""
    part = slice(start := max(0, pair.shared - PROBE // 2), start + PROBE)
    names = ("chosen", "rejected", "chosen_mask", "rejected_mask")
    parts = {name: getattr(pair, name)[part] for name in names}
    return replace(pair, prompt=pair.prompt[-PROBE:], ref_chosen=None, ref_rejected=None, **parts)


def depends_on_neighbours(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> bool:
    """Whether a response of the middle one of three pairs takes anything from tokens that it must not see.

    The gradient of its log-probabilities by the embeddings of those tokens is exactly 0, in any precision and on any
    device, unless something flows. A comparison of values would have to tell a leak from rounding.
    """
    row = build_row(pairs, range(len(pairs))).to(device)
    for response, hidden_part in ((2, REJECTED), (3, CHOSEN)):
        embedded: list[Tensor] = []

        def keep(_: nn.Module, __: object, output: Tensor, embedded: list[Tensor] = embedded) -> Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[-1]

        hook = scorer.causal.get_input_embeddings().register_forward_hook(keep)
        try:
            with torch.enable_grad():
                logps = row_logps(scorer, row).logps
                (gradient,) = torch.autograd.grad(logps[row.response == response].sum(), embedded[0])
        finally:
            hook.remove()
        if (gradient[0, (row.pair != 1) | (row.part == hidden_part)] != 0).any():
            return True
    return False


@torch.no_grad()
def place_difference(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> float:
    """Mean change of a pair's values at another place of the row, with its responses swapped."""
    first, middle, last = pairs
    swapped = replace(
        middle,
        chosen=middle.rejected,
        rejected=middle.chosen,
        chosen_mask=middle.rejected_mask,
        rejected_mask=middle.chosen_mask,
    )
    rows = [build_row(some, range(3)).to(device) for some in ([first, middle, last], [swapped, last, first])]
    before, after = (row_logps(scorer, row).logps for row in rows)
    (one, two), (two_moved, one_moved) = (
        [values[row.response == number] for number in numbers]
        for row, values, numbers in zip(rows, (before, after), ((2, 3), (0, 1)), strict=True)
    )
    return (torch.cat([one, two]) - torch.cat([one_moved, two_moved])).abs().mean().item()


def prove_determinism(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> None:
    """ValueError where two training-mode passes differ because something is drawn at random (dropout, say).

    The policy must be the same function as the reference at every step. A pass repeated with the same seed shows what
    kernels without a fixed order of summation add. A collective under ZeRO-3.
    """
    model, training = scorer.model, scorer.model.training
    row = build_row([_cut(min(pairs, key=len)), _cut(max(pairs, key=len))], (0, 1)).to(device)
    model.train()
    first, again, other = (_seeded(scorer, row, seed, device) for seed in (0, 0, 1))
    model.train(training)
    noise, drawn = ((first - values).abs().mean().item() for values in (again, other))
    if drawn > 4 * noise:
        named = sorted({f"{type(m).__name__}.{name}" for m in model.modules() for name in probabilities(m)})
        where = f"; still set: {', '.join(named[:5])}" if named else ""
        raise ValueError(
            f"dropout is still active in {type(scorer.causal).__name__}: two training-mode passes over the same pairs "
            f"differ by {drawn:.2g} nats a token{where}. DPO needs a policy without randomness: set every dropout and "
            "jitter probability in the model's config.json to 0"
        )


@torch.no_grad()
def _seeded(scorer: Scorer, row: Row, seed: int, device: torch.device) -> Tensor:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return row_logps(scorer, row).logps


@torch.no_grad()
def _plainly(model: nn.Module, pairs: Sequence[Pair], device: torch.device) -> Tensor:
    responses = [(pair.prompt, response) for pair in pairs for response in (pair.chosen, pair.rejected)]
    return torch.cat([plain_logps(model, prompt, response, device) for prompt, response in responses])


def same(given: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether log-probabilities differ by no more than rounding does, in the mean and at the most."""
    if not torch.isfinite(given).all():
        return False
    difference = (given - expected).abs()
    return difference.mean().item() <= ROUNDING[dtype] and difference.max().item() <= 20 * ROUNDING[dtype]


@torch.no_grad()
def prove_start(
    policy: nn.Module, objective: Objective, pairs: Sequence[Pair], row_tokens: int, device: torch.device
) -> dict[str, float]:
    """Before the first update the policy is the reference: the stored values must be those computed live.

    On a sample: every token within rounding, rewards near 0, and each loss at its start value (ln 2 for sigmoid, say).
    A collective under ZeRO-3.
    """
    sample = spread(pairs, 8, row_tokens)
    row = build_row(sample, range(len(sample))).to(device)
    tokens = row_logps(policy, row)
    given = row_pairs(row, tokens, objective)
    beta = float(objective.options.get("beta", 1.0))
    found = {
        "token": (tokens.logps - row.reference).abs().max().item(),
        "reward": beta * torch.cat([given.chosen_ratio, given.rejected_ratio]).abs().mean().item(),
    }
    dtype = next(policy.parameters()).dtype
    # Rounding is as often up as down, so that its sum over a response grows with the root of the tokens.
    walk = ROUNDING[dtype] * math.sqrt(len(row.response) / (2 * len(sample)))
    near = max(START[dtype], beta * walk)
    if not (found["reward"] <= near and same(tokens.logps, row.reference, dtype)):
        raise Mismatch(
            f"the stored reference log-probabilities differ by up to {found['token']:.3g} from those of the model that "
            f"is about to be trained, and its first rewards by {found['reward']:.3g} from 0 (pairs "
            f"{', '.join(pair.id for pair in sample)}): another base model, template or precision made them"
        )
    return {**found, "loss": _prove_first_loss(objective, given, sample, near / beta, START[dtype])}


def _prove_first_loss(
    objective: Objective, given: Pairs, sample: Sequence[Pair], rounding: float, least: float
) -> float:
    """How far the losses are from the values that theory gives; ValueError where rounding of the ratios is not enough.

    What `rounding` nats in each ratio make of a loss is found by moving the ratios, since losses differ by how steep
    they are: 1 / beta for IPO, beta / 2 for sigmoid.
    """
    found, furthest = objective.components(given), 0.0
    exact = replace(given, ref_chosen=given.chosen, ref_rejected=given.rejected)
    still = objective.components(exact)
    moved = [
        replace(exact, ref_chosen=given.chosen + shift, ref_rejected=given.rejected - shift)
        for shift in (rounding, -rounding)
    ]
    for name, expected in objective.start_values(sample).items():
        slack = max((objective.components(one)[name] - still[name]).abs().mean().item() for one in moved)
        first = found[name].mean().item()
        if not math.isclose(first, expected, rel_tol=1e-6, abs_tol=max(least, 0.0 if math.isnan(slack) else slack)):
            raise ValueError(
                f"the first loss `{name}` is {first:.6g} on pairs {', '.join(pair.id for pair in sample)}; theory "
                f"gives {expected:.6g} for a policy that equals its reference, with the margins and labels that "
                "train.* asks for. Either a margin or label of the data that nobody asked for enters the loss, "
                "or the loss in training/losses.py is wrong"
            )
        furthest = max(furthest, 0.0 if first == expected else abs(first - expected))
    return furthest


def spread(pairs: Sequence[Pair], count: int, row_tokens: int) -> list[Pair]:
    """Some pairs from all over the set that fit into a row together; at least the shortest of all."""
    chosen: list[Pair] = []
    for pair in pairs[:: max(1, len(pairs) // (4 * count))]:
        if len(chosen) < count and sum(map(len, chosen)) + len(pair) <= row_tokens:
            chosen.append(pair)
    return chosen or [min(pairs, key=len)]
