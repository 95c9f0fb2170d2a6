"""The parameters of our flows as Prefect's pages show them: a form with choices, and a refusal before a run starts.

The server checks a run's parameters against the JSON schema that is made from these types when the flow is deployed;
what a schema cannot say (an option that the chosen loss does not take) is checked when the run begins.
"""

import difflib
import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic.fields import FieldInfo

from flows import ROOT
from tasks.configuration import section
from tasks.errors import UserError
from tasks.params import RECIPES, Params
from tasks.place import CLUSTER, Cluster, groups, load_cluster
from tasks.redact import redact

# A form offers a choice or a text field only where nothing may be null: these words stand for it.
NO_RECIPE, NO_NAME = "none", ""
CHOICES = [NO_RECIPE, *sorted(path.stem for path in RECIPES.glob("*.yaml"))]
NAME = r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$"


def _null_for(word: str) -> AfterValidator:
    return AfterValidator(lambda value: None if value == word else value)


if TYPE_CHECKING:
    Recipe = str | None
else:
    Recipe = Annotated[
        Literal[tuple(CHOICES)] | None, _null_for(NO_RECIPE), WithJsonSchema({"type": "string", "enum": CHOICES})
    ]
Name = Annotated[
    Annotated[str, Field(pattern=NAME)] | None,
    _null_for(NO_NAME),
    WithJsonSchema({"type": "string", "pattern": NAME}),
]


def keys(model: type[BaseModel] = Params, above: str = "") -> dict[str, FieldInfo]:
    """Every key of params.yaml by its dotted name, as `train.beta`."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        if above:
            found[above + name] = field
        below = section(model, name)
        if below and get_origin(field.annotation) is not dict:
            found |= keys(below, f"{above}{name}.")
    return found


def settable() -> dict[str, FieldInfo]:
    """What overrides may name: every key of params.yaml, and the machines' worker groups below `cluster.`."""
    machines = {name: field for name, field in keys(Cluster).items() if name.split(".")[0] in groups()}
    return {**keys(), **{f"cluster.{name}": field for name, field in machines.items()}}


def known_and_typed(overrides: dict[str, Any]) -> dict[str, Any]:
    """Each key is ours and each value has its type; whether they go together is seen when they are laid over."""
    ours = settable()
    for name, value in overrides.items():
        if name not in ours:
            near = difflib.get_close_matches(name, ours, n=1)
            hint = f"Did you mean `{near[0]}`?" if near else "They are written as in `train.beta`."
            raise ValueError(f"`{name}` is not a key of params.yaml. {hint}")
        try:
            _adapter(ours[name]).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            raise ValueError(f"`{name}`: {problem['msg']}, and it is {value!r}.") from None
    return overrides


def _adapter(field: FieldInfo) -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[field.annotation, field])  # type: ignore[arg-type]


def schema() -> dict[str, Any]:
    """Of overrides: one field for each key, described by its comment and its value when the flow is deployed.

    No field has a default: a form posts defaults, and an override that nobody chose would win over the recipe.
    """
    text, machines = (ROOT / "params.yaml").read_text(), (ROOT / CLUSTER).read_text()
    values, fields = {}, {}
    said = {**comments(text), **{f"cluster.{name}": found for name, found in comments(machines).items()}}
    with suppress(yaml.YAMLError, UserError):  # whoever reads the file next says what is wrong
        values = {**yaml.safe_load(text), "cluster": load_cluster(ROOT).model_dump()}
    for name, field in settable().items():
        now = redact(f"When deployed: {json.dumps(_value(values, name), default=str)}")
        described = ". ".join([*said.get(name, {}).values(), now])
        fields[name] = {**_field_schema(field), "title": name, "description": described}
    return {"type": "object", "properties": fields, "additionalProperties": False}


def _value(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _field_schema(field: FieldInfo) -> dict[str, Any]:
    """A few fixed values are one choice: Prefect's form posts `false` for a boolean that nobody touched, and cannot
    change a constant that may be null."""
    made = _adapter(field).json_schema()
    made.pop("default", None)
    if "$defs" in made:  # a nested model is checked when the run begins
        return {}
    values = [_values(kind) for kind in made.get("anyOf", [made])]
    return {"enum": [one for few in values for one in few]} if all(values) else made


def _values(kind: dict[str, Any]) -> list[Any]:
    """All values of a type that has only a few."""
    if "const" in kind:
        return [kind["const"]]
    few: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
    return few.get(kind.get("type", ""), kind.get("enum", []))


def comments(text: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    path: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"^((?:  )*)([\w]+):(.*?)(?: # ?(.*))?$", line):
            path[len(match[1]) // 2 :] = [match[2]]
            if match[4]:
                found[".".join(path)] = {"description": match[4].strip()}
    return found


Overrides = Annotated[
    Annotated[dict[str, Any], AfterValidator(known_and_typed)] | None,
    AfterValidator(lambda given: given or None),
    WithJsonSchema(schema()),
]
