"""The sections `sft` and `train` of params.yaml."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from tasks.config.strict import Count, Fraction, Positive, Section
from training.objectives import options

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
    def _refuse_removed(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("optimizer") == "muon":
            raise ValueError("`optimizer: muon` is gone: nobody aligns with it. Set optimizer to adamw")
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
    loss: dict[str, float]
    beta: Positive | None
    label_smoothing: Annotated[float, Field(ge=0.0, le=0.5)] | None
    gamma: float | None
    length_normalization: bool | None
    reference: bool | None
    tau: Positive | None
    cpo_alpha: Positive | None
    dpop_lambda: Positive | None
    desirable_weight: Positive | None = None
    undesirable_weight: Positive | None = None
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] | None
    f_alpha: float | None
    margin: Literal["scores"] | None
    margin_scale: Positive | None
    ld_alpha: Fraction | None
    wpo: bool | None
    reference_model: Literal["start", "base"] = "start"
    reference_update: ReferenceUpdate | None
    router_aux_loss_coef: Positive | None
    kl_limit: Positive | None
    stop_on_alarm: bool

    def loss_options(self) -> dict[str, options.Option]:
        """The options that are set, by name."""
        values = {name: getattr(self, name) for name in options.OPTIONS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def needs_reference(self) -> bool:
        return options.needs_reference(self.loss, self.loss_options())

    def check_rows(self, unpaired: bool) -> None:
        """ValueError if the loss is for the other kind of data."""
        options.check_rows(self.loss, unpaired)

    def check(self) -> None:
        super().check()
        options.check(self.loss, self.loss_options())
        if self.reference_model == "base" and (self.reference_update or not self.needs_reference):
            raise ValueError("`reference_model: base` needs a loss with a reference, and reference_update null")
        for name in ("kl_limit", "reference_update"):
            if getattr(self, name) and not self.needs_reference:
                raise ValueError(f"`{name}` has no effect on loss {', '.join(self.loss)}, which has no reference model")
