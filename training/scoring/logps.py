"""Log-probabilities of response tokens: of packed rows in one pass, or of one response at a time."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training.distributed.sequence_parallel import SequenceGroup
from training.models.fp8 import Fp8Linear
from training.pairs.batches import rank_rows_of_all
from training.pairs.packing import PackedRow, build_row
from training.pairs.pair import Ints, Pair
from training.pairs.pair_columns import columns_of
from training.scoring.attention import attention_inputs, supports_flash
from training.scoring.head import LogitTransform, Values, head_logps, target_values
from training.scoring.recurrent import RowSegments

# Largest mean difference per token between two ways to compute the same log-probabilities.
LOGP_TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 2e-7}
# With 8-bit matrix products, a difference that bfloat16 rounds away moves values to the next of few steps. Also the
# limit for models in which rounding changes much: a wrong computation changes more.
FP8_TOLERANCE = 0.3
Scores = tuple[list[float], list[float]]  # log-probabilities of a pair's chosen and rejected tokens


@dataclass(frozen=True)
class TokenLogps:
    logps: Tensor  # (response tokens,) float32, with gradient
    entropy: Tensor  # (response tokens,) of the predicted distribution, without gradient
    collision: Tensor  # (response tokens,) log sum_v p_v^2 of the predicted distribution, without gradient
    balance_loss: Tensor | None = None  # () of the row's tokens, in passes with gradients


class Scorer(nn.Module):
    """A causal language model that scores packed rows, including its head, so that ZeRO-3 gathers the head's weights.

    `path` selects the computation. `training.scoring.parity` picks the first that gives the model's own values:
    - `fused`: packed rows and the fused head;
    - `packed`: packed rows and the model's own head;
    - `padded`: each response after its own prompt, in right-padded batches, and the fused head. For models with layers
      that ignore the boundaries in a row;
    - `plain`: one response at a time and the model's own head.
    """

    def __init__(self, model: nn.Module, path: str = "fused") -> None:
        super().__init__()
        self.model, self.path = model, path
        self.head_is_sharded = False  # by ZeRO-3
        self.sequence: SequenceGroup | None = None  # ranks that share the tokens of a row, on packed paths
        self.has_recurrent_layers = False  # which compute packed rows by segment
        self.noise = 0.0  # `rounding_noise`, where it was measured
        self.load_balance: Any = None  # a training.models.routers.LoadBalancingLoss, or None

    @property
    def is_packed(self) -> bool:
        return self.path in ("fused", "packed")

    @property
    def causal(self) -> Any:
        """The transformers model, without the adapter around it."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def forward(self, row: PackedRow) -> tuple[Tensor, ...]:
        if self.is_packed:
            logps, entropy, collision = (value[row.target_index] for value in self._target_values(row))
        else:
            logps, entropy, collision = self._by_sequence(row)
        if self.load_balance is None or not torch.is_grad_enabled():
            return logps, entropy, collision
        return logps, entropy, collision, self.load_balance.loss(len(row.input_ids), self.sequence)

    def _target_values(self, row: PackedRow) -> Values:
        score = self._fused if self.path == "fused" else self._packed
        group, positions, targets = self.sequence, row.predict_positions, row.target_ids
        if group is None:
            return score(row, positions, targets)
        own = group.own_index(positions)
        values = score(row, positions[own] // group.size, targets[own])
        logps, entropy, collision = group.collect(torch.stack(values, 1), own, len(targets)).unbind(1)
        return logps, entropy, collision

    def _fused(self, row: PackedRow, positions: Tensor, targets: Tensor) -> Values:
        return self._head(self.causal.base_model(**self._inputs(row)).last_hidden_state[0, positions], targets)

    def _packed(self, row: PackedRow, positions: Tensor, targets: Tensor) -> Values:
        return target_values(self.model(**self._inputs(row), logits_to_keep=positions).logits[0], targets)

    def _by_sequence(self, row: PackedRow) -> Values:
        """Each response as a sequence of its own. Padding follows a sequence, so no causal layer sees it."""
        sequences = [row.input_ids[keys] for keys in row.key_index.tensor_split(row.cu_seqlens_k[1:-1].tolist())]
        response_lengths = row.response_index.bincount().tolist()
        batch_tokens = 0 if self.path == "plain" else len(row.input_ids)
        if self.head_is_sharded and self.path == "padded":
            batch_tokens = row.max_length * len(sequences)  # one pass per row: under ZeRO-3 each is a collective
        parts: dict[int, tuple[Tensor, ...]] = {}
        for batch in length_batches(list(map(len, sequences)), batch_tokens):
            values = self._batch_values([sequences[n] for n in batch], [response_lengths[n] for n in batch])
            parts |= dict(zip(batch, values, strict=True))
        columns = zip(*(parts[n] for n in sorted(parts)), strict=True)
        logps, entropy, collision = (torch.cat(column) for column in columns)
        return logps, entropy, collision

    def _batch_values(self, sequences: list[Tensor], response_lengths: list[int]) -> list[tuple[Tensor, ...]]:
        """Log-probability, entropy and collision of each sequence's response tokens."""
        ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        lengths = list(map(len, sequences))
        if self.load_balance:
            self.load_balance.is_token = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
        if self.path == "padded":
            both = list(zip(lengths, response_lengths, strict=True))
            columns = torch.cat([torch.arange(length - response - 1, length - 1) for length, response in both])
            rows = torch.arange(len(sequences)).repeat_interleave(torch.tensor(response_lengths))
            hidden = self.causal.base_model(input_ids=ids, use_cache=False).last_hidden_state[rows, columns]
            values = self._head(hidden, ids[rows, columns + 1])
        else:
            values = _plain(self.model, ids, response_lengths[0])  # one sequence at a time
        return list(zip(*(value.split(response_lengths) for value in values), strict=True))

    def _head(self, hidden: Tensor, targets: Tensor) -> Values:
        head, transform = self.causal.get_output_embeddings(), LogitTransform.from_config(self.causal.config)
        return head_logps(head, hidden, targets, transform, fused=not self.head_is_sharded)

    def _inputs(self, row: PackedRow) -> dict[str, Any]:
        config = self.causal.config.get_text_config()
        flash = supports_flash(row.input_ids.device, self.causal.dtype, getattr(config, "attn_logit_softcapping", None))
        ids, positions, attention = row.input_ids, row.position_ids, attention_inputs(row, flash)
        if self.has_recurrent_layers:
            attention["row_segments"] = RowSegments(row)
        if self.sequence:
            attention |= {"row_group": self.sequence, "row_tokens": len(ids)}
            ids, positions = self.sequence.own(ids), self.sequence.own(positions)
        return {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False, **attention}


def logp_tolerance(model: nn.Module, noise: float = 0.0) -> float:
    """Largest mean difference per token that rounding explains, in a model with this `rounding_noise`."""
    if any(isinstance(module, Fp8Linear) for module in model.modules()):
        return FP8_TOLERANCE
    return max(LOGP_TOLERANCE[next(model.parameters()).dtype], min(noise, FP8_TOLERANCE))


@torch.no_grad()
def rounding_noise(model: nn.Module, pairs: Sequence[Pair], device: torch.device) -> float:
    """Mean change per token of plain log-probabilities where each value of the embeddings is rounded the other way.

    Two correct computations differ by about as much. In bfloat16, 16 layers with gated delta nets and experts change by
    0.2; 16 layers of a plain transformer by 0.01.
    """
    generator = torch.Generator().manual_seed(0)  # on the CPU: the same values on all ranks and devices

    def move(_: nn.Module, __: object, embedded: Tensor) -> Tensor:
        signs = 1 - 2 * torch.randint(0, 2, embedded.shape, generator=generator)
        step = torch.finfo(embedded.dtype).eps / 2
        return (embedded.float() * (1 + step * signs.to(embedded.device))).to(embedded.dtype)

    exact = pairs_plain_logps(model, pairs, device)
    hook = Scorer(model).causal.get_input_embeddings().register_forward_hook(move)
    try:
        return (pairs_plain_logps(model, pairs, device) - exact).abs().mean().item()
    finally:
        hook.remove()


def row_logps(scorer: nn.Module, row: PackedRow) -> TokenLogps:
    """`scorer` is a Scorer or the DeepSpeed engine around one."""
    return TokenLogps(*scorer(row))


def plain_logps(model: nn.Module, prompt: Ints, response: Ints, device: torch.device) -> Tensor:
    """From one unpacked forward pass: the expected values of packed rows."""
    ids = torch.tensor([[*prompt, *response]], device=device)
    return _plain(model, ids, len(response))[0]


@torch.no_grad()
def pairs_plain_logps(model: nn.Module, pairs: Sequence[Pair], device: torch.device) -> Tensor:
    """Of chosen and rejected of each pair, one after the other."""
    responses = [(pair.prompt_ids, response) for pair in pairs for response in (pair.chosen_ids, pair.rejected_ids)]
    return torch.cat([plain_logps(model, prompt, response, device) for prompt, response in responses])


def _plain(model: nn.Module, ids: Tensor, response_length: int) -> Values:
    # The logits of a long prompt alone take more memory than training: 10 GiB for 36,000 tokens.
    keeps = "logits_to_keep" in inspect.signature(Scorer(model).causal.forward).parameters
    keep = {"logits_to_keep": response_length + 1} if keeps else {}
    logits = model(input_ids=ids, use_cache=False, **keep).logits[0, -response_length - 1 : -1]
    return target_values(logits, ids[0, -response_length:])


def length_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Batches of sequences, longest first. A padded batch has at most `batch_tokens` tokens or one sequence."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


@torch.no_grad()
def score_rank_share(
    scorer: nn.Module, pairs: Sequence[Pair], row_tokens: int, device: torch.device, *, rank: int, world: int
) -> dict[int, Scores]:
    """Scores of this rank's share of the pairs, by pair index. All ranks make equally many passes (collectives)."""
    scores: dict[int, Scores] = {}
    for group in rank_rows_of_all(columns_of(pairs).lengths, row_tokens, rank, world):
        rows = [build_row(pairs, indices, is_filler) for indices, is_filler in group]
        computed = [row_logps(scorer, row.to(device)).logps for row in rows]
        for row, logps in zip(rows, computed, strict=True):
            if not row.is_filler:
                lengths = row.response_index.bincount().tolist()
                responses = [part.tolist() for part in logps.cpu().split(lengths)]
                scores |= zip(row.pair_indices, zip(responses[0::2], responses[1::2], strict=True), strict=True)
    return scores
