"""Checkpoints in the background: the copy is exact and independent, one at a time, and errors are raised."""

import io
import threading
from collections import OrderedDict, defaultdict

import pytest
import torch

from tests.support.settings import KEY
from training.trainer import background_writer, checkpoint, checkpoint_files
from training.trainer.background_writer import BackgroundWriter


def saved(state) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def make_state() -> dict:
    flat = torch.arange(12, dtype=torch.float32)
    module = OrderedDict(weight=flat[:8].view(2, 4), bias=flat[8:])
    module._metadata = {"": {"version": 1}}
    return {"module": module, "steps": [torch.tensor(3), (1, "two")], "groups": defaultdict(list, a=[flat.bfloat16()])}


def test_a_copy_saves_the_same_bytes_and_does_not_change_with_the_original():
    state, writer = make_state(), BackgroundWriter()
    before = saved(state)
    copied = writer.copy(state)
    state["module"]["weight"].zero_()
    state["steps"].append("more")
    assert saved(copied) == before
    assert copied["module"]._metadata == {"": {"version": 1}}


def test_the_next_copy_uses_the_same_memory():
    state, writer = make_state(), BackgroundWriter()
    first = writer.copy(state)["module"]["weight"].data_ptr()
    state["module"]["weight"].fill_(7)
    second = writer.copy(state)["module"]["weight"]
    assert second.data_ptr() == first
    assert second.eq(7).all()


def test_a_state_that_has_no_room_is_not_copied(monkeypatch):
    state, writer = make_state(), BackgroundWriter()
    size = sum(tensor.numel() * tensor.element_size() for tensor in (torch.zeros(12), torch.zeros(3), torch.tensor(3)))
    monkeypatch.setattr(background_writer, "free_memory", lambda: 2 * size - 2 + 12 * 2)
    assert writer.copy(state) is None
    monkeypatch.setattr(background_writer, "free_memory", lambda: 100 * size)
    assert writer.copy(state) is not None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert writer.copy(state) is None


def test_free_memory_heeds_a_container_and_not_its_file_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(background_writer, "CGROUP", tmp_path)
    everything = background_writer.free_memory()
    assert everything > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 250000\ninactive_file 150000\n")
    assert background_writer.free_memory() == 750000
    (tmp_path / "memory.max").write_text("max\n")
    assert background_writer.free_memory() > 1000000


def test_the_caller_goes_on_and_the_next_save_waits():
    writer, may_end, order = BackgroundWriter(), threading.Event(), []

    def slow() -> None:
        may_end.wait(30)
        order.append("first")

    writer.start(slow)
    writer.check()
    assert order == []  # it is still being written
    threading.Timer(0.2, may_end.set).start()
    writer.start(lambda: order.append("second"))
    writer.wait()
    assert order == ["first", "second"]


def test_an_error_is_raised_by_the_next_call():
    writer = BackgroundWriter()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    writer.start(fail)
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    with pytest.raises(OSError, match="No space left"):
        writer.check()


def test_a_training_that_fails_still_leaves_the_checkpoint_in_its_writer():
    order = []

    def train() -> None:
        with BackgroundWriter() as writer:
            writer.start(lambda: order.append("written"))
            raise FloatingPointError

    with pytest.raises(FloatingPointError):
        train()
    assert order == ["written"]


def test_rank_0_publishes_when_every_rank_has_written_its_files(tmp_path):
    checkpoint_files.claim(tmp_path, "mine")
    new = checkpoint.NewCheckpoint(tmp_path, "mine", 10, 2, (), KEY)
    aside = new.temporary
    aside.mkdir()
    (aside / f"{checkpoint.PART}0.json").write_text('{"a.pt": "1"}')
    late = threading.Timer(0.5, lambda: (aside / f"{checkpoint.PART}1.json").write_text('{"b.pt": "2"}'))
    late.start()
    assert checkpoint._hashes_of_all(new, 2) == {"a.pt": "1", "b.pt": "2"}
    assert list(aside.iterdir()) == []


def test_rank_0_stops_waiting_when_a_newer_run_takes_over(tmp_path):
    checkpoint_files.claim(tmp_path, "mine")
    threading.Timer(0.5, lambda: checkpoint_files.claim(tmp_path, "newer")).start()
    with pytest.raises(RuntimeError, match="a newer run has taken over"):
        checkpoint._hashes_of_all(checkpoint.NewCheckpoint(tmp_path, "mine", 10, 2, (), KEY), 2)
