"""The typed, strict view of params.yaml (what changes a result); infra/cluster.yaml is in place.py.

`python -m tasks.params` checks both files; `python -m tasks.params RECIPE` prints params.yaml with a recipe laid over.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from tasks.configuration import Count, Fraction, Positive, Section, dotted, lay_over, read_yaml, validate
from tasks.dataset import formats
from tasks.dataset.drift import FIGURES
from tasks.dataset.violations import VIOLATIONS
from tasks.errors import UserError
from tasks.place import Cluster, load_cluster
from tasks.redact import is_secret
from training import options

__all__ = ["Cluster", "Params", "dotted", "load_cluster", "overlay", "read_yaml", "validate"]

PARAMS = Path("params.yaml")  # relative: a stage runs in the root of its workspace
RECIPES = Path(__file__).resolve().parents[1] / "flows" / "recipes"

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["nf4"]


def known(key: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    for name in names:
        if name not in allowed:
            raise ValueError(f"{key}: there is no `{name}`. Known here: {', '.join(allowed)}")


class Mixed(Section):
    """One source of a mixture."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # a folder's, below data/raw
    data: str
    weight: Positive  # of each of its pairs in the loss
    share: Annotated[float, Field(gt=0.0, le=1.0)]  # of its rows that are taken


Data = Annotated[
    Annotated[str, Tag("address")] | Annotated[list[Mixed], Tag("mixture")],
    Discriminator(lambda value: "mixture" if isinstance(value, list) else "address"),  # for errors that name one place
]


class Source(Section):
    data: Data
    eval: str | None
    model: str
    adapter: str | None
    seed: int

    @model_validator(mode="after")
    def _a_mixture_has_names_of_its_own(self) -> "Source":
        names = [one.name for one in self.data] if isinstance(self.data, list) else ["data"]
        if not names or len({*names, "eval"}) <= len(names):
            raise ValueError("a mixture needs sources, each with a name of its own, none of them `eval`")
        return self


class Layout(Section):
    """How the rows of a source are laid out."""

    format: str
    columns: dict[str, str]

    @model_validator(mode="after")
    def _format_and_columns_are_ours(self) -> "Layout":
        known("format", [self.format], ["auto", *formats.SHAPES])
        known("columns", self.columns, formats.COLUMNS)
        return self


class Prepare(Layout):
    by_source: dict[str, Layout]
    expand: Literal["all", "adjacent", "best_rest"]
    min_margin: Annotated[float, Field(ge=0.0)]
    ties: Literal["drop", "soft"]
    template: str
    chat_template_kwargs: dict[str, Any]
    loss_on: Literal["last", "all"]
    apply_loss_mask: bool
    max_tokens: Annotated[int, Field(ge=8)]
    over_length: Literal["drop", "truncate_prompt", "truncate_response", "fail"]
    eval_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    max_pairs: Count | None
    max_characters: Count
    near_duplicates: Annotated[float, Field(ge=0.5, le=1.0)] | None
    max_bad_fraction: Fraction
    thresholds: dict[str, Fraction]

    @model_validator(mode="after")
    def _thresholds_and_template_are_known(self) -> "Prepare":
        known("thresholds", self.thresholds, VIOLATIONS)
        if self.template not in ("auto", "plain", "chatml") and "{" not in self.template:
            raise ValueError(
                f"template '{self.template}' is neither auto, plain, chatml nor the text of a Jinja template"
            )
        return self


class Reference(Section):
    dtype: Dtype
    quantization: Quantization | None


class Adapter(Section):
    rank: Count
    alpha: Positive
    targets: str | list[str]
    use_rslora: bool
    use_dora: bool


Share = Annotated[float, Field(gt=0.0, lt=1.0)]
EvalSteps = Annotated[
    Annotated[Count, Tag("steps")] | Annotated[Share, Tag("share")] | Annotated[Literal["epoch"], Tag("epoch")],
    Discriminator(lambda value: {str: "epoch", float: "share"}.get(type(value), "steps")),  # one place in an error
]


