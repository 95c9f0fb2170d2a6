"""Log-probabilities of response tokens, from packed rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.attention import row_mask
from training.packing import Pair, Row, build_row, pack

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float64: 1e-6}


@dataclass(frozen=True)
class TokenLogps:
    logps: Tensor  # (targets,) float32, with gradient
    entropy: Tensor  # (targets,) of the predicting distribution, no gradient


def row_logps(model: nn.Module, row: Row) -> TokenLogps:
    """One forward pass over a packed row; only predicting positions reach the vocabulary."""
    output = model(
        input_ids=row.input_ids[None],
        position_ids=row.position_ids[None],
        attention_mask=row_mask(row),
        logits_to_keep=row.predict,
        use_cache=False,
    )
    logits = output.logits[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return _gather(logits, row.targets)


def _gather(logits: Tensor, targets: Tensor) -> TokenLogps:
    log_normaliser = logits.logsumexp(-1)
    logps = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normaliser
    with torch.no_grad():
        probabilities = (logits - log_normaliser[:, None]).exp()
        entropy = log_normaliser - (probabilities * logits).sum(-1)
    return TokenLogps(logps, entropy)


def plain_logps(model: nn.Module, prompt: Sequence[int], response: Sequence[int], device: torch.device) -> Tensor:
    """The same by one ordinary, unpacked forward pass: what the packed rows are checked against."""
    ids = torch.tensor([[*prompt, *response]], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return _gather(logits, ids[0, len(prompt) :]).logps


@torch.no_grad()
def check_packing(model: nn.Module, pairs: list[Pair], dtype: torch.dtype, device: torch.device) -> float:
    """Compare a packed row with plain passes; the largest difference, or ValueError where packing is not exact.

    An architecture whose attention ignores the mask (recurrent layers, say) must never train on wrong numbers.
    """
    row = build_row(pairs, range(len(pairs))).to(device)
    packed = row_logps(model, row).logps
    plain = torch.cat(
        [
            plain_logps(model, pair.prompt, response, device)
            for pair in pairs
            for response in (pair.chosen, pair.rejected)
        ]
    )
    difference = (packed - plain).abs().max().item()
    if not difference <= TOLERANCE[dtype]:
        raise ValueError(
            f"{type(model).__name__} does not give the same log-probabilities in packed rows as alone (they differ by "
            f"{difference:.3g}, at most {TOLERANCE[dtype]} is rounding): its attention does not follow the row's mask"
        )
    return difference


@torch.no_grad()
def score_pairs(
    model: nn.Module, pairs: Sequence[Pair], row_tokens: int, device: torch.device
) -> list[tuple[list[float], list[float]]]:
    """Log-probabilities of each pair's chosen and rejected tokens, in the order of the pairs."""
    scores: list[tuple[list[float], list[float]]] = [([], [])] * len(pairs)
    for members in pack([len(pair) for pair in pairs], row_tokens):
        row = build_row(pairs, members).to(device)
        values = row_logps(model, row).logps.tolist()
        for number in members:
            chosen, rejected = len(pairs[number].chosen), len(pairs[number].rejected)
            scores[number] = (values[:chosen], values[chosen : chosen + rejected])
            values = values[chosen + rejected :]
    return scores
