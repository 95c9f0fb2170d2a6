"""Ranks that share the tokens of a row: values and gradients of one rank, a share of its work, and what is refused."""

import json
import math
import os
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
)

from tests.models.test_architectures import FUSED
from tests.support import scoring
from training.distributed.sequence_parallel import SequenceGroup, sequence_group, start_sequence_groups
from training.models import adapters
from training.models.routers import LoadBalancingLoss
from training.objectives.metrics import row_loss
from training.objectives.objective import Objective
from training.pairs.packing import PackedRow, build_row
from training.pairs.pair import Pair
from training.scoring import parity
from training.scoring.logps import Scorer

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
GROUPED = {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 2}  # with 4 ranks, two share a key head
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "lora": LlamaConfig(**GROUPED),
    "checkpointed": LlamaConfig(**GROUPED),
    "compiled": LlamaConfig(**GROUPED),
    "own-head": LlamaConfig(**GROUPED),  # the path `packed`
    "tied": Qwen2Config(**{**SHAPE, "tie_word_embeddings": True}, num_attention_heads=12, num_key_value_heads=6),
    "one-key-head": Qwen2Config(**SHAPE, num_attention_heads=4, num_key_value_heads=1),
    "capped": Gemma2Config(**GROUPED, head_dim=12, sliding_window=4),
    "small-values": FUSED["DeepseekV3"],
    "experts": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
}
OBJECTIVE = Objective({"sigmoid": 1.0, "sft": 0.5}, {"beta": 0.3})


def make_pairs() -> list[Pair]:
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(61) for _ in range(count)]

    made = []
    for number, (prompt, chosen, rejected) in enumerate([(7, 9, 6), (13, 5, 11), (3, 1, 1), (5, 8, 4)]):
        shared = tokens(2) if number == 0 else []  # a prefix that both responses share
        answers = [*shared, *tokens(chosen)], [*shared, *tokens(rejected)]
        made.append(Pair(str(number), tokens(prompt), *answers, *([1] * len(answer) for answer in answers)))
    return made


def make_scorer(name: str, pairs: list[Pair]) -> Scorer:
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[name])
    model: Any = AutoModelForCausalLM.from_config(
        _config("DeepseekV3Config", config) if isinstance(config, dict) else config
    )
    if name == "lora":
        model = adapters.add_adapter(model, 3, 8.0, "all-linear", False, False, seed=0)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.data.normal_(0.0, 0.1)
    if name == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scorer = scoring.make_scorer(model.train(), pairs, CPU)
    assert scorer.path == "fused"
    if name == "own-head":
        scorer.path = "packed"
    if name == "experts":
        scorer.load_balance = LoadBalancingLoss(scorer.causal)
    return scorer


def _config(name: str, options: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, name)(**options)


def results(scorer: Scorer, row: PackedRow) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Losses and metrics of the pairs, and the gradients of the loss by parameter."""
    scorer.zero_grad()
    losses, metrics, balance = row_loss(scorer, OBJECTIVE, row)
    (losses.sum() + (0.0 if balance is None else 3.0 * balance)).backward()
    gradients = {n: p.grad.clone() for n, p in scorer.named_parameters() if p.requires_grad and p.grad is not None}
    return {**metrics, **({} if balance is None else {"balance": balance.detach()})}, gradients


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest, relative to the largest value of each tensor, at least 1e-3."""
    assert found.keys() == expected.keys()
    sizes = {name: max(1e-3, value.abs().max().item()) for name, value in expected.items()}
    return max(((found[name] - expected[name]).abs().max() / sizes[name]).item() for name in expected)


