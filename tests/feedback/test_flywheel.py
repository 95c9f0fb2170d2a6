"""The demo of the flywheel: how its users vote against a real arena, and what its report says."""

import random
from pathlib import Path

from fastapi.testclient import TestClient

from services import flywheel
from services.arena.answers import Prompt
from services.arena.app import create_app, create_router
from services.flywheel import User
from tasks.artifacts import demo
from tasks.feedback.events import Answer
from tasks.feedback.journal import FeedbackJournal, read_events
from tasks.reports import flywheel_report

TOKEN = "a token that is long enough"
PROMPT = demo.questions(0, 1)[0]
KIND = f"{demo._answer(PROMPT)} {demo.KIND[0]}"
RUDE = f"{demo._answer(PROMPT)} {demo.RUDE[0]}"


class RudeAndKind:
    """The first model is rude, the second kind."""

    def pairs(self, prompts):
        return [tuple(self._answer(prompt, number) for number in (0, 1)) for prompt in prompts]

    def _answer(self, prompt: Prompt, number: int) -> Answer:
        question = prompt.messages[-1]["content"]
        text = f"{demo._answer(question)} {(demo.RUDE, demo.KIND)[number][0]}"
        id_ = random.Random(question + str(number)).randbytes(16).hex()
        role = ("champion", "challenger")[number]
        where = {"model": "m", "version": "", "run": "", "user": "", "parameters": {}}
        return Answer(id=id_, time=1.0, messages=prompt.messages, text=text, role=role, **where)


def test_a_user_prefers_the_kind_answer_and_errs_at_the_given_rate():
    rng = random.Random(0)
    assert {User("a", 1, 0.0).choose(PROMPT, KIND, RUDE, rng) for _ in range(20)} == {"left"}
    assert {User("a", 1, 0.0).choose(PROMPT, RUDE, KIND, rng) for _ in range(20)} == {"right"}
    assert User("a", 1, 0.0).choose(PROMPT, KIND, KIND, rng) == "tie"
    assert User("a", 1, 0.0).choose(PROMPT, RUDE, RUDE, rng) == "both_bad"
    wrong = sum(User("a", 1, 0.3).choose(PROMPT, KIND, RUDE, rng) == "right" for _ in range(1000))
    assert 250 < wrong < 350


def test_the_users_vote_in_an_arena_up_to_their_numbers(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(flywheel, "USERS", (User("ana", 12, 0.0), User("troll", 4, 1.0)))
    prompts = [Prompt([{"role": "user", "content": question}]) for question in demo.questions(1, 20)]
    router = create_router(RudeAndKind(), FeedbackJournal(tmp_path), token=TOKEN, prompts=prompts, overlap=1.0)
    with TestClient(create_app(router), headers={"x-arena": "1", "x-token": TOKEN}) as client:
        assert list(flywheel._votes(client, night=0))[-1] == 16
        results = client.get("api/progress", params={"results": True}).json()
        again = list(flywheel._votes(client, night=0))  # an interrupted night continues
    assert again[-1] == 16
    assert results["votes"] == {"second": 12, "first": 4}
    assert results["raters"] == {"ana": 12, "troll": 4}
    (journal,) = tmp_path.glob("*.jsonl")
    assert sum(type(event).__name__ == "Feedback" for event in read_events(journal)[0]) == 16


def test_the_report_leads_from_votes_to_weights(tmp_path: Path):
    rate = {"rate": 0.5, "low": 0.45, "high": 0.55}
    lineage = {"version": "", "run": "", "start": "", "data": "", "weights": ""}
    nights = [{"night": 0, **lineage, "votes": {"tie": 7, "first": 2, "second": 1}, "win_rate": rate}]
    first = {"version": "1", "run": "r", "start": "base folder", "data": "d" * 64, "weights": "w" * 64}
    nights.append(
        {
            "night": 1,
            **first,
            "votes": {"second": 6, "both_bad": 4},
            "win_rate": {"rate": 0.7, "low": 0.65, "high": 0.75},
        }
    )
    second = {**first, "version": "2", "start": "registry:m/1|base folder"}
    nights.append({"night": 2, **second, "votes": {"second": 9}, "win_rate": {"rate": 0.8, "low": 0.75, "high": 0.85}})
    rows = [[cell.strip() for cell in line] for line in flywheel_report.rows(nights)]
    assert [row[1:4] for row in rows] == [
        ["base model", "", "0"],
        ["1", "base model", "10"],
        ["2", "version 1", "20"],
    ]
    assert rows[1][4:] == ["70.0% (65.0% to 75.0%)", "6 / 4 / 0", "d" * 12, "w" * 12]
    page = flywheel_report.write(nights, tmp_path).read_text()
    assert "version 1" in page
    assert "after night 2" in page