class ReferenceUpdate(Section):
    """TR-DPO: ref <- alpha policy + (1 - alpha) ref."""

    every: Count  # steps
    alpha: Annotated[float, Field(gt=0.0, le=1.0)]


class Train(Section):
    loss: dict[str, float]
    beta: Positive | None
    label_smoothing: Annotated[float, Field(ge=0.0, le=0.5)] | None
    gamma: float | None
    length_normalization: bool | None
    reference: bool | None
    tau: Positive | None
    cpo_alpha: Positive | None
    dpop_lambda: Positive | None
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] | None
    f_alpha: float | None
    beta_alpha: Positive | None
    beta_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] | None
    beta_filter: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    margin: Literal["scores"] | None
    margin_scale: Positive | None
    ld_alpha: Fraction | None
    wpo: bool | None
    reference_update: ReferenceUpdate | None
    router_aux_loss_coef: Positive | None
    adapter: Adapter | None
    dtype: Dtype
    quantization: Quantization | None
    learning_rate: Positive
    schedule: Literal["cosine", "linear", "constant"]
    warmup_fraction: Fraction
    weight_decay: Annotated[float, Field(ge=0.0)]
    max_grad_norm: Positive
    global_batch_size: Count
    epochs: Count
    max_steps: Count | None
    logging_steps: Count
    eval_steps: EvalSteps | None
    select: str | None
    patience: Count | None
    max_skipped_steps: Count
    kl_limit: Positive | None
    stop_on_alarm: bool
    resume_from_checkpoint: Annotated[str, Field(min_length=1)]
    seed: int
    deterministic: bool

    def loss_options(self) -> dict[str, options.Option]:
        """The options that were given, by name."""
        given = {name: getattr(self, name) for name in options.OPTIONS}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def needs_reference(self) -> bool:
        return options.needs_reference(self.loss, self.loss_options())

    @model_validator(mode="after")
    def _loss_is_known_and_every_option_has_an_effect(self) -> "Train":
        options.check(self.loss, self.loss_options())
        return self

    @model_validator(mode="after")
    def _what_selects_and_quantizes_can(self) -> "Train":
        if self.patience and not (self.select and self.eval_steps):
            raise ValueError("`patience` counts evaluations of `select`: set `select` and `eval_steps` too, or null")
        if self.select and not self.select.startswith("eval/"):
            raise ValueError(f"`select` names a metric of held-out pairs, eval/..., and it is '{self.select}'")
        if self.quantization and not self.adapter:
            raise ValueError("`quantization` freezes the base: set `adapter`, or quantization to null")
        for name in ("kl_limit", "reference_update"):
            if getattr(self, name) and not self.needs_reference:
                raise ValueError(f"`{name}` has no effect on loss {', '.join(self.loss)}, which has no reference")
        return self


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


class Evaluate(Section):
    dtype: Dtype
    prompts: Annotated[int, Field(ge=0)]
    engine: Literal["auto", "transformers", "vllm"]
    max_new_tokens: Count
    temperature: Annotated[float, Field(ge=0.0)]
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    judge: Literal["demo", "none", "reward", "endpoint"]
    reward_model: RewardModel | None
    endpoint: Endpoint | None
    harness: Harness | None
    seed: int

    @model_validator(mode="after")
    def _a_judge_has_what_it_needs_and_nothing_else(self) -> "Evaluate":
        for judge, option in (("reward", "reward_model"), ("endpoint", "endpoint")):
            given = getattr(self, option) is not None
            if given and self.judge != judge:
                raise ValueError(f"`{option}` has no effect on judge {self.judge}: set it to null, or judge to {judge}")
            if self.judge == judge and not given:
                raise ValueError(f"judge {judge} needs `{option}`: set it")
        return self


class Export(Section):
    dtype: Dtype
    max_shard_size: Annotated[str, Field(pattern=r"^\d+(KB|MB|GB)$")]
    gguf: list[Literal["f16", "q8_0"]]


