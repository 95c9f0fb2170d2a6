"""How far raters agree with each other, and who contradicts the others.

A rater's vote on two answers is compared with the majority of the other raters' votes on the same two (leave-one-out).
A rater who agrees less often than a coin, by an exact binomial test, is called contradicting.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import comb

from tasks.feedback.events import Answer, Event, Feedback
from tasks.runs.records import text_table

LEVEL = 0.01  # chance of naming any honest rater, over all raters (Bonferroni)
DECIDED = ("first", "second")
SWAPPED = {"first": "second", "second": "first"}

Pair = tuple[str, str]  # ids of two answers in order of id, whichever was on the left
Comparisons = dict[Pair, dict[str, str]]  # by rater: first, second, tie or both_bad


@dataclass(frozen=True)
class Rater:
    name: str
    votes: int  # preferences
    thumbs: int
    compared: int  # decided votes on which the others have a majority
    agreed: int
    contradicts: bool


def split(events: Iterable[Event]) -> tuple[dict[str, Answer], list[Feedback]]:
    events = list(events)
    answers = {event.id: event for event in events if isinstance(event, Answer)}
    return answers, [event for event in events if isinstance(event, Feedback)]


def same_answers(answers: Mapping[str, Answer]) -> dict[str, str]:
    """The id under which feedback on each answer is counted: equal answers to equal prompts share one."""
    first = dict[str, str]()
    contents = {id_: repr((answers[id_].messages, answers[id_].text)) for id_ in sorted(answers)}
    return {id_: first.setdefault(content, id_) for id_, content in contents.items()}


def merge_equal(feedback: Iterable[Feedback], ids: Mapping[str, str]) -> list[Feedback]:
    """Feedback under the ids of `same_answers`; not on answers that are gone, nor votes between equal answers."""
    known = (vote for vote in one_per_token(feedback) if {vote.answer, vote.other} - {""} <= ids.keys())
    named = (replace(vote, answer=ids[vote.answer], other=ids.get(vote.other, "")) for vote in known)
    return [vote for vote in named if vote.answer != vote.other]


def one_per_token(feedback: Iterable[Feedback]) -> list[Feedback]:
    """The last vote of each token of the gateway on an answer, or on two: who its users are is the application's word.

    An answer was given to one of them. Votes of the arena, whose raters log in there, are all kept.
    """
    ordered = sorted(feedback, key=lambda vote: (vote.time, vote.id))
    return list({(vote.through or vote.id, vote.kind, _pair(vote)): vote for vote in ordered}.values())


def last_votes(feedback: Iterable[Feedback], kind: str) -> list[Feedback]:
    """A rater's last word on each answer or two answers, unless it was withdrawn."""
    ordered = sorted((vote for vote in feedback if vote.kind == kind), key=lambda vote: (vote.time, vote.id))
    last = {(vote.rater, _pair(vote)): vote for vote in ordered}
    return [vote for vote in last.values() if kind != "preference" or vote.value != "withdrawn"]


def _pair(vote: Feedback) -> Pair:
    return (vote.answer, vote.other) if vote.answer < vote.other else (vote.other, vote.answer)


def comparisons(feedback: Iterable[Feedback]) -> Comparisons:
    votes: Comparisons = defaultdict(dict)
    for vote in last_votes(feedback, "preference"):
        in_order = vote.answer < vote.other
        votes[_pair(vote)][vote.rater] = vote.value if in_order else SWAPPED.get(vote.value, vote.value)
    return dict(votes)


def agreement(compared: Comparisons, excluded: frozenset[str] = frozenset()) -> dict[str, tuple[int, int]]:
    """(comparisons, agreements) of each rater with the majority of the others."""
    counts = defaultdict[str, list[int]](lambda: [0, 0])
    for votes in compared.values():
        decided = {rater: vote for rater, vote in votes.items() if vote in DECIDED and rater not in excluded}
        total = Counter(decided.values())
        for rater, vote in decided.items():
            same, other = total[vote] - 1, total[SWAPPED[vote]]
            if same != other:
                counts[rater][0] += 1
                counts[rater][1] += same > other
    return {rater: (compared, agreed) for rater, (compared, agreed) in counts.items()}


def contradicting(compared: Comparisons) -> frozenset[str]:
    """Raters below chance; the clearest first: such a rater makes honest ones who share comparisons look worse."""
    named = frozenset[str]()
    tests = max(1, len(agreement(compared)))
    while True:
        chances = {rater: below_chance(*counts) for rater, counts in agreement(compared, named).items()}
        lowest = min(chances.values(), default=1.0)
        if lowest >= LEVEL / tests:
            return named
        named |= {rater for rater, chance in chances.items() if chance == lowest}


def below_chance(compared: int, agreed: int) -> float:
    """Probability that a coin agrees at most this often."""
    return sum(comb(compared, count) for count in range(agreed + 1)) / 2**compared


def raters(events: Iterable[Event]) -> list[Rater]:
    """Everybody who gave feedback, those with most votes first."""
    answers, feedback = split(events)
    feedback = merge_equal(feedback, same_answers(answers))
    compared = comparisons(feedback)
    counts, named = agreement(compared), contradicting(compared)
    votes = Counter(rater for by_rater in compared.values() for rater in by_rater)
    thumbs = Counter(vote.rater for vote in last_votes(feedback, "thumb"))
    names = sorted({vote.rater for vote in feedback}, key=lambda name: (-votes[name] - thumbs[name], name))
    return [Rater(name, votes[name], thumbs[name], *counts.get(name, (0, 0)), name in named) for name in names]


def table(people: list[Rater]) -> str:
    """For the terminal."""
    rows = []
    for rater in people:
        share = f"{rater.agreed / rater.compared:.0%}" if rater.compared else "-"
        note = "contradicts the others" if rater.contradicts else ""
        rows.append((rater.name, str(rater.votes), str(rater.thumbs), str(rater.compared), share, note))
    table = text_table(rows, ("rater", "votes", "thumbs", "compared", "agreement", ""))
    if not (named := [rater.name for rater in people if rater.contradicts]):
        return table
    return (
        f"{table}\n\n{', '.join(named)}: agreement with the majority of the others is below chance (binomial test, "
        f"level {LEVEL} over all raters). `feedback:` leaves out their feedback unless you write "
        "`exclude_contradicting=false`."
    )


def shares(votes: Mapping[str, str]) -> tuple[float, int] | None:
    """The share of the raters for the first answer, and how many voted; None where half of them call both bad."""
    counts = Counter(votes.values())
    voted = counts["first"] + counts["second"] + counts["tie"]
    return None if counts["both_bad"] >= voted else ((counts["first"] + counts["tie"] / 2) / voted, voted)
