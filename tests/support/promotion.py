"""Small fake exports, and their promotion with a real registry."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.config.cluster import Cluster, load_cluster
from tasks.config.params import load_params, overlay
from tasks.config.paths import METRICS, MODEL
from tasks.config.strict import read_yaml
from tasks.promote.stage import promote
from tasks.system.files import hash_files, read_json, write_json
from tasks.tracking import verify
from tasks.tracking.journal import StageJournal
from tasks.tracking.pipeline_run import open_run
from tasks.tracking.registry import registry
from tests.support.workspaces import make_workspace

PROMPTS = 200
NAME = "dpo-demo"


@pytest.fixture
def workspace(tmp_path: Path, mlflow_store: Path, monkeypatch) -> Path:
    root = make_workspace(tmp_path / "workspace", Path("unused"), **{"source.data": "demo"})
    shutil.copytree(mlflow_store, root / ".mlflow")
    monkeypatch.chdir(root)
    monkeypatch.delenv("DPO_RUN", raising=False)
    return root


def export(weights: str, kind: int = PROMPTS, correct: int = PROMPTS, pairs: str = "today", **checks: Any) -> None:
    """Write what evaluate and export write, for a model with this many kind and correct answers of 200."""
    records = [{"text": f"answer {n}", "tokens": 5, "kind": n < kind, "correct": n < correct} for n in range(PROMPTS)]
    lines = [{"id": str(n), "prompt": f"prompt {n}", "base": r, "policy": r} for n, r in enumerate(records)]
    held_out = [{"id": str(n), "prompt": f"prompt {n}", "margin": 1.0} for n in range(PROMPTS)]
    METRICS.mkdir(parents=True, exist_ok=True)
    for name, content in (("samples.jsonl", lines), ("pairs.jsonl", held_out)):
        (METRICS / name).write_text("".join(json.dumps(line) + "\n" for line in content))
    metrics = {
        "rewards/accuracies": 0.97,
        "samples": {"policy": {"kind": kind / PROMPTS, "correct": correct / PROMPTS}},
        "health": {"repetition": 0.01, "length_ratio": 1.0, "empty": 0.0},
    }
    write_json(METRICS / "evaluate.json", metrics)
    shutil.rmtree(MODEL, ignore_errors=True)
    MODEL.mkdir(parents=True)
    (MODEL / "model.safetensors").write_text(weights)
    manifest = {
        "model": NAME,
        "data": {"source": "pairs.jsonl", "sha256": "d" * 64, "pairs": {"eval.arrow": pairs}},
        "base": {"model": "demo", "sha256": "b" * 64},
        "params": load_params().model_dump(exclude={"promote"}),
        "metrics": metrics,
        "checks": {"same_greedy_text": True, **checks},
        "made": {"commit": "c" * 40},
    }
    write_json(MODEL / "manifest.json", {**manifest, "files": hash_files(MODEL)})
    verify.seal(MODEL)


def run() -> dict[str, Any]:
    """Promote the workspace's export without starting the uploader; returns the decision."""
    promote(StageJournal(open_run(load_params(), load_cluster()), "promote"))
    return read_json(METRICS / "promote.json")


def aliases() -> dict[str, str]:
    with registry(load_cluster(), NAME) as model_registry:
        return {alias: str(n) for alias, n in model_registry.client.get_registered_model(NAME).aliases.items()}


def set_params(root: Path, old: str, new: str) -> None:
    path = root / "params.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def push_to(root: Path) -> Path:
    target = root / "elsewhere"
    set_params(root, "push: null", f"push: file://{target}")
    path = root / "infra/cluster.yaml"
    allowed = overlay(read_yaml(path), {"access": {"push": [f"file://{root}"]}}, Cluster)
    path.write_text(yaml.safe_dump(allowed))
    return target
