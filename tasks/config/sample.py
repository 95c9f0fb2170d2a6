"""The section `sample` of params.yaml, which params.yaml leaves out: its defaults are here."""

from typing import Annotated, Literal

from pydantic import Field

from tasks.config.evaluate import Endpoint, Evaluate, RewardModel, check_judge
from tasks.config.strict import Count, Positive, Section


class Sample(Section):
    """On-policy pairs: answers of the start model, which a judge compares."""

    prompts: Count | None = None
    answers: Annotated[int, Field(ge=2, le=64)] = 4
    pairs: Literal["best_worst", "all"] = "best_worst"
    min_margin: Annotated[float, Field(ge=0.0)] = 0.0
    keep_source: bool = False
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_new_tokens: Count | None = None
    judge: Literal["evaluate", "demo", "reward", "endpoint"] = "evaluate"
    reward_model: RewardModel | None = None
    endpoint: Endpoint | None = None
    seed: int = 0

    def check(self) -> None:
        check_judge(self)

    def as_evaluate(self, evaluate: Evaluate) -> Evaluate:
        """The section `evaluate` with the sampling settings and the judge of this one."""
        names = ["temperature", "top_p", "seed"] + (["max_new_tokens"] if self.max_new_tokens else [])
        names += [] if self.judge == "evaluate" else ["judge", "reward_model", "endpoint"]
        return evaluate.model_copy(update={name: getattr(self, name) for name in names})
