"""`dvc repro` notices files edited in place, and runs no stage if the content is the same."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.artifacts import demo
from tasks.config.params import overlay
from tasks.config.strict import dotted, read_yaml
from tests.support.workspaces import PROJECT, write_data

NAMES = ["source.data pairs.jsonl", "source.model model", "source.adapter adapter"]
WEIGHTS = ("model/model.safetensors", "adapter/adapter_model.safetensors")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Our params.yaml and our `fingerprint`; `source` and what is behind it are copies, which take no time."""
    write_data(tmp_path / "pairs.jsonl", demo.rows(0)[:20])
    for weights in WEIGHTS:
        (tmp_path / weights).parent.mkdir()
        (tmp_path / weights).write_bytes(b"0")
    given = {"source.data": "pairs.jsonl", "source.model": "model", "source.adapter": "adapter"}
    content = overlay(read_yaml(PROJECT / "params.yaml"), dotted(given))
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(content))
    real = read_yaml(PROJECT / "dvc.yaml")["stages"]
    watched = [dep for dep in real["source"]["deps"] if dep.startswith("data/")]
    copy = "cp -r pairs.jsonl model adapter data/raw"
    stages = {"fingerprint": real["fingerprint"]}
    stages["source"] = {"cmd": f"mkdir -p data/raw && {copy}", "deps": watched, "outs": ["data/raw"]}
    stages["behind"] = {"cmd": "cp -r data/raw data/behind", "deps": ["data/raw"], "outs": ["data/behind"]}
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    dvc(tmp_path, "init", "--no-scm", "-q")
    return tmp_path


def dvc(repo: Path, *arguments: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("DPO_")}
    path_of_modules = os.pathsep.join([str(PROJECT), *filter(None, [env.get("PYTHONPATH")])])
    env |= {"PATH": path, "PYTHONPATH": path_of_modules, "FORK_STAGES": "1"}
    done = subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=repo, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ran(said: str) -> list[str]:
    return re.findall(r"^Running stage '(\w+)'", said, re.MULTILINE)


@pytest.mark.slow
def test_dvc_repro_notices_an_edited_file_and_edited_folders_and_nothing_else(repo: Path) -> None:
    assert ran(dvc(repo, "repro")) == ["fingerprint", "source", "behind"]
    first = (repo / "dvc.lock").read_text()
    edited = [repo / "pairs.jsonl", *(repo / name for name in WEIGHTS)]
    for file in edited:
        file.touch()
    assert ran(dvc(repo, "repro")) == ["fingerprint"]  # touched, and not changed
    assert (repo / "dvc.lock").read_text() == first
    assert dvc(repo, "status").split() == ["fingerprint:", "always", "changed"]

    for file, name in zip(edited, NAMES, strict=True):
        before = file.read_bytes()
        file.write_bytes(before[:-1] + b"\r")  # as long as it was
        said = dvc(repo, "repro")
        assert f"fingerprint: the content of {name} changed" in said
        assert ran(said) == ["fingerprint", "source", "behind"], name
        file.write_bytes(before)

    assert ran(dvc(repo, "repro")) == ["fingerprint"]  # as at first: DVC's run cache gives the rest back
    assert (repo / "dvc.lock").read_text() == first
    for path in ("pairs.jsonl", "model", "adapter", ".scratch"):  # as in a clone on another machine, after `dvc pull`
        shutil.move(repo / path, repo / f"{path}.gone")
    said = dvc(repo, "repro")
    assert ran(said) == ["fingerprint"]
    assert "source.data: there is no file pairs.jsonl" in said
    assert "The run uses the content that was fetched before." in said
