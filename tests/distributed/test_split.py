"""A model that two ranks share: neither ever holds more than 60% of it, and results are those of the whole model."""

import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import multiprocessing, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tasks.evaluate.evaluator import Evaluator
from tasks.evaluate.sampler import Sampling, Weights
from tasks.tracking.journal_reader import read_lines
from tests.support.workspaces import run, start, workers, write_cluster
from training.exporting import merging
from training.models import adapters
from training.models import sharded as sharded_model
from training.models.loading import load_model
from training.pairs.pair import Pair
from training.trainer.engine import local_shard

HOW = Sampling(max_new_tokens=2, temperature=1.0, top_p=1.0, seed=0)
SPLIT = {"num_workers": 2, "zero_stage": 3, "row_tokens": 128}
PROMPTS = [[1, 4, 30, 31, 32], [1, 4, *range(60, 90)], [1, 5, 6], [7, 8, 9, 10]]


def make_pairs() -> list[Pair]:
    rng = np.random.default_rng(0)
    parts = [[rng.integers(0, 200, rng.integers(3, 12)) for _ in range(3)] for _ in range(9)]
    return [Pair(str(n), p, c, r, np.ones(len(c)), np.ones(len(r))) for n, (p, c, r) in enumerate(parts)]


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_base: Path) -> Path:
    """A folder with a base, and an adapter for it. The ranks gather less than a tenth of its weights at a time."""
    root = tmp_path_factory.mktemp("split")
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=208,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        initializer_range=0.1,
        tie_word_embeddings=True,
        **{name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    LlamaForCausalLM(config).save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    policy = adapters.add_adapter(
        load_model(root / "base", "float32"), 2, 4, ["q_proj", "down_proj"], False, False, seed=0
    )
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.05)
    adapters.save_adapter(policy, dict(policy.named_parameters()), root / "policy", "base")
    return root


def weights(root: Path, adapter: bool) -> Weights:
    base = root / "base"
    return Weights(base, base, "float32", adapter=root / "policy" if adapter else None)


def share_of_two(rank: int, root: str) -> None:
    """One of the two ranks: what it samples, scores and exports, and the largest part of a model that it ever held."""
    folder, largest = Path(root), [0.0]
    os.environ["DS_ACCELERATOR"] = "cpu"
    sharded_model.MAX_LIVE_PARAMETERS = 5_000  # a large model, too, gathers few of its layers at a time
    merging.GREEDY_TOKENS = 2
    start_inference = sharded_model.start_inference

    def watched(scorer: Any, config: dict[str, Any]) -> nn.Module:
        ready = start_inference(scorer, config)
        parameters: list[Any] = list(scorer.parameters())
        own = sum(local_shard(parameter).numel() for parameter in parameters)
        total = sum(parameter.ds_numel for parameter in parameters)

        def look(*_: object) -> None:
            live = sum(parameter.ds_numel for parameter in parameters if parameter.numel())
            largest[0] = max(largest[0], (own + live) / total)

        for module in scorer.modules():
            module.register_forward_hook(look)
        return ready

    sharded_model.start_inference = watched
    worker, pairs = Evaluator(), make_pairs()
    worker.join(f"file://{root}/meeting", rank, 2)
    own = pairs[:6] if rank == 0 else pairs[6:]
    rows = [[0, 1], [2, 3], [4, 5]] if rank == 0 else [[0, 1, 2]]  # not as many passes
    found: dict[str, Any] = {}
    for name in ("base", "policy", "base again"):
        model = weights(folder, adapter=name == "policy")
        answers = worker.sample(model, PROMPTS[2 * rank : 2 * rank + 2], HOW)
        values, note = worker.score(model, own, rows, pairs[:3])
        assert note is None
        found[name] = {"answers": [answer.ids for answer in answers], "logps": [part[0].tolist() for part in values]}
    worker.free()
    checks, _ = merging.export(
        folder / "base", folder / "policy", True, "float32", folder / "out", "100KB", PROMPTS[:2], split=True
    )
    found |= {"checks": checks, "share": largest[0]}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # gloo's threads may outlive the interpreter


