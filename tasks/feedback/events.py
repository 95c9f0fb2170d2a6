"""Events of serving: an answer that a model gave, and a person's feedback on it. Plain data, checked before it is kept."""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

Messages = list[dict[str, str]]  # [{"role": "user", "content": ...}, ...]

ID = re.compile(r"[0-9a-f]{32}")  # uuid4().hex
MODEL = re.compile(r"[\w.-][\w. -]{0,199}")  # part of an experiment's name and of an address
ROLES = ("champion", "challenger", "sample")
SPEAKERS = ("system", "user", "assistant", "tool")
VALUES = {"thumb": ("up", "down"), "edit": (), "preference": ("first", "second", "tie", "both_bad")}
LONGEST_NAME, LONGEST_TEXT, LONGEST_PROMPT = 250, 200_000, 1_000_000  # characters; MLflow takes 250 of a rater's name


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Becomes one MLflow trace."""

    id: str
    time: float  # seconds since the epoch; MLflow keeps milliseconds
    messages: Messages  # the prompt
    text: str
    model: str  # of the registry
    version: str  # "" for a model folder that is not registered
    run: str  # the pipeline run that made it, "" if unknown
    role: str
    user: str  # who asked, "" if unknown
    parameters: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """Becomes one MLflow assessment of the answer's trace."""

    id: str
    time: float
    answer: str
    rater: str
    kind: str
    value: str  # edit: the corrected text
    other: str = ""  # preference: the second answer; `answer` is the first


Event = Answer | Feedback


def check(event: Event) -> None:
    """ValueError for an event that cannot be kept: the sender and MLflow take whatever passes here."""
    _require(bool(ID.fullmatch(event.id)), "id", "must be 32 hexadecimal digits (uuid4().hex)")
    _require(isinstance(event.time, int | float) and 0 < event.time < 1e11, "time", "must be seconds since the epoch")
    if isinstance(event, Answer):
        _check_answer(event)
    else:
        _check_feedback(event)


def _check_answer(answer: Answer) -> None:
    _require(isinstance(answer.messages, list) and len(answer.messages) > 0, "messages", "must be a non-empty list")
    for message in answer.messages:
        known = isinstance(message, dict) and set(message) == {"role", "content"} and message["role"] in SPEAKERS
        _require(known, "messages", f"must each have a role ({', '.join(SPEAKERS)}) and a content")
        _require_text(message["content"], "messages", LONGEST_PROMPT)
    _require(sum(len(message["content"]) for message in answer.messages) <= LONGEST_PROMPT, "messages", "are too long")
    _require_text(answer.text, "text", LONGEST_TEXT)
    _require(bool(MODEL.fullmatch(answer.model)), "model", "must be a model's name: letters, digits, `.`, `_`, `-`")
    for name in ("version", "run", "user"):
        _require_text(getattr(answer, name), name, LONGEST_NAME)
    _require(answer.role in ROLES, "role", f"must be one of {', '.join(ROLES)}")
    try:
        _require_text(json.dumps(answer.parameters, allow_nan=False), "parameters", LONGEST_TEXT)
    except TypeError as error:
        raise ValueError(f"parameters cannot be written as JSON: {error}") from error


def _check_feedback(feedback: Feedback) -> None:
    _require(bool(ID.fullmatch(feedback.answer)), "answer", "must be the id of an answer")
    _require_text(feedback.rater, "rater", LONGEST_NAME)
    _require(feedback.rater.strip() != "", "rater", "must not be empty")
    _require(feedback.kind in VALUES, "kind", f"must be one of {', '.join(VALUES)}")
    _require_text(feedback.value, "value", LONGEST_TEXT)
    if feedback.kind == "edit":
        _require(feedback.value.strip() != "", "value", "must be the corrected answer, not empty")
    else:
        known = VALUES[feedback.kind]
        _require(feedback.value in known, "value", f"of a {feedback.kind} must be one of {', '.join(known)}")
    if feedback.kind == "preference":
        two = bool(ID.fullmatch(feedback.other)) and feedback.other != feedback.answer
        _require(two, "other", "must be the id of the second answer")
    else:
        _require(feedback.other == "", "other", f"must be empty for a {feedback.kind}")


def _require(good: bool, name: str, rule: str) -> None:
    if not good:
        raise ValueError(f"{name} {rule}")


def _require_text(value: Any, name: str, longest: int) -> None:
    _require(isinstance(value, str), name, "must be text")
    _require(len(value) <= longest, name, f"has more than {longest:,} characters")
    valid = "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)
    _require(valid, name, "has a null character or half of a surrogate pair")


def to_json(event: Event) -> dict[str, Any]:
    return {"event": type(event).__name__.lower(), **asdict(event)}


def from_json(content: dict[str, Any]) -> Event:
    """ValueError, TypeError or KeyError for what `to_json` has not written."""
    fields = dict(content)
    kind = {"answer": Answer, "feedback": Feedback}[fields.pop("event")]
    event: Event = kind(**fields)
    check(event)
    return event
