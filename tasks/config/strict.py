"""Strict configuration files: typed sections, layers that override each other, and one clear sentence per mistake."""

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from tasks.errors import UserError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]
T = TypeVar("T", bound=BaseModel)


class Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    def check(self) -> None:
        """ValueError if values of this section exclude each other; each value alone is valid."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check()
        return self


def parse_yaml(text: str) -> Any:
    """yaml.safe_load, in C where PyYAML has it: a run reads its configuration dozens of times."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)  # tests/config/test_security.py forbids yaml.load
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _CommandLine(yaml.SafeLoader):
    """YAML in which `1e-5` is a number, as in YAML 1.2. PyYAML follows 1.1, as DVC does when it reads params.yaml."""


_CommandLine.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def parse_value(text: str) -> Any:
    """A value of the command line."""
    if re.fullmatch(r"\w+:", text):  # the address `feedback:`, in which YAML sees a mapping
        return text
    loader = _CommandLine(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def to_yaml(value: Any) -> str:
    """A value as YAML on one line; not as JSON, whose 5e-07 YAML reads as text."""
    text = yaml.safe_dump([value], default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True)
    return text.strip()[1:-1]


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Restore it with `git checkout -- {path}`.") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or type(error).__name__
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(f"{path} is not valid YAML ({where}{problem}). Correct that line.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a mapping of sections, not {type(content).__name__}.")
    return content


def overlay(base: dict[str, Any], over: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Merge `over` into `base` section by section; any other value (a loss mixture, a column map) is replaced."""
    merged = dict(base)
    for key, value in over.items():
        subsection = section(model, key)
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = overlay(base[key], value, subsection) if subsection and both else value
    return merged


class Layer(NamedTuple):
    origin: str  # the file or command that set the values
    content: Mapping[str, Any]


class Value(NamedTuple):
    value: Any
    origin: str


def merge(layers: Sequence[Layer], model: type[BaseModel]) -> dict[str, Any]:
    """All layers as one; later layers win."""
    content: dict[str, Any] = {}
    for layer in layers:
        content = overlay(content, layer.content, model)
    return content


def changed(layers: Sequence[Layer], model: type[BaseModel]) -> dict[str, Value]:
    """Each key, by dotted name, whose value is not the first layer's, with the last layer that set it."""
    values: dict[str, Value] = {}
    for layer in layers:
        for name, value in _leaves(layer.content, model):
            # An optional section (`train.adapter`) may become null, or stop being null.
            hidden = [old for old in values if old.startswith(f"{name}.") or name.startswith(f"{old}.")]
            values = {old: kept for old, kept in values.items() if old not in hidden}
            values[name] = Value(value, layer.origin)
    defaults = dict(_leaves(layers[0].content, model))
    return {name: last for name, last in values.items() if name not in defaults or last.value != defaults[name]}


def _leaves(content: Mapping[str, Any], model: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        subsection = section(model, key)
        if subsection and isinstance(value, dict):
            yield from _leaves(value, subsection, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def dotted(overrides: dict[str, Any]) -> dict[str, Any]:
    """{"train.beta": 0.2} as {"train": {"beta": 0.2}}."""
    nested: dict[str, Any] = {}
    for name, value in overrides.items():
        *sections, key = name.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = value
    return nested


def section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The model of the section at `key`; None where `key` is no section."""
    field = model.model_fields.get(key)
    candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
    return next((c for c in candidates if inspect.isclass(c) and issubclass(c, Section)), None)


def all_keys(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The keys of a section and of the sections in it, by dotted name. Not those below a mapping from names."""
    for name, field in model.model_fields.items():
        yield f"{above}{name}", field
        subsection = section(model, name)
        if subsection and get_origin(field.annotation) is not dict:
            yield from all_keys(subsection, f"{above}{name}.")


def validate(model: type[T], content: dict[str, Any], path: Path) -> T:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        sentences = [_sentence(model, problem) for problem in error.errors()]
        raise UserError("\n".join(f"{path}: {sentence}" for sentence in sentences)) from None


def _sentence(model: type[BaseModel], problem: Any) -> str:
    path = [str(part) for part in problem["loc"]]
    name, value = ".".join(path), problem.get("input")
    if problem["type"] == "extra_forbidden":
        return f"Unknown key `{name}`. {_suggestion(model, path)}"
    if problem["type"] == "missing":
        return f"`{name}` is missing. Add it."
    if problem["type"] in ("float_type", "int_type") and isinstance(value, str) and _is_number(value):
        number = to_yaml(float(value))
        return f"`{name}` is the text '{value}' and not a number: YAML needs a dot in it. Write {number}."
    message = problem["msg"].removeprefix("Value error, ")
    return (f"`{name}`: {message}" if name else message) + (
        "" if problem["type"] == "value_error" else f", but it is {value!r}."
    )


def _suggestion(model: type[BaseModel], path: list[str]) -> str:
    """The same key of another section, a similar one of this section, or all keys of this section."""
    *sections, key = path
    candidates = [name for name, _ in all_keys(model) if name.rpartition(".")[2] == key]
    for part in sections:
        model = section(model, part) or model
    if not candidates:
        candidates = [".".join([*sections, name]) for name in difflib.get_close_matches(key, model.model_fields, n=1)]
    if not candidates:
        return f"Known keys: {', '.join(model.model_fields)}."
    return f"Did you mean {' or '.join(f'`{name}`' for name in candidates)}?"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_overrides(texts: Iterable[str] | None) -> dict[str, Any]:
    """KEY=VALUE options of a command line; each value is YAML, and may be a number such as 1e-5."""
    return dict(_override(text) for text in texts or ())


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UserError(f"--set takes KEY=VALUE, as in --set train.beta=0.2, not '{text}'.")
    try:
        return key, parse_value(value)
    except yaml.YAMLError:
        raise UserError(f"--set {key}: '{value}' is not valid YAML.") from None
