"""`dpo serve` as a process, with real engines of the tiny model and a real MLflow registry: answers, feedback, hot swap
under load, faults, canary. The tests share one gateway and run in their order."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.health import is_healthy
from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.config.paths import MODEL
from tasks.feedback import traces
from tasks.feedback.events import Answer, Feedback
from tasks.feedback.journal import read_events
from tasks.promote.champion import rollback
from tasks.promote.stage import promote
from tasks.system.files import hash_files, read_json, write_json
from tasks.system.ports import free_port
from tasks.tracking import verify
from tasks.tracking.journal import StageJournal
from tasks.tracking.pipeline_run import open_run
from tests.support.fork_server import family
from tests.support.promotion import NAME, export
from tests.support.workspaces import PROJECT, make_workspace, wait_for
from training.models.chat import keep_template
from training.models.prompt_tokens import PromptTokens
from training.models.tiny import TEMPLATE

pytestmark = pytest.mark.slow
TOKENS = {"ann": "a-token-of-ann-0123456789", "bob": "b-token-of-bob-0123456789"}
OPENING = "{{ bos_token }}"
HELLO = [{"role": "user", "content": "hello"}]
# One client: each makes a TLS context, which takes longer than an answer. No connection outlives a gateway.
HTTP = httpx.Client(timeout=60, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass
class Gateway:
    """A gateway process in a workspace; `start` again after its end."""

    workspace: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[str] = field(init=False)

    def start(self, *options: str) -> None:
        tokens = ",".join(f"{name}:{token}" for name, token in TOKENS.items())
        paths = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "DPO_SERVE_TOKENS": tokens, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        env["FORK_STAGES"] = "1"  # an engine imports for nine seconds of a core
        command = [sys.executable, "-m", "cli", "serve", "--port", str(self.port), "--patience", "20", *options]
        with (self.workspace / "serve.log").open("a") as log:
            self.process = subprocess.Popen(command, cwd=self.workspace, env=env, stdout=log, stderr=log)
        wait_for(lambda: self.process.poll() is not None or is_healthy(f"http://127.0.0.1:{self.port}/health"), 300)
        assert self.process.poll() is None, self.said()

    def said(self) -> str:
        return (self.workspace / "serve.log").read_text()

    def client(self, name: str = "ann") -> Any:
        import openai  # a second, in the one process that needs it

        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=TOKENS[name], max_retries=0)

    def call(self, method: str, path: str, name: str | None = "ann", **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {TOKENS[name]}"} if name else {}
        address = f"http://127.0.0.1:{self.port}{path}"
        return HTTP.request(method, address, headers=headers, **options)

    def ask(self, **options: Any) -> httpx.Response:
        return self.call("POST", "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 4, **options})

    def engines(self) -> list[psutil.Process]:
        found = []
        for process in family(self.process.pid):
            with suppress(psutil.Error):  # it has ended
                found += [process] if "transformers.cli.transformers" in process.cmdline() else []
        return found

    def events(self) -> dict[str, Answer | Feedback]:
        files = sorted((self.workspace / ".scratch" / "feedback").glob("*.jsonl"))
        return {event.id: event for file in files for event in read_events(file)[0]}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path, tiny_base: Path) -> Iterator[Gateway]:
    root = make_workspace(tmp_path_factory.mktemp("serving") / "workspace", tiny_base, **{"source.data": "demo"})
    shutil.copytree(mlflow_store, root / ".mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.delenv("DPO_RUN", raising=False)
        register(tiny_base, "one")
        gateway = Gateway(root)
        gateway.start("--rate", "100000")
        yield gateway
        if gateway.process.poll() is None:
            gateway.process.terminate()
        gateway.process.wait(60)


def register(base: Path, about: str) -> str:
    """A new version with the weights of a real model, which passes the gate and becomes the champion."""
    export(about)
    manifest = read_json(MODEL / "manifest.json")
    shutil.rmtree(MODEL)
    shutil.copytree(base, MODEL)
    (MODEL / "README.md").write_text(about)
    keep_template(MODEL, TEMPLATE.replace(OPENING, OPENING + "{{ style }}"), {"style": "Short words."})  # as `export`
    endless = {**read_json(base / "generation_config.json"), "eos_token_id": 0}  # a greedy answer has max_tokens
    write_json(MODEL / "generation_config.json", endless)
    if about == "broken":
        (MODEL / "config.json").write_text("{}")
    write_json(MODEL / "manifest.json", {**manifest, "files": hash_files(MODEL)})
    verify.seal(MODEL)
    promote(StageJournal(open_run(load_params(), load_cluster()), "promote"))
    return str(read_json(Path("data/metrics/promote.json"))["version"])


def test_an_answer_is_recorded_under_the_id_of_the_response(gateway, tiny_base):
    raw = gateway.client().chat.completions.with_raw_response.create(
        model=NAME, messages=HELLO, max_completion_tokens=5, temperature=0, user="carol"
    )
    answer = raw.parse()
    assert raw.headers["X-DPO-Answer-Id"] == answer.id
    assert (answer.model, answer.choices[0].finish_reason) == (f"{NAME}/1", "length")
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens == PromptTokens(MODEL).count(HELLO) > PromptTokens(tiny_base).count(HELLO)
    kept = gateway.events()[answer.id]
    assert (kept.text, kept.messages) == (answer.choices[0].message.content, HELLO)
    assert (kept.model, kept.version, kept.role, kept.user) == (NAME, "1", "champion", "carol")
    assert kept.run
    assert kept.parameters.items() >= {"max_tokens": 5, "temperature": 0.0, "top_p": 1.0, "tokens": 5}.items()
    assert [model.id for model in gateway.client().models.list()] == [NAME, f"{NAME}/1"]


def test_a_stream_comes_in_pieces_and_its_end_after_the_record(gateway):
    options = {"model": NAME, "messages": HELLO, "max_tokens": 6, "temperature": 0}
    whole = gateway.client().chat.completions.create(**options).choices[0].message.content
    pieces = []
    for chunk in gateway.client().chat.completions.create(**options, stream=True):
        pieces.append(chunk)
        if chunk.choices[0].finish_reason:
            assert chunk.id in gateway.events()
    assert len(pieces) > 3
    assert {(chunk.id, chunk.model) for chunk in pieces} == {(pieces[0].id, f"{NAME}/1")}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == whole
    assert pieces[-1].usage.completion_tokens == 6
    assert gateway.ask(stream=True).text.endswith("data: [DONE]\n\n")


def test_a_temperature_samples(gateway):
    texts = [gateway.ask(temperature=1.5, max_tokens=20).json()["choices"][0]["message"]["content"] for _ in range(3)]
    assert len(set(texts)) > 1


def test_without_a_token_nothing_but_health_is_answered(gateway):
    for method, path in (("POST", "/v1/chat/completions"), ("POST", "/v1/feedback"), ("GET", "/v1/models")):
        answer = gateway.call(method, path, name=None)
        assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert gateway.call("GET", "/v1/stats", name=None).status_code == 401
    assert gateway.call("GET", "/docs").status_code == 404
    assert gateway.call("GET", "/health", name=None).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"messages": []}, 400, "messages: "),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role: "),
        ({"tools": []}, 400, "tools: "),
        ({"max_tokens": 5000}, 400, "max_tokens is 5000, and this server allows 1024."),
        ({"model": "gpt"}, 404, f"Ask for one of: {NAME}, {NAME}/1."),
        ({"messages": [{"role": "user", "content": "x" * 2**21}]}, 413, "larger than 1,048,576 bytes"),
    ],
)
def test_a_bad_request_is_refused_in_openais_form(gateway, change, status, said):
    answer = gateway.ask(**change)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_a_client_that_disconnects_ends_the_generation(gateway):
    before = len(gateway.events())
    body = {"messages": HELLO, "max_tokens": 1000, "temperature": 0, "stream": True}
    address = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {TOKENS['ann']}"}
    with httpx.stream("POST", address, json=body, headers=headers, trust_env=False) as stream:
        lines = stream.iter_lines()  # kept: the connection is closed with it
        next(lines)
        assert gateway.call("GET", "/v1/stats").json()["running"] == {f"{NAME}/1": 1}
    wait_for(lambda: gateway.call("GET", "/v1/stats").json()["running"] == {f"{NAME}/1": 0}, 5)
    assert len(gateway.events()) == before


def test_a_prompt_beyond_the_context_is_refused_before_it_reaches_the_engine(gateway):
    long = [{"role": "user", "content": "hello " * 150_000}]
    refused = gateway.ask(messages=long).json()["error"]
    assert (refused["type"], refused["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert re.search(
        r"The messages have \d{6} tokens and max_tokens asks for 4, and the model's context 1024", refused["message"]
    )
    assert gateway.ask(max_tokens=1024).json()["error"]["code"] == "context_length_exceeded"
    most = PromptTokens(MODEL).count(HELLO)
    unlimited = {"messages": HELLO, "temperature": 0}  # a sampled answer may end before the context does
    answer = gateway.call("POST", "/v1/chat/completions", json=unlimited).json()
    assert answer["usage"]["completion_tokens"] == 1024 - most


def test_an_engine_that_stays_busy_after_its_client_left_is_started_again(gateway):
    (engine,) = gateway.engines()
    port = int(engine.cmdline()[engine.cmdline().index("--port") + 1])
    (server,) = {one.pid for one in psutil.net_connections("tcp") if one.laddr[1] == port and one.status == "LISTEN"}
    psutil.Process(server).suspend()  # as in a long computation: it takes connections and answers nothing
    with pytest.raises(httpx.ReadTimeout):
        gateway.call("POST", "/v1/chat/completions", json={"messages": HELLO}, timeout=2)
    wait_for(lambda: "answered nobody for 20 s after a client had left" in gateway.said(), 60)
    wait_for(lambda: gateway.ask().status_code == 200, 240)
    assert engine.pid not in {process.pid for process in gateway.engines()}


def test_half_a_request_is_closed(gateway):
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/feedback HTTP/1.1\r\nHost: x\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_feedback_is_on_disk_when_it_is_acknowledged_and_reaches_mlflow(gateway):
    first, second = (gateway.ask().json()["id"] for _ in range(2))
    sent = [
        {"answer_id": first, "kind": "thumb", "value": "up"},
        {"answer_id": first, "kind": "thumb", "value": "down", "user": "carol"},
        {"answer_id": second, "kind": "edit", "value": "A better answer."},
        {"answer_id": first, "kind": "preference", "value": "second", "other": second},
    ]
    for body in sent:
        stored = gateway.call("POST", "/v1/feedback", "bob", json=body).json()["id"]
        event = gateway.events()[stored]
        assert (event.answer, event.kind, event.value) == (body["answer_id"], body["kind"], body["value"])
        assert event.rater == body.get("user", "bob")
    (figures,) = gateway.call("GET", "/v1/stats").json()["versions"]
    assert (figures["model"], figures["role"], figures["answers"]) == (f"{NAME}/1", "champion", len(answers(gateway)))
    assert (figures["thumbs"]["up"], figures["thumbs"]["down"]) == (0, 1)  # a token has one vote: its last
    another = {"answer_id": first, "kind": "thumb", "value": "up", "user": "ann"}
    assert gateway.call("POST", "/v1/feedback", "bob", json=another).status_code == 403  # ann has a token
    assert gateway.call("POST", "/v1/feedback", json=another).status_code == 200
    (figures,) = gateway.call("GET", "/v1/stats").json()["versions"]
    assert figures["thumbs"] == {"up": 1, "down": 1, "share_up": {"value": 0.5, "low": 0.0945, "high": 0.9055}}
    assert 0 < figures["latency_seconds"]["p50"] <= figures["latency_seconds"]["p95"]

    def in_mlflow() -> bool:
        found = {event.id for event in traces.read(load_cluster(), traces.experiment_name(NAME))}
        return set(gateway.events()) == found

    wait_for(lambda: (gateway.workspace / ".scratch/feedback/sent.json").exists(), 60)
    wait_for(in_mlflow, 60)


def answers(gateway: Gateway) -> list[Answer]:
    return [event for event in gateway.events().values() if isinstance(event, Answer)]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"answer_id": "0" * 32}, 404),
        ({"answer_id": "no id"}, 400),
        ({"value": "sideways"}, 400),
        ({"kind": "edit", "value": " "}, 400),
        ({"kind": "preference", "value": "first"}, 400),
        ({"kind": "preference", "value": "first", "other": "0" * 32}, 404),
        ({"more": 1}, 400),
        ({"user": "a\nraters"}, 400),
    ],
)
def test_bad_feedback_is_refused(gateway, change, status):
    known = answers(gateway)[0].id
    before = len(gateway.events())
    body = {"answer_id": known, "kind": "thumb", "value": "up", **change}
    assert gateway.call("POST", "/v1/feedback", json=body).status_code == status
    assert len(gateway.events()) == before


def test_promote_and_rollback_swap_the_model_without_dropping_a_request(gateway, tiny_base):
    seen, failed, stop = list[str](), list[str](), threading.Event()

    def load(stream: bool) -> None:
        while not stop.wait(0.3):
            answer = gateway.ask(stream=stream, max_tokens=8)
            complete = answer.text.endswith("data: [DONE]\n\n") if stream else answer.status_code == 200
            text = answer.text if stream or not complete else answer.json()["model"]
            (seen if complete else failed).append(text)

    threads = [threading.Thread(target=load, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    try:
        assert register(tiny_base, "two") == "2"
        seconds = [time_until(seen, f"{NAME}/2")]
        rollback()
        seconds.append(time_until(seen, f"{NAME}/1"))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    print(f"{len(seen)} requests, {len(failed)} failed, swaps after {seconds} s")
    assert not failed
    wait_for(lambda: len(gateway.engines()) == 1, 60)


def time_until(seen: list[str], name: str) -> float:
    began, before = time.monotonic(), len(seen)
    wait_for(lambda: name in seen[before:], 300)
    return round(time.monotonic() - began, 1)


def test_a_version_that_does_not_start_leaves_the_champion_in_its_place(gateway, tiny_base):
    version = register(tiny_base, "broken")
    wait_for(lambda: f"The engine of {NAME}/{version} did not start" in gateway.said(), 240)
    assert gateway.ask().json()["model"] == f"{NAME}/1"
    rollback()


def test_a_killed_engine_is_started_again_while_the_registry_is_down(gateway):
    database = gateway.workspace / ".mlflow" / "mlflow.db"
    database.rename(database.with_suffix(".away"))
    try:
        wait_for(lambda: "There is no registry yet" in gateway.said(), 120)
        (engine,) = gateway.engines()
        engine.kill()
        wait_for(lambda: not gateway.engines(), 10)
        refused = gateway.ask()
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
        assert gateway.call("GET", "/health").status_code == 503
        wait_for(lambda: gateway.ask().status_code == 200, 240)
    finally:
        database.with_suffix(".away").rename(database)


def test_no_engine_survives_a_killed_gateway(gateway):
    _, *descendants = family(gateway.process.pid)
    assert len(descendants) > 3  # the engine, the sender and their guards
    gateway.process.send_signal(signal.SIGKILL)
    gateway.process.wait(10)
    assert psutil.wait_procs(descendants, timeout=60)[1] == []


def test_a_challenger_gets_its_share_and_old_answers_still_take_feedback(gateway):
    (old, *_) = answers(gateway)
    gateway.start("--challenger", "2", "--share", "0.5", "--rate", "40")
    thumb = {"answer_id": old.id, "kind": "thumb", "value": "up"}
    assert gateway.call("POST", "/v1/feedback", "bob", json=thumb).status_code == 200
    by_user = {f"user {n}": gateway.ask(user=f"user {n}", max_tokens=1).json() for n in range(20)}
    models = [answer["model"] for answer in by_user.values()]
    assert 4 <= models.count(f"{NAME}/2") <= 16
    again = gateway.ask(user="user 0", max_tokens=1).json()
    assert again["model"] == by_user["user 0"]["model"]
    roles = {event.version: event.role for event in answers(gateway) if event.id in {a["id"] for a in by_user.values()}}
    assert roles == {"1": "champion", "2": "challenger"}
    assert gateway.ask(model=f"{NAME}/2").json()["model"] == f"{NAME}/2"
    apart = {(v["model"], v["role"]): v["answers"] for v in gateway.call("GET", "/v1/stats").json()["versions"]}
    assert apart[f"{NAME}/2", "challenger"] == models.count(f"{NAME}/2") + 1 + (again["model"] == f"{NAME}/2")


def test_too_many_requests_of_one_token_wait(gateway):
    asked = (gateway.call("GET", "/v1/models") for _ in range(200))
    refused = next(answer for answer in asked if answer.status_code != 200)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert gateway.call("GET", "/v1/models", "bob").status_code == 200


def test_the_gateway_ends_with_its_engines(gateway):
    _, *descendants = family(gateway.process.pid)
    gateway.process.terminate()
    assert gateway.process.wait(60) == 0
    assert psutil.wait_procs(descendants, timeout=60)[1] == []
    assert json.dumps(TOKENS["ann"])[1:-1] not in gateway.said()
