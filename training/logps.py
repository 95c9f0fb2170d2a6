"""Log-probabilities of response tokens: of packed rows by one pass each, or plainly, one response at a time."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training.attention import can_flash, row_inputs
from training.batches import rank_rows
from training.head import Shaping, gather, head_logps
from training.packing import Ints, Pair, Row, build_row

# Of a token, in the mean.
ROUNDING = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 2e-7}
AT_ONCE = 512  # pairs that are packed into rows together
Scores = tuple[list[float], list[float]]  # log-probabilities of a pair's chosen and rejected tokens


@dataclass(frozen=True)
class TokenLogps:
    logps: Tensor  # (response tokens,) float32, with gradient
    entropy: Tensor  # (response tokens,) of the predicting distribution, no gradient
    collision: Tensor  # (response tokens,) log sum_v p_v^2 of the predicting distribution, no gradient
    balance: Tensor | None = None  # () load-balancing loss of the row's tokens, in passes with gradients


class Scorer(nn.Module):
    """A causal language model that scores packed rows. It holds the head too, so that ZeRO-3 can gather it.

    `how` is the fastest path that gives this model's own numbers, which `training.proof` finds out:
    `fused` packs rows and fuses the head; `packed` packs rows and leaves the head to the model; `padded` computes each
    response after its own prompt, in right-padded batches with a fused head, for layers that ignore a row's
    boundaries; `plain` computes one response at a time with the model's own head.
    """

    def __init__(self, model: nn.Module, how: str = "fused") -> None:
        super().__init__()
        self.model, self.how = model, how
        self.whole_head = True  # False where ZeRO-3 shards it
        self.balance: Any = None  # a training.routers.LoadBalance, where its loss is wanted

    @property
    def packs(self) -> bool:
        return self.how in ("fused", "packed")

    @property
    def causal(self) -> Any:
        """The transformers model under an adapter, if there is one."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def forward(self, row: Row) -> tuple[Tensor, ...]:
        if self.packs:
            values = self._fused(row) if self.how == "fused" else self._packed(row)
            logps, entropy, collision = (value[row.copies] for value in values)
        else:
            logps, entropy, collision = self._by_sequence(row)
        if self.balance is None or not torch.is_grad_enabled():
            return logps, entropy, collision
        return logps, entropy, collision, self.balance.loss()

    def _fused(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        return self._head(self.causal.base_model(**self._inputs(row)).last_hidden_state[0, row.predict], row.targets)

    def _packed(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        return gather(_wide(self.model(**self._inputs(row), logits_to_keep=row.predict).logits[0]), row.targets)

    def _by_sequence(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        """Every response as a sequence of its own. A causal layer never sees the padding that follows a sequence."""
        sequences = [row.input_ids[keys] for keys in row.keys.tensor_split(row.key_ends[1:-1].tolist())]
        responded = row.response.bincount().tolist()
        # One pass a row under ZeRO-3, where each is a collective of ranks whose rows differ.
        room = 0 if self.how == "plain" else len(row.input_ids) if self.whole_head else row.longest * len(sequences)
        parts: dict[int, tuple[Tensor, ...]] = {}
        for batch in length_batches(list(map(len, sequences)), room):
            scored = self._score([sequences[n] for n in batch], [responded[n] for n in batch])
            parts |= dict(zip(batch, scored, strict=True))
        columns = zip(*(parts[n] for n in sorted(parts)), strict=True)
        logps, entropy, collision = (torch.cat(column) for column in columns)
        return logps, entropy, collision

    def _score(self, sequences: Sequence[Tensor], responded: Sequence[int]) -> list[tuple[Tensor, ...]]:
        ids = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        places = [torch.arange(len(s) - n - 1, len(s) - 1) for s, n in zip(sequences, responded, strict=True)]
        at = (torch.arange(len(sequences)).repeat_interleave(torch.tensor(responded)), torch.cat(places))
        targets = torch.cat([s[-n:] for s, n in zip(sequences, responded, strict=True)])
        if self.balance:
            self.balance.real = torch.arange(ids.shape[1]) < torch.tensor(list(map(len, sequences)))[:, None]
        if self.how == "padded":
            hidden = self.causal.base_model(input_ids=ids, use_cache=False).last_hidden_state[at]
            values = self._head(hidden, targets)
        else:
            values = _plain(self.model, ids, responded[0])  # one sequence at a time
        return list(zip(*(value.split(list(responded)) for value in values), strict=True))

    def _head(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        head = self.causal.get_output_embeddings()
        return head_logps(head, hidden, targets, Shaping.of(self.causal.config), fused=self.whole_head)

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
    # Without it the logits of a long prompt alone take more memory than training: 10 GiB for 36,000 tokens.
    keep = {"logits_to_keep": responded + 1} if _keeps(model) else {}
    logits = model(input_ids=ids, use_cache=False, **keep).logits[0, -responded - 1 : -1]
    return gather(_wide(logits), ids[0, -responded:])


def _keeps(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(Scorer(model).causal.forward).parameters


def length_batches(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Sequences by batch, longest first; padded to its longest, no batch of several exceeds `room` tokens."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= room:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def score_pairs(scorer: nn.Module, pairs: Sequence[Pair], row_tokens: int, device: torch.device) -> list[Scores]:
    """Log-probabilities of each pair's chosen and rejected tokens, in the order of the pairs."""
    scores = score_share(scorer, pairs, row_tokens, device, rank=0, world=1)
    return [scores[number] for number in range(len(pairs))]


@torch.no_grad()
def score_share(
    scorer: nn.Module, pairs: Sequence[Pair], row_tokens: int, device: torch.device, *, rank: int, world: int
) -> dict[int, Scores]:
    """Those of a rank's share of the pairs, by their number. Every rank makes as many passes: they are collectives."""
    scores: dict[int, Scores] = {}
    lengths = [len(pair) for pair in pairs]
    for start in range(0, len(pairs), AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, len(pairs)))
        dealt = rank_rows(numbers, lengths, lengths, row_tokens, rank, world)
        rows = [build_row(pairs, members) for members, _ in dealt]
        computed = [row_logps(scorer, row.to(device)).logps for row in rows]
        for row, values, (_, counts) in zip(rows, computed, dealt, strict=True):
            if counts:
                _hand_out(row, pairs, values.tolist(), scores)
    return scores


def _hand_out(row: Row, pairs: Sequence[Pair], values: list[float], scores: dict[int, Scores]) -> None:
    for number in row.pairs:
        chosen, rejected = len(pairs[number].chosen), len(pairs[number].rejected)
        scores[number] = (values[:chosen], values[chosen : chosen + rejected])
        values = values[chosen + rejected :]
