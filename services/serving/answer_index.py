"""Recent answers by id, with their thumbs and latencies, as the journals on disk tell.

All writers' journals are read, so votes of the arena count too. An answer whose journal was sent and deleted is looked
up in MLflow; the figures begin at `since`.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from tasks.config.cluster import load_cluster
from tasks.config.paths import main_checkout
from tasks.errors import UserError
from tasks.feedback.events import Answer, Event, Feedback
from tasks.feedback.journal import read_events

MOST_ANSWERS = 200_000  # in memory; the oldest are dropped


@dataclass
class Served:
    time: float  # seconds since the epoch
    version: str  # MODEL/VERSION
    role: str
    seconds: float | None = None
    thumbs: dict[str, str] = field(default_factory=dict)  # the last of each token, or rater


class AnswerIndex:
    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self.offsets: dict[str, int] = {}
        self.answers: dict[str, Served] = {}
        self._read_new()

    def knows(self, answer: str) -> bool:
        """True also while MLflow is down: feedback is kept, and the sender drops it if its answer never comes."""
        from tasks.feedback.traces import has_answer

        with self.lock:
            if answer not in self.answers:
                self._read_new()
            if answer in self.answers:
                return True
        try:
            return has_answer(load_cluster(main_checkout()), answer)
        except UserError:
            return True

    def stats(self) -> dict[str, Any]:
        """For each version and role: answers, thumbs with the share of thumbs up, latency."""
        with self.lock:
            self._read_new()
            groups: dict[tuple[str, str], list[Served]] = {}
            for served in self.answers.values():
                groups.setdefault((served.version, served.role), []).append(served)
            versions = [{"model": name, "role": role, **_figures(group)} for (name, role), group in groups.items()]
            return {"versions": versions, "since": min((served.time for served in self.answers.values()), default=None)}

    def _read_new(self) -> None:
        new = list[Event]()
        for path in sorted(self.folder.glob("*.jsonl")):
            with suppress(FileNotFoundError):  # sent and deleted
                events, self.offsets[path.name] = read_events(path, self.offsets.get(path.name, 0))
                new += events
        for event in sorted(new, key=lambda event: isinstance(event, Feedback)):  # answers first
            self._add(event)
        while len(self.answers) > MOST_ANSWERS:
            del self.answers[next(iter(self.answers))]

    def _add(self, event: Event) -> None:
        if isinstance(event, Answer):
            name = f"{event.model}/{event.version}" if event.version else event.model
            seconds: Any = event.parameters.get("seconds")
            self.answers[event.id] = Served(event.time, name, event.role, seconds)
        elif event.kind == "thumb" and event.answer in self.answers:
            self.answers[event.answer].thumbs[event.through or event.rater] = event.value


def _figures(group: list[Served]) -> dict[str, Any]:
    thumbs = [value for served in group for value in served.thumbs.values()]
    up = thumbs.count("up")
    seconds = [served.seconds for served in group if served.seconds is not None]
    p50, p95 = numpy.percentile(seconds, [50, 95]).round(3).tolist() if seconds else (None, None)
    votes = {"up": up, "down": len(thumbs) - up, "share_up": wilson(up, len(thumbs))}
    return {"answers": len(group), "thumbs": votes, "latency_seconds": {"p50": p50, "p95": p95} if seconds else None}


def wilson(successes: int, count: int) -> dict[str, float] | None:
    """A share with Wilson's score interval."""
    if not count:
        return None
    from scipy.stats import binomtest  # imports for a second, which would delay the first answer

    interval = binomtest(successes, count).proportion_ci(0.95, method="wilson")
    share = {"value": successes / count, "low": interval.low, "high": interval.high}
    return {name: round(float(value), 4) for name, value in share.items()}
