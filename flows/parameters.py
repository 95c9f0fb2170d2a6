"""Types of the flows' parameters: Prefect's pages make a form of them, and reject mistakes before a run starts.

The server validates a run's parameters against the JSON schema that Prefect makes from these types on deployment. What
a schema cannot express (an option that the chosen loss does not take) is checked when the run starts.
"""

import difflib
import itertools
import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, TypeAdapter, ValidationError, WithJsonSchema
from pydantic.fields import FieldInfo

from tasks.config import old_train
from tasks.config.cluster import CLUSTER, RENAMED, Cluster, groups, load_cluster
from tasks.config.params import RECIPES, Params
from tasks.config.paths import ROOT
from tasks.config.strict import all_keys, read_yaml
from tasks.config.train import loss_keys
from tasks.errors import UserError
from tasks.runs.names import NAME, check_name
from tasks.secrets.redact import redact

# A form offers a choice or a text field only for values that cannot be null. These stand for null.
NO_RECIPE, NO_NAME = "none", ""
BELOW_LOSS = "train.loss."
CHOICES = [NO_RECIPE, *sorted(path.stem for path in RECIPES.glob("*.yaml"))]
NAME_OR_NONE = rf"^$(?!\n)|{NAME}"


def _null_for(word: str) -> AfterValidator:
    return AfterValidator(lambda value: None if value == word else value)


def _valid_name(name: str | None) -> str | None:
    try:
        return check_name(name) if name else None
    except UserError as error:
        raise ValueError(str(error)) from None


if TYPE_CHECKING:
    Recipe = str | None
else:
    Recipe = Annotated[
        Literal[tuple(CHOICES)] | None, _null_for(NO_RECIPE), WithJsonSchema({"type": "string", "enum": CHOICES})
    ]
Name = Annotated[
    str | None,
    AfterValidator(_valid_name),
    WithJsonSchema({"type": "string", "pattern": NAME_OR_NONE}),
]


def settable() -> dict[str, FieldInfo]:
    """The keys that overrides may set: those of params.yaml, where a section that may be null is a key too, and those
    of worker groups below `cluster.`."""
    params = {name: field for name, field in all_keys(Params) if "." in name or not field.is_required()}
    cluster = {f"cluster.{name}": field for name, field in all_keys(Cluster) if name.split(".")[0] in groups()}
    return params | loss_keys() | cluster


def known_and_typed(overrides: dict[str, Any]) -> dict[str, Any]:
    """Check that each key exists and each value has its type; whether they fit together is checked later."""
    fields, loss = settable(), overrides.get("train.loss")
    if message := old_train.override_refusal(overrides, loss if isinstance(loss, dict) else _shipped_loss()):
        raise ValueError(f"{message}.")
    for name, value in overrides.items():
        if name not in fields:
            current = re.sub(r"(?<=^cluster\.)\w+", lambda group: RENAMED.get(group[0], group[0]), name)
            near = difflib.get_close_matches(current, fields, n=1)
            hint = f"Did you mean `{near[0]}`?" if near else "Write it as in `train.beta`."
            raise ValueError(f"`{name}` is not a key of params.yaml. {hint}")
        try:
            _adapter(fields[name]).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            message = problem["msg"].removeprefix("Value error, ")
            raise ValueError(f"`{name}` is {value!r}: {message}.") from None
    return overrides


def _shipped_loss() -> dict[str, Any]:
    with suppress(UserError, KeyError):  # the run reports what is wrong in the file
        return dict(read_yaml(ROOT / "params.yaml")["train"]["loss"])
    return {}


def _adapter(field: FieldInfo) -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[field.annotation, field])  # type: ignore[arg-type]


def schema() -> dict[str, Any]:
    """The schema of overrides: a field for each key, described by its comment and its value on deployment.

    No field has a default: a form sends defaults, and an override that nobody chose would win over the recipe.
    """
    text, cluster_text = (ROOT / "params.yaml").read_text(), (ROOT / CLUSTER).read_text()
    values, fields = {}, {}
    described = {**comments(text), **{f"cluster.{name}": line for name, line in comments(cluster_text).items()}}
    with suppress(yaml.YAMLError, UserError):  # the run reports what is wrong in the file
        values = {**yaml.safe_load(text), "cluster": load_cluster(ROOT).model_dump()}
    for name, field in settable().items():
        if name.startswith(BELOW_LOSS):
            continue  # 100 fields that few need: accepted, but not part of the form
        value = redact(f"When deployed: {json.dumps(_value(values, name), default=str)}")
        description = ". ".join(filter(None, [described.get(name), value]))
        fields[name] = {**_field_schema(field), "title": name, "description": description}
    below_loss: dict[str, Any] = {f"^{re.escape(BELOW_LOSS)}": {}}
    return {"type": "object", "properties": fields, "patternProperties": below_loss, "additionalProperties": False}


def _value(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _field_schema(field: FieldInfo) -> dict[str, Any]:
    """A type with few values becomes a choice: Prefect's form sends `false` for a boolean that nobody touched, and
    cannot change a constant that may be null."""
    schema = _adapter(field).json_schema()
    schema.pop("default", None)
    if "$defs" in schema:  # a nested model is checked when the run starts
        return {}
    values = [_values(kind) for kind in schema.get("anyOf", [schema])]
    return {"enum": list(itertools.chain(*values))} if all(values) else schema


def _values(kind: dict[str, Any]) -> list[Any]:
    """All values of a type that has only a few; empty for other types."""
    if "const" in kind:
        return [kind["const"]]
    few: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
    return few.get(kind.get("type", ""), kind.get("enum", []))


def comments(text: str) -> dict[str, str]:
    """The comment behind each key of a YAML file, by the key's dotted name."""
    by_key: dict[str, str] = {}
    path: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"^((?:  )*)([\w]+):(.*?)(?: # ?(.*))?$", line):
            path[len(match[1]) // 2 :] = [match[2]]
            if match[4]:
                by_key[".".join(path)] = match[4].strip()
    return by_key


Overrides = Annotated[
    Annotated[dict[str, Any], AfterValidator(known_and_typed)] | None,
    AfterValidator(lambda overrides: overrides or None),
    WithJsonSchema(schema()),
]
