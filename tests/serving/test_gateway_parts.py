"""The parts of the gateway that need no engine: tokens, rate limit, requests, routing, the index of answers."""

import asyncio
import json
import shutil
import sys
import unicodedata
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from services.arena.app import Login
from services.serving import answer_index, engine, tokens, watchdog
from services.serving.answer_index import AnswerIndex, wilson
from services.serving.engine import Target
from services.serving.fleet import CHALLENGER, CHAMPION, Fleet
from services.serving.requests import ChatRequest, FeedbackRequest
from services.serving.tokens import RateLimit, Tokens
from tasks.config.cluster import load_cluster
from tasks.errors import UserError
from tasks.feedback import traces
from tasks.feedback.events import Answer, Feedback, check, person
from tasks.feedback.journal import FeedbackJournal
from tasks.secrets.private import checkout_folder
from tasks.secrets.redact import redact
from tests.support.workspaces import write_cluster
from training.models.prompt_tokens import PromptTokens, context_length


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(tokens.VARIABLE, raising=False)
    return tmp_path


def test_the_first_start_makes_a_token_that_only_its_owner_can_read(workspace):
    made = Tokens()
    file = checkout_folder(workspace) / "tokens.json"
    ((name, token),) = json.loads(file.read_text()).items()
    assert (made.origin, file.stat().st_mode & 0o777) == (str(file), 0o600)
    assert made.owner(f"Bearer {token}") == name
    assert made.owner(f"bearer {token}") == name  # RFC 9110: the scheme's case does not matter
    for wrong in (token, f"Basic {token}", f"Bearer{token}", f"Bearer  {token}", f"Bearer {token[:-1]}", "Bearer ", ""):
        assert made.owner(wrong) is None
    assert Tokens().owner(f"Bearer {token}") == name  # the second start makes none


def test_an_edited_file_counts_at_once_and_a_mistake_in_it_locks_nobody_out(workspace):
    known, file = Tokens(), checkout_folder(workspace) / "tokens.json"
    assert redact("a" * 16) == "a" * 16
    file.write_text(json.dumps({"ann": "a" * 16}))
    assert known.owner("Bearer " + "a" * 16) == "ann"
    assert redact("a" * 16) == "***"
    file.write_text("{")
    assert known.owner("Bearer " + "a" * 16) == "ann"
    with pytest.raises(UserError, match=r"tokens\.json must have the form"):
        Tokens()


@pytest.mark.parametrize("value", ["", "ann", "ann:short", ":" + "a" * 20, "a\u202en:" + "a" * 20])
def test_tokens_of_the_environment_are_checked(workspace, monkeypatch, value):
    monkeypatch.setenv(tokens.VARIABLE, value)
    with pytest.raises(UserError, match="DPO_SERVE_TOKENS must have the form NAME:TOKEN"):
        Tokens()


def test_the_rate_limit_refills_over_a_minute(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(tokens.time, "monotonic", lambda: now)
    limit = RateLimit(30)
    assert [limit.wait("ann") for _ in range(30)] == [0.0] * 30
    assert limit.wait("ann") == limit.wait("ann") == pytest.approx(2.0)  # 30 a minute: one every two seconds
    assert limit.wait("bob") == 0.0
    now += 2
    assert (limit.wait("ann"), limit.wait("ann")) == (0.0, pytest.approx(2.0))


def test_wilsons_interval():
    """Of 8 of 10 at z = 1.96: (0.8 + 0.19208 +- 1.96 sqrt(0.016 + 0.009604)) / 1.38416 = 0.4902 and 0.9433."""
    assert wilson(8, 10) == {"value": 0.8, "low": 0.4902, "high": 0.9433}
    assert wilson(0, 0) is None
    assert wilson(3, 3)["high"] == 1.0


def test_a_request_has_explicit_parameters_and_null_means_absent():
    content: dict[str, Any] = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "tools": None,
    }
    chat = ChatRequest.model_validate_json(json.dumps({**content, "seed": 3}))
    assert chat.messages[0].plain() == {"role": "user", "content": "x"}
    assert chat.parameters(7, 9, 99) == {"max_tokens": 7, "temperature": 1.0, "top_p": 1.0, "seed": 3}
    assert chat.parameters(7, 9, None)["max_tokens"] == 7
    assert chat.parameters(7, 95, 99)["max_tokens"] == 4  # what is left of the context
    assert ChatRequest(**content, max_completion_tokens=2, max_tokens=5).parameters(7, 9, 99)["max_tokens"] == 2
    with pytest.raises(HTTPException, match="The messages have 99 tokens, and the model's context 99"):
        chat.parameters(7, 99, 99)
    with pytest.raises(HTTPException, match="have 95 tokens and max_tokens asks for 5, and the model's context 99"):
        ChatRequest(**content, max_tokens=5).parameters(7, 95, 99)


