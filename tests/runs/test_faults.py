"""A sample of the fault sweep (`make test-faults` tries every operation), and a disk that is really full."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tasks.system.disk import mount_of
from tests.faults.harness import FAULTS, Harness, harness
from tests.faults.scenarios import Bench
from tests.faults.sweep import points
from tests.support.workspaces import make_workspace, refusal, run, write_cluster

pytestmark = pytest.mark.slow
# So many operations of each command, the first of each kind and file, evenly spread; a fault for each in turn.
SAMPLE = {"source": 1, "rollback": 1}
MORE = {"source": 6, "prepare": 3, "promote": 3, "rollback": 2, "rollback, MLflow's server": 2}
SAMPLES = [*SAMPLE.items(), *(pytest.param(*sample, marks=pytest.mark.exhaustive) for sample in MORE.items())]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with harness(tmp_path_factory.mktemp("faults")) as started:
        yield started


@pytest.fixture(scope="module")
def bench(made: Harness, tiny_base: Path, mlflow_store: Path) -> Iterator[Bench]:
    with closing(Bench(made.folder, made, tiny_base, mlflow_store)) as opened:
        yield opened


@pytest.mark.parametrize(("name", "count"), SAMPLES)
def test_the_same_command_completes_what_a_fault_stopped(bench: Bench, name: str, count: int) -> None:
    order = points(bench.expected(name)["trace"])
    for number in range(count):
        faults = [fault for fault in FAULTS if order[fault]]
        fault = faults[number % len(faults)]
        first = sorted(order[fault][: max(4, len(order[fault]) // 4)])
        start = (2 * number + 1) * len(first) // (2 * count)
        wrong = None
        for only, at in first[start : start + 3]:
            wrong = bench.try_fault(name, fault, at, only)
            if (
                wrong is not None
            ):  # otherwise it was not reached: an uploader that is a little later sends in fewer calls
                break
        assert wrong == [], f"{name}, {fault} at {only}, no. {at}"


@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_a_disk_that_fails_in_the_middle_of_a_stage_is_a_sentence(bench: Bench, fault: str) -> None:
    # The second write: where the first fails, shutil tries another way.
    done = bench.run(bench.ready("source"), fault, 2, only="write /data/*/pairs.jsonl")
    (sentence,) = [line for line in done.said.splitlines() if line.startswith("error: ")]
    assert done.code == 2  # which no flow tries again
    full = f"file system {mount_of(bench.root)} is full ("
    assert (full if fault == "enospc" else "could not be written: Input/output error") in sentence
    assert "run the same command again" in sentence


@pytest.mark.parametrize(
    "request_path", [pytest.param("/runs/create", marks=pytest.mark.exhaustive), "/model-versions/create"]
)
def test_what_is_made_on_a_server_is_made_once_though_the_answer_is_lost(bench: Bench, request_path: str) -> None:
    """MLflow's client sends such a request again by itself."""
    wrong = bench.try_fault("promote, MLflow's server", "drop", 1, only=f"receive /server/api/2.0/mlflow{request_path}")
    assert wrong == []  # None: the fault was not reached


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_told_before_a_stage_and_the_same_command_completes_afterwards(
    tmp_path: Path, tiny_base: Path, mlflow_store: Path
) -> None:
    with small_disk(tmp_path / "disk", "24m") as disk:
        root = make_workspace(disk / "workspace", tiny_base, rows=30)
        shutil.copytree(mlflow_store, root / ".mlflow")
        filler = disk / "filler"
        for stage in ("source", "prepare"):
            filler.write_bytes(bytes(shutil.disk_usage(root).free - 2**20))
            sentence = refusal(root, stage)
            assert f"{stage} needs about " in sentence
            assert f"on the file system {disk}, and 1" in sentence
            assert "run the same command again" in sentence
            filler.unlink()
            run(root, stage)
            assert (root / "data" / ("raw" if stage == "source" else "pairs")).exists()


def test_a_full_disk_is_told_before_training(tmp_path: Path, referenced: Path) -> None:
    root = tmp_path / "workspace"
    shutil.copytree(referenced, root)
    with small_disk(tmp_path / "disk", "1m") as disk:
        write_cluster(root, {"output_dir": str(disk)})
        sentence = refusal(root, "train")
        assert f"on the file system {disk}, and 1" in sentence
        assert "iB are free. Free some space there" in sentence
