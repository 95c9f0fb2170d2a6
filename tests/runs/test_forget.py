"""`dpo forget`: a person's rows leave runs, cache and registry, and the champion keeps serving."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.artifacts import demo
from tasks.system.files import hash_files, read_json
from tests.runs.test_runs import command
from tests.support.fork_server import clean_environment
from tests.support.workspaces import run, write_data

pytestmark = pytest.mark.slow
SECRET = "my street is Elm Road"
# The stage `source`, as small as possible: data/raw with its manifest.
SOURCE = """
import json
import os
import shutil
from pathlib import Path
rows = Path(os.environ["DPO_HOME"]) / "pairs.jsonl"
for name in ("raw/pairs", "base", "source"):
    (Path("data") / name).mkdir(parents=True, exist_ok=True)
shutil.copyfile(rows, "data/raw/pairs/pairs.jsonl")
files = [{"file": "pairs.jsonl", "called": "pairs.jsonl", "rows": 1, "sha256": "0"}]
sources = [{"key": "source.data", "name": "pairs", "address": "pairs.jsonl", "files": files}]
Path("data/raw/manifest.json").write_text(json.dumps({"source": "pairs.jsonl", "sha256": "0", "sources": sources}))
Path("data/base/manifest.json").write_text("{}")
Path("data/source/out.json").write_text(rows.read_text())
"""
# A run in a worktree and its version; with `champion` it takes the alias, as promote does.
RUN = """
import hashlib, sys
from pathlib import Path
from mlflow import MlflowClient
from tasks.config.cluster import load_cluster
from tasks.runs import run_config
from tasks.lifecycle import run_workspace
from tasks.system.files import write_json
from tasks.tracking.registry import Moves, registry
from tasks.tracking.mlflow_client import absolute_uri
name, before = sys.argv[1], sys.argv[2:]
files = run_config.resolve(None, {"train.beta": 0.2 + len(name) / 100}).files
record = run_workspace.new_record(name, files, worktree=True, flow_run=f"flow-{name}")
with run_workspace.open_workspace(record, f"flow-{name}") as run:
    run.dvc("repro", "export")
    run_workspace.commit_results(run)
run_workspace.close_workspace(run)
client = MlflowClient(absolute_uri(load_cluster().tracking_uri))
if not client.search_registered_models():
    client.create_registered_model("dpo-demo")
    client.create_experiment("dpo", artifact_location=Path(".mlflow/artifacts").resolve().as_uri())
made = client.create_run(client.get_experiment_by_name("dpo").experiment_id, tags={"pipeline_run": name})
write_json(run.run_folder / "run.json", {"run_id": made.info.run_id})
client.log_artifact(made.info.run_id, "pairs.jsonl")
export = Path(".scratch") / f"export-{name}"
export.mkdir()
(export / "model.safetensors").write_text(name)
with registry(load_cluster(), "dpo-demo") as found:
    tags = {"manifest_sha256": hashlib.sha256(name.encode()).hexdigest(), "run": name}
    version = found.add(made.info.run_id, export, [], tags)
    with found.exclusively() as held:
        found.move(Moves({"champion": version.number, "previous": before[0] if before else None}), held)
