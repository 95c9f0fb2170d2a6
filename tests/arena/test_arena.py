"""The arena's API: blind comparisons, votes that are kept, agreement, win rate, access."""

import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from services.arena.answers import ModelAnswers, Prompt, Side, sides
from tasks.errors import UserError
from tasks.feedback.agreement import agreement
from tasks.feedback.answer_cache import erase
from tasks.feedback.events import Answer
from tests.support.arena import FixedAnswers, Rater, arena, questions, stored, votes

SHORT = {"max_new_tokens": 8, "temperature": 0.7, "top_p": 0.95, "seed": 0}


def test_a_vote_names_the_answer_whatever_side_it_was_on(tmp_path: Path) -> None:
    with arena(tmp_path, FixedAnswers(), questions(20)) as address:
        ada, left = Rater(address, "ada"), 0
        while shown := ada.next():
            assert set(shown) == {"id", "messages", "left", "right"}  # nothing tells whose answer it is
            left += "challenger" in shown["left"]
            progress = ada.prefer(shown, "challenger")
    assert 3 <= left <= 17  # sides are random: outside with a probability of 0.0004
    assert Counter(vote.value for vote in votes(tmp_path)) == {"second": 20}
    assert progress["labelled"] == progress["total"] == 20
    roles = {event.id: event.role for event in stored(tmp_path) if isinstance(event, Answer)}
    assert {(roles[vote.answer], roles[vote.other]) for vote in votes(tmp_path)} == {("champion", "challenger")}
    assert len(roles) == 40


def test_order_and_sides_differ_between_raters_and_stay_after_a_reload(tmp_path: Path) -> None:
    with arena(tmp_path, FixedAnswers(), questions(30), overlap=1.0) as address:
        sequences = []
        for name in ("ada", "ada", "ben"):
            rater, seen = Rater(address, name), list[tuple[str, bool]]()
            while shown := rater.next(*(key for key, _ in seen)):
                seen.append((shown["id"], "challenger" in shown["left"]))
            sequences.append(seen)
    assert sequences[0] == sequences[1]
    assert [key for key, _ in sequences[0]] != [key for key, _ in sequences[2]]
    sides = dict(sequences[0])
    assert 0 < sum(sides[key] != left for key, left in sequences[2]) < 30


def test_raters_share_the_work_and_overlap_on_a_share_of_it(tmp_path: Path) -> None:
    """Comparisons on a colleague's screen count as voted on, so two raters do not get the same one at once."""
    with arena(tmp_path, FixedAnswers(), questions(40), overlap=0.25) as address:
        raters, seen = [Rater(address, "ada"), Rater(address, "ben")], list[list[str]]([[], []])
        while len({key for keys in seen for key in keys}) < 40:
            for rater, keys in zip(raters, seen, strict=True):
                shown = rater.next()
                assert shown is not None
                keys.append(shown["id"])
                rater.vote(shown["id"], "tie")
        both = set(seen[0]) & set(seen[1])
        while shown := raters[0].next():  # who wants to go on gets every comparison once
            seen[0].append(shown["id"])
            progress = raters[0].vote(shown["id"], "tie")
    assert 1 <= len(both) <= 20
    assert len(seen[0]) == len(set(seen[0])) == 40
    assert progress["raters"]["ada"] == 40


def test_figures_of_two_raters(tmp_path: Path) -> None:
    """Ada prefers the challenger in all four; Ben agrees in two, sees a tie in one and the champion in one.

    Win rate: outcomes per comparison 1, 1, 0.75 and 0.5, mean 0.8125. Raw agreement: 2 of 4. Alpha: 8 votes, of which
    6 second, 1 first, 1 tie. Observed disagreement: 2 comparisons x 2; expected: (64 - 38) / 7. 1 - 4 / (26 / 7).
    """
    with arena(tmp_path, FixedAnswers(), questions(4), overlap=1.0) as address:
        ada, ben = Rater(address, "ada"), Rater(address, "ben")
        while shown := ada.next():
            ada.prefer(shown, "challenger")
        for word in ("challenger", "challenger", "champion", ""):
            shown = ben.next()
            assert shown is not None
            progress = ben.prefer(shown, word) if word else ben.vote(shown["id"], "tie")
    assert progress["win_rate"]["rate"] == 0.8125
    assert 0 < progress["win_rate"]["low"] < 0.8125 < progress["win_rate"]["high"] <= 1
    assert progress["agreement"] == {"comparisons": 4, "agreement": 0.5, "alpha": pytest.approx(1 - 4 / (26 / 7))}
    assert progress["raters"] == {"ada": 4, "ben": 4}