def fleet(share: float) -> Fleet:
    made = Fleet("m", "m/2", share, seed=0)
    for role, version in ((CHAMPION, "1"), (CHALLENGER, "2")):
        target = Target("m", version, "", "")
        made.engines[role] = SimpleNamespace(target=target, is_alive=True, running=0)  # type: ignore[assignment]
    return made


def routed(made: Fleet, model: str | None = None, user: str | None = None) -> str:
    with made.lease(model, user) as (role, one):
        assert one.running == 1
    assert one.running == 0
    return role


def test_a_share_of_users_and_of_requests_meets_the_challenger():
    made = fleet(0.1)
    users = [routed(made, user=f"user {n}") for n in range(2000)]
    assert users == [routed(made, "m", f"user {n}") for n in range(2000)]
    requests = [routed(made) for _ in range(2000)]
    for roles in (users, requests):  # 200 expected, standard deviation 13
        assert 150 < roles.count(CHALLENGER) < 250
    assert {routed(made, "m/2") for _ in range(9)} == {CHALLENGER}
    assert {routed(made, "m/1") for _ in range(9)} == {CHAMPION}
    with pytest.raises(HTTPException, match="Ask for one of: m, m/1, m/2"):
        routed(made, "m/3")


def test_a_dead_challenger_loses_its_share_and_a_dead_champion_asks_to_wait():
    made = fleet(1.0)
    assert routed(made) == CHALLENGER
    made.engines[CHALLENGER].is_alive = False  # type: ignore[misc]
    assert routed(made) == CHAMPION
    made.engines[CHAMPION].is_alive = False  # type: ignore[misc]
    with pytest.raises(HTTPException) as caught:
        routed(made)
    assert (caught.value.status_code, caught.value.headers) == (503, {"Retry-After": "10"})


def answer(version: str, role: str = CHAMPION, seconds: float = 1.0) -> Answer:
    prompt = {"messages": [{"role": "user", "content": "x"}], "text": "y", "user": "ann", "run": "r"}
    return Answer(
        id=uuid.uuid4().hex, time=1e9, model="m", version=version, role=role, parameters={"seconds": seconds}, **prompt
    )


def thumb(about: Answer, rater: str, value: str, through: str = "") -> Feedback:
    rest = {"kind": "thumb", "value": value, "through": through}
    return Feedback(id=uuid.uuid4().hex, time=1e9, answer=about.id, rater=rater, **rest)


def test_figures_count_each_raters_last_thumb_by_version_and_role(tmp_path, monkeypatch):
    answers = [answer("1", seconds=n) for n in (1, 2, 3)] + [answer("2", CHALLENGER)]
    votes, mine = FeedbackJournal(tmp_path), FeedbackJournal(tmp_path)
    for rater, value in (("ann", "up"), ("bob", "up"), ("ann", "down")):  # in a file that may be read first
        votes.append(thumb(answers[0], rater, value))
    for rater in ("carol", "dave", "eve"):  # whom one token invents
        votes.append(thumb(answers[1], rater, "up", tokens.through("ann")))
    for one in answers:
        mine.append(one)
    index = AnswerIndex(tmp_path)
    first, second = index.stats()["versions"]
    assert (first["model"], first["role"], first["answers"]) == ("m/1", CHAMPION, 3)
    assert (first["thumbs"]["up"], first["thumbs"]["down"]) == (2, 1)
    assert first["latency_seconds"] == {"p50": 2.0, "p95": 2.9}
    assert (second["model"], second["role"], second["thumbs"]["share_up"]) == ("m/2", CHALLENGER, None)
    monkeypatch.setattr(answer_index, "MOST_ANSWERS", 2)
    mine.append(answer("3"))
    assert {one["model"]: one["answers"] for one in index.stats()["versions"]} == {"m/2": 1, "m/3": 1}


