"""On-policy rounds: their parameters, the end when a model is not promoted, and a kill in the second round."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cli.main import app
from tasks.errors import UserError
from tasks.system.files import read_json
from tests.support.workspaces import wait_for

Env = dict[str, str]
ROUNDS = [sys.executable, "-m", "cli", "rounds"]
OPTIONS = ["--recipe", "demo", "--name", "r"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["0"], "there must be at least 1 round"),
        (["--set", "train.bta=1"], "Did you mean `train.beta`"),
        (["--set", "source.model=registry:champion", "--reference", "base"], "write it behind a bar"),
        (["--set", "source.data=rows.jsonl"], "`sample` needs a judge"),
        (["--set", "sft={learning_rate: 1.0e-4}"], "set one of them to null"),
    ],
)
def test_a_mistake_is_reported_before_anything_starts(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        app(["rounds", *arguments], standalone_mode=False)
    assert sentence in str(refusal.value)


def rounds(root: Path, env: Env, count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*ROUNDS, str(count), *OPTIONS, *arguments]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900)


def ran(root: Path) -> dict[str, int]:
    stages = (root / ".scratch" / "ran").read_text().split()
    return {stage: stages.count(stage) for stage in ("source", "train", "promote")}


def register(root: Path, number: int) -> None:
    """A version of dpo-demo that is champion, as far as a run that only names it can tell."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/.mlflow/mlflow.db")
    if number == 1:
        client.create_registered_model("dpo-demo")
    client.create_model_version("dpo-demo", "nowhere", tags={"manifest_sha256": f"{number:064x}", "run": "earlier"})
    client.set_registered_model_alias("dpo-demo", "champion", str(number))


def start_of(root: Path, run: str) -> str:
    params = yaml.safe_load((root / ".scratch" / "runs" / run / "results" / "params.yaml").read_text())
    assert params["sample"] == {"answers": 4, "seed": int(run[-1]) - 1}
    return str(params["source"]["model"])


@pytest.mark.slow
def test_rounds_start_from_the_champion_of_the_moment_and_continue_after_a_refusal(
    dummy_repo: Path, prefect_api: Env
) -> None:
    refused(dummy_repo, prefect_api)
    register(dummy_repo, 1)
    again = rounds(dummy_repo, {**prefect_api, "DUMMY": "promote:win"}, 2, "--reference", "base", "--keep-going")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "r-1 finished before" in again.stdout
    assert starts(dummy_repo) == {"1": "demo", "2": "registry:dpo-demo/1|demo"}
    assert start_of(dummy_repo, "r-2") == "registry:dpo-demo/1|demo"
    params = yaml.safe_load((dummy_repo / ".scratch/runs/r-2/results/params.yaml").read_text())
    assert params["train"]["reference_model"] == "base"
    assert ran(dummy_repo) == {"source": 2, "train": 2, "promote": 2}  # nothing of r-1 is repeated
    assert re.search(r"1 +r-1 +demo +1\.000 +0\.980 +no", again.stdout), again.stdout
    assert re.search(r"2 +r-2 +registry:dpo-demo/1\|demo +1\.000 +0\.980 +yes", again.stdout), again.stdout
    assert "All 2 rounds are done." in again.stdout


def refused(root: Path, env: Env) -> None:
    """The first round of three, whose model is not promoted."""
    ended = rounds(root, env, 3, "--reference", "base")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Stopped after round 1 of 3: its model was not promoted" in ended.stdout
    assert "because rewards/accuracies is 0.5, below <0.9>" in ended.stdout
    assert ran(root)["promote"] == 1
    assert start_of(root, "r-1") == "demo"  # there is no champion yet


def starts(root: Path) -> dict[str, str]:
    return dict(read_json(root / ".scratch/rounds/r/rounds.json")["starts"])


@pytest.mark.slow
@pytest.mark.exhaustive  # test_runs.py kills runs, too
def test_a_killed_round_continues_with_the_champion_that_it_began_with(dummy_repo: Path, prefect_api: Env) -> None:
    refused(dummy_repo, prefect_api)
    register(dummy_repo, 1)
    given = ["--reference", "base", "--keep-going"]
    command = [*ROUNDS, "2", *OPTIONS, *given]
    env = {name: value for name, value in prefect_api.items() if name != "FORK_STAGES"}  # `dpo` itself is not forked
    process = subprocess.Popen(command, cwd=dummy_repo, env={**env, "DUMMY": "source:sleep"})
    wait_for((dummy_repo / ".scratch" / "pids").exists, 300)
    process.send_signal(signal.SIGKILL)
    process.wait()
    pids = [int(pid) for pid in (dummy_repo / ".scratch" / "pids").read_text().split()]
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60)  # the round ended with us
    assert starts(dummy_repo) == {"1": "demo", "2": "registry:dpo-demo/1|demo"}
    before = ran(dummy_repo)
    register(dummy_repo, 2)  # somebody promotes another model in the meantime

    wins = {**prefect_api, "DUMMY": "promote:win"}
    again = rounds(dummy_repo, wins, 2, *given)
    assert again.returncode == 0, again.stdout + again.stderr
    assert start_of(dummy_repo, "r-2") == "registry:dpo-demo/1|demo"  # as when the round began
    assert ran(dummy_repo) == {"source": before["source"] + 1, "train": 2, "promote": 2}  # nothing of r-1 is repeated

    other = rounds(dummy_repo, wins, 2, *given, "--set", "train.beta=0.3")
    assert other.returncode == 1
    assert "There are other rounds named r" in other.stderr
    assert os.listdir(dummy_repo / ".scratch/rounds") == ["r"]