def test_agreement_follows_krippendorffs_definition() -> None:
    assert agreement([["a"], ["b"]]) == {"comparisons": 0, "agreement": None, "alpha": None}
    assert agreement([["a", "a"], ["b", "b"]])["alpha"] == 1
    assert agreement([["a", "a"], ["a", "a"]])["alpha"] is None
    # Three raters who skip some: observed (9 - 5) / 2 = 2; 5 votes, 2 a and 3 b: expected (25 - 13) / 4 = 3.
    assert agreement([["a", "a", "b"], ["a"], ["b", "b"]]) == {
        "comparisons": 2,
        "agreement": 0.5,
        "alpha": pytest.approx(1 - 2 / 3),
    }


def test_identical_answers_are_ties_that_nobody_reads(tmp_path: Path) -> None:
    same = FixedAnswers(lambda prompt: "Yes.", lambda prompt: "Yes." if "0" in prompt else "No.")
    with arena(tmp_path, same, questions(3)) as address:
        ada = Rater(address, "ada")
        while shown := ada.next():
            progress = ada.prefer(shown, "No.")
    assert (progress["total"], progress["identical"]) == (2, 1)
    assert progress["win_rate"]["rate"] == pytest.approx(2.5 / 3, abs=1e-6)


def test_undo_withdraws_a_vote_and_a_repeated_request_changes_nothing(tmp_path: Path) -> None:
    with arena(tmp_path, FixedAnswers(), questions(3)) as address:
        ada, key = Rater(address, "ada"), uuid.uuid4().hex
        shown = ada.next()
        assert shown is not None
        ada.vote(shown["id"], "both_bad", key)
        assert ada.vote(shown["id"], "left", key)["votes"] == {"both_bad": 1}
        undo = {"id": uuid.uuid4().hex, "comparison": shown["id"]}
        assert ada.call("undo", undo)["labelled"] == ada.call("undo", undo)["labelled"] == 0
        assert ada.vote(shown["id"], "tie")["votes"] == {"tie": 1}
    assert [vote.value for vote in votes(tmp_path)] == ["both_bad", "withdrawn", "tie"]
    with arena(tmp_path, FixedAnswers(), questions(3)) as address:  # the last word also counts after a restart
        ada = Rater(address, "ada")
        while shown := ada.next():
            progress = ada.vote(shown["id"], "both_bad")
    assert progress["votes"] == {"tie": 1, "both_bad": 2}


def test_a_prompt_whose_answers_cannot_be_stored_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    strange = [Prompt([{"role": "poet", "content": "Sing."}]), *questions(2)]
    with arena(tmp_path, FixedAnswers(second=lambda prompt: "\0" if "0" in prompt else "Fine."), strange) as address:
        ada = Rater(address, "ada")
        while shown := ada.next():
            progress = ada.prefer(shown, "Fine.")
        with pytest.raises(urllib.error.HTTPError, match="422"):
            ada.call("prompt", {"text": "\0"})
        with pytest.raises(urllib.error.HTTPError, match=r"422|500"):  # FastAPI cannot quote it in its reply
            ada.call("prompt", {"text": "\ud800"})
    assert (progress["labelled"], progress["total"]) == (1, 1)
    assert capfd.readouterr().err.count("arena: a prompt is left out") == 2


def test_a_typed_prompt_comes_next_and_is_kept(tmp_path: Path) -> None:
    with arena(tmp_path, FixedAnswers(), questions(5)) as address:
        ada = Rater(address, "ada")
        ada.call("prompt", {"text": "What is <b>bold</b>?"})
        while len([event for event in stored(tmp_path) if isinstance(event, Answer)]) < 2:
            time.sleep(0.05)
        shown = ada.next()
        assert shown is not None
        assert shown["messages"] == [{"role": "user", "content": "What is <b>bold</b>?"}]
        assert ada.call("progress")["total"] == 6
    assert {event.user for event in stored(tmp_path) if isinstance(event, Answer)} == {"ada"}


