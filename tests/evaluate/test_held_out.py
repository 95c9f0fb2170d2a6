"""Metrics on held-out pairs: intervals, calibration, tables, and the pairs that look mislabelled."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.config.cluster import load_cluster
from tasks.evaluate.held_out import bucket, calibration, disagreements, held_out, histogram, length_bias, probability
from tasks.evaluate.sampler import Weights
from tasks.evaluate.scoring import answer_log_ratios, evaluator_pool
from training.evaluation.pair_scores import pair_values, score_rows, stored_pair_values
from training.evaluation.samples import PairValues
from training.objectives.objective import Objective
from training.pairs.pair import Pair
from training.scoring.logps import plain_logps
from training.scoring.parity import scoring

SURE = math.log(0.88 / 0.12)  # sigmoid of it is 0.88


def value(name: str, margin: float, chosen: int = 10, rejected: int = 10, kl: float = 0.0) -> PairValues:
    tokens = {"chosen_tokens": chosen, "rejected_tokens": rejected}
    return PairValues(id=name, chosen_reward=margin, rejected_reward=0.0, kl=kl, **tokens)


def row(prompt: str, **more: str) -> dict:
    return {"prompt": prompt, "chosen_ids": [1], "rejected_ids": [2], **more}


def test_calibration_compares_confidence_with_accuracy():
    """Of 25 pairs at 88% 22 are right: no error. At 88% and none right, the error is 0.88 - 0."""
    good = [value(str(n), SURE if n < 22 else -SURE) for n in range(25)]
    (only,) = calibration(good)
    assert only == {"confidence": 0.88, "accuracy": 0.88, "pairs": 25}
    found = held_out(good, [row(str(n)) for n in range(25)])
    assert found["calibration"]["expected_error"] == pytest.approx(0.0, abs=1e-6)
    assert found["calibration"]["brier"] == pytest.approx((22 * 0.12**2 + 3 * 0.88**2) / 25, abs=1e-6)
    assert found["calibration"]["log_loss"] == pytest.approx(-(22 * math.log(0.88) + 3 * math.log(0.12)) / 25, abs=1e-6)
    wrong = held_out([value("a", -SURE)], [row("a")])
    assert wrong["calibration"]["expected_error"] == pytest.approx(0.88)


def test_a_huge_margin_does_not_overflow():
    assert probability(value("a", 1e6)) == 1.0
    assert probability(value("a", -1e6)) == pytest.approx(0.0)


def test_length_bias_reports_accuracy_where_the_chosen_response_is_shorter():
    values = [value("a", 1.0, 20, 10), value("b", 1.0, 30, 10), value("c", -1.0, 5, 10), value("d", 0.0, 5, 10)]
    found = length_bias(values)
    assert found["chosen_longer/accuracy"] == 1.0
    assert found["chosen_shorter/accuracy"] == 0.0  # a tie is not a win
    assert (found["chosen_longer/pairs"], found["chosen_shorter/pairs"]) == (2, 2)
    assert found["correlation"] > 0.8
    assert length_bias([value("a", 1.0)])["correlation"] == 0.0


def test_tables_by_source_and_by_length_of_the_longer_response():
    values = [value("a", 1.0, 32, 4), value("b", -1.0, 4, 33), value("c", 2.0, 600, 4)]
    rows = [row("a", source="hh"), row("b", source="hh"), row("c")]
    tables = held_out(values, rows)["tables"]
    assert tables["source"]["hh"] == {"pairs": 2, "accuracy": 0.5, "margin": 0.0, "kl": 0.0}
    assert tables["source"]["all"]["pairs"] == 1  # a row without a source
    assert list(tables["length"]) == ["1-32", "33-64", "513-"]
    assert [bucket(n) for n in (1, 32, 33, 512, 513)] == ["1-32", "1-32", "33-64", "257-512", "513-"]


def test_the_strongest_disagreement_comes_first_with_its_texts():
    values = [value(str(n), float(n)) for n in range(-1, 60)]
    rows = [row(f"p{n}") for n in range(-1, 60)]
    lines = disagreements(
        list(reversed(values)), list(reversed(rows)), lambda texts: [f"text {ids[0]}" for ids in texts]
    )
    assert [line["margin"] for line in lines[:3]] == [-1.0, 0.0, 1.0]
    assert (lines[0]["chosen"], lines[0]["rejected"]) == ("text 1", "text 2")
    assert "chosen" not in lines[-1]  # not a suspicious label: its texts are left out


def test_the_histogram_counts_every_pair_once():
    bars = histogram([value("a", 0.0), value("b", 1.0), value("c", 1.0)], bins=2)
    assert bars == [{"margin": 0.25, "pairs": 1}, {"margin": 0.75, "pairs": 2}]
    assert sum(bar["pairs"] for bar in histogram([value("a", 3.0)])) == 1
    assert sum(bar["pairs"] for bar in histogram([value("a", 3.0), value("b", 3.0 + 1e-15)])) == 2


@pytest.fixture(scope="module")
def model(tiny_base: Path):
    from training.models.loading import load_model

    return load_model(tiny_base, "float32")


def test_pair_values_equal_plain_forward_passes_and_average_to_the_training_metrics(model):
    """With a mask, and with a reference that is not the policy."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(10, 500, (count,), generator=generator).tolist()

    def pair(n: int) -> Pair:
        masks, reference = (
            ([0] + [1] * (3 + n), [1] * 5),
            {"ref_chosen_logps": [-5.0] * (4 + n), "ref_rejected_logps": [-4.5] * 5},
        )
        return Pair(f"{n}", ids(6), ids(4 + n), ids(5), *masks, **reference)

    pairs = [pair(n) for n in range(5)]
    objective, cpu = Objective({"sigmoid": 1.0}, {"beta": 0.3}), torch.device("cpu")
    with scoring(model, pairs, cpu) as (scorer, _):
        means, values = pair_values(scorer, objective, pairs, 64, cpu)
        stored = score_rows(scorer, pairs, [[4, 0], [1, 3, 2]], cpu)  # in other rows
    again, each = stored_pair_values(stored, objective, pairs, 64)
    assert again == pytest.approx(means, abs=1e-4)
    assert [v.margin for v in each] == pytest.approx([v.margin for v in values], abs=1e-4)
    for pair, given in zip(pairs, values, strict=True):
        live = plain_logps(model, pair.prompt_ids, pair.chosen_ids, cpu).tolist()
        assert given.chosen_reward == pytest.approx(0.3 * sum(x + 5.0 for x in live[1:]), abs=1e-3)
    for name, own in (
        ("rewards/margins", [v.margin for v in values]),
        ("rewards/chosen", [v.chosen_reward for v in values]),
        ("kl", [v.kl for v in values]),
        ("rewards/accuracies", [float(v.margin > 0) for v in values]),
    ):
        assert sum(own) / len(own) == pytest.approx(means[name], rel=1e-4, abs=1e-5), name
    assert [v.chosen_tokens for v in values] == [3, 4, 5, 6, 7]  # tokens in the loss mask


