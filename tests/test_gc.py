"""`make gc` on a real repository with real runs, a real registry and DVC's cache: what is kept still opens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import make_dummy_repo
from tests.test_runs import command, stored

pytestmark = pytest.mark.slow
Env = dict[str, str]

# Runs without Prefect: a worktree, `dvc repro` there, its commit. The one that fails keeps its worktree.
MAKE = """
import sys, time
from pathlib import Path
from flows import runs, workspace
from tasks.errors import UserError
for number, name in enumerate(sys.argv[1:]):
    files = workspace.plan(None, {"train.beta": 0.2 + number / 10})
    record = workspace.prepared(name, files, own=True, flow_run=f"flow-{name}", label=name)
    try:
        with workspace.opened(record, f"flow-{name}") as place:
            place.dvc("repro", "train")
            (place.logs / "addresses").write_text(f"train/{name}\\nreference/{name}\\n")
            if name == "broken":
                raise UserError("broken")
    except UserError:
        continue
    workspace.closed(place)
    time.sleep(1.1)  # since is in seconds
"""
# What promote does, without a model: a version for each of these runs, `champ` being champion.
REGISTER = """
import hashlib, sys
from pathlib import Path
from mlflow import MlflowClient
from tasks.params import load_cluster
from tasks.tracking.registry import Moves, registry
from tasks.tracking.journal import absolute
client = MlflowClient(absolute(load_cluster().tracking_uri))
client.create_registered_model("dpo-demo")
experiment = client.create_experiment("dpo", artifact_location=Path(".mlflow/artifacts").resolve().as_uri())
for name in sys.argv[1:]:
    run = client.create_run(experiment, tags={"pipeline_run": name, **({"keep": "yes"} if name == "loved" else {})})
    export = Path(".scratch") / f"export-{name}"
    export.mkdir()
    (export / "model.safetensors").write_text(name)
    with registry(load_cluster(), "dpo-demo") as found:
        digest = hashlib.sha256(name.encode()).hexdigest()
        version = found.add(run.info.run_id, export, [], {"manifest_sha256": digest, "run": name})
        if name == "champ":
            with found.exclusively() as held:
                found.move(Moves({"champion": version.number}), held)
"""


@pytest.fixture(scope="module")
def env() -> Env:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DPO_"))}


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path, env: Env) -> Path:
    """Runs from old to new: broken (failed), old, champ, loved (tagged in MLflow), tagged (by git), new."""
    root = make_dummy_repo(tmp_path_factory.mktemp("gc") / "repo", mlflow_store)
    names = ["broken", "old", "champ", "loved", "tagged", "new"]
    for script, given in ((MAKE, names), (REGISTER, ["old", "champ", "loved"])):
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


def test_it_shows_first_and_then_keeps_what_is_needed(repo: Path, env: Env, tmp_path: Path) -> None:
    before = files(repo)
    lost, stays = stored(repo, "old", "train"), stored(repo, "champ", "train")
    shown = command(repo, env, "flows.gc", "--keep", "1")
    assert shown.returncode == 0, shown.stderr
    kept, _, going = shown.stdout.partition("To delete:")
    reasons = [tuple(line.split(maxsplit=1)) for line in kept.splitlines()[2:] if line]
    assert reasons == [
        ("new", "recent"),
        ("tagged", "git tag v1"),
        ("loved", "tagged keep in MLflow"),
        ("champ", "champion of dpo-demo"),
    ]
    for part in (
        "old (finished",
        "broken (failed",
        "dpo-demo version 1",
        "train/nobody",
        "reference/old",
        "objects of",
    ):
        assert part in going, going
    assert "4.9 KiB" in going  # a checkpoint of 5000 bytes
    assert before - files(repo) == set()  # nothing is gone

    done = command(repo, env, "flows.gc", "--keep", "1", "--yes")
    assert done.returncode == 0, done.stderr
    cache = repo / ".dvc/cache/files/md5"
    assert not (cache / lost[:2] / lost[2:]).exists()
    assert (cache / stays[:2] / stays[2:]).exists()
    assert sorted(path.name for path in (repo / ".scratch/runs").iterdir()) == ["champ", "loved", "new", "tagged"]
    assert list((repo / ".scratch/worktrees").iterdir()) == []  # broken was old, and nobody kept it
    staying = ["champ", "loved", "new", "tagged"]
    assert sorted(path.name for path in (repo / ".scratch/train").iterdir()) == staying  # they can be continued
    assert list((repo / ".scratch/inputs").iterdir()) == []  # copies of what is elsewhere
    assert sorted(path.name for path in (repo / ".scratch/reference").iterdir()) == staying
    assert sorted(path.read_text() for path in (repo / ".mlflow").rglob("*.safetensors")) == ["champ", "loved"]
    again = command(repo, env, "flows.gc", "--keep", "1")
    assert "Nothing is to delete." in again.stdout

    for name, beta in (("champ", 0.4), ("tagged", 0.6)):
        opened = command(repo, env, "flows.open", name, str(tmp_path / name))
        assert opened.returncode == 0, opened.stderr
        assert "Not in DVC's cache" not in opened.stdout
        assert json.loads((tmp_path / name / "data/train/out.json").read_text())["beta"] == pytest.approx(beta)
        assert (tmp_path / name / "data/reference/out.json").exists()


def test_it_does_not_delete_while_a_run_is_at_work(repo: Path, env: Env) -> None:
    hold = "import sys; from pathlib import Path; from tasks.machines.lock import held\n"
    hold += "with held(Path('.scratch/worktrees/busy')): print('held', flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", hold], cwd=repo, env=env, stdin=pipe, stdout=pipe, text=True) as busy:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "held\n"
        refused = command(repo, env, "flows.gc", "--yes")
        busy.communicate("")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "error: busy is at work: wait until it ends, and then run `make gc YES=1`.\n"
