"""The section `evaluate` of params.yaml."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tasks.config.names import HARNESS_PRESETS
from tasks.config.strict import Count, Positive, Section
from tasks.config.train import Dtype


class RewardModel(Section):
    model: str
    label: str | None


class Endpoint(Section):
    url: Annotated[str, Field(pattern=r"^https?://[\w.:\[\]-]+(/[^\s\\]*)?$")]
    model: str
    key_variable: Annotated[str, Field(pattern=r"^\w+$")] | None
    requests_per_minute: Positive


class Harness(Section):
    tasks: Annotated[list[str], Field(min_length=1)]
    limit: Count | None
    folder: str | None

    def task_names(self) -> list[str]:
        """The harness's names, with the tasks of each preset in its place."""
        return [name for task in self.tasks for name in HARNESS_PRESETS.get(task, (task,))]


class Evaluate(Section):
    dtype: Dtype
    prompts: Annotated[int, Field(ge=0)]
    engine: Literal["auto", "transformers", "vllm"]
    max_new_tokens: Count
    temperature: Annotated[float, Field(ge=0.0)]
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    judge: Literal["auto", "demo", "none", "reward", "endpoint"]  # Params resolves auto
    reward_model: RewardModel | None
    endpoint: Endpoint | None
    harness: Harness | None
    seed: int

    def check(self) -> None:
        check_judge(self)


def check_judge(section: Any) -> None:
    for judge, option in (("reward", "reward_model"), ("endpoint", "endpoint")):
        is_set = getattr(section, option) is not None
        if is_set and section.judge != judge:
            raise ValueError(f"`{option}` has no effect on judge {section.judge}: set it to null, or judge to {judge}")
        if section.judge == judge and not is_set:
            raise ValueError(f"judge {judge} needs `{option}`: set it")
