"""Monitors of a run: skipped steps, alarms for known failure modes, the best evaluation, and preemption."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from training.pairs.pair import Pair

FALLING_LOGS = 5  # consecutive logs over which the chosen log-probability fell
SATURATED = 20.0  # a reward margin whose sigmoid leaves no gradient: 2e-9
LOWER_IS_BETTER = ("loss", "kl")


class PreemptionSignal:
    """Whether any rank was asked to stop. The answer comes one step late, so that no step waits for the device."""

    def __init__(self, stop_requested: Callable[[], bool], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.stop_requested, self.flag = stop_requested, torch.zeros(1, device=device)
        self.on_cpu, self.copied = torch.zeros(1, pin_memory=on_gpu), torch.cuda.Event() if on_gpu else None

    def check(self) -> bool:
        """The same on all ranks. A collective."""
        if self.copied:
            self.copied.synchronize()
        preempted = bool(self.on_cpu.item())
        self.flag.fill_(float(self.stop_requested()))
        dist.all_reduce(self.flag, op=dist.ReduceOp.MAX)
        self.on_cpu.copy_(self.flag, non_blocking=True)
        if self.copied:
            self.copied.record()
        return preempted


class Monitor:
    """Part of a run's state. Checkpoints contain the attributes in `STATE`; the others are options of the run."""

    STATE: ClassVar[tuple[str, ...]]

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.STATE}

    def load(self, state: Mapping[str, Any]) -> None:
        for name in self.STATE:
            setattr(self, name, state[name])


@dataclass
class SkippedSteps(Monitor):
    """Updates that all ranks skipped because a gradient was not finite on one of them."""

    STATE = ("total", "in_a_row", "pairs")
    limit: int
    total: int = 0
    in_a_row: int = 0
    pairs: list[str] = field(default_factory=list)  # ids of the pairs whose losses were not finite

    def record_update(self) -> None:
        self.in_a_row = 0

    def record_skip(self, step: int, ids: Sequence[str]) -> None:
        """Count a skipped update; FloatingPointError if there were too many in a row."""
        self.total += 1
        self.in_a_row += 1
        self.pairs = sorted({*self.pairs, *ids})
        if self.in_a_row >= self.limit:
            named = ", ".join(self.pairs[:8]) or "none; only the gradient of the whole step was not finite"
            raise FloatingPointError(
                f"{self.in_a_row} updates in a row up to step {step} were skipped, because a loss or gradient was not "
                f"finite (pairs: {named}); the last checkpoint is kept"
            )

    def record_overflow(self) -> None:
        """Count a step that float16's loss scaling skipped to find its scale: normal, and no reason to stop."""
        self.total += 1


def nonfinite_pairs(rows: Sequence[tuple[tuple[int, ...], Tensor]], pairs: Sequence[Pair]) -> list[str]:
    """Ids of the pairs on all ranks whose losses are not finite. A collective, called only after a skipped step."""
    own = [
        pairs[number].id
        for numbers, losses in rows
        for number, finite in zip(numbers, torch.isfinite(losses).tolist(), strict=True)
        if not finite
    ]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    return [pair_id for pair_ids in by_rank for pair_id in pair_ids]


@dataclass
class Alarms(Monitor):
    """Alarms from the logged means, the same on every rank. Each is reported once, when it starts."""

    STATE = ("chosen", "raised")
    kl_limit: float | None
    chosen: list[float] = field(default_factory=list)  # the last chosen log-probabilities
    raised: list[str] = field(default_factory=list)

    def check(self, values: Mapping[str, float]) -> dict[str, str]:
        """New alarms by name: what is wrong and what to do about it."""
        if "logps/chosen" in values:  # a window may have no desirable rows
            self.chosen = [*self.chosen, values["logps/chosen"]][-FALLING_LOGS - 1 :]
        steps = zip(self.chosen, self.chosen[1:], strict=False)
        falling = len(self.chosen) > FALLING_LOGS and all(before > after for before, after in steps)
        active = {}
        if falling and values.get("rewards/chosen", 0.0) < 0:
            active["displacement"] = (
                f"the chosen responses have become less likely over {FALLING_LOGS} logs (rewards/chosen "
                f"{values['rewards/chosen']:.3g}): the policy moves away from both responses. Lower "
                "train.learning_rate or, for losses of pairs, add an sft term to train.loss"
            )
        if values.get("rewards/margins", 0.0) > SATURATED:
            active["saturation"] = (
                f"rewards/margins is {values['rewards/margins']:.3g}: the losses no longer give a gradient. Stop "
                "earlier (train.max_steps), or lower train.beta or train.learning_rate"
            )
        if self.kl_limit is not None and values.get("kl", 0.0) > self.kl_limit:
            active["kl"] = f"kl {values['kl']:.3g} is above train.kl_limit {self.kl_limit}: raise train.beta"
        new = {name: message for name, message in active.items() if name not in self.raised}
        self.raised = [*self.raised, *new]
        return new


@dataclass
class BestPolicy(Monitor):
    """The best evaluations so far by a metric, and how many evaluations did not improve on it."""

    STATE = ("value", "step", "since", "ranked")
    metric: str | None
    patience: int | None
    keep: int  # number of the best checkpoints to keep
    value: float | None = None
    step: int | None = None
    since: int = 0  # evaluations since the best one
    ranked: list[tuple[float, int]] = field(default_factory=list)  # (value, step) of the best `keep`, best first

    def update(self, step: int, values: Mapping[str, float]) -> bool:
        """Add an evaluation; whether it is the best so far."""
        if self.metric is None:
            return False
        value = values[self.metric]
        sign = -1.0 if self.metric.rsplit("/", 1)[-1] in LOWER_IS_BETTER else 1.0
        others = [entry for entry in self.ranked if entry[1] != step]
        ranked = sorted([*others, (value, step)], key=lambda entry: (math.isnan(entry[0]), -sign * entry[0]))
        self.ranked = ranked[: self.keep]
        if self.value is None or sign * value > sign * self.value:
            self.value, self.step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    @property
    def steps(self) -> list[int]:
        """Steps whose checkpoints are among the best. A resumed run may keep fewer than the checkpoint has ranked."""
        return [step for _, step in self.ranked[: self.keep]]

    @property
    def out_of_patience(self) -> bool:
        return self.patience is not None and self.since >= self.patience
