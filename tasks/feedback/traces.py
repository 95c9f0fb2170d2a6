"""Answers as MLflow traces and feedback as their assessments: sending the journal, reading back, erasing a person.

A trace's id and an assessment's id are made from the event's own id. So sending an event again, after a kill between
sending it and noting that, finds it there and adds nothing.
"""

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tasks.config.cluster import Cluster, load_cluster
from tasks.errors import UserError
from tasks.feedback.events import Answer, E, Event, Feedback, check, from_json, to_json
from tasks.feedback.journal import blank, feedback_folder, is_closed, read_events, stored_events
from tasks.secrets.redact import redact
from tasks.system import disk
from tasks.system.files import read_json_or_empty, write_json
from tasks.system.lock import file_lock
from tasks.tracking.experiment import make_experiment
from tasks.tracking.mlflow_client import absolute_uri, database, limit_waiting, log_in

PREFIX = "feedback-"  # of an experiment's name; the model's name follows
TRACE, ASSESSMENT = "tr-", "a-"  # as MLflow's own ids begin
SENT, WAITING, LOCK = "sent.json", "waiting.json", "send.lock"
CHUNK = 200  # events of a journal between two notes of what was sent
PAGE, MOST_IDS = 500, 100  # traces per search, MLflow's limit; ids in a filter
WAIT_DAYS = 7.0  # for the answer that a feedback names: another machine may send it later
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds
CONNECTIONS = 8  # to an MLflow server; SQLite takes one writer
PREVIEW = 500  # characters in MLflow's list of traces
TAGS = ("model", "version", "run", "role", "user")
KIND = ("mlflow.experimentKind", "genai_development")  # MLflow opens the page of traces


def experiment_name(model: str) -> str:
    return PREFIX + model


def follow(folder: Path, cluster: Cluster, stop: threading.Event) -> None:
    """For a thread of a server: send what comes until `stop` is set; never raises."""
    pause, last = FIRST_PAUSE, ""
    while not stop.is_set():
        try:
            send(folder, cluster)
            pause, last = FIRST_PAUSE, ""
        except Exception as error:
            if str(error) != last:
                last = str(error)
                print(f"feedback: not sent yet, kept on disk: {redact(last)}", file=sys.stderr, flush=True)
            pause = min(2 * pause, LONGEST_PAUSE)
        stop.wait(pause)


def send(folder: Path, cluster: Cluster) -> int:
    """Send the journal's new events to MLflow; returns how many. Only one process sends at a time."""
    if not folder.exists():
        return 0
    with file_lock(folder / LOCK, wait=False) as acquired:
        if not acquired:
            return 0
        total, unsent, waiting = 0, _unsent(folder), _waiting(folder)
        while unsent or waiting:
            events = [*waiting, *(event for batch, _ in unsent.values() for event in batch)]
            with _store(cluster, "forwarder") as store:
                orphans = _send(store, events)
            write_json(folder / WAITING, {"events": [to_json(event) for event in orphans]})
            offsets = {name: offset for name, offset in _offsets(folder).items() if (folder / name).exists()}
            write_json(folder / SENT, offsets | {name: offset for name, (_, offset) in unsent.items()})
            total += len(events) - len(orphans)
            unsent = _unsent(folder)
            waiting = orphans if unsent else []
        _remove_sent(folder)
        return total


def sync() -> bool:
    """Send what servers could not send, for `dpo sync`; returns whether MLflow took it."""
    try:
        if sent_events := send(feedback_folder(), load_cluster()):
            print(f"sent {sent_events} answers and feedback")
    except UserError as error:
        print(f"error: {error}")
        return False
    return True


def _waiting(folder: Path) -> list[Event]:
    return [from_json(content) for content in read_json_or_empty(folder / WAITING).get("events", [])]


def _offsets(folder: Path) -> dict[str, int]:
    return {name: int(offset) for name, offset in read_json_or_empty(folder / SENT).items()}


