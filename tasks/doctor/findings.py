"""What `make doctor` says, line by line: each thing that is wrong with what mends it."""

import threading
from collections.abc import Callable
from typing import Any

from tasks.redact import redact


class Findings:
    """Lines as they come; whether any of them is bad. `fix`: do what can be done safely, and say so."""

    def __init__(self, fix: bool = False) -> None:
        self.bad = 0
        self.fix = fix

    def good(self, sentence: str) -> None:
        self._say("ok    ", sentence)

    def note(self, sentence: str) -> None:
        self._say("note  ", sentence)

    def wrong(self, sentence: str) -> None:
        self.bad += 1
        self._say("WRONG ", sentence)

    def stale(self, sentence: str, clear: Callable[[], object]) -> None:
        """Something left behind that stands in the way and may be taken away."""
        if self.fix:
            clear()
            self._say("fixed ", f"{sentence}: cleared")
        else:
            self.wrong(f"{sentence}. Run `make doctor FIX=1` to clear it.")

    def _say(self, kind: str, sentence: str) -> None:
        print(f"  {kind} {redact(sentence)}", flush=True)


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """What the function returns, or the exception that it raised, or TimeoutError: a name server may hang for ever."""
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
