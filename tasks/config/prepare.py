"""The section `prepare` of params.yaml."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tasks.config.names import COLUMNS, REJECT_REASONS, ROW_FORMATS, VALUES, check_names
from tasks.config.strict import Count, Fraction, Section


class Layout(Section):
    """How the rows of a source are laid out."""

    format: str
    columns: dict[str, str]
    values: dict[str, dict[str | int | float | bool, str]] = Field(default_factory=dict)

    def check(self) -> None:
        check_names("format", [self.format], ["auto", *ROW_FORMATS])
        check_names("columns", self.columns, COLUMNS)
        check_names("values", self.values, VALUES)
        for column, meanings in self.values.items():
            check_names(f"values.{column}", meanings.values(), VALUES[column])


class Prepare(Layout):
    by_source: dict[str, Layout]
    expand: Literal["all", "adjacent", "best_rest"]
    min_margin: Annotated[float, Field(ge=0.0)]
    ties: Literal["drop", "soft"]
    template: str
    chat_template_kwargs: dict[str, Any]
    tools: Literal["template", "text"] = "template"
    reasoning: Literal["keep", "strip", "text"] = "keep"
    loss_on: Literal["last", "all"]
    apply_loss_mask: bool
    max_tokens: Annotated[int, Field(ge=8)]
    over_length: Literal["drop", "truncate_prompt", "truncate_response", "fail"]
    eval_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    max_pairs: Count | None
    seed: int = 0
    max_characters: Count
    near_duplicates: Annotated[float, Field(ge=0.5, le=1.0)] | None
    max_bad_fraction: Fraction
    thresholds: dict[str, Fraction]

    def check(self) -> None:
        super().check()
        check_names("thresholds", self.thresholds, REJECT_REASONS)
        if self.template not in ("auto", "plain", "chatml") and "{" not in self.template:
            raise ValueError(
                f"template '{self.template}' is neither auto, plain, chatml nor the text of a Jinja template"
            )
