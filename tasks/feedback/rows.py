"""Rows for training from feedback: `source.data: feedback:MODEL?since=2026-11-01&min_agreement=0.7`.

Corrected answers and votes become pairs (the row shape `votes`, so that several raters make a soft label); thumbs
become unpaired rows. The same feedback gives the same bytes.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.errors import UserError
from tasks.feedback import traces
from tasks.feedback.events import Answer, Event, Feedback
from tasks.feedback.journal import feedback_folder
from tasks.feedback.raters import comparisons, contradicting, last_votes, merge_equal, same_answers, shares, split
from tasks.system.files import json_lines

FEEDBACK = "feedback:"
KINDS = {"pairs": ("preference", "edit"), "thumbs": ("thumb",)}  # of feedback, by kind of rows
VOTE = {"first": 1, "second": 2, "tie": 0}  # PandaLM's numbers, as the row shape `votes` reads them
Row = dict[str, Any]


def _seconds(value: str | float) -> float:
    if not isinstance(value, str):
        return value
    moment = datetime.fromisoformat(value)  # its message shows the value
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


Time = Annotated[float, BeforeValidator(_seconds)]
Names = Annotated[frozenset[str], BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)]


class Query(BaseModel):
    """What an address selects."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str
    since: Time = 0.0  # of the feedback, seconds since the epoch
    until: Time = float("inf")
    version: Names = frozenset()  # of the answers; empty: any
    rater: Names = frozenset()
    kind: Literal["pairs", "thumbs"] = "pairs"
    min_agreement: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    min_raters: Annotated[int, Field(ge=1)] = 1
    exclude_contradicting: bool = True


def parse(key: str, address: str) -> Query:
    """UserError for an unknown option or value."""
    model, _, query = address.removeprefix(FEEDBACK).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    known = [name for name in Query.model_fields if name != "model"]
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"{key}: `{unknown[0]}` in {address} is an unknown option. Use {', '.join(known)}.")
    try:
        return Query.model_validate({"model": model or load_params().promote.model_name, **options})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{key}: `{first['loc'][0]}={first['input']}` in {address} cannot be read: {first['msg']}. "
            "Write it as in feedback:MODEL?since=2026-11-01&version=3,4&min_agreement=0.7 (docs/feedback.md)."
        ) from None


def lines(key: str, address: str) -> str:
    """The rows of an address as JSON lines; "" where nothing matches. Sends what is on disk, then reads MLflow."""
    query, cluster = parse(key, address), load_cluster()
    traces.send(feedback_folder(), cluster)
    events = traces.read(cluster, traces.experiment_name(query.model))
    return json_lines(rows(events, query))


def advice(key: str, address: str) -> str:
    """What to do about an address that nothing matches."""
    query = parse(key, address)
    other = query.model_copy(update={"kind": "pairs" if query.kind == "thumbs" else "thumbs"})
    if count := len(rows(traces.read(load_cluster(), traces.experiment_name(query.model)), other)):
        how = "a loss of unpaired rows (train.loss: {kto: 1.0})" if other.kind == "thumbs" else "a loss of pairs"
        return f"But kind={other.kind} has {count} rows: add that option, and train with {how}."
    return (
        "Collect some (`dpo serve`, `dpo arena`), or select more: an earlier `since`, a lower `min_agreement` or "
        "`min_raters`."
    )


def rows(events: Iterable[Event], query: Query) -> list[Row]:
    answers, feedback = split(events)
    ids = same_answers(answers)
    excluded = contradicting(comparisons(merge_equal(feedback, ids))) if query.exclude_contradicting else frozenset()
    selected = [vote for vote in feedback if vote.rater not in excluded and _selected(vote, answers, query)]
    used, people = merge_equal(selected, ids), _people(selected, answers, ids)
    unnamed = [*_votes(used, answers, query), *_edits(used, answers), *_unpaired(used, answers, query)]
    for row in unnamed:
        names = {name for id_ in row["traces"].split() for name in people[id_]}
        row["raters"] = "\n".join(sorted(names - {row["user"]}))
    return sorted(unnamed, key=lambda row: (row["traces"], json.dumps(row)))


def _people(feedback: Iterable[Feedback], answers: dict[str, Answer], ids: dict[str, str]) -> dict[str, set[str]]:
    """Who asked for or rated each answer: erasing a person must find every row with a part of theirs."""
    people = defaultdict[str, set[str]](set)
    for vote in feedback:
        for id_ in filter(None, (vote.answer, vote.other)):
            people[ids[id_]] |= {vote.rater, answers[id_].user} - {""}
    return people


def _selected(vote: Feedback, answers: dict[str, Answer], query: Query) -> bool:
    about = [answers[id_] for id_ in (vote.answer, vote.other) if id_ in answers]
    return (
        vote.kind in KINDS[query.kind]
        and len(about) == (2 if vote.other else 1)
        and query.since <= vote.time < query.until
        and (not query.rater or vote.rater in query.rater)
        and (not query.version or any(answer.version in query.version for answer in about))
    )


def _pair(better: str, worse: str, about: Answer, votes: Iterable[int], ids: Iterable[str]) -> Row:
    """Two answers with a vote of each rater; 1 prefers the first."""
    cast = {f"annotator{number}": vote for number, vote in enumerate(sorted(votes), 1)}
    sides = {"prompt": about.messages, "response1": better, "response2": worse}
    return {**sides, **cast, "user": about.user, "traces": " ".join(ids)}


def _votes(feedback: Iterable[Feedback], answers: dict[str, Answer], query: Query) -> Iterator[Row]:
    for pair, votes in comparisons(feedback).items():
        first, second = (answers[id_] for id_ in pair)
        counted = shares(votes)
        if counted is None or first.messages != second.messages or _unusable(first.text, second.text):
            continue
        share, voted = counted
        if max(share, 1 - share) >= query.min_agreement and voted >= query.min_raters:
            cast = [VOTE[vote] for vote in votes.values() if vote in VOTE]
            yield _pair(first.text, second.text, first, cast, pair)


def _edits(feedback: Iterable[Feedback], answers: dict[str, Answer]) -> Iterator[Row]:
    edits = {(edit.answer, edit.value) for edit in last_votes(feedback, "edit")}
    for id_, text in edits:
        if not _unusable(text, answers[id_].text):
            yield _pair(text, answers[id_].text, answers[id_], [VOTE["first"]], [id_])


def _unusable(first: str, second: str) -> bool:
    """Equal or empty answers: `prepare` would quarantine the row."""
    return first.strip() == second.strip() or not first.strip() or not second.strip()


def _unpaired(feedback: Iterable[Feedback], answers: dict[str, Answer], query: Query) -> Iterator[Row]:
    """The majority of an answer's thumbs; an even split gives no row."""
    thumbs = defaultdict[str, list[bool]](list)
    for thumb in last_votes(feedback, "thumb"):
        thumbs[thumb.answer].append(thumb.value == "up")
    for id_, votes in thumbs.items():
        share, answer = sum(votes) / len(votes), answers[id_]
        agreed = share != 0.5 and max(share, 1 - share) >= query.min_agreement
        if agreed and len(votes) >= query.min_raters and answer.text.strip():
            completion = [{"role": "assistant", "content": answer.text}]
            sides = {"prompt": answer.messages, "completion": completion, "label": share > 0.5}
            yield {**sides, "user": answer.user, "traces": id_}