"""


def of_person(number: int) -> dict[str, str]:
    return {"prompt": f"{SECRET} {number}?", "chosen": "I see.", "rejected": "So what.", "user": "ann"}


@pytest.fixture
def repo(dummy_repo: Path) -> Path:
    root = dummy_repo
    stages = yaml.safe_load((root / "dvc.yaml").read_text())
    stages["stages"]["source"]["cmd"] = "python -m tasks.raw_copy"
    (root / "dvc.yaml").write_text(yaml.safe_dump(stages, sort_keys=False))
    (root / "tasks/raw_copy.py").write_text(SOURCE)
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["source"]["data"] = "pairs.jsonl"
    params["evaluate"]["judge"] = "none"
    params["promote"] |= {"require": {}, "max_regression": {}}
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "add", "dvc.yaml", "params.yaml", "tasks/raw_copy.py"], cwd=root, check=True)
    subprocess.run(["git", *who, "commit", "-q", "-m", "rows"], cwd=root, check=True)
    return root


def test_the_persons_runs_and_versions_go_once_another_model_is_champion(repo: Path) -> None:
    env = {**clean_environment(), "FORK_STAGES": "1"}

    def make(name: str, rows: list[dict[str, str]], *previous: str) -> None:
        write_data(repo / "pairs.jsonl", rows)
        script = [sys.executable, "-c", RUN, name, *previous]
        done = subprocess.run(script, cwd=repo, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def with_secret() -> set[str]:
        places = (repo / ".dvc/cache/files", repo / ".mlflow/artifacts", repo / ".scratch")
        files = [path for place in places for path in place.rglob("*") if path.is_file()]
        return {path.relative_to(repo).parts[0] for path in files if SECRET.encode() in path.read_bytes()}

    others = demo.rows(0)[:4]
    make("early", others)
    make("mixed", [*others, of_person(1)], "1")
    make("champ", [*others, of_person(1), of_person(2), of_person(3)], "2")
    shown = command(repo, env, "forget", "--user", "ann")
    assert shown.returncode == 0, shown.stderr
    for part in ("pairs.jsonl: rows 5, 6, 7", "run champ: 3 rows", "run mixed: 1 rows", "dpo-demo/3 champion", "--yes"):
        assert part in shown.stdout, shown.stdout
    assert "early" not in shown.stdout
    assert "dpo-demo/2 previous" in shown.stdout  # nothing is gone

    first = command(repo, env, "forget", "--user", "ann", "--yes")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Delete the rows 5, 6, 7 of" in first.stdout
    assert "dpo-demo/3 is champion and stays until another is" in first.stdout
    names = sorted(path.name for path in (repo / ".scratch/runs").iterdir())
    assert names == ["champ", "early"]
    weights = sorted(path.read_text() for path in (repo / ".mlflow").rglob("*.safetensors"))
    assert weights == ["champ", "early"]

    make("clean", others, "3")
    second = command(repo, env, "forget", "--user", "ann", "--yes")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "Nothing made from these rows is left" in second.stdout
    newest = read_json(max((repo / ".scratch/forget").iterdir()))
    assert newest["complete"] is True
    assert newest["deleted_versions"] == ["dpo-demo/3"]
    assert "ann" not in json.dumps(newest)
    assert with_secret() == set()
    assert sorted(path.name for path in (repo / ".scratch/runs").iterdir()) == ["clean", "early"]
    opened = command(repo, env, "open", "early", str(repo.parent / "early"))
    assert "No longer in DVC's cache" not in opened.stdout


REFERENCED = ("source", "prepare", "reference")


@pytest.mark.parametrize(
    ("undisturbed", "stages"),
    [
        ("referenced", REFERENCED),
        pytest.param("trained", (*REFERENCED, "train"), marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_after_the_rows_are_gone_equals_a_run_that_never_had_them(
    undisturbed: str, stages: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    never, workspace = request.getfixturevalue(undisturbed), tmp_path / "workspace"
    shutil.copytree(never, workspace, ignore=shutil.ignore_patterns("data", ".scratch"))
    lines = (workspace / "pairs.jsonl").read_text().splitlines(keepends=True)
    theirs = [json.dumps(of_person(number)) + "\n" for number in range(8)]
    (workspace / "pairs.jsonl").write_text("".join([*lines[:30], *theirs, *lines[30:]]))
    run(workspace, *stages)  # leaves checkpoints and reference shards behind
    folders = [name for name in ("data/pairs", "data/reference", "data/policy") if (never / name).exists()]
    assert len(folders) == len(stages) - 1  # all but what `source` makes
    assert all(hash_files(workspace / name) != hash_files(never / name) for name in folders)

    (workspace / "pairs.jsonl").write_text("".join(lines))
    run(workspace, *stages)
    for name in folders:
        assert hash_files(workspace / name) == hash_files(never / name)
