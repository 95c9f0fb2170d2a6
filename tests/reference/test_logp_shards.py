"""Reference log-probabilities are cached by the tokens of a pair, and nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tasks.artifacts.pairs import PAIR_SCHEMA, pairs_file, read_rows
from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.errors import UserError
from tasks.reference.logp_shards import missing_shards, pair_key, read_shards, stored_keys, write_reference, write_shard
from tasks.reference.stage import Progress, ReferenceScorer, _compute, _missing_shards
from tasks.system.progress import Bar
from training.pairs.pair import Pair

PROJECT = Path(__file__).resolve().parents[2]
PAIR = Pair("a", [1, 2], [3], [4, 5], [1], [1, 1])


def test_a_key_depends_only_on_the_tokens():
    same = replace(PAIR, id="b", label=0.5, weight=2.0, chosen_mask=[0], prompt_ids=np.array([1, 2], dtype=np.int64))
    assert pair_key(same) == pair_key(PAIR)
    moved = replace(PAIR, prompt_ids=[1], chosen_ids=[2, 3])  # the same tokens, cut elsewhere
    assert len({pair_key(pair) for pair in (PAIR, moved, replace(PAIR, rejected_ids=[4, 6]))}) == 3


def test_after_a_change_of_one_pair_only_that_pair_is_computed():
    pairs = [replace(PAIR, id=str(n), chosen_ids=[n]) for n in range(10)]
    keys = [pair_key(pair) for pair in pairs]
    changed = [*pairs[:4], replace(pairs[4], chosen_ids=[99]), *pairs[5:]]
    splits = {"train": [pair_key(pair) for pair in changed], "eval": keys[:1]}
    assert _missing_shards(splits, set(keys), 4) == [("train", {pair_key(changed[4]): 4})]


def test_a_repeated_pair_is_computed_once():
    assert list(missing_shards(["a", "b", "a", "c"], {"b"}, 8)) == [{"a": 0, "c": 3}]


def test_a_damaged_shard_is_deleted_and_the_others_are_read(tmp_path, capsys):
    write_shard(tmp_path, ["k1", "k2"], [([-1.0], [-2.0, -3.0]), ([-4.0], [-5.0])])
    write_shard(tmp_path, ["k3"], [([-6.0], [-7.0])])
    values = read_shards(tmp_path)
    assert stored_keys(values) == {"k1", "k2", "k3"}
    write_reference(tmp_path / "out", pa.chunked_array([["x", "y"], ["z"]]), ["k3", "k1", "k3"], values)
    rows = read_rows(tmp_path / "out")
    assert [(row["id"], row["chosen_logps"]) for row in rows] == [("x", [-6.0]), ("y", [-1.0]), ("z", [-6.0])]
    damaged = min(tmp_path.glob("*.parquet"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-5])
    assert len(stored_keys(read_shards(tmp_path))) < 3
    assert "is damaged; recomputing its pairs" in capsys.readouterr().err


def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tasks.reference.logp_shards.sync", full)
    with pytest.raises(OSError, match="Input/output error"):
        write_shard(tmp_path, ["k1"], [([-1.0], [-2.0])])
    assert list(tmp_path.iterdir()) == []


def test_a_base_model_that_cannot_be_loaded_is_a_user_error(tmp_path, monkeypatch):
    def load(*_: object) -> None:
        raise ValueError("its layers depend on other rows")

    monkeypatch.setattr(ReferenceScorer, "IN_PROCESS", True)
    monkeypatch.setattr(ReferenceScorer, "load", load)
    monkeypatch.setattr("tasks.reference.stage.reference_folder", lambda model: tmp_path)
    monkeypatch.chdir(tmp_path)
    pairs_file("train").parent.mkdir(parents=True)
    pa.ipc.new_stream(pairs_file("train"), PAIR_SCHEMA).close()
    params, cluster = load_params(PROJECT / "params.yaml"), load_cluster(PROJECT)
    with pytest.raises(UserError, match=r"source.model: its layers depend on other rows\. Choose another model"):
        _compute([("train", {})], Progress(0, Bar("reference", 1, "pairs")), params, cluster, tmp_path, 0)
