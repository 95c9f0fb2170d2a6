"""Which metrics a configuration will measure, so that a gate on any other metric is refused before a run starts.

tests/runs/test_end_to_end.py compares these names with those of a real evaluation.
"""

import difflib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from training.objectives.mixture import is_unpaired
from training.objectives.registry import LOSSES

if TYPE_CHECKING:
    from tasks.config.params import Params

ACCURACY = "rewards/accuracies"
ALWAYS = (  # measured in training and evaluation, whatever the loss
    *("loss", "rewards/chosen", "rewards/rejected", ACCURACY, "rewards/margins", "logps/chosen", "logps/rejected"),
    *("sft_loss", "entropy"),
)
HELD_OUT = (
    "pairs",
    *("calibration/expected_error", "calibration/brier", "calibration/log_loss", "length_bias/correlation"),
    *(
        f"length_bias/{group}/{part}"
        for group in ("chosen_shorter", "chosen_longer", "same_length")
        for part in ("pairs", "accuracy")
    ),
)
ANSWERS = ("tokens", "finished", "words", "distinct_1", "distinct_2", "repetition", "empty")
HEALTH = ("repetition", "repetition_rise", "empty", "unfinished", "length_ratio", "distinct_2_ratio")
VERDICTS = {"demo": ("kind", "correct"), "reward": ("reward",)}  # on single answers, by judge
WINS = ("wins", "ties", "losses", "refused", "rate", "low", "high")
WIN_RATES = (*WINS, *(f"length_controlled/{name}" for name in ("rate", "low", "high")))
BY_DATA = ("tables/",)  # prefixes of names that depend on the data


def of_training(params: "Params") -> list[str]:
    """Names of the training metrics, which held-out pairs have too."""
    parts = [f"loss/{name}" for name in params.train.loss] if len(params.train.loss) > 1 else []
    reference = ["kl"] if params.train.needs_reference else []
    if is_unpaired(params.train.loss):
        reference += [f"{ACCURACY}/chosen", f"{ACCURACY}/rejected"]
        reference += ["kl/mismatched"] if any(LOSSES[name].reads_kl for name in params.train.loss) else []
    return [*ALWAYS, *parts, *reference]


def of_evaluation(params: "Params") -> list[str]:
    """Names in evaluate.json, as `promote.require` and `promote.limits` write them."""
    names = [*of_training(params), *HELD_OUT]
    names += ["rewards/auc"] if is_unpaired(params.train.loss) else []
    if params.evaluate.prompts:
        answers = (*ANSWERS, *VERDICTS.get(params.evaluate.judge, ()))
        names += [f"samples/{model}/{name}" for model in ("policy", "base") for name in answers]
        names += [f"health/{name}" for name in HEALTH] + ["kl/answers"]
        names += [f"win_rate/{name}" for name in WIN_RATES] if params.evaluate.judge != "none" else []
    return names


def of_comparison(params: "Params") -> list[str]:
    """Names that a comparison with the champion gives, as `promote.max_regression` writes them."""
    if not params.evaluate.prompts:
        return [ACCURACY]
    verdicts = ("finished", *VERDICTS.get(params.evaluate.judge, ()))
    wins = ["win_rate"] if params.evaluate.judge != "none" else []
    return [ACCURACY, *(f"samples/policy/{name}" for name in verdicts), *wins]


def check(params: "Params") -> None:
    """ValueError for a gate or a selection by a metric that this configuration does not measure."""
    measured, by_data = of_evaluation(params), (*BY_DATA, *(("harness/",) if params.evaluate.harness else ()))
    bounds = [f"intervals/{name}/{end}" for name in measured for end in ("low", "high")]
    for key in ("require", "limits"):
        names = [name for name in getattr(params.promote, key) if not name.startswith(by_data)]
        _check(params, f"promote.{key}", names, [*measured, *bounds])
    _check(params, "promote.max_regression", params.promote.max_regression, of_comparison(params))
    if params.promote.error_budget:
        bounded = [name for name in of_comparison(params) if name != "samples/policy/reward"]
        _check(params, "promote.error_budget.metric", [params.promote.error_budget.metric], bounded)
    mixture = params.source.data if isinstance(params.source.data, list) else []
    prefixes = ["eval/", *(f"eval/{source.name}/" for source in mixture)]
    selectable = [prefix + name for prefix in prefixes for name in of_training(params)]
    _check(params, "train.select", [params.train.select] if params.train.select else [], selectable)


def _check(params: "Params", key: str, names: Iterable[str], measured: Collection[str]) -> None:
    for name in names:
        if name not in measured:
            raise ValueError(f"`{key}` names {name}, {_why_not(params, name, measured)}")


def _why_not(params: "Params", name: str, measured: Collection[str]) -> str:
    needs_answers, judge = name.startswith(("samples/", "health/", "win_rate", "kl/")), params.evaluate.judge
    if needs_answers and not params.evaluate.prompts:
        return "which is measured on sampled answers, and `evaluate.prompts` is 0. Raise it, or remove the metric"
    judges = [judge for judge, verdicts in VERDICTS.items() if name.removeprefix("samples/policy/") in verdicts]
    if name.startswith("win_rate") and judge == "none":
        judges = ["reward", "endpoint"]
    if judges and judge not in judges:
        return (
            f"which only judge {' or '.join(judges)} measures, and `evaluate.judge` is {judge} for this data. "
            "Remove the metric, or set another judge"
        )
    near = difflib.get_close_matches(name, measured, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else "docs/metrics.md lists the metrics"
    return f"which this configuration does not measure. {hint}"
