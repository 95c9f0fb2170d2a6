"""The gate in front of MLflow's server: a request passes if its login may call its route (mlflow_routes.py).

MLflow's server is two applications, FastAPI's around Flask's, each with its own check of logins, which let some routes
pass. So the gate reads the login itself, and finds a request's route as both applications would: what they would not
serve as a listed route is refused, whatever its path looks like. MLflow's own permissions apply behind it.
"""

import re
from typing import Any

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from flask import Flask
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send
from werkzeug.datastructures import Authorization
from werkzeug.exceptions import HTTPException

from tasks.tracking.mlflow_routes import EMPTY, SERVED, WITHOUT_LOGIN, Route, may

LOGIN = {"WWW-Authenticate": 'Basic realm="mlflow"'}  # a browser asks for it


class Gate:
    def __init__(self, app: FastAPI, flask: Flask) -> None:
        self.app, self.flask = app, flask
        self.native = native_routes(app)
        self.rules = flask.url_map.bind("localhost")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        own = await self.answer(scope) if scope["type"] == "http" else None
        await (own or self.app)(scope, receive, send)

    async def answer(self, scope: Scope) -> ASGIApp | None:
        """The gate's own answer to a request; None lets it pass."""
        if (route := self.route(scope["method"], scope["path"])) in WITHOUT_LOGIN:
            return None
        logins = [value for name, value in scope["headers"] if name == b"authorization"]
        user = await run_in_threadpool(self.user, logins[0].decode("latin-1")) if len(logins) == 1 else None
        if user is None:
            return _refuse(401, "UNAUTHENTICATED", "A login is required.", LOGIN)
        if route in EMPTY:
            return JSONResponse(EMPTY[route])
        if route is None or not may(user, route):
            what = f"The login {user} may not {scope['method']} {scope['path']} (tasks/tracking/mlflow_routes.py)."
            return _refuse(403, "PERMISSION_DENIED", what)
        return None

    def route(self, method: str, path: str) -> Route | None:
        """What would serve the request. FastAPI's own routes come first, and Flask has the rest."""
        for methods, pattern, rule in self.native:
            if method in methods and pattern.match(path):
                return method, rule
        try:
            rule, _ = self.rules.match(path, method, return_rule=True)
        except HTTPException:  # nothing, or a redirect to another spelling
            return None
        return method, rule.rule

    def user(self, authorization: str) -> str | None:
        """Whose login this is. MLflow's function keeps what it has verified for a while: it takes 0.4 s."""
        from mlflow.server.auth import authenticate_request_basic_auth

        with self.flask.test_request_context(headers={"Authorization": authorization}) as context:
            login = context.request.authorization
            if login is None or login.type != "basic" or not login.username or not login.password:
                return None
            return login.username if isinstance(authenticate_request_basic_auth(), Authorization) else None


def native_routes(app: FastAPI) -> list[tuple[set[str], re.Pattern[str], str]]:
    """FastAPI's routes in their order; without the mount of Flask, which takes every path."""
    contexts = [context for context in iter_route_contexts(app.routes) if context.path]
    return [(context.methods or set(), compile_path(context.path)[0], context.path) for context in contexts]


def _refuse(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """In the form in which MLflow's clients expect errors."""
    return JSONResponse({"error_code": code, "message": message}, status, headers)


def create_app() -> Gate:
    """The app `dpo` of `mlflow server`, for Uvicorn. Routers without a listed route, such as the assistant's, go."""
    from mlflow.server import app as flask
    from mlflow.server import auth

    app: Any = auth.create_app(flask)
    app.router.routes[:] = [route for route in app.routes if _is_served(route)]
    return Gate(app, flask)


def _is_served(route: Any) -> bool:
    contexts = list(iter_route_contexts([route]))
    return any(not context.path or _listed(context) for context in contexts)


def _listed(context: Any) -> bool:
    return any((method, context.path) in SERVED for method in context.methods or ())
