"""The architecture: who may import whom, each tool's home, and that DVC knows the code that a stage runs."""

import ast
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("source", "prepare", "reference", "train", "evaluate", "export")

# Who may import whom, besides the standard library.
LAYERS = {"training": {"training"}, "tasks": {"tasks", "training"}, "flows": {"flows", "tasks"}}

# One tool has one home.
HOMES = {
    "prefect": {"flows"},
    "mlflow": {f"tasks/tracking/{name}.py" for name in ("record", "registry", "experiment", "server")},
    "ray": {
        "tasks/machines/cluster.py",
        "tasks/machines/nodes.py",
        "tasks/machines/pool.py",
        "tasks/machines/rendezvous.py",
        "tasks/reference.py",
        "tasks/train.py",
    },
    "deepspeed": {"training/engine.py"},
    "peft": {"training/adapters.py"},
    "transformers": {"training"},
    "torch": {"training"},
    "datasets": {"tasks/dataset/fetch.py"},
    "pyarrow": {
        "tasks/dataset/pairs.py",
        "tasks/dataset/readers.py",
        "tasks/dataset/contract.py",
        "tasks/dataset/shards.py",
        "tasks/dataset/logp_shards.py",
    },
    "matplotlib": {"tasks/reports/plots.py", "tasks/dataset/histograms.py"},
    "gguf": {"training/gguf.py"},
    "lm_eval": {"training/harness.py"},
    "vllm": {"training/vllm_sampling.py"},
    "fsspec": {"tasks/release/push.py", "tasks/dataset/fetch.py"},
    "rich": {"tasks/progress.py", "tasks/reports/terminal.py", "tasks/dataset/preview.py", "tasks/reports/sweeps.py"},
    "tensorboardX": {"tasks/tracking/tensorboard.py"},
    "cryptography": {"tasks/signing.py"},
    "prometheus_client": {"flows/metrics.py"},
    "dvc": set(),  # the command alone
}

# Code that every stage runs in and that cannot change what it computes.
PLUMBING = {
    *(f"tasks/{name}.py" for name in ("access", "configuration", "disk", "errors", "output", "params", "paths")),
    *(f"tasks/{name}.py" for name in ("place", "progress", "redact")),
    *(f"tasks/{name}.py" for name in ("runs", "signing", "stage", "reports/plots")),
    *(f"tasks/machines/{name}.py" for name in ("cluster", "crashes", "flock", "lock", "process")),
    *(f"tasks/machines/{name}.py" for name in ("pool", "preemption", "rendezvous", "usage")),
    *(f"tasks/tracking/{name}.py" for name in ("experiment", "forward", "journal", "login", "record", "tensorboard")),
}


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def imported(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_files(path: Path) -> set[Path]:
    """The files of ours that a file imports."""
    candidates = {ROOT / (name.replace(".", "/") + ".py") for name in imported(path)}
    return {candidate for candidate in candidates if candidate.exists()}


def reachable(path: Path) -> set[str]:
    """All files of ours behind a stage. What plumbing imports for itself is plumbing's business."""
    seen, todo = set(), [path]
    while todo:
        file = todo.pop()
        name = file.relative_to(ROOT).as_posix()
        if name not in seen and name not in PLUMBING:
            seen.add(name)
            todo += own_files(file)
    return seen


@pytest.mark.parametrize("folder", LAYERS)
def test_a_layer_imports_only_what_lies_below_it(folder):
    for path in python_files(folder):
        ours = {name.split(".")[0] for name in imported(path)} & {*LAYERS, "tests"}
        assert ours <= LAYERS[folder], f"{path.relative_to(ROOT)} imports {ours - LAYERS[folder]}"


@pytest.mark.parametrize("tool", HOMES)
def test_a_tool_is_imported_at_home_only(tool):
    for folder in LAYERS:
        for path in python_files(folder):
            name = path.relative_to(ROOT).as_posix()
            at_home = any(name == home or name.startswith(home + "/") for home in HOMES[tool])
            uses = tool in {module.split(".")[0] for module in imported(path)}
            assert at_home or not uses, f"{name} imports {tool}, whose home is {HOMES[tool] or 'nowhere'}"


@pytest.mark.parametrize("stage", STAGES)
def test_dvc_depends_on_the_code_that_a_stage_imports(stage):
    listed = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"][stage]["deps"]
    code = {name for name in listed if name.endswith(".py")}
    assert code == reachable(ROOT / "tasks" / f"{stage}.py"), f"list exactly this code under {stage}"


def test_every_stage_is_named_once_in_dvc_yaml():
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert tuple(stages) == ("watch", *STAGES)
    assert [name for name, content in stages.items() if content.get("always_changed")] == ["watch"]
    assert all(content["cmd"] == f"python -m tasks.{name}" for name, content in stages.items())
