"""The arena in real Chromium: two raters, keys and clicks, a phone, hostile answers, a server that stops."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.background import free_port, is_healthy
from tests.support.arena import TOKEN, FixedAnswers, arena, questions, stored, votes
from tests.support.browser import Page, browser, chromium
from tests.support.workspaces import PROJECT, make_workspace, wait_for

pytestmark = pytest.mark.slow
HOSTILE = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
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
        assert page.evaluate("document.documentElement.scrollWidth") == width
        bars = "document.querySelector('#votes').getBoundingClientRect().bottom"
        assert page.evaluate(f"Math.round({bars})") == 844  # at the thumb, however long the answers are
        small = "[...document.querySelectorAll('#votes button')].filter(b => b.offsetHeight < 44 || b.offsetWidth < 44)"
        assert page.evaluate(f"{small}.length") == 0
        stacked = "document.querySelector('#left').offsetTop < document.querySelector('#right').offsetTop"
        assert page.evaluate(stacked) == (width == 390)
        for name in ("ask", "results"):
            page.evaluate(f"document.querySelector('#{name} summary').click()")
        assert page.evaluate("document.documentElement.scrollWidth") == width


@contextmanager
def command(root: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`dpo arena`, killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "arena", *arguments], cwd=root, env=environment(root), text=True
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