def _unsent(folder: Path) -> dict[str, tuple[list[Event], int]]:
    """The next events of each journal, and the offset behind them."""
    before = _offsets(folder)
    batches = {path.name: read_events(path, before.get(path.name, 0), CHUNK) for path in sorted(folder.glob("*.jsonl"))}
    return {name: batch for name, batch in batches.items() if batch[1] > before.get(name, 0)}


def _remove_sent(folder: Path) -> None:
    """Delete journals that were sent and that no process writes to."""
    closed = [path for path in folder.glob("*.jsonl") if is_closed(path)]  # before the look at what is unsent
    pending = _unsent(folder)
    for path in closed:
        if path.name not in pending:
            path.unlink()


class _Store:
    """MLflow's two clients, and the ids of experiments."""

    def __init__(self, uri: str) -> None:
        from mlflow import MlflowClient
        from mlflow.tracing.client import TracingClient

        self.file = database(uri)
        with file_lock(self.file.parent / "store.lock") if self.file else nullcontext():  # made by one process
            self.client, self.tracing = MlflowClient(uri, registry_uri=uri), TracingClient(uri)

    def experiment(self, model: str) -> str:
        name = experiment_name(model)
        if (known := self.client.get_experiment_by_name(name)) is None:
            known = make_experiment(self.client, name, self.file.parent / "artifacts" if self.file else None)
            self.client.set_experiment_tag(known.experiment_id, *KIND)
        return str(known.experiment_id)

    def traces(self, experiment: str, *, texts: bool = True) -> Iterator[Any]:
        """Oldest first: a trace that arrives while we read makes a new last page and moves no other."""
        token, order = None, ["timestamp_ms ASC"]
        while True:
            page = self.tracing.search_traces(
                locations=[experiment], max_results=PAGE, order_by=order, page_token=token, include_spans=texts
            )
            yield from page
            token = page.token
            if not token:
                return

    def each(self, function: Any, items: Iterable[Any]) -> None:
        with ThreadPoolExecutor(1 if self.file else CONNECTIONS) as pool:
            list(pool.map(function, items))


@contextmanager
def _store(cluster: Cluster, user: str) -> Iterator[_Store]:
    """MLflow, logged in as `user`; UserError if it cannot be used."""
    limit_waiting(MLFLOW_SEARCH_TRACES_MAX_BATCH_SIZE="100", MLFLOW_SEARCH_TRACES_MAX_THREADS=str(CONNECTIONS))
    from mlflow.exceptions import MlflowException

    uri = absolute_uri(cluster.tracking_uri)
    try:
        log_in(uri, user)
        yield _Store(uri)
    except (MlflowException, OSError) as error:
        reason = disk.explain(error) or redact(str(error).splitlines()[0])
        raise UserError(
            f"MLflow at {redact(cluster.tracking_uri)} could not be used for feedback: {reason} "
            "Start it (`dpo up`) or correct tracking_uri in infra/cluster.yaml; unsent feedback stays on disk."
        ) from error


def _send(store: _Store, events: Sequence[Event]) -> list[Event]:
    """Returns the feedback whose answer MLflow does not have yet. A new trace takes its feedback along."""
    answers = {event.id: event for event in events if isinstance(event, Answer)}
    feedback = {event.id: event for event in events if isinstance(event, Feedback)}
    stored = _stored_feedback(store, {*answers, *(vote.answer for vote in feedback.values())})
    by_answer = defaultdict[str, list[Feedback]](list)
    for vote in feedback.values():
        by_answer[vote.answer].append(vote)
    experiments = {model: store.experiment(model) for model in sorted({answer.model for answer in answers.values()})}
    new = [answer for answer in answers.values() if answer.id not in stored]
    store.each(lambda a: store.tracing.start_trace(_trace(a, experiments[a.model], by_answer[a.id])), new)
    for model, experiment in experiments.items():
        store.tracing.log_spans(experiment, [_span(answer) for answer in answers.values() if answer.model == model])
    late = [vote for vote in feedback.values() if vote.answer in stored and vote.id not in stored[vote.answer]]
    store.each(lambda vote: store.tracing.log_assessment(TRACE + vote.answer, _assessment(vote)), late)
    oldest = time.time() - WAIT_DAYS * 86400
    orphans = by_answer.keys() - stored.keys() - answers.keys()
    return [vote for vote in feedback.values() if vote.answer in orphans and vote.time > oldest]


