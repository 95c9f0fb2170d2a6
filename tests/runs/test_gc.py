"""`dpo gc` on a repository with real runs, a real registry and a DVC cache: kept runs still open."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.test_runs import command, stored
from tests.support.fork_server import clean_environment

pytestmark = pytest.mark.slow
Env = dict[str, str]

# Runs without Prefect: a worktree, `dvc repro` there, its commit. The one that fails keeps its worktree.
MAKE = """
import sys
from datetime import datetime, timedelta
from pathlib import Path
from tasks.runs import run_config
from tasks.lifecycle import run_workspace
from tasks.errors import UserError
for number, name in enumerate(sys.argv[1:]):
    changes = {"train.beta": 0.2 + number / 10, "export.max_shard_size": f"{number + 1}GB"}
    files = run_config.resolve(None, changes).files
    record = run_workspace.new_record(name, files, worktree=True, flow_run=f"flow-{name}")
    began = datetime.now().astimezone() - timedelta(minutes=10 - number)  # in seconds, so that no two are equal
    record = record.write(since=began.isoformat(timespec="seconds"))
    try:
        with run_workspace.open_workspace(record, f"flow-{name}") as run:
            (run.run_folder / "addresses").write_text(f"train/{name}\\nreference/{name}\\n")
            if name == "broken":
                raise UserError("broken")
            run.dvc("repro", "export")
            run_workspace.commit_results(run)
    except UserError:
        continue
    run_workspace.close_workspace(run)
"""
# What promote does, without a model: a version for each of these runs; `champ` is champion, the gate refused `new`.
REGISTER = """
import hashlib, sys
from pathlib import Path
from mlflow import MlflowClient
from tasks.config.cluster import load_cluster
from tasks.tracking.registry import Moves, registry
from tasks.tracking.mlflow_client import absolute_uri
client = MlflowClient(absolute_uri(load_cluster().tracking_uri))
client.create_registered_model("dpo-demo")
experiment = client.create_experiment("dpo", artifact_location=Path(".mlflow/artifacts").resolve().as_uri())
for name in sys.argv[1:]:
    run = client.create_run(experiment, tags={"pipeline_run": name, **({"keep": "yes"} if name == "loved" else {})})
    export = Path(".scratch") / f"export-{name}"
    export.mkdir()
    (export / "model.safetensors").write_text(name)
    with registry(load_cluster(), "dpo-demo") as found:
        digest = hashlib.sha256(name.encode()).hexdigest()
        tags = {"manifest_sha256": digest, "run": name, **({"promoted": "false"} if name == "new" else {})}
        version = found.add(run.info.run_id, export, [], tags)
        if name == "champ":
            with found.exclusively() as held:
                found.move(Moves({"champion": version.number}), held)
"""


@pytest.fixture(scope="module")
def env() -> Env:
    return {**clean_environment(), "FORK_STAGES": "1"}


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory, dummy_template: Path, env: Env) -> Path:
    """Runs from old to new: broken (failed), old, champ, loved (tagged in MLflow), tagged (by git), new."""
    root = Path(shutil.copytree(dummy_template, tmp_path_factory.mktemp("gc") / "repo", symlinks=True))
    names = ["broken", "old", "champ", "loved", "tagged", "new"]
    for script, given in ((MAKE, names), (REGISTER, ["old", "champ", "loved", "new"])):
        done = subprocess.run([sys.executable, "-c", script, *given], cwd=root, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    subprocess.run(["git", "tag", "v1", "runs/tagged"], cwd=root, check=True)
    for name in (*names, "nobody"):
        for kind in ("train", "reference", "inputs"):
            (root / ".scratch" / kind / name).mkdir(parents=True)
            (root / ".scratch" / kind / name / "state").write_bytes(bytes(5000))
    return root


def files(root: Path) -> set[str]:
    return {
        path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and "site" not in path.parts
    }


def test_gc_shows_and_then_deletes_only_what_no_kept_run_needs(repo: Path, env: Env, tmp_path: Path) -> None:
    before = files(repo)
    lost, stays = stored(repo, "old", "train"), stored(repo, "champ", "train")
    refused, policy = stored(repo, "new", "export"), stored(repo, "new", "train")
    shown = command(repo, env, "gc", "--keep", "1")
    assert shown.returncode == 0, shown.stderr
    kept, _, going = shown.stdout.partition("To delete:")
    lines = [line.split(maxsplit=3) for line in kept.splitlines()[2:] if line and not line.startswith("Disk: ")]
    assert all(unit in ("B", "KiB") and float(size) > 0 for _, size, unit, _ in lines)  # of the artifacts
    reasons = [(line[0], line[3]) for line in lines]
    assert reasons == [
        ("new", "recent, without its exported weights: the gate refused the model"),
        ("tagged", "git tag v1"),
        ("loved", "tagged keep in MLflow"),
        ("champ", "champion of dpo-demo"),
    ]
    for part in (
        "old (finished",
        "broken (failed",
        "dpo-demo version 1",
        "weights of dpo-demo version 4, which the gate refused",
        "train/nobody",
        "reference/old",
        "objects of",
    ):
        assert part in going, going
    assert "4.9 KiB" in going  # a checkpoint of 5000 bytes
    assert before - files(repo) == set()  # nothing is gone

    done = command(repo, env, "gc", "--keep", "1", "--yes")
    assert done.returncode == 0, done.stderr
    cache = repo / ".dvc/cache/files/md5"
    assert not (cache / lost[:2] / lost[2:]).exists()
    assert (cache / stays[:2] / stays[2:]).exists()
    assert not (cache / refused[:2] / refused[2:]).exists()
    assert (cache / policy[:2] / policy[2:]).exists()  # from which `dvc repro export` makes the weights again
    assert sorted(path.name for path in (repo / ".scratch/runs").iterdir()) == ["champ", "loved", "new", "tagged"]
    assert list((repo / ".scratch/worktrees").iterdir()) == []  # broken was old and had no reason to stay
    staying = ["champ", "loved", "new", "tagged"]
    assert sorted(path.name for path in (repo / ".scratch/train").iterdir()) == staying  # can be continued
    assert list((repo / ".scratch/inputs").iterdir()) == []  # copies of inputs
    assert sorted(path.name for path in (repo / ".scratch/reference").iterdir()) == staying
    assert sorted(path.read_text() for path in (repo / ".mlflow").rglob("*.safetensors")) == ["champ", "loved"]
    again = command(repo, env, "gc", "--keep", "1")
    assert "Nothing to delete." in again.stdout

    for name, beta in (("champ", 0.4), ("tagged", 0.6)):
        opened = command(repo, env, "open", name, str(tmp_path / name))
        assert opened.returncode == 0, opened.stderr
        assert "No longer in DVC's cache" not in opened.stdout
        assert json.loads((tmp_path / name / "data/train/out.json").read_text())["beta"] == pytest.approx(beta)
        assert (tmp_path / name / "data/reference/out.json").exists()


def test_gc_deletes_nothing_while_a_run_is_active(repo: Path, env: Env) -> None:
    hold = "import sys; from pathlib import Path; from tasks.system.lock import hold_workspace\n"
    hold += "with hold_workspace(Path('.scratch/worktrees/busy')): print('held', flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", hold], cwd=repo, env=env, stdin=pipe, stdout=pipe, text=True) as busy:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "held\n"
        refused = command(repo, env, "gc", "--yes")
        busy.communicate("")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "error: These runs are active: busy. Run `dpo gc --yes` when they have ended.\n"
