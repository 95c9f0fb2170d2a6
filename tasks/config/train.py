"""The sections `sft` and `train` of params.yaml."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic.fields import FieldInfo

from tasks.config import old_train
from tasks.config.strict import Count, Fraction, Positive, Section
from tasks.errors import UserError
from training.objectives import mixture
from training.objectives.loss import Option
from training.objectives.registry import LOSSES

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["nf4", "fp8"]


class Adapter(Section):
    rank: Count
    alpha: Positive
    targets: str | list[str]
    use_rslora: bool
    use_dora: bool
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)]
    init: Literal["zero", "pissa"] = "zero"
    lora_plus_ratio: Annotated[float, Field(ge=1.0)] = 1.0
    modules_to_save: list[str] = Field(default_factory=list)

    def check(self) -> None:
        """The policy must start as the reference."""
        if self.dropout and self.use_dora:
            raise ValueError(
                "`dropout` with `use_dora` also drops inputs of the base model, so that the policy would not start as "
                "the reference: set dropout to 0.0, or use_dora to false"
            )
        if self.init == "pissa" and (self.dropout or self.use_dora):
            raise ValueError(
                "`init: pissa` moves a part of the base model's weights into the adapter, where dropout and DoRA would "
                "change it from the start: set dropout to 0.0 and use_dora to false, or init to zero"
            )


Share = Annotated[float, Field(gt=0.0, lt=1.0)]
EvalSteps = Annotated[
    Annotated[Count, Tag("steps")] | Annotated[Share, Tag("share")] | Annotated[Literal["epoch"], Tag("epoch")],
    Discriminator(
        lambda value: {str: "epoch", float: "share"}.get(type(value), "steps")
    ),  # so that an error names one alternative
]


LOSS_SCHEMA = {"type": "object", "additionalProperties": {"anyOf": [{"type": "number"}, {"type": "object"}]}}


class ReferenceUpdate(Section):
    """TR-DPO: ref <- alpha policy + (1 - alpha) ref."""

    every: Count  # steps
    alpha: Annotated[float, Field(gt=0.0, le=1.0)]


class Optimization(Section):
    """How a model is trained, whatever the loss."""

    adapter: Adapter | None
    dtype: Dtype
    quantization: Quantization | None
    optimizer: Literal["adamw", "adamw_bf16", "adamw_8bit"] = "adamw"
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
    resume_from_checkpoint: Annotated[str, Field(min_length=1)]
    seed: int
    deterministic: bool

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_form(cls, content: Any) -> Any:
        if isinstance(content, dict) and (message := old_train.refusal(content, {})):
            raise ValueError(message)
        return content

    def check(self) -> None:
        if self.patience and not (self.select and self.eval_steps):
            raise ValueError(
                "`patience` counts evaluations of `select`: set `select` and `eval_steps` too, or set patience to null"
            )
        if self.select and not self.select.startswith("eval/"):
            raise ValueError(f"`select` must name a metric of held-out pairs, eval/..., not '{self.select}'")
        if self.quantization and not self.adapter:
            raise ValueError("`quantization` freezes the base model: set `adapter`, or set quantization to null")
        if self.quantization and self.adapter and self.adapter.init == "pissa":
            raise ValueError(
                "`adapter.init: pissa` changes weights that `quantization` has rounded: set one of them only"
            )


class Sft(Optimization):
    """Supervised fine-tuning before DPO. A key that is not set has this value."""

    adapter: Adapter | None = Adapter(
        rank=16, alpha=32, targets="all-linear", use_rslora=False, use_dora=False, dropout=0.0
    )
    dtype: Dtype = "float32"
    quantization: Quantization | None = None
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: Fraction = 0.03
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: Positive = 1.0
    global_batch_size: Count = 16
    epochs: Count = 1
    max_steps: Count | None = None
    logging_steps: Count = 5
    eval_steps: EvalSteps | None = 0.25
    select: str | None = None
    patience: Count | None = None
    max_skipped_steps: Count = 5
    resume_from_checkpoint: Annotated[str, Field(min_length=1)] = "auto"
    seed: int = 0
    deterministic: bool = False


class Train(Optimization):
    loss: Annotated[dict[str, Any], AfterValidator(mixture.check), WithJsonSchema(LOSS_SCHEMA)]
    beta: Positive | None
    ld_alpha: Fraction | None = None
    wpo: bool | None = None
    reference_model: Literal["start", "base"] = "start"
    reference_update: ReferenceUpdate | None
    router_aux_loss_coef: Positive | None
    kl_limit: Positive | None
    stop_on_alarm: bool

    def loss_options(self) -> dict[str, Option]:
        """The options that all losses share and that are set, by name."""
        values = {name: getattr(self, name) for name in mixture.SHARED}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def loss_weights(self) -> dict[str, float]:
        return mixture.weights_of(self.loss)

    @property
    def needs_reference(self) -> bool:
        return mixture.needs_reference(self.loss)

    def check_rows(self, unpaired: bool) -> None:
        """ValueError if the loss is for the other kind of data."""
        mixture.check_rows(self.loss, unpaired)

    def check(self) -> None:
        super().check()
        mixture.check_shared(self.loss, self.loss_options())
        if self.reference_model == "base" and (self.reference_update or not self.needs_reference):
            raise ValueError("`reference_model: base` needs a loss with a reference, and reference_update null")
        for name in ("kl_limit", "reference_update"):
            if getattr(self, name) and not self.needs_reference:
                raise ValueError(f"`{name}` has no effect on loss {', '.join(self.loss)}, which has no reference model")


def loss_keys() -> dict[str, FieldInfo]:
    """The keys below `train.loss` that an override may set, by dotted name: each loss, its weight and its options."""
    keys: dict[str, FieldInfo] = {}
    for name, declared in LOSSES.items():
        term = Annotated[Any, AfterValidator(partial(mixture.check_term, name))]
        kinds = {name: term, f"{name}.{mixture.WEIGHT}": Positive}
        kinds |= {f"{name}.{key}": option.kind for key, option in declared.options.items()}
        keys |= {f"train.loss.{key}": FieldInfo.from_annotation(kind) for key, kind in kinds.items()}
    return keys


def with_whole_loss(overrides: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides with the keys below `train.loss` as one `train.loss`, which takes its other values from the content."""
    train = content.get("train")
    given = overrides.get("train.loss") or (train.get("loss") if isinstance(train, Mapping) else None)
    loss = dict(given) if isinstance(given, Mapping) else {}
    if message := old_train.override_refusal(overrides, loss):
        raise UserError(f"{message}.")
    below = {name: value for name, value in overrides.items() if name.startswith("train.loss.")}
    if not below:
        return dict(overrides)  # also a `train.loss` that is no mapping, which the schema refuses
    for name, value in sorted(below.items()):
        loss_name, _, key = name.removeprefix("train.loss.").partition(".")
        term = loss.get(loss_name, {})
        term = term if isinstance(term, Mapping) else {mixture.WEIGHT: term}
        loss[loss_name] = {**term, key: value} if key else value
    others = {name: value for name, value in overrides.items() if name not in below}
    return {**others, "train.loss": loss}
