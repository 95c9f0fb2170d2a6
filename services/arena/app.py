"""The arena's page and API. A rater logs in with a name and the arena's token; a signed cookie keeps the name."""

import base64
import hashlib
import hmac
import re
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from services.arena.answers import ModelAnswers
from services.arena.comparisons import Arena
from services.http_app import plain_app
from tasks.errors import problems
from tasks.feedback.events import Id, Rater, person
from tasks.feedback.journal import FeedbackJournal

PATIENCE = 5.0  # seconds for answers that are being computed when the server stops
COOKIE, MONTH = "dpo_arena", 30 * 24 * 3600
PAGE, SCRIPT = (Path(__file__).with_name(name).read_text() for name in ("page.html", "page.js"))
STYLE = hashlib.sha256("".join(re.findall("<style>(.*?)</style>", PAGE, re.DOTALL)).encode()).digest()
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; img-src data:; "
    f"style-src 'sha256-{base64.b64encode(STYLE).decode()}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Login(BaseModel):
    name: Rater
    token: Annotated[str, Field(max_length=200)]


class Undo(BaseModel):
    id: Id
    comparison: Id


class Vote(Undo):
    choice: Literal["left", "right", "tie", "both_bad"]


class Question(BaseModel):
    text: Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=8000)]


def guard(request: Request, response: Response) -> None:
    """Against CSRF: a browser sends a custom header to another site only after a preflight, which we never allow."""
    response.headers.update(HEADERS)
    if request.method == "POST" and request.headers.get("x-arena") != "1":
        raise HTTPException(403, "The header X-Arena: 1 is missing.")


class Sessions:
    """Signed cookies. The key is derived from the token: a new token logs everybody out, a restart nobody."""

    def __init__(self, token: str) -> None:
        self.key = hashlib.sha256(b"arena session " + token.encode()).digest()

    def cookie(self, name: str) -> str:
        return self._signed(name.encode().hex())

    def _signed(self, text: str) -> str:
        return f"{text}.{hmac.new(self.key, text.encode(), 'sha256').hexdigest()}"

    def rater(self, request: Request) -> str:
        cookie = request.cookies.get(COOKIE, "")
        text = cookie.partition(".")[0]
        with suppress(ValueError):  # a name that an earlier release took
            if hmac.compare_digest(cookie.encode(), self._signed(text).encode()):
                return person(bytes.fromhex(text).decode())
        raise HTTPException(401, "Log in with your name and the arena's token.")


def create_router(answers: ModelAnswers, journal: FeedbackJournal, *, token: str, **options: Any) -> APIRouter:
    """Page and API, at relative addresses. Answers are computed while the app runs. `options` are those of Arena."""
    sessions = Sessions(token)
    arena = Arena(answers, journal, sessions.key, **options)
    rater = Depends(sessions.rater)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        worker = threading.Thread(target=arena.work, daemon=True)
        worker.start()
        yield
        arena.stopped.set()
        worker.join(PATIENCE)

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
    def progress(results: bool = False, name: str = rater) -> dict[str, Any]:
        """The page asks for `results` only while they are open."""
        return {**arena.progress(name), **(arena.results() if results else {})}

    @router.get("/api/next")
    def next_comparison(skip: Annotated[tuple[str, ...], Query()] = (), name: str = rater) -> dict[str, Any]:
        """Nothing in it tells which answer is whose."""
        if (chosen := arena.next(name, skip)) is None:
            return {"comparison": None, "state": "failed" if arena.failed else "waiting" if arena.queue else "done"}
        left, right = (chosen.first.text, chosen.second.text)[:: -1 if arena.is_swapped(name, chosen.id) else 1]
        return {"comparison": {"id": chosen.id, "messages": chosen.first.messages, "left": left, "right": right}}

    @router.post("/api/vote")
    def vote(form: Vote, name: str = rater) -> dict[str, Any]:
        arena.vote(name, form.id, form.comparison, form.choice)
        return arena.progress(name)

    @router.post("/api/undo")
    def undo(form: Undo, name: str = rater) -> dict[str, Any]:
        arena.undo(name, form.id, form.comparison)
        return arena.progress(name)

    @router.post("/api/prompt")
    def prompt(form: Question, name: str = rater) -> None:
        arena.ask(name, form.text.strip())

    return router


def create_app(router: APIRouter) -> FastAPI:
    """The arena as an app of its own."""
    app = plain_app()
    app.include_router(router)
    app.add_exception_handler(RequestValidationError, _refuse)
    return app


def _refuse(request: Request, error: Exception) -> Response:
    """FastAPI's own reply repeats the input, which may contain characters that cannot be encoded."""
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": problems(error.errors())}, 422)
