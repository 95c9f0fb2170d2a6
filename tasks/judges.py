"""Programs that judge a sampled answer: prompt and answer in, named verdicts out."""

from collections.abc import Callable

from tasks import demo


def nothing(prompt: str, answer: str) -> dict[str, bool]:
    """No judgement: length and whether the answer ended are measured all the same."""
    return {}


JUDGES: dict[str, Callable[[str, str], dict[str, bool]]] = {"demo": demo.judge, "none": nothing}
