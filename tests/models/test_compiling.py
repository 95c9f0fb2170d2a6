"""How many graphs a training compiles: each takes seconds before the first step or the first evaluation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.benchmarks.workload import make_pairs
from tests.support.scoring import make_scorer, score_pairs
from tests.support.settings import make_settings
from training.models.compiling import compile_layers
from training.objectives.objective import Objective
from training.pairs.packing import build_row
from training.scoring.logps import row_logps
from training.trainer.policy import build_policy
from training.trainer.start_checks import check_start

CPU = torch.device("cpu")
LORA = {"rank": 2, "alpha": 4.0, "targets": "all-linear", "use_rslora": False, "use_dora": False}
SHAPE = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that the compiler gets, instead of kernels."""
    made: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        made.append(graph)
        return graph.forward

    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: compiled(module, backend=backend, **options))
    torch._dynamo.reset()
    return made


@pytest.mark.parametrize(
    ("adapter", "checkpointing"),
    [
        pytest.param(None, False, id="full"),
        pytest.param({**LORA, "dropout": 0.1}, True, id="dropout, recomputed", marks=pytest.mark.exhaustive),
        pytest.param(LORA, True, id="lora, recomputed", marks=pytest.mark.exhaustive),
        pytest.param(None, True, id="full, recomputed", marks=pytest.mark.exhaustive),
        pytest.param(LORA, False, id="lora", marks=pytest.mark.exhaustive),
        pytest.param({**LORA, "dropout": 0.1}, False, id="dropout", marks=pytest.mark.exhaustive),
    ],
)
def test_all_layers_share_a_graph_for_the_start_check_and_steps_and_one_for_evaluation(
    tmp_path: Path, graphs: list[torch.fx.GraphModule], adapter: dict[str, Any] | None, checkpointing: bool
) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, num_attention_heads=2)).save_pretrained(tmp_path)
    settings = make_settings(
        model=str(tmp_path), folder=str(tmp_path), adapter=adapter, activation_checkpointing=checkpointing
    )
    (pair,) = make_pairs("short", 1, 100)  # on a CPU, other lengths are another graph
    scorer = make_scorer(build_policy(settings, CPU), [pair], CPU)
    with torch.no_grad():
        ((chosen, rejected),) = score_pairs(scorer.eval(), [pair], 512, CPU)
    scored = replace(pair, ref_chosen_logps=chosen, ref_rejected_logps=rejected)
    compile_layers(scorer.train().causal)
    objective = Objective({"sigmoid": 1.0}, {"beta": 0.1})
    check_start(scorer, objective, [scored], 512, CPU, gradients=True)
    assert len(graphs) == 1
    row_logps(scorer, build_row([scored], (0,))).logps.sum().backward()
    with_dropout = bool(adapter and adapter.get("dropout"))  # which the check turns off
    assert len(graphs) == (2 if with_dropout else 1)
    scorer.eval()
    with torch.no_grad():
        row_logps(scorer, build_row([scored], (0,)))
    assert len(graphs) == (3 if with_dropout else 2)
