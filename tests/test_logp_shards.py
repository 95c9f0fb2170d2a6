"""Reference values are stored by what determines them: the tokens of a pair, and nothing else."""

from dataclasses import replace

import numpy as np

from tasks.dataset.logp_shards import key_of, known_keys, read_shards, shards, write_shard, write_values
from tasks.dataset.pairs import read_rows
from tasks.reference import _missing
from training.packing import Pair

PAIR = Pair("a", [1, 2], [3], [4, 5], [1], [1, 1])


def test_a_key_is_of_the_tokens_alone():
    same = replace(PAIR, id="b", label=0.5, weight=2.0, chosen_mask=[0], prompt=np.array([1, 2], dtype=np.int64))
    assert key_of(same) == key_of(PAIR)
    moved = replace(PAIR, prompt=[1], chosen=[2, 3])  # the same tokens, cut elsewhere
    assert len({key_of(pair) for pair in (PAIR, moved, replace(PAIR, rejected=[4, 6]))}) == 3


def test_one_changed_pair_is_one_pair_to_compute():
    pairs = [replace(PAIR, id=str(n), chosen=[n]) for n in range(10)]
    keys = [key_of(pair) for pair in pairs]
    changed = [*pairs[:4], replace(pairs[4], chosen=[99]), *pairs[5:]]
    splits = {"train": changed, "eval": [pairs[0]]}
    missing = _missing(splits, {s: [key_of(p) for p in some] for s, some in splits.items()}, set(keys), 4)
    assert [[pair.id for pair in some] for some, _ in missing] == [["4"]]


def test_a_pair_that_stands_twice_is_computed_once():
    twice = [PAIR, replace(PAIR, id="again")]
    ((some, keys),) = shards(twice, [key_of(pair) for pair in twice], 8)
    assert ([pair.id for pair in some], keys) == (["a"], [key_of(PAIR)])


def test_shards_come_back_whole_and_a_damaged_one_is_passed_over(tmp_path, capsys):
    write_shard(tmp_path, ["k1", "k2"], [([-1.0], [-2.0, -3.0]), ([-4.0], [-5.0])])
    write_shard(tmp_path, ["k3"], [([-6.0], [-7.0])])
    values = read_shards(tmp_path)
    assert known_keys(values) == {"k1", "k2", "k3"}
    write_values(tmp_path / "out", ["x", "y", "z"], ["k3", "k1", "k3"], values)
    rows = read_rows(tmp_path / "out")
    assert [(row["id"], row["chosen_logps"]) for row in rows] == [("x", [-6.0]), ("y", [-1.0]), ("z", [-6.0])]
    damaged = min(tmp_path.glob("*.parquet"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-5])
    assert len(known_keys(read_shards(tmp_path))) < 3
    assert "is damaged; its pairs are computed again" in capsys.readouterr().err
