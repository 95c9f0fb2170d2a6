"""The arena's page and API. A rater logs in with a name and the arena's token; a signed cookie keeps the name."""

import base64
import hashlib
import hmac
import re
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from pydantic import BaseModel, Field

from services.arena.comparisons import Arena, NotReady
from tasks.feedback.answers import AnswerSource, Prompt
from tasks.feedback.events import Feedback
from tasks.feedback.journal import FeedbackJournal

COOKIE = "dpo_arena"
MONTH = 30 * 24 * 3600
TYPED = 20  # unanswered prompts of one rater
FOLDER = Path(__file__).parent
PAGE, SCRIPT = (FOLDER / "page.html").read_text(), (FOLDER / "page.js").read_text()
STYLE = base64.b64encode(hashlib.sha256(re.search(r"<style>(.*?)</style>", PAGE, re.S)[1].encode()).digest())  # type: ignore[index]
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'self'; style-src 'sha256-{STYLE.decode()}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Login(BaseModel):
    name: Annotated[str, Field(pattern=r"^[\w .@+-]{1,40}$")]
    token: Annotated[str, Field(max_length=200)]


class Undo(BaseModel):
    id: Key
    comparison: Key


class Vote(Undo):
    choice: Literal["left", "right", "tie", "both_bad"]


class Question(BaseModel):
    text: Annotated[str, Field(min_length=1, max_length=8000)]


def guard(request: Request, response: Response) -> None:
    """No other site can post: a browser asks us before it sends this header across sites, and we never agree."""
    response.headers.update(HEADERS)
    if request.method == "POST" and request.headers.get("x-arena") != "1":
        raise HTTPException(403, "The header X-Arena: 1 is missing.")


class Sessions:
    """Signed cookies. The key is derived from the token: a new token logs everybody out, a restart nobody."""

    def __init__(self, token: str) -> None:
        self.token, self.key = token, hashlib.sha256(b"arena session " + token.encode()).digest()

    def cookie(self, name: str) -> str:
        return f"{base64.urlsafe_b64encode(name.encode()).decode()}.{self._signature(name)}"

    def _signature(self, name: str) -> str:
        return hmac.new(self.key, name.encode(), "sha256").hexdigest()

    def rater(self, request: Request) -> str:
        encoded, _, signature = request.cookies.get(COOKIE, "").partition(".")
        try:
            name = base64.urlsafe_b64decode(encoded).decode()
        except ValueError:
            name = ""
        if not name or not hmac.compare_digest(signature.encode(), self._signature(name).encode()):
            raise HTTPException(401, "Log in with your name and the arena's token.")
        return name


def create_router(
    answers: AnswerSource,
    journal: FeedbackJournal,
    prompts: Iterable[Prompt] = (),
    votes: Iterable[Feedback] = (),
    *,
    token: str,
    overlap: float = 0.2,
) -> APIRouter:
    """Page and API, with relative addresses: it also works below a prefix. Answers are computed while the app runs."""
    sessions = Sessions(token)
    arena = Arena(answers, journal, prompts, votes, secret=sessions.key, overlap=overlap)
    Rater = Annotated[str, Depends(sessions.rater)]

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        worker = threading.Thread(target=arena.work, daemon=True)
        worker.start()
        yield
        arena.stop()
        worker.join()

    router = APIRouter(dependencies=[Depends(guard)], lifespan=lifespan)

    @router.get("/")
    def page() -> Response:
        return Response(PAGE, media_type="text/html", headers=HEADERS)

    @router.get("/page.js")
    def script() -> Response:
        return Response(SCRIPT, media_type="text/javascript", headers=HEADERS)

    @router.post("/api/login")
    def login(form: Login, request: Request, response: Response) -> dict[str, Any]:
        if not hmac.compare_digest(form.token.encode(), token.encode()):
            time.sleep(1)  # against guessing
            raise HTTPException(401, "This is not the arena's token.")
        cookie, secure = sessions.cookie(form.name), request.url.scheme == "https"
        response.set_cookie(COOKIE, cookie, MONTH, httponly=True, samesite="strict", secure=secure)
        return arena.progress(form.name)

    @router.post("/api/logout")
    def logout(response: Response) -> None:
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")

    @router.get("/api/progress")
    def progress(rater: Rater) -> dict[str, Any]:
        return arena.progress(rater)

    @router.get("/api/next")
    def next_comparison(rater: Rater, skip: Annotated[list[str], Query()] = []) -> dict[str, Any]:  # noqa: B006
        """Without ids and models: nothing in it tells which answer is whose."""
        if (found := arena.next(rater, skip)) is None:
            state = "failed" if arena.failure else "waiting" if arena.queue else "done"
            return {"comparison": None, "state": state}
        texts = [found.first.text, found.second.text]
        left, right = reversed(texts) if arena.is_swapped(rater, found.id) else texts
        return {"comparison": {"id": found.id, "messages": found.first.messages, "left": left, "right": right}}

    @router.post("/api/vote")
    def vote(form: Vote, rater: Rater) -> dict[str, Any]:
        with _as_http():
            arena.vote(rater, form.id, form.comparison, form.choice)
        return arena.progress(rater)

    @router.post("/api/undo")
    def undo(form: Undo, rater: Rater) -> dict[str, Any]:
        with _as_http():
            arena.undo(rater, form.id, form.comparison)
        return arena.progress(rater)

    @router.post("/api/prompt")
    def prompt(form: Question, rater: Rater) -> None:
        if sum(waiting.user == rater for waiting in list(arena.queue)) >= TYPED:
            raise HTTPException(429, f"{TYPED} of your prompts wait for their answers. Try again later.")
        arena.ask(rater, form.text.strip())

    return router


@contextmanager
def _as_http() -> Iterator[None]:
    """503: the page tries again. 404: it never will succeed."""
    try:
        yield
    except NotReady:
        raise HTTPException(503, "The answers are being loaded.") from None
    except KeyError:
        raise HTTPException(404, "This arena has no such comparison.") from None


def create_app(router: APIRouter) -> FastAPI:
    """The arena standing alone. FastAPI's own pages about the API would load scripts from elsewhere."""
    app = FastAPI(title="dpo arena", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(router)
    return app