def test_scoring_leaves_the_model_ready_to_generate(model):
    prompt = torch.tensor([[5, 6, 7]])
    before = model.generate(prompt, max_new_tokens=8, do_sample=False)
    with scoring(model, [Pair("a", [1], [2], [3], [1], [1])], torch.device("cpu")):
        pass
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), before)


def test_the_base_model_is_the_policy_with_its_adapter_switched_off(tiny_base: Path, adapter: Path):
    asked = [([5, 6, 7], [8, 9], [10]), ([5], [6], [7, 8])]
    base = Weights(tiny_base, tiny_base, "float32")
    policy = replace(base, adapter=adapter)
    with evaluator_pool(load_cluster(Path(__file__).parents[2]), "evaluate") as workers:
        assert answer_log_ratios(workers, base, base, asked) == [0.0, 0.0]
        first = answer_log_ratios(workers, policy, base, asked)
        assert answer_log_ratios(workers, base, policy, asked) == [-ratio for ratio in first]
        assert answer_log_ratios(workers, base, base, asked) == [0.0, 0.0]  # the adapter is loaded but switched off
    assert min(map(abs, first)) > 1e-3


def rated(reward: float, sign: int, zero: float = 0.1) -> PairValues:
    """An unpaired row: its reward should be above `zero` if it is desirable, below it otherwise."""
    high, low = (reward, zero) if sign > 0 else (zero, reward)
    return PairValues(
        id="a", chosen_reward=high, rejected_reward=low, chosen_tokens=3, rejected_tokens=3, kl=0.0, sign=sign
    )


def test_both_labels_of_unpaired_rows_count_the_same():
    """Nine desirable rows and one undesirable, all above the zero reward: 90% are right, but that is no skill."""
    values = [*(rated(0.5 + n / 100, 1) for n in range(9)), rated(0.4, -1)]
    rows = [row(f"prompt {n}") for n in range(10)]
    measured = held_out(values, rows)
    assert measured["tables"]["source"]["all"]["accuracy"] == 0.5
    assert measured["intervals"]["rewards/accuracies"]["low"] <= 0.5
    assert measured["rewards/auc"] == 1.0  # and yet the rewards order them rightly
    assert measured["length_bias"] == {"correlation": 0.0}
    margins = measured["intervals"]["rewards/margins"]
    assert margins["low"] <= 0.54 - 0.4 <= margins["high"]


def test_auc_counts_a_tie_half_and_one_label_alone_has_none():
    values = [rated(0.5, 1), rated(0.2, 1), rated(0.2, -1), rated(0.1, -1)]  # pairs: 1, 1, 0.5, 1
    rows = [row(f"prompt {n}") for n in range(4)]
    assert held_out(values, rows)["rewards/auc"] == pytest.approx(3.5 / 4)
    assert "rewards/auc" not in held_out(values[:2], rows[:2])


def test_the_texts_of_an_unpaired_row_are_its_own():
    tokens = {"chosen_ids": [1], "rejected_ids": [2]}
    lines = disagreements([rated(0.5, -1)], [{**row("prompt"), **tokens}], lambda ids: [str(one) for one in ids])
    assert lines[0]["rejected"] == "[1]"
    assert lines[0]["sign"] == -1
    assert "chosen" not in lines[0]
