"""A worker of the group `inference`: draws answers, scores pairs, and runs lm-evaluation-harness."""

from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.errors import UserError
from tasks.evaluate.sampler import Sampler, Weights, tokenizer_of
from training.evaluation.samples import PairValues
from training.pairs.pair import Pair

if TYPE_CHECKING:  # it loads torch
    from training.objectives.objective import Objective


class Evaluator(Sampler):
    REPLICATED = frozenset({"pair_values", "harness"})

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.shared: Any = None  # the scorer of a model that ZeRO-3 shards
        self.scorer: Any = None
        self.scorer_key: tuple[Weights, list[str]] | None = None  # the model and the probes of the scorer
        self.scorer_context = ExitStack()

    def score(
        self, weights: Weights, pairs: Sequence[Pair], rows: Sequence[Sequence[int]], probes: Sequence[Pair]
    ) -> tuple[list[Any], str | None]:
        """Values of each pair's tokens, and a note if scoring is slow. `probes` represent the pairs of all tasks."""
        from training.evaluation.pair_scores import score_rows
        from training.models.loading import best_device

        with self._loaded(weights):
            note = self._start_scoring(weights, probes)
            return score_rows(self.scorer, pairs, rows, best_device()), note

    def pair_values(
        self, objective: "Objective", pairs: Sequence[Pair], values: Sequence[Any], row_tokens: int
    ) -> tuple[dict[str, float], list[PairValues]]:
        """The training metrics from the values of all pairs. Needs no model."""
        from training.evaluation.pair_scores import stored_pair_values

        return stored_pair_values(values, objective, pairs, row_tokens)

    def harness(
        self, weights: Weights, tasks: list[str], limit: int | None, folder: Path | None, seed: int
    ) -> dict[str, float]:
        if find_spec("lm_eval") is None:
            raise UserError(
                "evaluate.harness needs lm-evaluation-harness, which is not installed. Run `.venv/bin/pip install "
                "lm_eval`, or set evaluate.harness to null."
            )
        from training.evaluation.lm_eval_tasks import scores

        self._before_sampling()
        try:
            with self._loaded(weights) as model:
                return scores(model, tokenizer_of(weights), tasks, limit, folder, seed)
        except ValueError as error:
            raise UserError(f"evaluate.harness: {error}. Change evaluate.harness in params.yaml.") from error

    def _load_shared(self, weights: Weights) -> tuple[Any, Any]:
        from training.scoring.sharded_scorer import load_sharded_scorer

        self.shared, engine = load_sharded_scorer(weights.folder, weights.dtype, weights.adapter)
        return self.shared.model, engine

    def _drop(self) -> None:
        super()._drop()
        self.shared = None

    def _start_scoring(self, weights: Weights, probes: Sequence[Pair]) -> str | None:
        """A scorer for this model and these pairs, kept for the following tasks; a note if it is a slow one."""
        from training.models.loading import best_device
        from training.scoring.parity import scoring

        key = (weights, [pair.id for pair in probes])
        if self.scorer_key == key:
            return None
        self._before_sampling()
        model = self.shared or self.model
        self.scorer, note = self.scorer_context.enter_context(scoring(model, probes, best_device()))
        if self.zero3 and self.scorer.path == "plain":
            raise UserError(f"{note}. Workers cannot share one copy of this model: set inference.zero_stage to 0.")
        self.scorer_key = key
        return note

    def _before_sampling(self) -> None:
        """Restore the model, so that it can generate."""
        self.scorer_context.close()
        self.scorer = self.scorer_key = None
