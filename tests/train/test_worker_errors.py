"""What a worker does with an error: report it to the user, or leave the restart to Ray Train; and what it loads."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.train
import torch.distributed as dist

from tasks.train import worker
from training.distributed.process_group import start_distributed
from training.trainer import loop


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a training; this process is its only rank."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    ranks = SimpleNamespace(get_local_rank=lambda: 0, get_world_rank=lambda: 0, get_node_rank=lambda: 0)
    monkeypatch.setattr(ray.train, "get_context", lambda: ranks)
    monkeypatch.setattr(worker, "_in_thread", lambda *given: None)
    start_distributed(deterministic=False)
    yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    monkeypatch.setattr(loop, "train", lambda *given, **options: work())
    objective = SimpleNamespace(needs_reference=False)
    settings = SimpleNamespace(folder=str(folder), attempt="one", compile=False, objective=objective)
    data = SimpleNamespace(read=lambda *given: SimpleNamespace(by_source=dict))
    config = {
        "settings": settings,
        "data": data,
        "root": str(folder),
        "driver": {},
        "system_metrics": 0,
        "world": 1,
    }
    worker.train_on_worker(config, b"key")


def test_a_wrong_setting_is_reported_and_not_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        raise ValueError("train.select: unknown metric")

    train(folder, monkeypatch, work)
    assert (folder / worker.FATAL).read_text() == "train.select: unknown metric."


def test_a_process_group_that_ray_ended_below_a_worker_is_no_error_of_the_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends it in another thread when a worker has died; torch then raises ValueError, as for a wrong argument."""

    def work() -> None:
        dist.destroy_process_group()
        dist.get_backend()

    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        train(folder, monkeypatch, work)
    assert not (folder / worker.FATAL).exists()


@pytest.mark.slow
def test_a_rank_loads_no_mlflow() -> None:
    """DeepSpeed's tuner would: a fifth of a worker's CPU time before its first step."""
    code = "from training.distributed.process_group import start_distributed; start_distributed(False); import sys; "
    code += "sys.exit('mlflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