def test_closed_to_everybody_without_the_token(tmp_path: Path) -> None:
    with arena(tmp_path, FixedAnswers(), questions(3)) as address:
        ada = Rater(address, "ada")
        (cookie,) = ada.cookies
        assert cookie.has_nonstandard_attr("HttpOnly")
        assert cookie.get_nonstandard_attr("SameSite") == "strict"

        def status(path: str, body: bytes | None = None, **headers: str) -> int:
            try:
                with urllib.request.urlopen(urllib.request.Request(address + path, body, headers)) as response:
                    return int(response.status)
            except urllib.error.HTTPError as error:
                return error.code

        json = {"Content-Type": "application/json"}
        own = {**json, "X-Arena": "1"}
        assert {status(f"/api/{path}") for path in ("next", "progress")} == {401}
        assert status("/api/vote", b"{}", **own) in (401, 422)
        assert status("/api/login", b'{"name": "eve", "token": "wrong"}', **own) == 401
        assert status("/api/login", b'{"name": "a\\nb", "token": "wrong"}', **own) == 422
        signed = f"{cookie.name}={cookie.value}"
        assert status("/api/progress", Cookie=signed) == 200
        assert status("/api/progress", Cookie=signed.replace("=", "=Z", 1)) == 401
        shown = ada.next()
        assert shown is not None
        vote = f'{{"id": "{"0" * 32}", "comparison": "{shown["id"]}", "choice": "left"}}'.encode()
        assert status("/api/vote", vote, **json, Cookie=signed) == 403  # as another site's page would send it
        assert status("/api/vote", vote.replace(b"left", b"maybe"), **own, Cookie=signed) == 422
        assert status("/api/vote", vote.replace(shown["id"].encode(), b"1" * 32), **own, Cookie=signed) == 404
        assert status("/docs") == 404
        with urllib.request.urlopen(address) as page:
            assert "script-src 'self'" in page.headers["Content-Security-Policy"]
            assert "unsafe" not in page.headers["Content-Security-Policy"]
    assert votes(tmp_path) == []


def test_models_answer_once_and_a_restart_reads_answers_and_votes(
    tmp_path: Path, tiny_base: Path, challenger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPO_HOME", str(tmp_path))
    first = Side("champion", "a", tiny_base, SHORT, "m")
    second = Side("challenger", "b", challenger, SHORT, "m")
    prompts = [Prompt([{"role": "user", "content": f"Where is the {thing}?"}]) for thing in ("cup", "key", "book")]
    for session in range(2):
        answers = ModelAnswers(first, second)
        with arena(tmp_path / "journal", answers, prompts, overlap=1.0) as address:
            rater = Rater(address, f"rater {session}")
            while shown := rater.next():
                progress = rater.vote(shown["id"], "left")
        assert bool(answers.models) == (not session)
        assert len(list((tmp_path / ".scratch" / "arena").rglob("*.json"))) == 6
        assert progress["raters"] == {f"rater {number}": 3 - progress["identical"] for number in range(session + 1)}
    assert progress["identical"] < 3
    asked = [replace(prompt, user="ada") for prompt in prompts]
    ModelAnswers(first, second).pairs(asked)
    assert (erase("ada"), erase("ada")) == (6, 0)  # the same prompts without a user stay
    assert len(list((tmp_path / ".scratch" / "arena").rglob("*.json"))) == 6
    texts = {event.text for event in stored(tmp_path / "journal") if isinstance(event, Answer)}
    assert len(texts) > 1


def test_two_samples_of_one_model_differ_by_their_seed(tmp_path: Path, tiny_base: Path, monkeypatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    first, second = sides(str(tiny_base), None, SHORT)
    assert (first.role, second.role) == ("sample", "sample")
    assert (first.sampling["seed"], second.sampling["seed"]) == (0, 1)
    ((one, other),) = ModelAnswers(first, second, tmp_path).pairs([Prompt([{"role": "user", "content": "Why?"}])])
    assert one.id != other.id
    with pytest.raises(UserError, match="at temperature 0 are equal"):
        sides(str(tiny_base), None, {**SHORT, "temperature": 0.0})
