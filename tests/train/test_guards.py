"""Skipped steps are counted and stop a run, alarms are raised once, and the best evaluation is selected."""

import pytest

from training.trainer.guards import FALLING_LOGS, Alarms, BestPolicy, SkippedSteps


def test_too_many_skips_in_a_row_stop_the_run_and_name_the_pairs():
    skips = SkippedSteps(limit=3)
    skips.record_skip(1, ["b"])
    skips.record_skip(2, ["a"])
    skips.record_update()
    skips.record_skip(4, [])
    skips.record_skip(5, [])
    with pytest.raises(FloatingPointError, match=r"3 updates in a row up to step 6 .*pairs: a, b"):
        skips.record_skip(6, [])
    assert skips.total == 5


def values(chosen: float, reward: float = -0.1, margin: float = 1.0, kl: float = 0.0) -> dict[str, float]:
    return {"logps/chosen": chosen, "rewards/chosen": reward, "rewards/margins": margin, "kl": kl}


def test_a_chosen_response_that_keeps_falling_is_an_alarm():
    alarms = Alarms(kl_limit=None)
    raised = [alarms.check(values(chosen=-10.0 - step)) for step in range(FALLING_LOGS + 3)]
    assert [set(new) for new in raised] == [set()] * FALLING_LOGS + [{"displacement"}, set(), set()]  # reported once
    rising = Alarms(kl_limit=None)
    assert not any(rising.check(values(chosen=-10.0 - step, reward=0.1)) for step in range(10))  # above the reference
    wavering = Alarms(kl_limit=None)
    assert not any(wavering.check(values(chosen=-10.0 - step % 3)) for step in range(20))


def test_saturated_margins_and_a_passed_kl_limit_are_alarms():
    assert set(Alarms(None).check(values(0.0, margin=25.0))) == {"saturation"}
    assert set(Alarms(0.5).check(values(0.0, kl=0.6))) == {"kl"}
    assert Alarms(0.5).check(values(0.0, kl=0.4)) == {}


def test_the_best_is_by_the_metrics_own_direction():
    accuracy = BestPolicy("eval/rewards/accuracies", patience=2, keep=0)
    assert [accuracy.update(n, {"eval/rewards/accuracies": v}) for n, v in enumerate([0.5, 0.7, 0.7, 0.6])] == [
        True,
        True,
        False,
        False,
    ]
    assert (accuracy.step, accuracy.value, accuracy.out_of_patience) == (1, 0.7, True)
    loss = BestPolicy("eval/loss", patience=None, keep=0)
    assert [loss.update(n, {"eval/loss": v}) for n, v in enumerate([0.5, 0.7, 0.4])] == [True, False, True]
    assert not loss.out_of_patience


def test_alarms_survive_a_resume():
    alarms = Alarms(None)
    for step in range(4):
        alarms.check(values(chosen=-10.0 - step))
    again = Alarms(None)
    again.load(alarms.state())
    assert again == alarms
