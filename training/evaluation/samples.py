"""Sampled answers and scored pairs as plain data, so that their readers need not import torch or transformers."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    text: str
    ids: tuple[int, ...]  # including the end token
    finished: bool  # ended by an end token, not by the limit

    @property
    def tokens(self) -> int:
        return len(self.ids) - self.finished


@dataclass(frozen=True, kw_only=True)
class PairValues:
    """Values of one pair; rewards as in the training metrics."""

    id: str
    chosen_reward: float
    rejected_reward: float
    chosen_tokens: int  # under the loss mask
    rejected_tokens: int
    kl: float  # half the squared log-ratio per token under the loss mask, as in training.objectives.metrics
    sign: int = 0  # of an unpaired row (Pair.sign); its reward is compared with Objective.zero_reward, the other reward

    @property
    def margin(self) -> float:
        return self.chosen_reward - self.rejected_reward


def make_answer(ids: Sequence[int], tokenizer: Any, end_ids: Collection[int]) -> Answer:
    """The answer in generated ids, which may continue after its end token."""
    end = next((index for index, token in enumerate(ids) if token in end_ids), None)
    text = tokenizer.decode(ids[:end], skip_special_tokens=True)
    return Answer(str(text), tuple(ids if end is None else ids[: end + 1]), end is not None)


def prompt_digest(prompt: Sequence[int], seed: int) -> bytes:
    """Seeds a prompt's random numbers, so that they do not depend on the other prompts of a batch."""
    return hashlib.sha256(f"{seed}:{','.join(map(str, prompt))}".encode()).digest()
