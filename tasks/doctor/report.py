"""What `dpo doctor` prints: one line per check, each problem with its remedy."""

import threading
from collections.abc import Callable
from typing import Any

from tasks.secrets.redact import redact


class Report:
    """Prints each result and counts the problems. With `fix`, it clears what is safe to clear."""

    def __init__(self, fix: bool = False) -> None:
        self.problems = 0
        self.fix = fix

    def ok(self, sentence: str) -> None:
        self._print("ok    ", sentence)

    def note(self, sentence: str) -> None:
        self._print("note  ", sentence)

    def wrong(self, sentence: str) -> None:
        self.problems += 1
        self._print("WRONG ", sentence)

    def check(self, passes: bool, sentence: str, problem: str) -> None:
        """`sentence` if the check passes, else `problem` with its remedy."""
        self.ok(sentence) if passes else self.wrong(problem)

    def stale(self, sentence: str, clear: Callable[[], object]) -> None:
        """A leftover that blocks a run and is safe to remove."""
        if self.fix:
            clear()
            self._print("fixed ", f"{sentence}: cleared")
        else:
            self.wrong(f"{sentence}. Run `dpo doctor --fix` to clear it.")

    def _print(self, kind: str, sentence: str) -> None:
        print(f"  {kind} {redact(sentence)}", flush=True)


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """The function's result, its exception, or a TimeoutError: a name server may hang for ever."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else TimeoutError(f"no answer in {seconds:g} s")
