"""`dpo plan` on a repository in which the pipeline has run once: which stages would run and why; no changes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.config.params import overlay
from tasks.config.strict import dotted
from tasks.runs.dvc_lock import StageInputs
from tests.flows.test_flow import STAGES
from tests.runs.test_runs import command
from tests.support.fork_server import clean_environment
from tests.support.workspaces import NO_JUDGE, PROJECT, demo_params

Env = dict[str, str]


@pytest.fixture(scope="module")
def env() -> Env:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**clean_environment(), "DPO_HOME": ".", "PATH": path, "FORK_STAGES": "1"}


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory, dummy_template: Path, env: Env) -> Path:
    """With a file and a folder of code among train's dependencies, and a run of 20 minutes and 3.5 GiB on record."""
    root = Path(shutil.copytree(dummy_template, tmp_path_factory.mktemp("plan") / "repo", symlinks=True))
    shutil.copy(PROJECT / "infra" / "cluster.yaml", root / "infra")  # every value is the default
    (root / "pairs.jsonl").write_text("{}\n")
    changes = {"source.data": "pairs.jsonl", **NO_JUDGE}
    (root / "params.yaml").write_text(yaml.safe_dump(overlay(demo_params(), dotted(changes))))
    content = yaml.safe_load((root / "dvc.yaml").read_text())
    content["stages"]["train"]["deps"] += ["tasks/dummy.py", "training/pairs"]
    (root / "dvc.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    done = subprocess.run([sys.executable, "-m", "dvc", "repro"], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = root / ".scratch" / "runs" / "earlier"
    record.mkdir(parents=True)
    source = yaml.safe_load((root / "params.yaml").read_text())["source"]
    (record / "params.json").write_text(json.dumps({"source": source}))
    (record / "stages.json").write_text(json.dumps([{"stage": "train", "state": "ran", "seconds": 1200.0}]))
    (record / "train.jsonl").write_text(json.dumps({"kind": "memory", "time": 0, "gib": 3.5}) + "\n")
    return root


def plan(root: Path, env: Env, *given: str) -> dict[str, str]:
    """The line of each stage."""
    before = (root / "dvc.lock").read_text(), (root / "params.yaml").read_text()
    done = command(root, env, "plan", *given)
    assert done.returncode == 0, done.stderr
    assert ((root / "dvc.lock").read_text(), (root / "params.yaml").read_text()) == before
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line and line.split()[0] in STAGES}
    assert list(lines) == STAGES
    return lines | {"all": done.stdout}


@pytest.mark.slow
def test_what_would_run_and_why(repo: Path, env: Env) -> None:
    nothing = plan(repo, env)
    assert all(nothing[stage].split() == [stage, "unchanged"] for stage in STAGES)
    assert "Nothing to run." in nothing["all"]
    assert "Every value is the default." in nothing["all"]

    (repo / "site.yaml").write_text("price_per_gpu_hour: 3.0\n")
    priced = {**env, "DPO_CLUSTER": "site.yaml"}
    beta = plan(repo, priced, "--set", "train.beta=0.2", "--set", "cluster.actor_train.gpus_per_worker=1")
    assert beta["reference"].split() == ["reference", "unchanged"]
    assert "param train.beta 0.1 -> 0.2" in beta["train"]
    assert re.search(r"(?m)^train.beta +0.2 +overrides$", beta["all"])
    assert "about 20 min" in beta["train"]
    assert "3.5 GiB measured" in beta["train"]
    assert "depends on train: data/train may change" in beta["evaluate"]
    assert "unknown" in beta["evaluate"]
    # 2 workers with a GPU each for 20 min
    assert (
        "In total: at least 20 min, some unknown; 0.67 GPU hours, 2.00 EUR, estimated from runs on the same"
        in beta["all"]
    )

    other = plan(repo, env, "--set", "source.seed=7")  # a run on other data says nothing about this one
    assert "param source.seed 0 -> 7" in other["source"]
    assert "about" not in other["train"]
    assert "`dpo init` prints an estimate for a new recipe" in other["all"]

    (repo / "site.yaml").write_text("actor_train: {num_workers: 3, save_steps: 7}\n")
    given = ["--recipe", "qwen2.5-0.5b-full", "--set", "cluster.actor_train.num_workers=5"]
    origins = plan(repo, {**env, "DPO_CLUSTER": "site.yaml"}, *given)["all"].partition("Not the default:")[2]
    assert {line.split()[0]: line.split(maxsplit=2)[1:] for line in origins.splitlines()[2:]}.items() >= {
        "cluster.actor_train.zero_stage": ["1", "the recipe qwen2.5-0.5b-full"],
        "cluster.actor_train.num_workers": ["5", "overrides"],
        "train.adapter": ["null", "the recipe qwen2.5-0.5b-full"],
    }.items()

    with (repo / "tasks" / "dummy.py").open("a") as file:
        file.write("# changed\n")
    assert "code changed: tasks/dummy.py" in plan(repo, env)["train"]

    (repo / "pairs.jsonl").write_text("{} \n")
    edited = plan(repo, env)
    assert "runs" in edited["source"]
    assert "the content behind an address of source changed" in edited["source"]
    assert "may run" in edited["prepare"]


@pytest.mark.slow
def test_a_mistake_is_one_message(repo: Path, env: Env) -> None:
    done = command(repo, env, "plan", "--set", "train.bta=1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Unknown key `train.bta`. Did you mean `train.beta`?" in done.stderr


def test_differences_are_named_and_numbers_compare_as_numbers() -> None:
    then = StageInputs("run", {"rate": 1e-06, "gone": 1}, {"a.py": "1", "data/x": "2", "same": "3"})
    now = StageInputs("run", {"rate": 2e-06, "new": None}, {"a.py": "9", "data/x": "8", "same": "3"})
    assert now.differences(then) == [
        "param gone 1 -> nothing",
        "param new nothing -> None",
        "param rate 1e-06 -> 2e-06",
        "code changed: a.py",
        "data changed: data/x",
    ]
    assert then.differences(then) == []