def test_an_answer_whose_journal_was_sent_and_deleted_is_found_in_mlflow(workspace, mlflow_store):
    shutil.copytree(mlflow_store, workspace / ".mlflow")
    (workspace / "infra").mkdir()
    write_cluster(workspace, {})
    folder, one = workspace / "journals", answer("1")
    FeedbackJournal(folder).append(one)  # its file is closed with it
    assert traces.send(folder, load_cluster()) == 1
    assert not list(folder.glob("*.jsonl"))
    index = AnswerIndex(folder)
    assert (index.knows(one.id), index.knows("0" * 32)) == (True, False)
    (workspace / ".mlflow").rename(workspace / "away")
    (workspace / ".mlflow").touch()  # the store cannot be used
    assert index.knows("0" * 32)


class Stuck:
    """An engine that gives one word to others, and then nothing."""

    def __init__(self, others: int) -> None:
        self.target, self.words, self.is_alive, self.others = Target("m", "1", "", ""), 0, True, others
        self.asked, self.stopped = 0, 0

    def stop(self) -> None:
        self.is_alive, self.stopped = False, self.stopped + 1

    async def answer(self, free_after: float) -> None:
        self.asked += 1
        for _ in range(self.others):
            await asyncio.sleep(0.15)
            self.words += 1
        await asyncio.sleep(free_after)


@pytest.mark.parametrize(("others", "free_after", "stopped"), [(0, 9, 1), (0, 0.05, 0), (4, 0.05, 0), (4, 9, 1)])
def test_an_engine_that_answers_nobody_after_a_client_left_is_ended(others, free_after, stopped):
    """One that goes on answering others is not, and a second client that leaves meanwhile is asked about, too."""
    engine: Any = Stuck(others)

    async def run() -> None:
        dog = watchdog.Watchdog(lambda one: one.answer(free_after), 0.3)
        dog.client_left(engine)
        await asyncio.sleep(0.02)
        dog.client_left(engine)
        while dog.tasks:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert (engine.stopped, engine.asked) == (stopped, 1 if stopped else 2)


def test_tokens_are_counted_with_the_models_template_and_its_context_is_read(tiny_base, tmp_path):
    prompts, messages = PromptTokens(tiny_base), [{"role": "user", "content": "hello"}]
    text = prompts.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompts.count(messages) == len(prompts.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert prompts.context == 1024
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(prompts.count, [messages] * 100))) == 1
    config = json.loads((tiny_base / "config.json").read_text())
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    assert context_length(tmp_path) == 4096
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert context_length(tmp_path) is None


def refused(make: Any, *values: Any, **fields: Any) -> bool:
    try:
        make(*values, **fields)
    except ValueError:  # pydantic's, too
        return True
    return False


def test_a_name_is_one_line_of_visible_characters_wherever_it_comes_from():
    """Of all of Unicode none but letters, marks, numbers, punctuation, symbols and the plain space."""
    hidden = [chr(n) for n in range(sys.maxunicode + 1) if unicodedata.category(chr(n))[0] in "CZ" and chr(n) != " "]
    assert [character for character in hidden if not refused(person, f"a{character}b")] == []
    about = {"answer_id": "0" * 32, "kind": "thumb", "value": "up"}
    for name in ("a\nraters", "a\u202eb", "a\u200bb", "a\u00a0b", "a\u3164", "x" * 251):
        assert refused(ChatRequest, messages=[{"role": "user", "content": "x"}], user=name)
        assert refused(FeedbackRequest, **about, user=name)
        assert refused(Login, name=name, token="t")
        assert refused(check, thumb(answer("1"), name, "up"))
        assert refused(check, replace(answer("1"), user=name))
    for name in ("ann", "Zoë Ångström", "李小龙", "o'hara+x@example.org", "user 7"):
        assert Login(name=f" {name}", token="t").name == person(unicodedata.normalize("NFD", name)) == name
        assert check(thumb(answer("1"), unicodedata.normalize("NFD", name), "up")).rater == name
    assert refused(check, thumb(answer("1"), " ", "up"))


def test_vllm_serves_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda name: object())
    command = engine.engine_command(Path("/m"), 5, 0.45)
    assert Path(command[0]).name == "vllm"
    assert command[1:] == ["serve", "/m", "--host", "127.0.0.1", "--port", "5", "--gpu-memory-utilization", "0.45"]


def test_a_folder_is_served_under_a_name_that_mlflow_takes(tmp_path):
    folder = tmp_path / "my model@2"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    target = engine.find_target(str(folder))
    assert (target.name, target.version, engine.weights(target, None)) == ("my_model_2", "", folder)
