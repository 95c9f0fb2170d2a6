"""Log-probabilities of response tokens: of packed rows by one pass each, or plainly, one response at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training.attention import can_flash, row_inputs
from training.head import Shaping, gather, head_logps
from training.packing import Ints, Pair, Row, build_row, pack

ROUNDING = {torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float64: 2e-7}  # of a token, in the mean
AT_ONCE = 512  # pairs that are packed into rows together


@dataclass(frozen=True)
class TokenLogps:
    logps: Tensor  # (response tokens,) float32, with gradient
    entropy: Tensor  # (response tokens,) of the predicting distribution, no gradient
    collision: Tensor  # (response tokens,) log sum_v p_v^2 of the predicting distribution, no gradient


class Scorer(nn.Module):
    """A causal language model that scores packed rows. It holds the head too, so that ZeRO-3 can gather it.

    `how` is the fastest way that gives this model's own numbers, which `training.proof` finds out:
    `fused` packs and fuses the head; `packed` leaves the head to the model; `plain` computes each response alone.
    """

    def __init__(self, model: nn.Module, how: str = "fused") -> None:
        super().__init__()
        self.model, self.how = model, how
        self.whole_head = True  # False where ZeRO-3 shards it

    @property
    def causal(self) -> Any:
        """The transformers model under an adapter, if there is one."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def forward(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        if self.how == "plain":
            return _one_by_one(self.model, row)
        logps, entropy, collision = self._fused(row) if self.how == "fused" else self._packed(row)
        return logps[row.copies], entropy[row.copies], collision[row.copies]

    def _fused(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.causal.base_model(**self._inputs(row)).last_hidden_state[0, row.predict]
        head = self.causal.get_output_embeddings()
        return head_logps(head, hidden, row.targets, Shaping.of(self.causal.config), fused=self.whole_head)

    def _packed(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        return gather(_wide(self.model(**self._inputs(row), logits_to_keep=row.predict).logits[0]), row.targets)

    def _inputs(self, row: Row) -> dict[str, Any]:
        config = self.causal.config.get_text_config()
        flash = can_flash(row.input_ids.device, self.causal.dtype, getattr(config, "attn_logit_softcapping", None))
        inputs = {"input_ids": row.input_ids[None], "position_ids": row.position_ids[None], "use_cache": False}
        return {**inputs, **row_inputs(row, flash)}


def row_logps(scorer: nn.Module, row: Row) -> TokenLogps:
    """By a Scorer, or by the engine around one."""
    return TokenLogps(*scorer(row))


def plain_logps(model: nn.Module, prompt: Ints, response: Ints, device: torch.device) -> Tensor:
    """By one ordinary, unpacked forward pass: what packed rows are checked against."""
    ids = torch.tensor([[*prompt, *response]], device=device)
    return _plain(model, ids, len(response))[0]


def _plain(model: nn.Module, ids: Tensor, responded: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = model(input_ids=ids, use_cache=False).logits[0, -responded - 1 : -1]
    return gather(_wide(logits), ids[0, -responded:])


def _one_by_one(model: nn.Module, row: Row) -> tuple[Tensor, Tensor, Tensor]:
    parts = []
    ends = row.key_ends.tolist()
    answered = row.response.bincount().tolist()
    for number, responded in enumerate(answered):
        parts.append(_plain(model, row.input_ids[row.keys[ends[number] : ends[number + 1]]][None], responded))
    logps, entropy, collision = (torch.cat(column) for column in zip(*parts, strict=True))
    return logps, entropy, collision


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


@torch.no_grad()
def score_pairs(
    scorer: nn.Module, pairs: Sequence[Pair], row_tokens: int, device: torch.device
) -> list[tuple[list[float], list[float]]]:
    """Log-probabilities of each pair's chosen and rejected tokens, in the order of the pairs."""
    scores: list[tuple[list[float], list[float]]] = [([], [])] * len(pairs)
    for start in range(0, len(pairs), AT_ONCE):
        lengths = [len(pair) for pair in pairs[start : start + AT_ONCE]]
        rows = [build_row(pairs, [start + i for i in row]) for row in pack(lengths, lengths, row_tokens)]
        computed = [row_logps(scorer, row.to(device)).logps for row in rows]
        for row, values in zip(rows, computed, strict=True):
            _hand_out(row, pairs, values.tolist(), scores)
    return scores


def _hand_out(row: Row, pairs: Sequence[Pair], values: list[float], scores: list[Any]) -> None:
    for number in row.pairs:
        chosen, rejected = len(pairs[number].chosen), len(pairs[number].rejected)
        scores[number] = (values[:chosen], values[chosen : chosen + rejected])
        values = values[chosen + rejected :]