def _stored_feedback(store: _Store, ids: set[str]) -> dict[str, set[str]]:
    """The answers among these that MLflow has, each with the ids of its feedback."""
    experiments = [experiment.experiment_id for experiment in _experiments(store)]
    wanted = [f"'{TRACE}{id_}'" for id_ in sorted(ids)] if experiments else []
    stored = dict[str, set[str]]()
    for start in range(0, len(wanted), MOST_IDS):  # by search: MLflow's batch calls refuse ids that it does not know
        among = f"request_id IN ({', '.join(wanted[start : start + MOST_IDS])})"
        for info in store.tracing.store.search_traces(locations=experiments, filter_string=among, max_results=PAGE)[0]:
            feedback = {str(assessment.assessment_id).removeprefix(ASSESSMENT) for assessment in info.assessments}
            stored[info.trace_id.removeprefix(TRACE)] = feedback
    return stored


def _trace(answer: Answer, experiment: str, feedback: Sequence[Feedback]) -> Any:
    from mlflow.entities import TraceInfo, TraceLocation, TraceState

    return TraceInfo(
        trace_id=TRACE + answer.id,
        trace_location=TraceLocation.from_experiment_id(experiment),
        request_time=round(answer.time * 1000),
        state=TraceState.OK,
        execution_duration=0,
        request_preview=answer.messages[-1]["content"][:PREVIEW],
        response_preview=answer.text[:PREVIEW],
        tags={"dpo.answer": answer.id, **{f"dpo.{name}": getattr(answer, name) for name in TAGS}},
        assessments=[_assessment(vote) for vote in feedback],
    )


def _span(answer: Answer) -> Any:
    from mlflow.entities.span import Span

    moment = round(answer.time * 1000) * 1_000_000
    attributes = {
        "mlflow.traceRequestId": TRACE + answer.id,
        "mlflow.spanType": "CHAT_MODEL",
        "mlflow.spanInputs": {"messages": answer.messages},
        "mlflow.spanOutputs": answer.text,
        "dpo.parameters": answer.parameters,
    }
    return Span.from_dict(
        {
            "trace_id": TRACE + answer.id,
            "span_id": answer.id[:15] + "1",  # MLflow takes none that is zero
            "parent_span_id": None,
            "name": "answer",
            "start_time_unix_nano": moment,
            "end_time_unix_nano": moment,
            "status": {"code": "STATUS_CODE_OK", "message": ""},
            "attributes": {name: json.dumps(value, ensure_ascii=False) for name, value in attributes.items()},
        }
    )


def _assessment(feedback: Feedback) -> Any:
    from mlflow.entities import AssessmentSource
    from mlflow.entities import Feedback as Assessment

    moment = round(feedback.time * 1000)
    assessment = Assessment(
        name=feedback.kind,
        value=feedback.value,
        source=AssessmentSource("HUMAN", feedback.rater),
        trace_id=TRACE + feedback.answer,
        metadata={"dpo.feedback": feedback.id, "dpo.other": feedback.other, "dpo.through": feedback.through},
        create_time_ms=moment,
        last_update_time_ms=moment,
    )
    assessment.assessment_id = ASSESSMENT + feedback.id
    return assessment


def read(cluster: Cluster, experiment: str, missing_ok: bool = False) -> Iterator[Event]:
    """The events of an experiment: all answers, then their feedback. Times are in whole milliseconds."""
    with _store(cluster, "writer") if _store_exists(cluster) else nullcontext() as store:
        known = store.client.get_experiment_by_name(experiment) if store else None
        if store is None or known is None:
            if missing_ok:
                return
            names = sorted(other.name for other in _experiments(store)) if store else []
            others = f"There is feedback in {', '.join(names)}." if names else "No feedback was collected yet."
            raise UserError(f"MLflow has no experiment {experiment}. {others} Serve the model with `dpo serve` first.")
        feedback = list[Feedback]()
        for trace in store.traces(known.experiment_id):
            if answer := _answer(trace):
                feedback += filter(None, map(_feedback, trace.info.assessments))
                yield answer
    yield from feedback


