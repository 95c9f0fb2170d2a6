"""Events of serving: an answer of a model, and a person's feedback on it. Plain data, checked before it is kept."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from tasks.errors import problems

SPEAKERS = ("system", "user", "assistant", "tool")
PREFERENCES = ("first", "second", "tie", "both_bad", "withdrawn")  # a rater's last one on two answers counts
VALUES = {"thumb": ("up", "down"), "edit": (), "preference": PREFERENCES}
LONGEST_PROMPT = 1_000_000  # characters
NO_NULL = r"^[^\x00]*$"  # Postgres stores no null character
CONFIG = ConfigDict(strict=True, allow_inf_nan=False, revalidate_instances="always", defer_build=True)


def _check_messages(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    if any(set(message) != {"role", "content"} or message["role"] not in SPEAKERS for message in messages):
        raise ValueError(f"each must have a role ({', '.join(SPEAKERS)}) and a content")
    if sum(len(message["content"]) for message in messages) > LONGEST_PROMPT:
        raise ValueError(f"they have more than {LONGEST_PROMPT:,} characters")
    return messages


Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # uuid4().hex
Time = Annotated[float, Field(gt=0, lt=1e11)]  # seconds since the epoch; MLflow keeps milliseconds
Name = Annotated[str, Field(max_length=250, pattern=NO_NULL)]  # MLflow takes 250 characters of a rater's name
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
    user: Name  # who asked, "" if unknown
    parameters: dict[str, JsonValue]


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """Becomes one MLflow assessment of the answer's trace."""

    __pydantic_config__ = CONFIG
    id: Id
    time: Time
    answer: Id
    rater: Annotated[str, Field(max_length=250, pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]  # not blank
    kind: Literal["thumb", "edit", "preference"]
    value: Text  # edit: the corrected text
    other: OtherId = ""  # preference: the second answer; `answer` is the first


Event = Answer | Feedback
KINDS: dict[str, type[Event]] = {"answer": Answer, "feedback": Feedback}
ADAPTERS: dict[type[Event], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in KINDS.values()}


def check(event: Event) -> None:
    """ValueError for an event that cannot be kept: the sender and MLflow take whatever passes here."""
    try:
        ADAPTERS[type(event)].validate_python(event)
    except ValidationError as error:
        raise ValueError(problems(error.errors())) from None
    if isinstance(event, Feedback):
        _check_value(event)


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
    event = KINDS[fields.pop("event")](**fields)
    check(event)
    return event
