"""The arena in real Chromium: two raters, keys and clicks, a phone, hostile answers, a server that stops."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.health import is_healthy
from tasks.config.cluster import load_cluster
from tasks.feedback import traces
from tasks.system.ports import free_port
from tests.support.arena import TOKEN, FixedAnswers, arena, questions, votes
from tests.support.browser import Page, browser, chromium
from tests.support.workspaces import environment, make_workspace, wait_for

pytestmark = pytest.mark.slow
EXPERIMENT = "feedback-dpo-demo"
HOSTILE = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
BEYOND = "document.documentElement.scrollWidth - document.documentElement.clientWidth"  # pixels to scroll sideways
SIDE = "[...document.querySelectorAll('.answer .text')].findIndex(e => e.textContent.includes('challenger'))"


def enter(page: Page, address: str, name: str, width: int = 1280, height: int = 800) -> None:
    page.open(f"{address}/#token={TOKEN.replace(' ', '%20')}", width, height)
    page.until("document.querySelector('#login')?.hidden", False)
    page.evaluate(f"document.querySelector('#login [name=name]').value = {json.dumps(name)}")
    page.evaluate("document.querySelector('#login form').requestSubmit()")
    page.until("document.querySelector('#comparison').hidden", False)


def wait_saved(page: Page, count: int) -> None:
    page.until(f"document.querySelector('#count').textContent.endsWith('{count} by you')", True)
    page.until("document.querySelector('#saved').textContent", "all saved")


def vote(page: Page, choose: str, number: int) -> None:
    """By key; waits until the vote is stored. The page takes two presses within 200 ms for one."""
    page.until("Date.now() - lastVote > 200", True)
    page.press(choose)
    wait_saved(page, number)


def test_two_raters_with_keys_and_clicks(tmp_path: Path) -> None:
    """Ada prefers the challenger four times; Ben does so twice, then calls a tie and finds both bad.

    Outcomes 1, 1, 0.75, 0.75: 87.5%. Agreement 2 of 4. Alpha: 6 second, 1 tie, 1 both bad: 1 - 4 / (26 / 7) = -0.08.
    """
    chromium()
    with (
        arena(tmp_path / "journal", FixedAnswers(), questions(4), overlap=1.0) as address,
        browser(tmp_path / "ada") as ada,
        browser(tmp_path / "ben") as ben,
    ):
        enter(ada, address, "Ada")
        for number in range(1, 5):  # arrows
            vote(ada, ["ArrowLeft", "ArrowRight"][ada.evaluate(SIDE)], number)
        ada.shows("You have voted on every comparison")
        enter(ben, address, "Ben")
        for number in (1, 2):  # digits
            vote(ben, "12"[ben.evaluate(SIDE)], number)
        ben.until("Date.now() - lastVote > 200", True)
        ben.evaluate("document.querySelector('[data-choice=tie]').click()")
        wait_saved(ben, 3)
        vote(ben, "1", 4)
        ben.press("u")  # that was a mistake
        wait_saved(ben, 3)
        ben.until("document.querySelector('#comparison').hidden", False)
        vote(ben, "4", 4)
        ben.evaluate("document.querySelector('#results summary').click()")
        text = ben.shows("88%", "50%", "Krippendorff's alpha: -0.08", "4 of 4 labelled", "Ben (you)")
        assert "6 for, 0 against, 1 tie, 1 both bad" in text
    values = [vote.value for vote in votes(tmp_path / "journal")]
    assert values.count("second") >= 6
    assert values[-2:] == ["withdrawn", "both_bad"]


@pytest.mark.parametrize("width", [390, 1280])
def test_hostile_and_long_answers_are_text_that_fits(tmp_path: Path, width: int) -> None:
    hostile = FixedAnswers(lambda prompt: HOSTILE, lambda prompt: "long" * 500 + "\n" + "word " * 500)
    with arena(tmp_path / "journal", hostile, questions(2)) as address, browser(tmp_path / "profile") as page:
        enter(page, address, "Ada", width, 844)
        page.shows(HOSTILE)
        assert page.evaluate("document.title") == "Arena"
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert page.evaluate(BEYOND) == 0
        bars = "document.querySelector('#votes').getBoundingClientRect().bottom"
        assert page.evaluate(f"Math.round({bars})") == 844  # at the thumb, however long the answers are
        small = "[...document.querySelectorAll('#votes button')].filter(b => b.offsetHeight < 44 || b.offsetWidth < 44)"
        assert page.evaluate(f"{small}.length") == 0
        stacked = "document.querySelector('#left').offsetTop < document.querySelector('#right').offsetTop"
        assert page.evaluate(stacked) == (width == 390)
        for name in ("ask", "results"):
            page.evaluate(f"document.querySelector('#{name} summary').click()")
        assert page.evaluate(BEYOND) == 0


@contextmanager
def command(root: Path, *arguments: str) -> Iterator[str]:
    """The address of a `dpo arena` that is killed at the end of the block."""
    port = arguments[-1]
    env = {**environment(), "DPO_ARENA_TOKEN": TOKEN, "FORK_STAGES": "1"}
    with (root / "arena.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "arena", *arguments], cwd=root, env=env, stdout=log, stderr=log
        )
        try:
            wait_for(lambda: process.poll() is not None or is_healthy(f"http://127.0.0.1:{port}/"), 240)
            assert process.poll() is None, (root / "arena.log").read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def test_a_killed_server_loses_no_vote(
    tmp_path: Path, tiny_base: Path, challenger: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real models and `dpo arena` itself: two votes stored, the server killed, two votes kept by the page and sent."""
    root = make_workspace(tmp_path / "work", tiny_base)
    shutil.copytree(mlflow_store, root / ".mlflow")
    things = ("cup", "key", "book", "hat", "pen")
    (root / "prompts.txt").write_text("".join(f"Where is the {thing}?\n" for thing in things))
    options = ["--prompts", "prompts.txt", "--max-new-tokens", "16", "--port", str(free_port())]
    chromium()
    monkeypatch.chdir(root)
    with browser(tmp_path / "profile") as page:
        with command(root, str(tiny_base), str(challenger), *options) as address:
            enter(page, address, "Ada")
            page.until("queue.length", 3)  # held ready for what follows
            for number in (1, 2):
                vote(page, "1", number)
            page.until("queue.length", 3)
        for _ in range(2):
            page.until("Date.now() - lastVote > 200", True)
            page.press("2")
        page.shows("2 not sent yet, kept on this device")
        assert page.evaluate("document.querySelector('#comparison').hidden") is False  # the third is still there
        cached = set((root / ".scratch/arena").rglob("*.json"))
        with command(root, str(tiny_base), str(challenger), *options) as address:
            wait_saved(page, 4)
            page.open(address)
            page.shows("4 by you", "1")
            vote(page, "3", 5)
            page.shows("You have voted on every comparison")
            wait_for(lambda: len(list(traces.read(load_cluster(), EXPERIMENT, missing_ok=True))) == 15, 120)
        assert set((root / ".scratch/arena").rglob("*.json")) == cached
    events = list(traces.read(load_cluster(), EXPERIMENT))
    assert len({event.id for event in events}) == len(events) == 15  # ten answers, five votes
