"""The reference stage on a real Ray: resumable by shard, and the same values from any number of workers."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as parquet
import pytest
import torch
import yaml
from torch import multiprocessing
from transformers import AutoModelForCausalLM, LlamaConfig

from tasks.artifacts.models import base_folder
from tasks.artifacts.pairs import check_inputs, read_rows
from tasks.errors import UserError
from tasks.runs import dvc
from tests.support.scoring import make_scorer, score_pairs
from tests.support.workspaces import refusal, run, shared_workers, start_shared, wait_for, write_cluster
from training.distributed.process_group import join_process_group
from training.models import sharded as sharded_model
from training.models.loading import load_model
from training.pairs.pair import Pair
from training.scoring.logps import score_rank_share
from training.scoring.parity import select_scoring_path
from training.trainer.engine import local_shard

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def shards(workspace: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in workspace.glob(".scratch/reference/*/*.parquet")}


def values(workspace: Path) -> dict[str, list[float]]:
    rows = [row for split in ("train", "eval") for row in read_rows(workspace / f"data/reference/{split}.arrow")]
    return {row["id"]: row["chosen_logps"] + row["rejected_logps"] for row in rows}


def flip(path: Path) -> None:
    """One bit, with the size and the modification time as they were."""
    content, state = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_a_stage_detects_a_flipped_bit_of_its_inputs(referenced, tiny_base, tmp_path, monkeypatch):
    workspace, model = Path(shutil.copytree(referenced, tmp_path / "work")), shutil.copytree(tiny_base, tmp_path / "m")
    monkeypatch.chdir(workspace)
    check_inputs()
    for path in ("data/pairs/train.arrow", "data/pairs/eval.arrow", "data/reference/train.arrow"):
        flip(Path(path))
        with pytest.raises(UserError, match=rf"{path} is not what the \w+ stage wrote"):
            check_inputs()
        if path == "data/pairs/train.arrow":
            assert path in refusal(workspace, "train")
        flip(Path(path))
    assert base_folder(str(model)) == model
    flip(model / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors is not the file that the source stage read"):
        base_folder(str(model))


def test_a_damaged_object_of_the_dvc_cache_is_detected(tmp_path):
    whole = tmp_path / "files/md5/90/0150983cd24fb0d6963f7d28e17f72"  # md5 of abc
    whole.parent.mkdir(parents=True)
    whole.write_text("abc")
    (whole.parent / "no-object.tmp").write_text("")
    assert dvc.damaged_objects(tmp_path) == []
    flip(whole)
    assert dvc.damaged_objects(tmp_path) == [whole]


def test_a_killed_stage_continues_as_a_group_that_loses_a_worker_and_gives_the_values_of_one_worker(
    referenced, tmp_path
):
    """First two workers with a copy of the model each, with other rows and shards, then two that share a model."""
    other = Path(shutil.copytree(referenced, tmp_path / "other"))
    shutil.rmtree(other / "data/reference")
    shutil.rmtree(other / ".scratch/reference")
    group = {"reference.num_workers": 2, "reference.row_tokens": 64}
    write_cluster(other, {**group, "reference.shard_pairs": 2})
    driver = start_shared(other, "reference")
    wait_for(lambda: len(shards(other)) > 5 or driver.poll() is not None, 300, pause=0.01)
    scorers = shared_workers(driver, "ReferenceScorer")
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    _, alive = psutil.wait_procs(scorers, timeout=240)  # they finish their writes
    assert scorers
    assert not alive
    before = shards(other)
    assert not (other / "data/reference").exists()

    write_cluster(other, {**group, "reference.shard_pairs": 5, "reference.zero_stage": 3})
    driver = start_shared(other, "reference")
    wait_for(lambda: len(shards(other)) > len(before) or driver.poll() is not None, 300, pause=0.01)
    shared_workers(driver, "ReferenceScorer")[0].kill()
    output, _ = driver.communicate(timeout=900)
    assert driver.returncode == 0, output
    cached = sum(parquet.read_metadata(path).num_rows for path in before)
    assert f"reference: {cached} of 120 pairs are cached" in output
    assert 0 < cached < 120
    assert output.count("a worker was lost; restarting the worker group") == 1
    assert before.items() <= shards(other).items()
    ours, theirs = values(referenced), values(other)
    assert ours.keys() == theirs.keys()
    for name, logps in ours.items():
        assert logps == pytest.approx(theirs[name], abs=1e-4)


@pytest.mark.exhaustive  # tests/distributed/test_split.py: of an evaluator, which loads and scores in the same way
def test_a_worker_of_two_holds_at_most_60_percent_of_the_model(tmp_path):
    """Its own half and the gathered layers; the values are those of the whole model."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=12, num_attention_heads=4, vocab_size=200
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    multiprocessing.start_processes(score_a_half, (str(tmp_path),), nprocs=2, start_method="spawn")
    pairs, whole = split_pairs(), make_scorer(load_model(tmp_path / "model", "float32").eval(), split_pairs(), CPU)
    expected = score_pairs(whole, pairs, 64, CPU)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    scores = {int(number): scores for half in found for number, scores in half["scores"].items()}
    assert len(scores) == len(pairs)
    for number, (chosen, rejected) in enumerate(expected):
        assert scores[number][0] == pytest.approx(chosen, abs=1e-5)
        assert scores[number][1] == pytest.approx(rejected, abs=1e-5)
    assert [half["share"] < 0.6 for half in found] == [True, True], [half["share"] for half in found]


