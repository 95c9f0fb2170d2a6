"""One update of the policy by the pairs of a global batch, and the state that a run carries from step to step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from training.objectives import global_batch
from training.objectives.metrics import MetricWindow, row_loss
from training.pairs.pair import Pair
from training.trainer import engine
from training.trainer.guards import Alarms, BestPolicy, SkippedSteps, nonfinite_pairs
from training.trainer.moving_reference import MovingReference
from training.trainer.settings import Settings
from training.trainer.step_loader import StepBatch

Losses = list[tuple[tuple[int, ...], Tensor]]  # of each row: the numbers of its pairs, and their losses


class TrainState:
    """What a run carries from step to step; each checkpoint contains it."""

    PARTS = ("window", "skips", "alarms", "best")

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.window = MetricWindow(device)
        self.skips = SkippedSteps(settings.max_skipped_steps)
        self.alarms = Alarms(settings.kl_limit)
        self.best = BestPolicy(settings.select, settings.patience, settings.keep_best)
        self.rewards = torch.zeros(2, dtype=torch.float64, device=device)  # sum and count of all rewards so far

    @property
    def reward_mean(self) -> Tensor:
        return (self.rewards[0] / self.rewards[1].clamp(min=1.0)).float()

    def state(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state() for name in self.PARTS}
        return {**parts, "rewards": self.rewards.tolist()}

    def load(self, state: Mapping[str, Any]) -> None:
        for name in self.PARTS:
            getattr(self, name).load(state[name])
        self.rewards = self.rewards.new_tensor(state["rewards"])

    def reset_monitoring(self) -> None:
        """Forget the alarms and the best policy of another training, whose checkpoint this run continues."""
        self.alarms.raised = []
        self.best = BestPolicy(self.best.metric, self.best.patience, self.best.keep)


def train_step(
    policy: Any,
    settings: Settings,
    batch: StepBatch,
    learning_rate: float,
    state: TrainState,
    pairs: Sequence[Pair],
    moving: MovingReference | None,
    count_zeros: bool,
) -> float | None:
    """Update by the weighted mean loss over the pairs of the global batch, whatever their rows and ranks.

    Returns the number of zeros in the gradient if `count_zeros`.
    """
    window, objective, world = state.window, settings.objective, policy.dp_world_size
    rows = [row.to(window.device) for row in batch.rows]
    rows = moving.rows(batch.step, rows) if moving else rows
    contexts = global_batch.global_batch_values(policy, objective, rows, batch.pair_numbers, window.device)
    shared: dict[str, Any] = {}
    if batch.kl_rows:  # unpaired rows
        others = [row.to(window.device) for row in batch.kl_rows]
        others = moving.rows(batch.step, others) if moving else others
        shared = global_batch.batch_kl(policy, objective, others, batch.pair_numbers, window.device)
    engine.set_learning_rate(policy, learning_rate)
    losses: Losses = []
    zeros = None
    for number, row in enumerate(rows):
        is_last = number == len(rows) - 1
        per_pair, values, balance = row_loss(
            policy, objective, row, reward_mean=state.reward_mean, **contexts.get(number, {}), **shared
        )
        # DeepSpeed averages gradients over ranks; the update needs their weighted mean over the global batch's pairs.
        # The gradients of ranks that share a row's tokens add up to its gradient, so they count as ranks, too.
        loss = (per_pair * row.weight).sum() * (world / batch.weight)
        if balance is not None:
            share = len(row.input_ids) / batch.tokens
            loss = loss + balance * ((settings.router_aux_loss_coef or 0.0) * share * world)
            # Logged values are means over pairs: their sum over the step's pairs must equal the sum of the shares.
            per_step = balance.detach() * share * (len(batch.pair_numbers) / len(row.pair_indices))
            values["aux_loss"] = per_step.expand(len(row.pair_indices))
        loss = loss * float(not row.is_filler)
        policy.set_gradient_accumulation_boundary(is_last)
        policy.backward(nan_if_nonfinite(loss))
        if count_zeros and is_last:
            zeros = engine.zero_gradients(policy)
        policy.step()
        window.add(values, row.weight, len(row.input_ids), row.is_filler)
        losses.append((row.pair_indices, per_pair.detach()))
    if engine.skipped(policy):
        _record_skip(policy, state, batch.step + 1, losses, pairs)
    else:
        _record_update(policy, state, batch.step + 1)
    if moving:
        moving.update(batch.step + 1)
    return zeros


def nan_if_nonfinite(loss: Tensor) -> Tensor:
    """NaN in place of an infinite loss, whose gradient may be finite: NaN makes all ranks skip the update."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


def _record_skip(policy: Any, state: TrainState, done: int, losses: Losses, pairs: Sequence[Pair]) -> None:
    state.window.drop_step()
    nonfinite = nonfinite_pairs(losses, pairs)
    if engine.loss_scale(policy) is None or nonfinite:
        state.skips.record_skip(done, nonfinite)
    else:
        engine.update_loss_scale(policy, done, overflow=True)
        state.skips.record_overflow()


def _record_update(policy: Any, state: TrainState, done: int) -> None:
    engine.update_loss_scale(policy, done, overflow=False)
    sums = state.window.end_step()
    state.skips.record_update()
    state.rewards += torch.stack([sums["rewards/chosen"] + sums["rewards/rejected"], 2 * sums["pairs"]])
