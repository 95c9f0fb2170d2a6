"""An arena on a free loopback port, answers that are known beforehand, and raters who vote over HTTP."""

import json
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import uvicorn

from services.arena.answers import Prompt, stable_id
from services.arena.app import create_app, create_router
from tasks.feedback.events import Answer, Event, Feedback
from tasks.feedback.journal import FeedbackJournal, read_events
from tasks.system.ports import free_port
from tests.support.workspaces import wait_for

TOKEN = "a token of the tests"


def champion_says(prompt: str) -> str:
    return f"The champion's answer to {prompt}"


def challenger_says(prompt: str) -> str:
    return f"The challenger's answer to {prompt}"


class FixedAnswers:
    """Functions of the prompt instead of models."""

    def __init__(self, first: Callable[[str], str] = champion_says, second: Callable[[str], str] = challenger_says):
        self.first, self.second = first, second

    def pairs(self, prompts: Sequence[Prompt]) -> list[tuple[Answer, Answer]]:
        return [(self._answer(p, self.first, "champion"), self._answer(p, self.second, "challenger")) for p in prompts]

    def _answer(self, prompt: Prompt, says: Callable[[str], str], role: str) -> Answer:
        text = says(prompt.messages[-1]["content"])
        return Answer(
            id=stable_id(prompt.messages, prompt.user, role),
            time=time.time(),
            messages=prompt.messages,
            text=text,
            model="test-model",
            version="1",
            run="",
            role=role,
            user=prompt.user,
            parameters={"arena": role},
        )


def questions(count: int) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": f"Question {number}?"}]) for number in range(count)]


def stored(folder: Path) -> list[Event]:
    return [event for path in sorted(folder.glob("*.jsonl")) for event in read_events(path)[0]]


def votes(folder: Path) -> list[Feedback]:
    return [event for event in stored(folder) if isinstance(event, Feedback)]


@contextmanager
def arena(
    folder: Path, answers: Any, prompts: Sequence[Prompt], port: int | None = None, **options: Any
) -> Iterator[str]:
    """Its address. The folder is that of the journal: a second arena on it continues the first one's work."""
    options = {"prompts": prompts, "votes": votes(folder), **options}
    router = create_router(answers, FeedbackJournal(folder), token=TOKEN, **options)
    port = port or free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(router), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started, 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class Rater:
    def __init__(self, address: str, name: str) -> None:
        self.address, self.name, self.cookies = address, name, CookieJar()
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))
        self.call("login", {"name": name, "token": TOKEN})

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"X-Arena": "1", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}/api/{path}", data, headers)
        with self.opener.open(request, timeout=60) as response:
            return json.load(response)

    def next(self, *skip: str) -> dict[str, Any] | None:
        """The next comparison once it is computed; None if there is none left."""
        query = "&".join(f"skip={key}" for key in skip)
        found: list[Any] = []
        wait_for(lambda: found.append(self.call(f"next?{query}")) or found[-1].get("state") != "waiting", 120)
        return found[-1]["comparison"]

    def vote(self, comparison: str, choice: str, key: str | None = None) -> dict[str, Any]:
        """Returns the results with this vote."""
        self.call("vote", {"id": key or uuid.uuid4().hex, "comparison": comparison, "choice": choice})
        return self.call("progress?results=1")

    def prefer(self, shown: dict[str, Any], word: str) -> dict[str, Any]:
        """Vote for the side whose text has this word."""
        return self.vote(shown["id"], "left" if word in shown["left"] else "right")
