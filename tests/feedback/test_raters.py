"""Who agrees with whom: a planted contradicting rater is named, honest ones are not."""

import random
from dataclasses import replace

from tasks.feedback.raters import LEVEL, agreement, below_chance, comparisons, contradicting, raters, table
from tasks.feedback.rows import Query, rows
from tests.support.feedback import NOW, answer, feedback, vote

RIGHT, WRONG = "first", "second"


def simulated(seed: int, error: dict[str, float], pairs: int = 60, per_pair: int = 3) -> list:
    """Votes on pairs whose first answer is better; a rater errs with the given probability, and sides are swapped."""
    chance = random.Random(seed)
    votes = []
    for _ in range(pairs):
        good, bad = answer(), answer()
        for name in chance.sample(sorted(error), per_pair):
            right = chance.random() >= error[name]
            two = (good, bad) if chance.random() < 0.5 else (bad, good)
            votes.append(vote(*two, name, "first" if (two[0] is good) == right else "second"))
    return votes


def test_the_binomial_tail_is_exact():
    assert below_chance(10, 0) == 1 / 1024
    assert below_chance(10, 1) == 11 / 1024
    assert below_chance(10, 10) == 1.0
    assert below_chance(0, 0) == 1.0


def test_agreement_leaves_the_raters_own_vote_out():
    one, two = answer(id="1" * 32), answer(id="2" * 32)
    votes = [vote(one, two, "a", "first"), vote(two, one, "b", "second"), vote(one, two, "c", "second")]
    votes.append(vote(one, two, "d", "tie"))
    compared = comparisons(votes)
    assert compared == {(one.id, two.id): {"a": "first", "b": "first", "c": "second", "d": "tie"}}
    assert agreement(compared) == {"c": (1, 0)}  # for a and b the others are split


def test_the_last_vote_of_a_rater_counts():
    one, two = answer(id="1" * 32), answer(id="2" * 32)
    votes = [vote(one, two, "a", "second", time=NOW + 5), vote(two, one, "a", "second", time=NOW + 9)]
    assert comparisons(reversed(votes)) == {(one.id, two.id): {"a": "first"}}


def test_a_token_has_one_vote_on_an_answer_however_many_users_it_invents():
    """Eight voices of one application against one rater of another and one of the arena; its last one counts."""
    one, two = answer(id="1" * 32, text="one"), answer(id="2" * 32, text="two")
    invented = [vote(one, two, f"user {n}", "second", time=NOW + n, through="a" * 16) for n in range(8)]
    votes = [*invented, vote(one, two, "ben", "first", through="b" * 16), vote(one, two, "cem", "first")]
    events = [one, two, *votes, *(feedback(one, rater=f"user {n}", time=NOW + n, through="a" * 16) for n in range(8))]
    found = {rater.name: (rater.votes, rater.thumbs) for rater in raters(events)}
    assert found == {"user 7": (1, 1), "ben": (1, 0), "cem": (1, 0)}
    (row,) = rows(events, Query(model="m", exclude_contradicting=False))
    assert (row["response1"], row["annotator1"], row["annotator2"], row["annotator3"]) == ("one", 1, 1, 2)
    assert "annotator4" not in row
    edits = [replace(cast, kind="edit", other="", value=f"edit of {cast.rater}") for cast in invented]
    (row,) = rows([one, *edits], Query(model="m"))
    assert row["response1"] == "edit of user 7"
    withdrawn = vote(one, two, "user 3", "withdrawn", time=NOW + 9, through="a" * 16)
    assert "user 7" not in {rater.name for rater in raters([one, two, *votes, withdrawn]) if rater.votes}


def test_a_planted_contradicting_rater_is_named_and_honest_ones_are_not():
    error = {"ann": 0.1, "ben": 0.1, "cem": 0.2, "dia": 0.3, "eve": 0.95}
    for seed in range(20):
        assert contradicting(comparisons(simulated(seed, error, pairs=120))) == {"eve"}, seed


def test_nobody_is_named_where_everybody_only_errs():
    coins = dict.fromkeys(("ann", "ben", "cem", "dia", "eve"), 0.5)  # the edge of the null hypothesis
    named = [contradicting(comparisons(simulated(seed, coins))) for seed in range(200)]
    assert sum(map(bool, named)) <= 200 * LEVEL + 3


def test_an_honest_rater_who_mostly_meets_the_contradicting_one_is_not_named():
    votes = simulated(1, {"ann": 0.05, "ben": 0.05, "eve": 0.95}, pairs=40)
    for _ in range(30):
        two = answer(), answer()
        votes += [vote(*two, "dia", RIGHT), vote(*two, "eve", WRONG)]
    assert contradicting(comparisons(votes)) == {"eve"}


def test_two_raters_who_contradict_each_other_are_both_named():
    votes = []
    for _ in range(20):
        two = answer(), answer()
        votes += [vote(*two, "ann", RIGHT), vote(*two, "eve", WRONG)]
    assert contradicting(comparisons(votes)) == {"ann", "eve"}


def test_the_table_counts_votes_and_thumbs_and_names_the_contradicting():
    votes = simulated(3, {"ann": 0.0, "ben": 0.0, "cem": 0.0, "eve": 1.0})
    known = [answer(id=id_, text=id_) for id_ in {id_ for one in votes for id_ in (one.answer, one.other)}]
    thumbs = [one := answer(), feedback(one, rater="tom"), feedback(one, rater="tom", value="down", time=NOW + 7)]
    found = {one.name: one for one in raters([*known, *votes, *thumbs])}
    assert (found["tom"].thumbs, found["tom"].votes, found["tom"].compared) == (1, 0, 0)
    assert found["eve"].agreed == 0
    assert found["eve"].contradicts
    assert sum(one.votes for one in found.values()) == 180
    lines = table(list(found.values())).splitlines()
    assert lines[0].split() == ["rater", "votes", "thumbs", "compared", "agreement"]
    assert [line.split()[0] for line in lines if line.endswith("contradicts the others")] == ["eve"]
    assert lines[-1].startswith("eve: agreement with the majority of the others is below chance")