def computed(scorer: Scorer, row: PackedRow) -> dict[str, int]:
    """Tokens and targets that this rank computes in a pass, and the (head, token) pairs in its attention."""
    counts = {"tokens": 0, "targets": 0, "heads": 0}
    layer, head, shared = scorer.causal.base_model.layers[0].mlp, scorer._head, SequenceGroup.to_tokens

    def count(name: str, number: int) -> None:
        counts[name] += number

    hook = layer.register_forward_hook(lambda _, inputs, __: count("tokens", inputs[0].shape[1]))
    scorer._head = lambda hidden, targets: (count("targets", len(targets)), head(hidden, targets))[1]  # type: ignore[method-assign]
    SequenceGroup.to_tokens = lambda group, out: (count("heads", out.shape[2]), shared(group, out))[1]  # type: ignore[method-assign]
    with torch.no_grad():
        scorer(row)
    hook.remove()
    SequenceGroup.to_tokens = shared  # type: ignore[method-assign]
    del scorer._head
    return counts


def rows_of(name: str) -> list[str]:
    return ["row"] if name == "compiled" else ["row", "few-targets"]  # another length is traced again


def compare(rank: int, size: int, root: str) -> None:
    """One rank: each model alone, and then with its tokens shared."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=size)
    start_sequence_groups(size)
    group, pairs, found = sequence_group(), make_pairs(), {}
    assert group is not None
    rows = {"row": build_row(pairs, range(4)), "few-targets": build_row(pairs, [2])}  # on most ranks none
    for name in CONFIGS:
        scorer = make_scorer(name, pairs)
        alone = {row: results(scorer, rows[row]) for row in rows}
        parity.share_tokens(scorer, group, pairs, CPU)
        if name == "llama":
            found["computed"] = computed(scorer, rows["row"])
        if name == "compiled" and size == 2 and rank == 0:  # slow
            # traced alone
            scorer.causal.base_model.layers[0].compile(dynamic=True, fullgraph=True, backend="eager")
        for row in rows_of(name):
            metrics, gradients = results(scorer, rows[row])
            for gradient in gradients.values():
                dist.all_reduce(gradient)
            found[f"{name} {row}"] = [difference(metrics, alone[row][0]), difference(gradients, alone[row][1])]
    Path(root, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # gloo's threads may outlive the interpreter


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_that_share_a_row_compute_its_values_and_gradients_with_a_share_of_the_work(tmp_path, size):
    multiprocessing.start_processes(compare, (size, str(tmp_path)), nprocs=size, start_method="spawn")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    row = build_row(make_pairs(), range(4))
    shares = [rank.pop("computed") for rank in ranks]
    tokens, targets = len(row.input_ids), len(row.target_ids)
    assert [share["tokens"] for share in shares] == [math.ceil(tokens / size)] * size
    assert sum(share["targets"] for share in shares) == targets
    assert max(share["targets"] for share in shares) <= 1.3 * targets / size  # every response is spread
    assert [share["heads"] for share in shares] == [2 * 4 // size] * size  # 2 layers of 4 heads, over all tokens
    for rank in ranks:
        assert rank.keys() == {f"{name} {row}" for name in CONFIGS for row in rows_of(name)}
        for name, largest in rank.items():
            assert max(largest) < 2e-5, name


PAIRS = make_pairs()


def share(config: Any, size: int) -> None:
    scorer = scoring.make_scorer(AutoModelForCausalLM.from_config(config), PAIRS, CPU)
    parity.share_tokens(scorer, SequenceGroup("none", 0, size), PAIRS, CPU)


def test_a_number_of_heads_that_the_ranks_cannot_share_is_named():
    with pytest.raises(
        ValueError, match=r"sequence_parallel is 3, but LlamaForCausalLM has 4 attention heads.*divisor of 4"
    ):
        share(LlamaConfig(**GROUPED), 3)


def test_a_model_without_packed_rows_is_refused():
    config = BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(ValueError, match=r"sequence_parallel 2 needs .* packed rows, and BloomForCausalLM does not"):
        share(config, 2)


def test_a_model_with_recurrent_layers_is_refused():
    config = Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"], block_multiple_of=8)
    with pytest.raises(ValueError, match=r"recurrent layers of Lfm2ForCausalLM read all of them in order: set it to 1"):
        share(config, 2)


def test_a_group_that_does_not_divide_the_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(ValueError, match="sequence_parallel 2 does not divide the number of workers, 3"):
        start_sequence_groups(2)
