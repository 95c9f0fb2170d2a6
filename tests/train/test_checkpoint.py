"""Checkpoints: damage is detected, a replaced attempt writes nothing, and old checkpoints are deleted."""

import json

import pytest

from tests.support.settings import KEY, make_settings
from training.trainer import checkpoint, checkpoint_files


def make_checkpoint(folder, step: int, attempt: str = "mine", keep: int = 2, best=(), state=None) -> None:
    """The part of `save` after every rank has written its files."""
    new = checkpoint.NewCheckpoint(folder, attempt, step, keep, best, KEY)
    aside = new.temporary
    (aside / "state").mkdir(parents=True)
    (aside / "state" / "rank0.pt").write_bytes(bytes(range(100)) * step)
    if state:
        (aside / "state.json").write_text(json.dumps(state))
    hashes = checkpoint._hashes(aside, [path for path in aside.rglob("*") if path.is_file()])
    checkpoint._publish(new, hashes)


def names(folder) -> list[str]:
    return [path.name for path in checkpoint_files.whole_checkpoints(folder, KEY)]


def test_the_newest_intact_checkpoint_comes_first_and_old_ones_are_deleted(tmp_path):
    checkpoint_files.claim(tmp_path, "mine")
    for step in (10, 20, 30):
        make_checkpoint(tmp_path, step)
    assert names(tmp_path) == ["step-00000030", "step-00000020"]
    assert not (tmp_path / "step-00000010").exists()


@pytest.mark.parametrize("how", ["flip", "truncate", "delete", "manifest"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, capsys, how):
    checkpoint_files.claim(tmp_path, "mine")
    make_checkpoint(tmp_path, 10)
    make_checkpoint(tmp_path, 20)
    newest = tmp_path / "step-00000020"
    part = newest / "state" / "rank0.pt"
    content = part.read_bytes()
    match how:
        case "flip":
            part.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
        case "truncate":
            part.write_bytes(content[:-1])
        case "delete":
            part.unlink()
        case "manifest":
            (newest / "manifest.json").write_text('{"files": ')
    assert names(tmp_path) == ["step-00000010"]
    assert "step-00000020 is not used" in capsys.readouterr().err


def test_an_unfinished_checkpoint_is_ignored_and_deleted_by_the_next(tmp_path):
    checkpoint_files.claim(tmp_path, "mine")
    (tmp_path / ".step-00000010.killed").mkdir()
    assert names(tmp_path) == []
    make_checkpoint(tmp_path, 20)
    assert not (tmp_path / ".step-00000010.killed").exists()


def test_a_worker_of_a_replaced_attempt_publishes_nothing(tmp_path):
    checkpoint_files.claim(tmp_path, "mine")
    make_checkpoint(tmp_path, 10)
    checkpoint_files.claim(tmp_path, "newer")
    with pytest.raises(RuntimeError, match="a newer run has taken over"):
        make_checkpoint(tmp_path, 20)
    assert names(tmp_path) == ["step-00000010"]


def test_the_manifest_has_a_hash_per_file(tmp_path):
    checkpoint_files.claim(tmp_path, "mine")
    make_checkpoint(tmp_path, 10)
    manifest = json.loads((tmp_path / "step-00000010" / "manifest.json").read_text())
    assert manifest["step"] == 10
    assert list(manifest["files"]) == ["state/rank0.pt"]


@pytest.mark.parametrize(
    ("adapter", "fits"),
    [(None, False), ({"use_dora": True}, False), ({"modules_to_save": ["norm"]}, False), ({"rank": 4}, True)],
)
def test_an_optimizer_whose_groups_had_weight_decay_on_norms_is_refused(tmp_path, adapter, fits):
    """Plain LoRA trains matrices alone: its groups are the same."""
    settings = make_settings(model="m", folder=str(tmp_path), adapter=adapter)
    expected = (
        "contains the state of the optimizer muon, which is gone" if fits else "applied to biases and norms too"
    )  # the next check, or this one
    with pytest.raises(ValueError, match=expected):
        checkpoint._check_convertible(tmp_path, {"optimizer": "muon"}, settings)
