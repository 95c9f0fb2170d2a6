"""The schema of params.yaml: everything that changes a result. infra/cluster.yaml is in cluster.py.

`dpo check-config` validates both files; `dpo check-config RECIPE` prints the values with a recipe.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from tasks.config import metrics, strict
from tasks.config.cluster import Cluster, load_cluster
from tasks.config.names import COLUMNS, DRIFT_METRICS, HARNESS_PRESETS, REJECT_REASONS, ROW_FORMATS, VALUES
from tasks.config.strict import Count, Fraction, Positive, Section, dotted, read_yaml, validate
from tasks.config.training import Dtype, Optimization, Quantization, Sft, Train
from tasks.errors import UserError
from tasks.secrets.redact import is_secret

__all__ = ["Cluster", "Optimization", "Params", "Train", "dotted", "load_cluster", "overlay", "read_yaml", "validate"]

RUN = "run:"  # an address of data: the pairs of an earlier run
PARAMS = Path("params.yaml")  # relative: a stage runs in the root of its workspace
RECIPES = Path(__file__).resolve().parents[2] / "flows" / "recipes"


def check_names(key: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    for name in names:
        if name not in allowed:
            raise ValueError(f"{key}: unknown name `{name}`. Known names: {', '.join(allowed)}")


class Mixed(Section):
    """One source of a mixture."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # of its folder below data/raw
    data: str
    weight: Positive  # of each pair in the loss
    share: Annotated[float, Field(gt=0.0, le=1.0)]  # of the rows, which are sampled


Data = Annotated[
    Annotated[str, Tag("address")] | Annotated[list[Mixed], Tag("mixture")],
    Discriminator(
        lambda value: "mixture" if isinstance(value, list) else "address"
    ),  # so that an error names one alternative
]


class Source(Section):
    data: Data
    eval: str | None
    sft: str | None = None
    exclude: str | None = None
    model: str
    adapter: str | None
    seed: int

    def check(self) -> None:
        names = [source.name for source in self.data] if isinstance(self.data, list) else ["data"]
        if not names or len(set(names)) < len(names) or {"eval", "sample"}.intersection(names):
            raise ValueError("a mixture needs at least one source; each name must be unique and not `eval` or `sample`")
        if self.adapter and self.model.startswith("registry:"):
            raise ValueError("`adapter` belongs to another model than the registered one: set it to null")

    def addresses(self) -> list[str]:
        return [self.data] if isinstance(self.data, str) else [source.data for source in self.data]

    def is_demo(self) -> bool:
        """Whether all prompts are the demo's, also those of pairs that earlier runs sampled."""
        return all(address == "demo" or address.startswith(RUN) for address in self.addresses())


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


class Reference(Section):
    dtype: Dtype
    quantization: Quantization | None


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


def check_judge(section: "Evaluate | Sample") -> None:
    for judge, option in (("reward", "reward_model"), ("endpoint", "endpoint")):
        is_set = getattr(section, option) is not None
        if is_set and section.judge != judge:
            raise ValueError(f"`{option}` has no effect on judge {section.judge}: set it to null, or judge to {judge}")
        if section.judge == judge and not is_set:
            raise ValueError(f"judge {judge} needs `{option}`: set it")


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


class Export(Section):
    dtype: Dtype
    max_shard_size: Annotated[str, Field(pattern=r"^\d+(KB|MB|GB)$")]
    gguf: list[Literal["f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"]]


Regression = Annotated[  # auto: refuse what is shown to be worse; a number: what is not shown to be within it
    Annotated[Annotated[float, Field(ge=0.0)], Tag("number")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if isinstance(value, str) else "number"),
]


class ErrorBudget(Section):
    """How often luck may promote a model, and how much the champions together may lose (docs/evaluation.md)."""

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


