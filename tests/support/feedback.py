"""Events for tests."""

import uuid
from pathlib import Path
from typing import Any

from tasks.feedback.events import Answer, Event, Feedback
from tasks.feedback.journal import FeedbackJournal

NOW = 1_700_000_000.125


def new_id() -> str:
    return uuid.uuid4().hex


def answer(**over: Any) -> Answer:
    fields = {
        "id": new_id(),
        "time": NOW,
        "messages": [{"role": "user", "content": "Wie heißt Du? 🙂"}],
        "text": "Ich heiße Bot.",
        "model": "m",
        "version": "3",
        "run": "20261101-quiet-fox",
        "role": "champion",
        "user": "ann",
        "parameters": {"temperature": 0.7, "max_tokens": 64},
    }
    return Answer(**{**fields, **over})


def feedback(on: Answer, **over: Any) -> Feedback:
    fields = {"id": new_id(), "time": NOW + 1, "answer": on.id, "rater": "bob", "kind": "thumb", "value": "up"}
    return Feedback(**{**fields, **over})


def vote(first: Answer, second: Answer, rater: str, value: str, **over: Any) -> Feedback:
    return feedback(first, other=second.id, kind="preference", rater=rater, value=value, **over)


def written(folder: Path, *events: Event) -> FeedbackJournal:
    journal = FeedbackJournal(folder)
    for event in events:
        journal.append(event)
    return journal
