"""The influence of training pairs: finite differences along the held-out gradient equal TracIn's dot products."""

from pathlib import Path

import pytest
import torch

from tests.support.scoring import make_scorer
from training.evaluation.influence import MarginDerivatives, move_halfway
from training.models.adapters import load_adapter
from training.models.loading import load_model
from training.models.tokenizer import load_tokenizer
from training.objectives.objective import Objective
from training.pairs.pair import Pair

CPU = torch.device("cpu")
OBJECTIVE = Objective({"sigmoid": 1.0}, {"beta": 0.1})
TEXTS = [
    ("Where is it?", " Under the bed.", " Find it."),
    ("Who is there?", " Ana.", " Nobody at all."),
    ("Why?", " So.", " No."),
]


def pairs(base: Path) -> list[Pair]:
    encode = load_tokenizer(base).encode
    ids = [[encode(text, add_special_tokens=False) for text in texts] for texts in TEXTS]
    return [
        Pair(str(number), prompt, chosen, rejected, [1] * len(chosen), [1] * len(rejected))
        for number, (prompt, chosen, rejected) in enumerate(ids)
    ]


def test_changes_equal_the_dot_products_of_gradients(tiny_base: Path, adapter: Path) -> None:
    model, given = load_adapter(load_model(tiny_base, "float32"), adapter), pairs(tiny_base)
    parameters = move_halfway(model, None)
    derivatives = MarginDerivatives(make_scorer(model, given, CPU), OBJECTIVE, parameters, CPU)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    target = derivatives.gradient(given[:1], [2.0])
    assert sum(part.square().sum().item() for part in target) == pytest.approx(1.0, rel=1e-4)

    changes = derivatives.along(target, given, [[2, 0], [1]])
    assert all(torch.equal(before[name], parameter) for name, parameter in parameters.items())
    for number, pair in enumerate(given):  # the same with a backward pass for each pair
        own = derivatives.gradient([pair], [1.0])
        (norm,) = derivatives.along(own, [pair], [[0]])
        cosine = sum((a * b).sum().item() for a, b in zip(own, target, strict=True))
        assert changes[number] == pytest.approx(norm * cosine, rel=0.02, abs=0.01 * changes[0])


def test_a_fully_trained_policy_moves_halfway_to_its_base_model(tiny_base: Path) -> None:
    model = load_model(tiny_base, "float32")
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for name, parameter in move_halfway(model, tiny_base).items():
        torch.testing.assert_close(parameter, base[name] + 0.5)