@pytest.mark.slow
@pytest.mark.exhaustive  # test_tensor_parallel.py splits layers, too
def test_two_ranks_that_share_a_model_give_the_results_of_the_whole_and_hold_at_most_60_percent(models: Path):
    (models / "out").mkdir()
    multiprocessing.start_processes(share_of_two, (str(models),), nprocs=2, start_method="spawn")
    halves = [json.loads((models / f"{rank}.json").read_text()) for rank in range(2)]
    pairs, alone = make_pairs(), Evaluator()
    for name in ("base", "policy", "base again"):
        model = weights(models, adapter=name == "policy")
        answers = [tuple(ids) for half in halves for ids in half[name]["answers"]]
        assert answers == [answer.ids for answer in alone.sample(model, PROMPTS, HOW)]
        values, _ = alone.score(model, pairs, [[n] for n in range(len(pairs))], pairs[:3])
        logps = [tokens for half in halves for tokens in half[name]["logps"]]
        for given, expected in zip(logps, values, strict=True):
            assert given == pytest.approx(expected[0].tolist(), abs=1e-4)
    assert halves[0]["base"] != halves[0]["policy"]
    assert halves[0]["checks"] == halves[1]["checks"]
    assert halves[0]["checks"]["largest_logit_difference"] < 1e-4
    whole = adapters.load_adapter(load_model(models / "base", "float32"), models / "policy").merge_and_unload()
    written = load_model(models / "out", "float32").state_dict()
    assert all(torch.equal(written[name], tensor) for name, tensor in whole.state_dict().items())
    assert all(half["share"] < 0.6 for half in halves), [half["share"] for half in halves]


def test_an_export_holds_one_shard_and_one_tensor(models: Path, tmp_path: Path, monkeypatch):
    """Not the model: what is alive is counted at each tensor that the merge gives."""
    alive: dict[int, int] = {}
    peak = [0]
    real = adapters.merged_tensors

    class Counted(torch.Tensor):
        pass

    def counted(*given: Any) -> Any:
        for name, tensor in real(*given):
            own = tensor.clone().as_subclass(Counted)
            alive[id(own)] = own.nbytes
            weakref.finalize(own, alive.pop, id(own))
            peak[0] = max(peak[0], sum(alive.values()))
            yield name, own
            del own, tensor

    monkeypatch.setattr(adapters, "merged_tensors", counted)
    adapters.write_merged(models / "base", models / "policy", tmp_path, torch.float32, "100KB")
    total = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert total > 1_000_000
    assert peak[0] < 300_000, f"{peak[0]} of {total} bytes at once"


@pytest.mark.slow
@pytest.mark.exhaustive  # its parts: the test above, and a ZeRO-3 group in tests/reference/test_reference.py
def test_a_model_split_over_two_workers_goes_through_all_stages(referenced: Path, tmp_path: Path):
    """Full fine-tuning, so that training, too, saves a model that no rank holds; an evaluating worker is killed."""
    root = Path(shutil.copytree(referenced, tmp_path / "workspace", symlinks=True))
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["train"] |= {"adapter": None, "max_steps": 4}
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    groups = ("reference", "actor_train", "inference")
    write_cluster(root, {f"{group}.{key}": value for group in groups for key, value in SPLIT.items()})
    run(root, "train")
    driver = start(root, "evaluate")
    group = workers(driver, 2, "Evaluator")
    group[1].kill()
    said, _ = driver.communicate(timeout=900)
    assert driver.returncode == 0, said
    assert said.count("a worker was lost; restarting the worker group") == 1
    run(root, "export")
    (journal,) = root.glob(".scratch/train/*/metrics.jsonl")
    trained = [line["values"] for line in read_lines(journal)[0] if "eval/loss" in line.get("values", {})][-1]
    evaluated = json.loads((root / "data/metrics/evaluate.json").read_text())
    for name in ("loss", "rewards/margins", "logps/chosen"):
        assert evaluated[name] == pytest.approx(trained[f"eval/{name}"], abs=1e-4), name
    checks = json.loads((root / "data/model/manifest.json").read_text())["checks"]
    assert checks["largest_logit_difference"] == 0.0
    policy, model = (load_file(root / f"data/{name}/model.safetensors") for name in ("policy", "model"))
    assert policy.keys() == model.keys()
    assert all(torch.equal(policy[name], model[name]) for name in policy)
