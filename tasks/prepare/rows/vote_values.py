"""What the values of a vote mean: which of two answers each prefers, and by how much.

A map from values to first, second or tie says it. Numbers may stand for a range: the keys <0 and >0 for ratings such as
-3 to 3, and fractions lie between the numbers that mean first and second (AlpacaEval's 1.2 is a preference of 0.8).
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tasks.source.reject_reasons import RejectedRow

TIES = ("tie", "both", "neither", "equal", "draw", "same")
SHARES = {"first": 1.0, "second": 0.0, "tie": 0.5}  # of a vote, for the first answer
SIGNED = {"<0": "first", "0": "tie", ">0": "second"}
RATING = 10  # the largest number that is a rating
COMPARISON = re.compile(r"(.+?)(>{1,3}|<{1,3}|={1,2})(.+)")
OPERATORS = (">", ">>", "<", "<<", "=", "==")


def vote_key(value: Any) -> str:
    """A vote as the map has it: 1, 1.0, "1.0" and " 1" are the same, and so are "A > B" and "[[a>b]]"."""
    text = str(value).strip().lower()
    if "<" in text or ">" in text or "=" in text:
        return re.sub(r"\s*([<>=]+)\s*", r"\1", text.strip("[] "))
    number = number_of(text)
    return text if number is None or not number.is_integer() else str(int(number))


def read_vote(value: Any, meaning: Mapping[str, str]) -> tuple[float, float]:
    """The share of a vote for the first answer, and its strength where it is a rating with a sign (else 0)."""
    key = vote_key(value)
    if key in meaning:
        return SHARES[meaning[key]], 0.0
    number = number_of(key)
    if number is not None and (side := "<0" if number < 0.0 else ">0") in meaning:
        return SHARES[meaning[side]], abs(number)
    ends = {meaning[end]: float(end) for end in meaning if number_of(end) is not None and meaning[end] != "tie"}
    if number is None or number.is_integer() or len(ends) < 2 or not min(ends.values()) < number < max(ends.values()):
        raise RejectedRow("bad_number", f"which answer the vote {str(value)[:40]} prefers is not known")
    return (number - ends["second"]) / (ends["first"] - ends["second"]), 0.0


def evident_votes(values: Iterable[Any], first: str, second: str) -> dict[str, str]:
    """first, second or tie for each value, if the values end like the names of the answers' columns; otherwise {}.

    A and B, 1 and 2 are clear for any names, and so are A>B and ratings such as -3 to 3, where the negative ones lie on
    the side of the first answer. 0 and 1 are clear only where the columns are numbered so, -1 and 1 alone never, and
    0, 1 and 2 never: one of them is a tie, and data sets differ in which.
    """
    keys = {vote_key(value) for value in values}
    if _are_ratings(keys):
        return SIGNED
    if (first[-1], second[-1]) == ("1", "2") and _are_fractions(keys):
        return {"1": "first", "2": "second"}
    preferred = {key: _preferred(key) for key in keys}
    ties = [key for key, side in preferred.items() if side.startswith(TIES)]
    sides = {side for key, side in preferred.items() if key not in ties}
    for ends in ((first[-1].lower(), second[-1].lower()), ("a", "b"), ("1", "2"), ("first", "second")):
        patterns = {end: re.compile(rf"(?:\w+[ _-])?{end}") for end in ends}
        matches = {side: next((end for end in ends if patterns[end].fullmatch(side)), None) for side in sides}
        if None not in matches.values() and (set(matches.values()) == set(ends) or not ends[0].isdigit()) and sides:
            stems = {side.removesuffix(end) for side, end in matches.items() if end}
            compared = any(preferred[key] != key for key in keys)
            return _vocabulary(ends, stems, compared) | dict.fromkeys((*TIES, "tie (bothbad)", *ties), "tie")
    return {}


def _vocabulary(ends: tuple[str, str], stems: set[str], compared: bool) -> dict[str, str]:
    """The votes of this kind, those that the first rows do not have included."""
    known = {f"{stem}{end}": side for stem in stems for end, side in zip(ends, ("first", "second"), strict=True)}
    if not compared:
        return known
    pairs = [(f"{stem}{ends[0]}", f"{stem}{ends[1]}") for stem in stems]
    written = [f"{a}{sign}{b}" for pair in pairs for a, b in (pair, pair[::-1]) for sign in OPERATORS]
    return known | {text: known.get(_preferred(text), "tie") for text in written}


def _preferred(key: str) -> str:
    """The answer that a comparison such as a>>b names as the better one; other votes as they are."""
    match = COMPARISON.fullmatch(key)
    if not match:
        return key
    return "tie" if match[2][0] == "=" else match[1] if match[2][0] == ">" else match[3]


def _are_ratings(keys: set[str]) -> bool:
    """Whether these are whole numbers on both sides of 0 and with more than one strength, such as -3 to 3."""
    numbers = [number_of(key) for key in keys]
    if not all(number is not None and number.is_integer() and abs(number) <= RATING for number in numbers):
        return False
    strengths = {abs(number) for number in numbers if number}
    return len(strengths) > 1 and len({number < 0.0 for number in numbers if number}) == 2


def _are_fractions(keys: set[str]) -> bool:
    """Whether these are numbers between 1 and 2 on both sides of the middle, and not all of them whole."""
    numbers = [number for key in keys if (number := number_of(key)) is not None]
    if len(numbers) < len(keys) or not any(map(is_fraction, keys)):
        return False
    return 1.0 <= min(numbers) < 1.5 < max(numbers) <= 2.0


def is_fraction(text: str) -> bool:
    number = number_of(text)
    return number is not None and not number.is_integer()


def number_of(text: str) -> float | None:
    """The finite number that the text is, if it is one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
