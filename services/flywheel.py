"""`dpo flywheel`: programmed users vote in the arena, and each night trains the next champion on their votes.

The users like answers that are kind and correct, and err now and then; one of them votes against the others. Each
night's votes are on new prompts: first they measure the champion against the base model, then they teach the next one.
"""

import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.health import wait_until_healthy
from tasks.artifacts import demo
from tasks.config.paths import ROOT, main_checkout
from tasks.errors import UserError
from tasks.reports import flywheel_report
from tasks.runs.records import text_table
from tasks.source.stage import make_demo_model
from tasks.system import processes
from tasks.system.files import publish, read_json, read_json_or_empty, write_json
from tasks.system.ports import free_port
from tasks.system.progress import Bar
from tasks.tracking.model_names import registered_version
from tasks.tracking.registry import NotRegistered

MODEL, RECIPE = "dpo-flywheel", "flywheel"
PROMPTS = 240  # a night
SAMPLING = ("--temperature", "0.8", "--top-p", "1.0", "--max-new-tokens", "48")
START_TIMEOUT = 300.0  # seconds


@dataclass(frozen=True)
class User:
    name: str
    votes: int  # a night
    errors: float  # share of votes for the wrong answer

    def choose(self, prompt: str, left: str, right: str, rng: random.Random) -> str:
        likes = [all(demo.judge(prompt, text).values()) for text in (left, right)]
        if likes[0] == likes[1]:
            return "tie" if likes[0] else "both_bad"
        return "left" if likes[0] != (rng.random() < self.errors) else "right"


USERS = (User("ana", 110, 0.05), User("ben", 110, 0.1), User("carla", 100, 0.1), User("troll", 40, 0.95))


def flywheel(nights: int) -> None:
    """A command that was interrupted, or that is called with more nights, continues where the last one ended."""
    folder = main_checkout() / ".scratch" / "flywheel"
    if not (folder / "base" / "config.json").exists():
        with publish(folder / "base") as base:
            make_demo_model(base, seed=0)
    state = folder / "nights.json"
    done = read_json_or_empty(state).get("nights", [])
    for night in range(len(done), nights + 1):
        if night:
            print(f"\nNight {night}: train on all votes so far, from the champion on", flush=True)
            _dpo("retrain", "--recipe", RECIPE)
        print(f"\nDay {night + 1}: {len(USERS)} users compare answers in the arena", flush=True)
        champion = _lineage()
        done.append({"night": night, **champion, **_vote(folder, night, champion["version"])})
        write_json(state, {"nights": done})
    _dpo("raters", MODEL)
    print(text_table(flywheel_report.rows(done), flywheel_report.HEAD))
    print(f"\nReport: {flywheel_report.write(done, folder)}")


def _lineage() -> dict[str, Any]:
    """From the champion's weights back to the votes; empty before the first promotion."""
    try:
        with registered_version(f"{MODEL}/champion") as (_, models, version):
            manifest = read_json(models.fetch(version, "model", "manifest.json"))
            return {
                "version": version.number,
                "run": version.tags["run"],
                "start": manifest["base"]["model"],
                "data": version.tags["data_sha256"],
                "weights": version.tags["manifest_sha256"],
            }
    except NotRegistered:
        return {"version": "", "run": "", "start": "", "data": "", "weights": ""}


def _vote(folder: Path, night: int, champion: str) -> dict[str, Any]:
    """All users' votes on new prompts: the base model against the champion, or against itself while there is none."""
    prompts = folder / f"prompts-{night}.txt"
    prompts.write_text("\n".join(demo.questions(night, PROMPTS)) + "\n")
    with _arena(folder, prompts, [f"{MODEL}/{champion}"] if champion else []) as client:
        total = sum(user.votes for user in USERS)
        with Bar("arena", total, "votes") as bar:
            for done in _votes(client, night):
                bar.update(done)
        progress = client.get("api/progress", params={"results": True}).raise_for_status().json()
    return {"votes": progress["votes"], "win_rate": progress["win_rate"]}


def _votes(client: httpx.Client, night: int) -> Iterator[int]:
    """Users take turns by login; yields how many votes there are."""
    rng, done = random.Random(night), 0
    for user in USERS:
        form = {"name": user.name, "token": client.headers["x-token"]}
        own = client.post("api/login", json=form).raise_for_status().json()["yours"]
        while own < user.votes:
            answer = client.get("api/next").raise_for_status().json()
            if (comparison := answer["comparison"]) is None:
                if answer["state"] != "waiting":
                    break
                time.sleep(0.2)
                continue
            choice = user.choose(comparison["messages"][-1]["content"], comparison["left"], comparison["right"], rng)
            vote = {"id": secrets.token_hex(16), "comparison": comparison["id"], "choice": choice}
            client.post("api/vote", json=vote).raise_for_status()
            own += 1
            yield done + own
        done += user.votes
        yield done


@contextmanager
def _arena(folder: Path, prompts: Path, challenger: list[str]) -> Iterator[httpx.Client]:
    """A running arena."""
    token, port = secrets.token_hex(16), free_port()
    command = ["arena", str(folder / "base"), *challenger, "--prompts", str(prompts), *SAMPLING, "--overlap", "0.3"]
    command += ["--port", str(port), "--feedback-model", MODEL]
    address, log = f"http://127.0.0.1:{port}/", folder / "arena.log"
    headers = {"x-arena": "1", "x-token": token}
    with (
        log.open("w") as output,
        processes.spawn(_command(*command), ROOT, {**os.environ, "DPO_ARENA_TOKEN": token}, output) as process,
        httpx.Client(base_url=address, headers=headers, timeout=60) as client,
    ):
        wait_until_healthy(address, "The arena did not start", log, lambda: process.poll() is None, START_TIMEOUT)
        yield client


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cli", *arguments]


def _dpo(*arguments: str) -> None:
    if subprocess.run(_command(*arguments), cwd=ROOT).returncode:
        raise UserError(f"`dpo {' '.join(arguments)}` failed; the reason is above. `dpo flywheel` continues there.")
