"""The section `promote` of params.yaml."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from tasks.config.names import DRIFT_METRICS, check_names
from tasks.config.strict import Count, Positive, Section

Regression = Annotated[  # auto: refuse what is shown to be worse; a number: what is not shown to be within it
    Annotated[Annotated[float, Field(ge=0.0)], Tag("number")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if isinstance(value, str) else "number"),
]


class ErrorBudget(Section):
    """How often luck may promote a model, and how much the champions together may lose (docs/error-budget.md)."""

    metric: str
    alpha: Annotated[float, Field(gt=0.0, lt=0.5)] = 0.05
    tests: Count = 365
    improvement: bool = True
    anchor: Annotated[str, Field(pattern=r"^(first|[1-9]\d*)$")] | None = "first"
    max_loss: Annotated[float, Field(gt=0.0, lt=0.5)] = 0.03
    biased_votes: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0

    def check(self) -> None:
        if not self.improvement and self.anchor is None:
            raise ValueError("error_budget has no effect without `improvement: true` or an `anchor`: set one of them")


class Promote(Section):
    model_name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    alias: Annotated[str, Field(pattern=r"^[a-z][\w-]*$")]
    require: dict[str, float]
    limits: dict[str, float]
    max_regression: dict[str, Regression]
    approval_hours: Positive | None
    push: str | None
    drift: dict[str, Annotated[float, Field(ge=0.0)]]
    on_drift: Literal["stop", "warn"]
    error_budget: ErrorBudget | None = None

    def check(self) -> None:
        check_names("drift", self.drift, DRIFT_METRICS)
        reserved = ("challenger", "previous", *(["anchor"] if self.error_budget else []))
        if self.alias in reserved:
            raise ValueError(f"alias: `{self.alias}` is reserved. Choose another, such as `champion`")
