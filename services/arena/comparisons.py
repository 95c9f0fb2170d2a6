"""The comparisons of an arena: computed ahead of the raters, shown once to each of them, and their votes."""

import hmac
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

from fastapi import HTTPException

from services.arena.answers import ModelAnswers, Prompt, stable_id
from tasks.evaluate.intervals import mean_interval
from tasks.evaluate.win_rate import SHARE
from tasks.feedback.agreement import agreement
from tasks.feedback.events import Answer, Feedback, check
from tasks.feedback.journal import FeedbackJournal
from tasks.secrets.redact import redact

BATCH = 8  # prompts answered together
IDLE = 0.2  # seconds between two looks for new prompts
READING = 600.0  # seconds in which a comparison on a rater's screen counts as voted on
TYPED = 20  # prompts of one rater that may wait for their answers
WITHDRAWN = "withdrawn"
WINS = {"first": 0.0, "second": 1.0, "tie": 0.5, "both_bad": 0.5}  # of the second answer


class Comparison(NamedTuple):
    id: str
    first: Answer
    second: Answer


class Arena:
    """Thread-safe. `votes` are those of earlier sessions; every rater gets the share `overlap` of the comparisons."""

    def __init__(
        self,
        answers: ModelAnswers,
        journal: FeedbackJournal,
        secret: bytes,
        prompts: Iterable[Prompt] = (),
        votes: Iterable[Feedback] = (),
        overlap: float = 0.2,
    ) -> None:
        self.answers, self.journal, self.secret, self.overlap = answers, journal, secret, overlap
        self.comparisons: dict[str, Comparison] = {}
        self.votes: dict[str, dict[str, str]] = {}  # value by comparison and rater
        self.sent: dict[str, dict[str, float]] = {}  # time by comparison and rater
        self.known: set[str] = set()  # ids of votes
        self.prompts: set[str] = set()
        self.queue: deque[Prompt] = deque()
        self.identical, self.failed = 0, False
        self.lock, self.stopped = threading.RLock(), threading.Event()
        for vote in sorted(votes, key=lambda vote: vote.time):
            self._count(vote)
        for prompt in prompts:
            self._enqueue(prompt, len(self.queue))

    def _enqueue(self, prompt: Prompt, position: int) -> None:
        if (key := stable_id(prompt.messages, prompt.user)) not in self.prompts:
            self.prompts.add(key)
            self.queue.insert(position, prompt)

    def work(self) -> None:
        """Compute answers until `stopped` is set; runs in a thread of its own."""
        try:
            while not self.stopped.is_set():
                self._answer_batch()
        except Exception as error:
            self.failed, reason = True, redact(f"{type(error).__name__}: {error}")
            print(f"arena: answers cannot be computed: {reason}", file=sys.stderr, flush=True)

    def _answer_batch(self) -> None:
        with self.lock:
            batch = list(self.queue)[: BATCH if self.comparisons else 1]  # the first rater waits for one prompt only
        if not batch:
            self.stopped.wait(IDLE)
        for prompt, (first, second) in zip(batch, self.answers.pairs(batch), strict=True):
            with self.lock:
                self.queue.remove(prompt)
                self._add(first, second)

    def _add(self, first: Answer, second: Answer) -> None:
        try:
            check(first)
            check(second)
        except ValueError as error:  # such as a role that is none: no vote on it could be stored
            print(f"arena: a prompt is left out: {redact(str(error))}", file=sys.stderr, flush=True)
            return
        if first.text == second.text:  # a tie that nobody has to read
            self.identical += 1
            return
        key = stable_id(first.id, second.id)
        self.comparisons[key] = Comparison(key, first, second)
        if first.user:  # a prompt that somebody typed is in no file: the next session finds it in the journal
            self._journal_answers(key)

    def _journal_answers(self, key: str) -> None:
        if key not in self.votes:
            self.journal.append(self.comparisons[key].first)
            self.journal.append(self.comparisons[key].second)
            self.votes[key] = {}

    def ask(self, rater: str, text: str) -> None:
        """Add a prompt that a rater typed; its answers are computed next."""
        with self.lock:
            if sum(prompt.user == rater for prompt in self.queue) >= TYPED:
                raise HTTPException(429, f"{TYPED} of your prompts wait for their answers. Try again later.")
            self._enqueue(Prompt([{"role": "user", "content": text}], rater), 0)

    def next(self, rater: str, skip: Collection[str]) -> Comparison | None:
        """A comparison that the rater has not voted on: own prompts, then the fewest votes first, in random order."""
        with self.lock:
            unseen = [key for key in self.comparisons if key not in skip and rater not in self.votes.get(key, {})]
            if not unseen:
                return None
            chosen = min(unseen, key=partial(self._rank, rater))
            self.sent.setdefault(chosen, {})[rater] = time.monotonic()
            return self.comparisons[chosen]

    def _rank(self, rater: str, key: str) -> tuple[bool, int, float]:
        oldest = time.monotonic() - READING
        reading = {who for who, since in self.sent.get(key, {}).items() if since > oldest}
        others = {*self.votes.get(key, {}), *reading} - {rater}
        is_shared = self._random("shared", key) < self.overlap
        is_other = self.comparisons[key].first.user != rater
        return is_other, 0 if is_shared else len(others), self._random("order", rater, key)

    def _random(self, *content: str) -> float:
        """A number in [0, 1) that is always the same and that nobody can compute without the secret."""
        digest = hmac.digest(self.secret, "\0".join(content).encode(), "sha256")
        return int.from_bytes(digest[:6]) / 2**48

    def is_swapped(self, rater: str, comparison: str) -> bool:
        """Whether this rater sees the second answer on the left."""
        return self._random("side", rater, comparison) < 0.5

    def vote(self, rater: str, key: str, comparison: str, choice: str) -> None:
        """Store a vote. `key` is the page's id of it: a request that is sent again has no effect."""
        left, right = ("second", "first") if self.is_swapped(rater, comparison) else ("first", "second")
        self._store(rater, key, comparison, {"left": left, "right": right}.get(choice, choice))

    def undo(self, rater: str, key: str, comparison: str) -> None:
        """Withdraw a vote. The journal only grows: a rater's last word on a comparison counts."""
        if rater in self.votes.get(comparison, {}):
            self._store(rater, key, comparison, WITHDRAWN)

    def _store(self, rater: str, key: str, comparison: str, value: str) -> None:
        with self.lock:
            if comparison not in self.comparisons:  # the page repeats a 503, and gives up on a 404
                raise HTTPException(503 if self.queue else 404, "The arena does not have this comparison.")
            _, first, second = self.comparisons[comparison]
            pair = {"answer": first.id, "other": second.id}
            vote = Feedback(
                id=stable_id(rater, key), time=time.time(), rater=rater, kind="preference", value=value, **pair
            )
            if vote.id not in self.known:
                self._journal_answers(comparison)
                self.journal.append(vote)
                self._count(vote)

    def _count(self, vote: Feedback) -> None:
        self.known.add(vote.id)
        votes = self.votes.setdefault(stable_id(vote.answer, vote.other), {})
        votes[vote.rater] = vote.value
        if vote.value == WITHDRAWN:
            del votes[vote.rater]

    def progress(self, rater: str) -> dict[str, Any]:
        with self.lock:
            voters = [self.votes.get(key, {}) for key in self.comparisons]
            labelled, yours = sum(map(bool, voters)), sum(rater in by_rater for by_rater in voters)
            total = len(self.comparisons) + len(self.queue)
        return {"rater": rater, "labelled": labelled, "yours": yours, "total": total}

    def results(self) -> dict[str, Any]:
        with self.lock:
            votes = [dict(self.votes.get(key, {})) for key in self.comparisons]
            second = next((comparison.second.role for comparison in self.comparisons.values()), "")
        voted = [list(by_rater.values()) for by_rater in votes if by_rater]
        return {
            "second": second,
            "raters": dict(sorted(Counter(rater for by_rater in votes for rater in by_rater).items())),
            "votes": Counter(value for values in voted for value in values),
            "identical": self.identical,
            "agreement": agreement(voted),
            "win_rate": _win_rate(voted, self.identical) if voted else None,
        }


def _win_rate(voted: Sequence[Sequence[str]], identical: int) -> dict[str, float]:
    """Of the second answers. One outcome per comparison, since its votes are not independent; equal texts are ties."""
    outcomes = [*(mean(WINS[vote] for vote in votes) for votes in voted), *[0.5] * identical]
    rate = mean_interval(outcomes, [str(number) for number in range(len(outcomes))], SHARE)
    return {"rate": rate.mean, **rate.bounds(), "comparisons": len(outcomes)}