class Params(Section):
    source: Source
    sample: Sample | None = None
    prepare: Prepare
    sft: Sft | None = None
    reference: Reference
    train: Train
    evaluate: Evaluate
    export: Export
    promote: Promote

    @model_validator(mode="before")
    @classmethod
    def _choose_judge(cls, content: Any) -> Any:
        source, evaluate = (content.get(name) for name in ("source", "evaluate"))
        if not (isinstance(source, dict) and isinstance(evaluate, dict) and evaluate.get("judge") == "auto"):
            return content
        judge = "demo" if source.get("data") == "demo" else "none"
        return {**content, "evaluate": {**evaluate, "judge": judge}}

    def check(self) -> None:
        self._check_secrets()
        self._check_quantization()
        self._check_dtypes()
        self._check_data_sources()
        self._check_judge_and_metrics()
        self._check_reference_model()
        self._check_sample()

    def _check_secrets(self) -> None:
        for name, value in _texts(self.model_dump()):
            if is_secret(value):
                raise ValueError(
                    f"`{name}` holds what looks like a password or a token, and params are committed, logged and "
                    "exported. Put it into an environment variable (AWS_ACCESS_KEY_ID, HF_TOKEN, ...) and remove it"
                )

    def _check_quantization(self) -> None:
        if self.train.quantization != self.reference.quantization:
            raise ValueError(
                "train.quantization and reference.quantization must be equal: the policy starts as the reference model"
            )
        if self.train.quantization and self.evaluate.engine == "vllm":
            raise ValueError(
                f"`evaluate.engine` vllm loads the base model in 16 bits, and train.quantization is "
                f"{self.train.quantization}: set evaluate.engine to auto or transformers"
            )
        if self.train.adapter and self.train.adapter.modules_to_save and self.evaluate.engine == "vllm":
            raise ValueError(
                "`evaluate.engine` vllm loads no adapter with `modules_to_save`: set evaluate.engine to auto or "
                "transformers"
            )

    def _check_dtypes(self) -> None:
        """The values of policy and reference are subtracted: rounding of different kinds adds up to nats."""
        dtypes = {name: getattr(self, name).dtype for name in ("reference", "train", "evaluate")}
        if self.train.needs_reference and len(set(dtypes.values())) > 1:
            named = ", ".join(f"{name}.dtype is {dtype}" for name, dtype in dtypes.items())
            raise ValueError(
                "policy and reference must be computed in one precision: over long answers, rounding of two kinds "
                f"differs by nats. {named}: set all of them to {self.train.dtype}"
            )

    def _check_data_sources(self) -> None:
        if (self.source.eval is None) == (self.prepare.eval_fraction is None):
            raise ValueError(
                "held-out pairs come from `source.eval` or `prepare.eval_fraction`: set one, and the other to null"
            )
        if self.source.sft and not self.sft:
            raise ValueError(
                "`source.sft` is the data of the stage sft, which is off: set `sft` too, or source.sft to null"
            )

    def _check_judge_and_metrics(self) -> None:
        judges = [self.evaluate.judge, self.sample.judge if self.sample else ""]
        if "demo" in judges and not self.source.is_demo():
            raise ValueError(
                "`evaluate.judge` demo knows the answers to the demo's questions only, and `source.data` is other "
                "data. Set evaluate.judge to auto, reward or endpoint"
            )
        metrics.check(self)

    def _check_reference_model(self) -> None:
        named = self.source.model.startswith("registry:") and "|" in self.source.model
        if self.train.reference_model == "base" and (self.sft or not named):
            raise ValueError(
                "`train.reference_model` base is the model behind the bar of `source.model: registry:NAME|ADDRESS`, "
                f"and source.model is {self.source.model}{' with sft' if self.sft else ''}. Set it to start"
            )

    def _check_sample(self) -> None:
        if self.sample and self.sft:
            raise ValueError(
                "`sample` draws answers of the model at `source.model`, and `sft` changes that model afterwards: set "
                "one of them to null. To sample from a tuned model, run sft first, then start from its champion"
            )
        if self.sample and self.sample.as_evaluate(self.evaluate).judge == "none":
            raise ValueError(
                "`sample` needs a judge, and there is none: set evaluate.judge or sample.judge to reward or endpoint"
            )


def _texts(content: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every string in nested sections and lists, with its dotted name."""
    if isinstance(content, str):
        yield name, content
    children = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in children:
        yield from _texts(value, f"{name}.{key}" if name else str(key))


def load_params(path: Path = PARAMS) -> Params:
    return validate(Params, read_yaml(path), path)


def read_recipe(name: str, part: str = "params") -> dict[str, Any]:
    """The part of a recipe that overrides params.yaml (`params`) or infra/cluster.yaml (`cluster`)."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if name not in names:
        raise UserError(f"There is no recipe '{name}' in flows/recipes. Recipes: {', '.join(names)}.")
    content = read_yaml(RECIPES / f"{name}.yaml")
    if unknown := content.keys() - {"params", "cluster"}:
        raise UserError(f"flows/recipes/{name}.yaml: Unknown key `{unknown.pop()}`. Known keys: params, cluster.")
    return content.get(part, {})


def read_params(recipe: str | None) -> dict[str, Any]:
    """The validated content of params.yaml, with a recipe."""
    content = read_yaml(PARAMS)
    if recipe:
        content = overlay(content, read_recipe(recipe))
    validate(Params, content, RECIPES / f"{recipe}.yaml" if recipe else PARAMS)
    return content


def overlay(base: dict[str, Any], over: dict[str, Any], model: type[BaseModel] = Params) -> dict[str, Any]:
    return strict.overlay(base, over, model)


def show(recipe: str | None) -> None:
    """Validate both configuration files; with a recipe, print the resulting values."""
    load_cluster()
    content = read_params(recipe)
    if recipe:
        print(yaml.safe_dump(content, sort_keys=False), end="")
    else:
        print("params.yaml and infra/cluster.yaml are valid.")
