"""The gate: its reasons, and what a number of pairs can show."""

from tasks.config.params import load_params
from tasks.promote.gate import gate, regressions
from tests.support.workspaces import PROJECT


def test_the_gate_names_every_reason():
    params = load_params(PROJECT / "params.yaml").promote.model_copy(
        update={
            "require": {"rewards/accuracies": 0.9, "samples/policy/kind": 0.95, "samples/policy/corect": 0.9},
            "limits": {"health/repetition": 0.2},
        }
    )
    metrics = {
        "pairs": 50,
        "rewards/accuracies": 0.93,
        "intervals": {"rewards/accuracies": {"low": 0.87, "high": 0.96}},
        "samples": {"policy": {"kind": float("nan"), "correct": 1.0}},
        "health": {"repetition": 0.5, "length_ratio": 1.0, "empty": 0.0},
    }
    # The interval is twice as wide as the distance to 0.9, so it takes four times as many prompts.
    lower_end = "its lower end counts and is below 0.9, which needs about 200 prompts, and there are 50"
    assert gate(params, metrics, {"same_greedy_text": True, "reloaded": False}) == [
        "the export is not verified: the check reloaded failed",
        f"rewards/accuracies is 0.93 (0.87 to 0.96): {lower_end}",
        "samples/policy/kind is nan, below 0.95",
        "samples/policy/corect was not measured (similar: samples/policy/correct, samples/policy/kind)",
        "health/repetition is 0.5, above 0.2",
    ]


def _row(difference: float, low: float, high: float, count: int) -> dict[str, float]:
    return {"difference": difference, "low": low, "high": high, "count": count, "prompts": count}


def test_an_equal_model_passes_with_few_pairs_or_learns_how_many_a_number_needs():
    """All of 62 pairs agree, so Wilson's share of unseen exceptions is 3.84 / (62 + 3.84) = 0.058; 0.02 needs 188."""
    promote = load_params(PROJECT / "params.yaml").promote
    auto = promote.model_copy(update={"max_regression": {"rewards/accuracies": "auto"}})
    strict = promote.model_copy(update={"max_regression": {"rewards/accuracies": 0.02}})
    equal = {"rewards/accuracies": _row(0.0, -0.058345, 0.058345, 62)}
    assert regressions(auto, equal, "1") == []
    (reason,) = regressions(strict, equal, "1")
    assert reason == (
        "rewards/accuracies against version 1 is +0 (-0.0583 to +0.0583): its lower end counts and is below -0.02, "
        "which needs about 188 prompts, and there are 62"
    )
    assert regressions(strict, {"rewards/accuracies": _row(0.0, -0.02, 0.02, 189)}, "1") == []
    worse = {"rewards/accuracies": _row(-0.1, -0.17, -0.03, 62)}
    (reason,) = regressions(auto, worse, "1")
    assert reason == "rewards/accuracies is worse than that of version 1: -0.1 (-0.17 to -0.03), n = 62"
    (reason,) = regressions(auto, {"samples/policy/kind": equal["rewards/accuracies"]}, "1")
    assert reason == "rewards/accuracies was not compared with version 1"
