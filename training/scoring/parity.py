"""Select the fastest scoring path whose log-probabilities match the model's plain forward passes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from training.distributed.sequence_parallel import SequenceGroup
from training.models.recurrent_layers import recurrent_layers
from training.models.transformers_internals import attention_of
from training.pairs.packing import CHOSEN, REJECTED, build_row
from training.pairs.pair import Pair
from training.pairs.pair_columns import longest, shortest
from training.scoring.attention import PACKED_ATTENTION
from training.scoring.logps import Scorer, logp_tolerance, pairs_plain_logps, rounding_noise, row_logps
from training.scoring.recurrent import follow_segments

PROBE = 32  # tokens of each part of a pair in the checks that need a backward pass
_FALLBACKS = {
    "packed": "the model's own vocabulary head is used, which keeps each row's logits",
    "padded": "each response is computed after its own prompt in padded batches",
    "plain": "each response is computed alone, with the model's own vocabulary head",
}


@contextmanager
def scoring(model: nn.Module, pairs: Sequence[Pair], device: torch.device) -> Iterator[tuple[Scorer, str | None]]:
    """A scorer of the model, or the model itself if it is one, and a note if its path is a slower one.

    The end of the block restores the model's attention, so that it can generate.
    """
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    own, training = attention_of(scorer.causal), model.training
    try:
        model.eval()
        yield scorer, select_scoring_path(scorer, pairs, device)
    finally:
        scorer.causal.set_attn_implementation(own)
        model.train(training)


def select_scoring_path(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> str | None:
    """Set the fastest path that reproduces the model's plain log-probabilities; a note if that is a slower one.

    On a packed path, a response must depend neither on its neighbours in the row nor on its position there. Recurrent
    and linear-attention layers carry state across the boundaries of a row unless they follow its segments; a model with
    others must never train on packed rows. The passes are collectives under ZeRO-3.
    """
    model, causal = scorer.model, scorer.causal
    # The longest may exceed an attention window. A pass over it takes long: pairs of one length need only one of them.
    sample = list({len(pair): pair for pair in (shortest(pairs), longest(pairs))}.values())
    own, training = attention_of(causal), model.training
    model.eval()
    expected = pairs_plain_logps(model, sample, device)
    if causal.dtype in (torch.bfloat16, torch.float16):
        scorer.noise = rounding_noise(model, list(map(shorten, sample)), device)
    layers = recurrent_layers(causal)
    follow_segments(layers)
    scorer.has_recurrent_layers = bool(layers)
    reasons = []
    for scorer.path in ("fused", "packed", "padded"):
        causal.set_attn_implementation(own if scorer.path == "padded" else PACKED_ATTENTION)
        failure = _failure(scorer, sample, expected, pairs[len(pairs) // 2], device)
        if failure is None:
            break
        reasons.append(failure)
    else:
        scorer.path = "plain"
        causal.set_attn_implementation(own)
    model.train(training)
    if not reasons:
        return None
    name, fallback = type(causal).__name__, _FALLBACKS[scorer.path]
    return f"{name} takes a slower path: {fallback} ({'; '.join(dict.fromkeys(reasons))})"


def share_tokens(scorer: Scorer, group: SequenceGroup, pairs: Sequence[Pair], device: torch.device) -> None:
    """Let the ranks of a group share the tokens of each row; ValueError if the model cannot do that. A collective."""
    name, training = type(scorer.causal).__name__, scorer.model.training
    if not scorer.is_packed:
        raise ValueError(
            f"actor_train.sequence_parallel {group.size} needs a model that computes packed rows, and {name} does not: "
            "set it to 1"
        )
    if scorer.has_recurrent_layers:
        raise ValueError(
            f"actor_train.sequence_parallel {group.size} gives each rank every {group.size}th token of a row, but the "
            f"recurrent layers of {name} read all of them in order: set it to 1"
        )
    heads = scorer.causal.config.get_text_config().num_attention_heads
    if heads % group.size:
        raise ValueError(
            f"actor_train.sequence_parallel is {group.size}, but {name} has {heads} attention heads, which "
            f"{group.size} ranks cannot share: set it to a divisor of {heads}"
        )
    scorer.model.eval()
    row = build_row([shorten(pair) for pair in (shortest(pairs), longest(pairs))], (0, 1)).to(device)
    with torch.no_grad():
        whole = row_logps(scorer, row).logps
        scorer.sequence = group
        difference = (row_logps(scorer, row).logps - whole).abs().mean().item()
    scorer.model.train(training)
    if not difference <= logp_tolerance(scorer, scorer.noise):  # NaN must fail
        raise ValueError(
            f"actor_train.sequence_parallel {group.size} changes the log-probabilities of {name} by {difference:.2g} a "
            "token, because a layer other than attention reads several tokens: set it to 1"
        )


def _failure(
    scorer: Scorer, sample: Sequence[Pair], expected: Tensor, middle: Pair, device: torch.device
) -> str | None:
    """Why the scorer's path differs from plain passes; None if it does not."""
    probes = [shorten(pair) for pair in (sample[0], middle, sample[-1])]
    rounding = logp_tolerance(scorer, scorer.noise)
    try:
        if scorer.is_packed and depends_on_neighbours(scorer, probes, device):
            return "a response depends on its neighbours in the row"
        if scorer.is_packed and not position_difference(scorer, probes, device) <= rounding:  # NaN must fail
            return "a response depends on its position in the row"
        with torch.no_grad():
            values = row_logps(scorer, build_row(sample, range(len(sample))).to(device)).logps
        # Only the mean: where rounding makes a router choose another expert, single tokens change a lot.
        if not (values - expected).abs().mean().item() <= rounding:
            return f"log-probabilities differ by up to {(values - expected).abs().max().item():.2g} from plain passes"
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, RuntimeError, LookupError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    return None


