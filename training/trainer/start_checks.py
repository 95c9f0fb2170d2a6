"""Checks before the first update: the policy is deterministic and equals the reference, and the first loss is right."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from training.models.loading import dropout_attributes
from training.objectives.metrics import pair_logps
from training.objectives.objective import Objective
from training.objectives.pair_logps import PairLogps
from training.pairs.packing import PackedRow, build_row
from training.pairs.pair import Pair
from training.pairs.pair_columns import longest, shortest
from training.scoring.logps import Scorer, logp_tolerance, row_logps
from training.scoring.parity import shorten
from training.trainer.settings import ReferenceMismatch

# Tolerance of the first loss and rewards, at least.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float64: 1e-6}


def check_determinism(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> None:
    """ValueError if two training-mode passes differ because of random draws, for example dropout.

    The policy must be the same function as the reference at every step. A third pass repeats the first one's seed: it
    shows the noise of kernels without a fixed order of summation. A collective under ZeRO-3.
    """
    model, training = scorer.model, scorer.model.training
    row = build_row([shorten(shortest(pairs)), shorten(longest(pairs))], (0, 1)).to(device)
    model.train()
    first, same_seed, other_seed = (_seeded_logps(scorer, row, seed, device) for seed in (0, 0, 1))
    model.train(training)
    noise, change = ((first - values).abs().mean().item() for values in (same_seed, other_seed))
    if change > 4 * noise:
        active = sorted({f"{type(m).__name__}.{name}" for m in model.modules() for name in dropout_attributes(m)})
        where = f"; still set: {', '.join(active[:5])}" if active else ""
        raise ValueError(
            f"dropout is still active in {type(scorer.causal).__name__}: two training-mode passes over the same pairs "
            f"differ by {change:.2g} nats a token{where}. DPO needs a policy without randomness: set every dropout and "
            "jitter probability in the model's config.json to 0"
        )


@torch.no_grad()
def _seeded_logps(scorer: Scorer, row: PackedRow, seed: int, device: torch.device) -> Tensor:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return row_logps(scorer, row).logps


@torch.no_grad()
def check_start(
    policy: Any,  # a Scorer, or the DeepSpeed engine around one
    objective: Objective,
    pairs: Sequence[Pair],
    row_tokens: int,
    device: torch.device,
    gradients: bool = False,
) -> dict[str, float]:
    """Check that the policy equals the reference before the first update; returns the largest differences.

    On a sample of pairs, every token must be within rounding of the stored reference, rewards must be near 0, and each
    loss must have its expected first value (ln 2 for sigmoid). An adapter's dropout is off. A collective under ZeRO-3.
    In training mode and with `gradients`, compiled layers take the graph of the first step instead of one more.
    """
    sample = _sample_pairs(pairs, 8, row_tokens)
    row = build_row(sample, range(len(sample))).to(device)
    with _without_dropout(policy), torch.set_grad_enabled(gradients):
        values = row_logps(policy, row)
    tokens = replace(values, logps=values.logps.detach(), balance_loss=None)
    logps = pair_logps(row, tokens, objective)
    beta = float(objective.options.get("beta", 1.0))
    token = (tokens.logps - row.ref_logps).abs().max().item()
    reward = beta * torch.cat([logps.chosen_ratio, logps.rejected_ratio]).abs().mean().item()
    dtype, rounding = next(policy.parameters()).dtype, logp_tolerance(policy, policy.noise)
    # Rounding goes up as often as down, so that its sum over a response grows with the square root of the tokens.
    random_walk = rounding * math.sqrt(len(row.response_index) / (2 * len(sample)))
    tolerance = max(TOLERANCE[dtype], beta * random_walk)
    if not (reward <= tolerance and _within_rounding(tokens.logps, row.ref_logps, rounding)):
        raise ReferenceMismatch(
            f"the stored reference log-probabilities differ by up to {token:.3g} from those of the model that is about "
            f"to be trained, and its first rewards by {reward:.3g} from 0 (pairs "
            f"{', '.join(pair.id for pair in sample)}): another base model, template or precision made them"
        )
    loss = _check_first_loss(objective, logps, sample, tolerance / beta, TOLERANCE[dtype])
    return {"token": token, "reward": reward, "loss": loss}


@contextmanager
def _without_dropout(policy: nn.Module) -> Iterator[None]:
    active = [module for module in policy.modules() if isinstance(module, _DropoutNd) and module.p and module.training]
    for module in active:
        module.eval()
    yield
    for module in active:
        module.train()


def _within_rounding(logps: Tensor, expected: Tensor, rounding: float) -> bool:
    if not torch.isfinite(logps).all():
        return False
    difference = (logps - expected).abs()
    return difference.mean().item() <= rounding and difference.max().item() <= 20 * rounding


def _check_first_loss(
    objective: Objective, logps: PairLogps, sample: Sequence[Pair], rounding: float, tolerance: float
) -> float:
    """The largest distance of a loss from its theoretical first value; ValueError if rounding cannot explain it.

    Losses differ in slope: 1 / beta for IPO, beta / 2 for sigmoid. So the effect of `rounding` nats in each log-ratio
    is measured by shifting the ratios.
    """
    losses, largest = objective.components(logps), 0.0
    at_start = replace(logps, ref_chosen_logps=logps.chosen_logps, ref_rejected_logps=logps.rejected_logps)
    start_losses = objective.components(at_start)
    shifted = [
        replace(at_start, ref_chosen_logps=logps.chosen_logps + shift, ref_rejected_logps=logps.rejected_logps - shift)
        for shift in (rounding, -rounding)
    ]
    for name, expected in objective.losses_at_reference(sample).items():
        slack = max((objective.components(moved)[name] - start_losses[name]).abs().mean().item() for moved in shifted)
        first = losses[name].mean().item()
        allowed = max(tolerance, 0.0 if math.isnan(slack) else slack)
        if not math.isclose(first, expected, rel_tol=1e-6, abs_tol=allowed):
            raise ValueError(
                f"the first loss `{name}` is {first:.6g} on pairs {', '.join(pair.id for pair in sample)}, but theory "
                f"gives {expected:.6g} for a policy that equals its reference, with the margins and labels that "
                "train.* sets. Either the data's margins or labels enter the loss although train.* does not use them, "
                "or the loss in training/objectives/losses/ is wrong"
            )
        largest = max(largest, 0.0 if first == expected else abs(first - expected))
    return largest


def _sample_pairs(pairs: Sequence[Pair], count: int, row_tokens: int) -> list[Pair]:
    """Up to `count` pairs, spread over the set, that fit into one row; at least the shortest pair."""
    sample: list[Pair] = []
    for pair in pairs[:: max(1, len(pairs) // (4 * count))]:
        if len(sample) < count and sum(map(len, sample)) + len(pair) <= row_tokens:
            sample.append(pair)
    return sample or [shortest(pairs)]
