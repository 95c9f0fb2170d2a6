"""What a model gave, as plain data: whoever reads it need not import transformers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    text: str
    ids: tuple[int, ...]  # with the token that ended it
    finished: bool  # ended by itself, and not by the limit

    @property
    def tokens(self) -> int:
        return len(self.ids) - self.finished


@dataclass(frozen=True, kw_only=True)
class PairValues:
    """Of one pair; rewards as the training metrics have them."""

    id: str
    chosen_reward: float
    rejected_reward: float
    chosen_tokens: int  # that count
    rejected_tokens: int
    kl: float  # half the squared log-ratio per counted token, as in training.metrics

    @property
    def margin(self) -> float:
        return self.chosen_reward - self.rejected_reward