def _store_exists(cluster: Cluster) -> bool:
    """MLflow would create a missing SQLite file, and a reader must not create a store."""
    file = database(cluster.tracking_uri)
    return file is None or file.exists()


def has_answer(cluster: Cluster, answer: str) -> bool:
    """Whether MLflow has the trace of an answer."""
    with _store(cluster, "writer") as store:
        return answer in _stored_feedback(store, {answer})


def _answer(trace: Any) -> Answer | None:
    """None for a trace that another tool made or changed, or whose texts are on their way."""
    tags = trace.info.tags
    if "dpo.answer" not in tags or not trace.data.spans:
        return None
    span = trace.data.spans[0]
    answer = Answer(
        id=tags["dpo.answer"],
        time=trace.info.request_time / 1000,
        messages=span.inputs["messages"],
        text=span.outputs,
        parameters=span.get_attribute("dpo.parameters") or {},
        **{name: tags.get(f"dpo.{name}", "") for name in TAGS},
    )
    return _checked(answer)


def _feedback(assessment: Any) -> Feedback | None:
    """None for an assessment of another tool, or one that a person has changed into something invalid."""
    metadata = assessment.metadata or {}
    if "dpo.feedback" not in metadata or assessment.valid is False or assessment.feedback is None:
        return None
    feedback = Feedback(
        id=metadata["dpo.feedback"],
        time=assessment.create_time_ms / 1000,
        answer=assessment.trace_id.removeprefix(TRACE),
        rater=assessment.source.source_id,
        kind=assessment.name,
        value=assessment.feedback.value,
        other=metadata.get("dpo.other", ""),
        through=metadata.get("dpo.through", ""),
    )
    return _checked(feedback)


def _checked(event: E) -> E | None:
    try:
        return check(event)
    except ValueError:
        return None


def _experiments(store: _Store) -> list[Any]:
    return list(store.client.search_experiments(filter_string=f"name LIKE '{PREFIX}%'"))


def erase(cluster: Cluster, user: str, folder: Path | None = None) -> int:
    """Delete a person's answers with all feedback on them, and the person's own feedback; returns how many events.

    The journals on disk come first, so that nothing is sent again.
    """
    folder = folder or feedback_folder()
    with file_lock(folder / LOCK), _store(cluster, "writer") as store:
        traces, assessments = _belonging(store, user)
        local, waiting = stored_events(folder), _waiting(folder)
        answers = {TRACE + event.id for event in local if isinstance(event, Answer) and event.user == user}
        answers |= {info.trace_id for info in traces}
        theirs = {event.id for event in [*local, *waiting] if _is_of(event, user, answers)}
        for path in folder.glob("*.jsonl"):
            blank(path, theirs)
        if waiting:
            kept = [to_json(event) for event in waiting if event.id not in theirs]
            write_json(folder / WAITING, {"events": kept})
        store.each(lambda info: store.client.delete_traces(info.experiment_id, trace_ids=[info.trace_id]), traces)
        store.each(lambda rated: store.tracing.delete_assessment(rated.trace_id, rated.assessment_id), assessments)
    assessments += [rated for info in traces for rated in info.assessments]
    erased = {trace.removeprefix(TRACE) for trace in answers} | theirs
    return len(erased | {rated.assessment_id.removeprefix(ASSESSMENT) for rated in assessments})


def _is_of(event: Event, user: str, traces: set[str]) -> bool:
    if isinstance(event, Answer):
        return event.user == user
    return event.rater == user or TRACE + event.answer in traces


def _belonging(store: _Store, user: str) -> tuple[list[Any], list[Any]]:
    """The person's traces, and the person's assessments of other traces."""
    traces, assessments = list[Any](), list[Any]()
    for experiment in _experiments(store):
        for info in (trace.info for trace in store.traces(experiment.experiment_id, texts=False)):
            if info.tags.get("dpo.user") == user:
                traces.append(info)
            else:
                assessments += [rated for rated in info.assessments if rated.source.source_id == user]
    return traces, assessments
