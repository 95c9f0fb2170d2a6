"""Configuration files that are read strictly: sections, overlays of them, and a sentence for every mistake."""

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.errors import UserError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]
T = TypeVar("T", bound=BaseModel)


class Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is not there. Restore it with `git checkout -- {path.name}`.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {str(error).replace(chr(10), ' ')}. Mend that line.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping of sections, and it holds {type(content).__name__}.")
    return content


def lay_over(base: dict[str, Any], over: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Lay `over` on `base`: sections are merged, every other value (a loss mixture, a column map) is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = section(model, key)
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = lay_over(base[key], value, below) if below and both else value
    return merged


class Layer(NamedTuple):
    origin: str  # the file, or what else the values come from
    content: Mapping[str, Any]


class Value(NamedTuple):
    value: Any
    origin: str


def merge(layers: Sequence[Layer], model: type[BaseModel]) -> dict[str, Any]:
    """All layers as one; later layers win."""
    content: dict[str, Any] = {}
    for layer in layers:
        content = lay_over(content, dict(layer.content), model)
    return content


def changed(layers: Sequence[Layer], model: type[BaseModel]) -> dict[str, Value]:
    """Each key, by dotted name, whose value is not the first layer's, with the last layer that set it."""
    values: dict[str, Value] = {}
    for layer in layers:
        for name, value in _leaves(layer.content, model):
            # An optional section (`train.adapter`) may become null, or stop being null.
            hidden = [old for old in values if old.startswith(f"{name}.") or name.startswith(f"{old}.")]
            values = {old: found for old, found in values.items() if old not in hidden}
            values[name] = Value(value, layer.origin)
    defaults = dict(_leaves(layers[0].content, model))
    return {name: found for name, found in values.items() if name not in defaults or found.value != defaults[name]}


def _leaves(content: Mapping[str, Any], model: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        below = section(model, key)
        if below and isinstance(value, dict):
            yield from _leaves(value, below, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def dotted(overrides: dict[str, Any]) -> dict[str, Any]:
    """{"train.beta": 0.2} as {"train": {"beta": 0.2}}."""
    nested: dict[str, Any] = {}
    for name, value in overrides.items():
        *sections, key = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return nested


def section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    field = model.model_fields.get(key)
    candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
    return next((c for c in candidates if inspect.isclass(c) and issubclass(c, Section)), None)


def validate(model: type[T], content: dict[str, Any], path: Path) -> T:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        sentences = [_sentence(model, problem) for problem in error.errors()]
        raise UserError("\n".join(f"{path}: {sentence}" for sentence in sentences)) from None


def _sentence(model: type[BaseModel], problem: Any) -> str:
    where = [str(part) for part in problem["loc"]]
    name, value = ".".join(where), problem.get("input")
    if problem["type"] == "extra_forbidden":
        for part in where[:-1]:
            model = section(model, part) or model
        near = difflib.get_close_matches(where[-1], model.model_fields, n=1)
        known = f"Did you mean `{near[0]}`?" if near else f"Known here: {', '.join(model.model_fields)}."
        return f"`{name}` is not a key of ours. {known}"
    if problem["type"] == "missing":
        return f"`{name}` is missing. Add it."
    if problem["type"] in ("float_type", "int_type") and isinstance(value, str) and _is_number(value):
        return f"`{name}` is the text '{value}' and not a number: YAML wants a dot there. Write {_with_dot(value)}."
    message = problem["msg"].removeprefix("Value error, ")
    return (f"`{name}`: {message}" if name else message) + (
        "" if problem["type"] == "value_error" else f", and it is {value!r}."
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _with_dot(text: str) -> str:
    mantissa, _, exponent = text.lower().partition("e")
    mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
    return f"{mantissa}e{exponent if exponent[:1] in '+-' else '+' + exponent}" if exponent else mantissa