def split_pairs() -> list[Pair]:
    rng = np.random.default_rng(0)
    parts = [[rng.integers(0, 200, rng.integers(3, 12)) for _ in range(3)] for _ in range(9)]
    return [Pair(str(n), p, c, r, np.ones(len(c)), np.ones(len(r))) for n, (p, c, r) in enumerate(parts)]


def score_a_half(rank: int, folder: str) -> None:
    """A process of its own: one of the two ranks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    sharded_model.MAX_LIVE_PARAMETERS = 5_000  # a large model, too, gathers few of its layers at a time
    join_process_group(f"file://{folder}/meeting", rank, 2)
    scorer, ready = sharded_model.load_sharded(Path(folder) / "model", "float32")
    select_scoring_path(scorer, split_pairs(), CPU)
    live: list[int] = []

    def record_live(*_: object) -> None:
        whole = [parameter for parameter in scorer.parameters() if parameter.numel()]
        live.append(sum(parameter.ds_numel for parameter in whole))

    for module in scorer.modules():
        module.register_forward_hook(record_live)
    scores = score_rank_share(ready, split_pairs(), 64, CPU, rank=rank, world=2)
    own = sum(local_shard(parameter).numel() for parameter in scorer.parameters())
    total = sum(parameter.ds_numel for parameter in scorer.parameters())
    found = {"scores": scores, "share": (own + max(live)) / total}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # gloo's threads may outlive the interpreter


def test_another_beta_computes_nothing(referenced, tmp_path):
    other = Path(shutil.copytree(referenced, tmp_path / "beta"))
    sides = [len(read_rows(other / f"data/pairs/{split}.arrow")) for split in ("train", "eval")]
    assert len(shards(other)) == sum(math.ceil(pairs / 16) for pairs in sides)
    text = (other / "params.yaml").read_text()
    (other / "params.yaml").write_text(text.replace("beta: 0.1", "beta: 0.2"))
    assert "reference: 120 of 120 pairs are cached" in run(other, "reference")


def test_a_loss_without_a_reference_computes_none(referenced, tmp_path):
    other = Path(shutil.copytree(referenced, tmp_path / "free"))
    params = yaml.safe_load((other / "params.yaml").read_text())
    params["train"] |= {"loss": {"simpo": {"weight": 1.0, "gamma": 0.5}}}
    (other / "params.yaml").write_text(yaml.safe_dump(params))
    assert "loss simpo uses no reference model; nothing to compute" in run(other, "reference")
    assert values(other) == {}
