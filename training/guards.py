"""What watches a run: steps that had to be skipped, and alarms when a course is known to end badly."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FALLS = 5  # logs in a row over which the chosen log-probability fell
SATURATED = 20.0  # a reward margin whose sigmoid leaves no gradient: 2e-9
LOWER_IS_BETTER = ("loss", "kl")


class Preempted(Exception):
    """A rank was asked to end: all ranks have saved a checkpoint."""


class Notice:
    """Whether any rank was asked to end; known one step later, so that no step waits for the device."""

    def __init__(self, asked: Callable[[], bool], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.asked, self.flag = asked, torch.zeros(1, device=device)
        self.seen, self.copied = torch.zeros(1, pin_memory=on_gpu), torch.cuda.Event() if on_gpu else None

    def look(self) -> bool:
        """The same on all ranks. A collective."""
        if self.copied:
            self.copied.synchronize()
        found = bool(self.seen.item())
        self.flag.fill_(float(self.asked()))
        dist.all_reduce(self.flag, op=dist.ReduceOp.MAX)
        self.seen.copy_(self.flag, non_blocking=True)
        if self.copied:
            self.copied.record()
        return found


@dataclass
class Skips:
    """Updates that were skipped on all ranks, because a gradient was not finite on one."""

    limit: int
    total: int = 0
    in_a_row: int = 0
    pairs: list[str] = field(default_factory=list)  # whose losses were not finite

    def taken(self) -> None:
        self.in_a_row = 0

    def skipped(self, step: int, ids: Sequence[str]) -> None:
        """Count it; FloatingPointError where there were too many in a row."""
        self.total += 1
        self.in_a_row += 1
        self.pairs = sorted({*self.pairs, *ids})
        if self.in_a_row >= self.limit:
            named = ", ".join(self.pairs[:8]) or "none alone; the gradient of the whole step"
            raise FloatingPointError(
                f"{self.in_a_row} updates in a row up to step {step} were skipped, because a loss or gradient was not "
                f"finite (pairs: {named}); the last checkpoint is kept"
            )

    def overflowed(self) -> None:
        """Count a step that float16's loss scaling skipped to find its scale: normal, and no reason to stop."""
        self.total += 1

    def state(self) -> dict[str, Any]:
        return {"total": self.total, "in_a_row": self.in_a_row, "pairs": self.pairs}

    def load(self, state: Mapping[str, Any]) -> None:
        self.total, self.in_a_row, self.pairs = state["total"], state["in_a_row"], list(state["pairs"])


def not_finite(rows: Sequence[tuple[tuple[int, ...], Tensor]], ids: Sequence[str]) -> list[str]:
    """Ids of the pairs whose losses are not finite, of all ranks. A collective, and only after a skip."""
    found = [
        ids[number]
        for numbers, losses in rows
        for number, fine in zip(numbers, torch.isfinite(losses).tolist(), strict=True)
        if not fine
    ]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return [name for some in everywhere for name in some]


@dataclass
class Alarms:
    """Read off the logged means; the same on every rank. Each is said when it begins."""

    kl_limit: float | None
    chosen: list[float] = field(default_factory=list)  # the last chosen log-probabilities
    raised: list[str] = field(default_factory=list)

    def look(self, values: Mapping[str, float]) -> dict[str, str]:
        """New alarms by name, with what to do about them."""
        self.chosen = [*self.chosen, values["logps/chosen"]][-FALLS - 1 :]
        falling = len(self.chosen) > FALLS and all(a > b for a, b in zip(self.chosen, self.chosen[1:], strict=False))
        found = {}
        if falling and values["rewards/chosen"] < 0:
            found["displacement"] = (
                f"the chosen responses have become less likely over {FALLS} logs (rewards/chosen "
                f"{values['rewards/chosen']:.3g}): the policy moves away from both. Add an sft term to train.loss, "
                "or lower train.learning_rate"
            )
        if values["rewards/margins"] > SATURATED:
            found["saturation"] = (
                f"rewards/margins is {values['rewards/margins']:.3g}: the losses give no gradient any more. Stop "
                "earlier (train.max_steps), or lower train.beta or train.learning_rate"
            )
        if self.kl_limit is not None and values.get("kl", 0.0) > self.kl_limit:
            found["kl"] = f"kl {values['kl']:.3g} is above train.kl_limit {self.kl_limit}: raise train.beta"
        new = {name: sentence for name, sentence in found.items() if name not in self.raised}
        self.raised = [*self.raised, *new]
        return new

    def state(self) -> dict[str, Any]:
        return {"chosen": self.chosen, "raised": self.raised}

    def load(self, state: Mapping[str, Any]) -> None:
        self.chosen, self.raised = list(state["chosen"]), list(state["raised"])


@dataclass
class Best:
    """The best evaluations so far by a named metric."""

    metric: str | None
    patience: int | None
    keep: int  # of the best, whose checkpoints are kept
    value: float | None = None
    step: int | None = None
    since: int = 0  # evaluations without a better one
    ranked: list[tuple[float, int]] = field(default_factory=list)  # (value, step) of the best `keep`, the best first

    def look(self, step: int, values: Mapping[str, float]) -> bool:
        """Whether this evaluation is the best."""
        if self.metric is None:
            return False
        sign = -1.0 if self.metric.rsplit("/", 1)[-1] in LOWER_IS_BETTER else 1.0
        others = [entry for entry in self.ranked if entry[1] != step]
        ranked = sorted([*others, (values[self.metric], step)], key=lambda entry: _last_if_nan(-sign * entry[0]))
        self.ranked = ranked[: self.keep]
        if self.value is None or sign * values[self.metric] > sign * self.value:
            self.value, self.step, self.since = values[self.metric], step, 0
            return True
        self.since += 1
        return False

    @property
    def steps(self) -> list[int]:
        """Steps whose checkpoints are kept for their rank."""
        return [step for _, step in self.ranked]

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.since >= self.patience

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step, "since": self.since, "ranked": self.ranked}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value, self.step, self.since = state["value"], state["step"], state["since"]
        self.ranked = [(value, step) for value, step in state["ranked"]][: self.keep]


def _last_if_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value