class Promote(Section):
    model_name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    alias: Annotated[str, Field(pattern=r"^[a-z][\w-]*$")]
    require: dict[str, float]
    limits: dict[str, float]
    max_regression: dict[str, Annotated[float, Field(ge=0.0)]]
    approval_hours: Positive | None
    push: str | None
    drift: dict[str, Annotated[float, Field(ge=0.0)]]
    on_drift: Literal["stop", "warn"]

    @model_validator(mode="after")
    def _drift_is_of_figures_that_there_are(self) -> "Promote":
        known("drift", self.drift, FIGURES)
        return self

    @model_validator(mode="after")
    def _the_alias_is_not_one_of_ours(self) -> "Promote":
        if self.alias in ("challenger", "previous"):
            raise ValueError(f"alias: `{self.alias}` is where we keep another version. Choose another, as `champion`")
        return self


class Params(Section):
    source: Source
    prepare: Prepare
    reference: Reference
    train: Train
    evaluate: Evaluate
    export: Export
    promote: Promote

    @model_validator(mode="after")
    def _secrets_are_elsewhere(self) -> "Params":
        for name, value in _texts(self.model_dump()):
            if is_secret(value):
                raise ValueError(
                    f"`{name}` holds what looks like a password or a token, and params are committed, logged and "
                    "exported. Put it into the environment (AWS_ACCESS_KEY_ID, HF_TOKEN, ...) and leave it out here"
                )
        return self

    @model_validator(mode="after")
    def _the_reference_is_the_policys_start(self) -> "Params":
        if self.train.quantization != self.reference.quantization:
            raise ValueError(
                "train.quantization and reference.quantization must be the same: the policy starts as the reference"
            )
        if self.train.quantization and self.evaluate.engine == "vllm":
            raise ValueError(
                f"`evaluate.engine` vllm would load the base in 16 bits, and train.quantization is "
                f"{self.train.quantization}: set evaluate.engine to auto or transformers"
            )
        return self

    @model_validator(mode="after")
    def _held_out_pairs_come_from_one_place(self) -> "Params":
        if (self.source.eval is None) == (self.prepare.eval_fraction is None):
            raise ValueError(
                "held-out pairs come from `source.eval` or by `prepare.eval_fraction`: give one, and null for the other"
            )
        return self


def _texts(content: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text of nested sections and lists, by its dotted name."""
    if isinstance(content, str):
        yield name, content
    below = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in below:
        yield from _texts(value, f"{name}.{key}" if name else str(key))


def load_params(path: Path = PARAMS) -> Params:
    return validate(Params, read_yaml(path), path)


def read_recipe(name: str, part: str = "params") -> dict[str, Any]:
    """What a recipe lays over params.yaml, or over infra/cluster.yaml."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if name not in names:
        raise UserError(f"There is no recipe '{name}' in flows/recipes. There are: {', '.join(names)}.")
    content = read_yaml(RECIPES / f"{name}.yaml")
    if unknown := content.keys() - {"params", "cluster"}:
        raise UserError(f"flows/recipes/{name}.yaml: `{unknown.pop()}` is neither `params` nor `cluster`.")
    return content.get(part, {})


def overlay(base: dict[str, Any], over: dict[str, Any], model: type[BaseModel] = Params) -> dict[str, Any]:
    """Lay `over` on `base`: sections are merged, every other value (a loss mixture, a column map) is replaced."""
    return lay_over(base, over, model)


def main() -> None:
    try:
        load_cluster()
        content = read_yaml(PARAMS)
        if len(sys.argv) > 1:
            content = overlay(content, read_recipe(sys.argv[1]))
            validate(Params, content, RECIPES / f"{sys.argv[1]}.yaml")
            print(yaml.safe_dump(content, sort_keys=False), end="")
        else:
            validate(Params, content, PARAMS)
            print("params.yaml and infra/cluster.yaml are good.")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
