"""The schema of params.yaml: everything that changes a result. infra/cluster.yaml is in cluster.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from tasks.config import metrics, old_train, strict
from tasks.config.cluster import refuse_renamed
from tasks.config.evaluate import Evaluate
from tasks.config.paths import ROOT
from tasks.config.prepare import Prepare
from tasks.config.promote import Promote
from tasks.config.sample import Sample
from tasks.config.source import Source
from tasks.config.strict import Section, read_yaml, validate
from tasks.config.train import Dtype, Quantization, Sft, Train
from tasks.errors import UserError
from tasks.secrets.redact import is_secret

PARAMS = Path("params.yaml")  # relative: a stage runs in the root of its workspace
RECIPES = ROOT / "flows" / "recipes"


class Reference(Section):
    dtype: Dtype
    quantization: Quantization | None


class Export(Section):
    dtype: Dtype
    max_shard_size: Annotated[str, Field(pattern=r"^\d+(KB|MB|GB)$")]
    gguf: list[Literal["f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"]]


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


def load_stored_params(path: Path) -> Params:
    """The params of an earlier run, also in the form of an earlier version."""
    return validate(Params, old_train.to_new_form(read_yaml(path)), path)


def read_recipe(name: str, part: str = "params") -> dict[str, Any]:
    """The part of a recipe that overrides params.yaml (`params`) or infra/cluster.yaml (`cluster`)."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if name not in names:
        raise UserError(f"There is no recipe '{name}' in flows/recipes. Recipes: {', '.join(names)}.")
    path = RECIPES / f"{name}.yaml"
    content = read_yaml(path)
    if unknown := content.keys() - {"params", "cluster"}:
        raise UserError(f"flows/recipes/{name}.yaml: Unknown key `{unknown.pop()}`. Known keys: params, cluster.")
    _refuse_old_form(path, content.get("params") or {})
    refuse_renamed(content.get("cluster", ()), f"flows/recipes/{name}.yaml, `cluster`")
    return content.get(part, {})


def _refuse_old_form(path: Path, params: dict[str, Any]) -> None:
    """The recipe's own keys in their new form, not those of a configuration in which they are merged."""
    train = params.get("train")
    if isinstance(train, dict) and old_train.refusal(train, {}):
        shipped = read_yaml(ROOT / PARAMS).get("train", {}).get("loss", {})
        raise UserError(f"{path}: `params.train`: {old_train.refusal(train, shipped)}")


def overlay(base: dict[str, Any], over: dict[str, Any], model: type[BaseModel] = Params) -> dict[str, Any]:
    return strict.overlay(base, over, model)
