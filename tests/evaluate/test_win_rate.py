"""Win rates, length control and health metrics, each deterministic for a seed."""

import numpy
import pytest

from tasks.evaluate import health
from tasks.evaluate.win_rate import length_controlled, win_rate

PROMPTS = [str(n) for n in range(400)]


def test_ties_count_half_and_refusals_are_excluded():
    found = win_rate([1.0, 1.0, 0.5, 0.0, None], PROMPTS[:5], [0.0] * 5)
    assert found["rate"] == (2 + 0.5) / 4
    assert {name: found[name] for name in ("wins", "ties", "losses", "refused")} == {
        "wins": 2,
        "ties": 1,
        "losses": 1,
        "refused": 1,
    }
    assert found["low"] < found["rate"] < found["high"]


def test_a_judge_that_always_refuses_gives_no_rate():
    assert win_rate([None, None], PROMPTS[:2], [0.0, 0.0]) == {"wins": 0, "ties": 0, "losses": 0, "refused": 2}


def test_length_control_removes_wins_that_come_from_length():
    """Outcomes depend only on length, by sigmoid(2 tanh(d)): 50% at d = 0, but most answers are longer and win."""
    generator = numpy.random.default_rng(0)
    lengths = generator.normal(1.0, 1.0, 400)
    chance = 1 / (1 + numpy.exp(-2 * numpy.tanh(lengths / lengths.std())))
    outcomes = (generator.random(400) < chance).astype(float)
    found = win_rate(list(outcomes), PROMPTS, list(lengths))
    assert found["rate"] > 0.7
    assert found["length_controlled"]["low"] < 0.5 < found["length_controlled"]["high"]
    assert found == win_rate(list(outcomes), PROMPTS, list(lengths))  # the same evaluation, the same numbers


def test_length_control_keeps_wins_that_do_not_depend_on_length():
    generator = numpy.random.default_rng(0)
    outcomes = (generator.random(400) < 0.8).astype(float)  # whatever the length
    fair = length_controlled(outcomes, generator.normal(0.0, 5.0, 400))
    assert fair.mean == pytest.approx(outcomes.mean(), abs=0.01)
    assert fair.low > 0.7


def test_length_control_is_finite_if_length_separates_wins_from_losses():
    outcomes, lengths = numpy.array([0.0] * 20 + [1.0] * 20), numpy.array([-1.0] * 20 + [1.0] * 20)
    fair = length_controlled(outcomes, lengths)
    assert fair.mean == pytest.approx(0.5, abs=0.05)
    assert numpy.isfinite([fair.low, fair.high]).all()


def test_variety_and_repetition():
    """`a b a b a b`: 4-grams abab, baba, abab: 1 - 2/3. Of 6 words 2 are distinct, of 5 pairs of words 2."""
    assert health.repetition(list("ababab")) == pytest.approx(1 / 3)
    assert health.repetition(list("abc")) == 0.0
    found = health.variety(["a b a b a b"])
    assert (found["distinct_1"], found["distinct_2"]) == (round(2 / 6, 4), round(2 / 5, 4))
    assert health.variety(["", "x"])["empty"] == 0.5


def test_health_compares_the_policy_with_the_base_model():
    before = {"repetition": 0.0, "empty": 0.0, "finished": 1.0, "tokens": 10.0, "distinct_2": 0.5}
    after = {"repetition": 0.4, "empty": 0.1, "finished": 0.75, "tokens": 25.0, "distinct_2": 0.1}
    assert health.drift(before, after) == {
        "repetition": 0.4,
        "repetition_rise": 0.4,
        "empty": 0.1,
        "unfinished": 0.25,
        "length_ratio": 2.5,
        "distinct_2_ratio": 0.2,
    }
