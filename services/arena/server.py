"""`dpo arena`: serve the arena alone, and send its votes to MLflow in the background."""

import threading
from pathlib import Path
from typing import Any

from services import passwords
from services.arena.answers import ARENA, ModelAnswers, Prompt, sides
from services.arena.app import PATIENCE, create_app, create_router
from services.http_app import run
from tasks.chat import as_messages, read_prompts
from tasks.config.access import LOOPBACK_NAMES
from tasks.config.cluster import Cluster, load_cluster
from tasks.errors import UserError
from tasks.feedback import traces
from tasks.feedback.events import Answer, Event, Feedback
from tasks.feedback.journal import FeedbackJournal, feedback_folder, stored_events
from tasks.system.ports import http_address, require_free

SHORTEST_TOKEN = 16


def serve(
    names: tuple[str, str | None],
    prompts: Path | None,
    from_traces: bool,
    sampling: dict[str, Any],
    overlap: float,
    token: str | None,
    address: tuple[str, int],
    feedback_model: str | None = None,
) -> None:
    """Compare champion and challenger (`names`) until Ctrl-C."""
    host, port = address
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise UserError(f"The token has {len(token)} characters. Give at least {SHORTEST_TOKEN}, or leave it out.")
    require_free(host, port)
    texts = [Prompt(as_messages(prompt)) for prompt in (read_prompts(prompts) if prompts else ())]
    first, second = sides(*names, sampling, feedback_model)
    cluster, journal, stop = load_cluster(), FeedbackJournal(), threading.Event()
    events = _stored(cluster, first.model)
    earlier = [event for event in events if isinstance(event, Answer) and (from_traces or _is_typed(event))]
    router = create_router(
        ModelAnswers(first, second),
        journal,
        token=token or passwords.load()[passwords.ARENA],
        prompts=[*texts, *(Prompt(answer.messages, answer.user) for answer in earlier)],
        votes=[event for event in events if isinstance(event, Feedback)],
        overlap=overlap,
    )
    sender = threading.Thread(target=traces.follow, args=(journal.folder, cluster, stop), daemon=True)
    sender.start()
    _announce(host, port, token)
    run(create_app(router), host, port)
    stop.set()
    sender.join(PATIENCE)  # the rest stays in the journal


def _stored(cluster: Cluster, model: str) -> list[Event]:
    """Answers and votes of earlier sessions. The journal first: the sender deletes a file once MLflow has it."""
    local = stored_events(feedback_folder())
    sent = traces.read(cluster, traces.experiment_name(model), missing_ok=True)
    return list({event.id: event for event in [*local, *sent]}.values())


def _is_typed(answer: Answer) -> bool:
    """Whether a rater typed the prompt in an earlier session."""
    return ARENA in answer.parameters and answer.user != ""


def _announce(host: str, port: int, token: str | None) -> None:
    """The token follows a #, which browsers send to no server."""
    link = "" if token else f"#token={passwords.load()[passwords.ARENA]}"
    print(f"The arena is at {http_address(host, port)}/{link}", flush=True)
    print("Raters log in with any name and the token. Ctrl-C stops it; nothing is lost.", flush=True)
    if host not in LOOPBACK_NAMES:
        print("Traffic is not encrypted: put a proxy with TLS in front of it.", flush=True)
