"""Events of serving: an answer of a model, and a person's feedback on it. Plain data, checked before it is kept."""

import re
import unicodedata
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from tasks.errors import problems

SPEAKERS = ("system", "user", "assistant", "tool")
PREFERENCES = ("first", "second", "tie", "both_bad", "withdrawn")  # a rater's last one on two answers counts
VALUES = {"thumb": ("up", "down"), "edit": (), "preference": PREFERENCES}
LONGEST_PROMPT = 1_000_000  # characters
LONGEST_NAME = 250  # MLflow takes no more characters of a rater's name
NO_NULL = r"^[^\x00]*$"  # Postgres stores no null character
# Printable to Python, and yet without a shape: two names that differ in these look the same.
SHAPELESS = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
CONFIG = ConfigDict(strict=True, allow_inf_nan=False, revalidate_instances="always", defer_build=True)


def _check_messages(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    if any(set(message) != {"role", "content"} or message["role"] not in SPEAKERS for message in messages):
        raise ValueError(f"each must have a role ({', '.join(SPEAKERS)}) and a content")
    if sum(len(message["content"]) for message in messages) > LONGEST_PROMPT:
        raise ValueError(f"they have more than {LONGEST_PROMPT:,} characters")
    return messages


def person(name: str) -> str:
    """A name as it is kept. ValueError for one that could pass for another's, or for several in a list of lines."""
    name = unicodedata.normalize("NFC", name)
    if not name.isprintable() or SHAPELESS.search(name):
        raise ValueError("a name has printable characters alone: no line breaks, control, bidi or invisible ones")
    if len(name) > LONGEST_NAME:
        raise ValueError(f"a name has at most {LONGEST_NAME} characters")
    return " ".join(name.split())


def _named(name: str) -> str:
    if not name:
        raise ValueError("a rater's name is missing")
    return name


Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # uuid4().hex
Time = Annotated[float, Field(gt=0, lt=1e11)]  # seconds since the epoch; MLflow keeps milliseconds
Name = Annotated[str, Field(max_length=LONGEST_NAME, pattern=NO_NULL)]
User = Annotated[str, AfterValidator(person)]  # "" if unknown
Rater = Annotated[User, AfterValidator(_named)]
Role = Annotated[str, Field(pattern="^(champion|challenger|sample)$")]
OtherId = Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]
Text = Annotated[str, Field(max_length=200_000, pattern=NO_NULL)]
ModelName = Annotated[str, Field(pattern=r"^[\w.-][\w. -]{0,199}$")]  # part of an experiment's name and of an address
Messages = list[dict[str, Annotated[str, Field(pattern=NO_NULL)]]]  # [{"role": "user", "content": ...}, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Becomes one MLflow trace."""

    __pydantic_config__ = CONFIG
    id: Id
    time: Time
    messages: Annotated[Messages, Field(min_length=1), AfterValidator(_check_messages)]  # the prompt
    text: Text
    model: ModelName  # of the registry
    version: Name  # "" for a model folder that is not registered
    run: Name  # the pipeline run that made it, "" if unknown
    role: Role
    user: User  # who asked, "" if unknown
    parameters: dict[str, JsonValue]


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """Becomes one MLflow assessment of the answer's trace."""

    __pydantic_config__ = CONFIG
    id: Id
    time: Time
    answer: Id
    rater: Rater
    kind: Literal["thumb", "edit", "preference"]
    value: Text  # edit: the corrected text
    other: OtherId = ""  # preference: the second answer; `answer` is the first
    through: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")] = ""  # hash of the gateway's token


Event = Answer | Feedback
E = TypeVar("E", Answer, Feedback, Event)
KINDS: dict[str, type[Event]] = {"answer": Answer, "feedback": Feedback}
ADAPTERS: dict[type[Event], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in KINDS.values()}


def check(event: E) -> E:
    """The event as it is kept. ValueError for one that cannot be: the sender and MLflow take whatever passes here."""
    try:
        checked: E = ADAPTERS[type(event)].validate_python(event)
    except ValidationError as error:
        raise ValueError(problems(error.errors())) from None
    if isinstance(checked, Feedback):
        _check_value(checked)
    return checked


def _check_value(feedback: Feedback) -> None:
    kind, values = feedback.kind, VALUES[feedback.kind]
    if kind == "edit" and not feedback.value.strip():
        raise ValueError("value must be the corrected answer, not empty")
    if kind != "edit" and feedback.value not in values:
        raise ValueError(f"value of a {kind} must be one of {', '.join(values)}")
    if kind == "preference" and feedback.other in ("", feedback.answer):
        raise ValueError("other must be the id of the second answer")
    if kind != "preference" and feedback.other:
        raise ValueError(f"other must be empty for a {kind}")


def to_json(event: Event) -> dict[str, Any]:
    return {"event": type(event).__name__.lower(), **asdict(event)}


def from_json(content: dict[str, Any]) -> Event:
    """ValueError, TypeError or KeyError for what `to_json` has not written."""
    fields = dict(content)
    return check(KINDS[fields.pop("event")](**fields))