def shorten(pair: Pair) -> Pair:
    """A pair with only the tokens around the position where the two responses diverge."""
    part = slice(start := max(0, pair.shared_prefix - PROBE // 2), start + PROBE)
    names = ("chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")
    parts = {name: getattr(pair, name)[part] for name in names}
    return replace(pair, prompt_ids=pair.prompt_ids[-PROBE:], ref_chosen_logps=None, ref_rejected_logps=None, **parts)


def depends_on_neighbours(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> bool:
    """Whether a response of the middle one of three pairs depends on tokens that it must not see.

    If it does not, the gradient of its log-probabilities with respect to the embeddings of those tokens is exactly 0,
    in any precision and on any device. A comparison of values could not tell a leak from rounding.
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
                (gradient,) = torch.autograd.grad(logps[row.response_index == response].sum(), embedded[0])
        finally:
            hook.remove()
        if (gradient[0, (row.token_pair != 1) | (row.token_part == hidden_part)] != 0).any():
            return True
    return False


@torch.no_grad()
def position_difference(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> float:
    """Mean change of a pair's log-probabilities at another position of the row, with its responses swapped."""
    first, middle, last = pairs
    swapped = replace(
        middle,
        chosen_ids=middle.rejected_ids,
        rejected_ids=middle.chosen_ids,
        chosen_mask=middle.rejected_mask,
        rejected_mask=middle.chosen_mask,
    )

    def response_logps(order: Sequence[Pair], number: int) -> list[Tensor]:
        """Of chosen and rejected of the row's pair with this number."""
        row = build_row(order, range(3)).to(device)
        logps = row_logps(scorer, row).logps
        return [logps[row.response_index == index] for index in (2 * number, 2 * number + 1)]

    chosen, rejected = response_logps([first, middle, last], 1)
    rejected_moved, chosen_moved = response_logps([swapped, last, first], 0)
    return (torch.cat([chosen, rejected]) - torch.cat([chosen_moved, rejected_moved])).abs().mean().item()
