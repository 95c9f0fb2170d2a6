"""The architecture: who may import whom, each tool's home, and that DVC knows the code that a stage runs."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("source", "sample", "prepare", "sft", "reference", "train", "evaluate", "export")

# Who may import whom, besides the standard library.
LAYERS = {
    "training": {"training"},
    "tasks": {"tasks", "training"},
    "services": {"services", "tasks"},
    "flows": {"flows", "services", "tasks"},
    "cli": {"cli", "flows", "services", "tasks"},
}

# One tool has one home.
HOMES = {
    "prefect": {"flows", "services", "cli"},
    "mlflow": {
        *(f"tasks/tracking/{name}.py" for name in ("mlflow_writer", "registry", "experiment", "artifact_store")),
        *(f"tasks/tracking/{name}.py" for name in ("mlflow_server", "mlflow_gate")),
        "tasks/feedback/traces.py",
    },
    "ray": {"tasks/cluster", "tasks/train/driver.py", "tasks/train/worker.py"},
    "deepspeed": {
        "training/trainer/engine.py",
        "training/trainer/optimizer.py",
        "training/distributed",
        "training/scoring/sharded_model.py",
    },
    "peft": {"training/models/adapters.py"},
    "transformers": {"training"},
    "torch": {"training"},
    "datasets": {"tasks/source/fetch.py"},
    "pyarrow": {
        "tasks/artifacts/training_data.py",
        "tasks/artifacts/pairs.py",
        "tasks/source/readers.py",
        "tasks/prepare/shards.py",
        "tasks/source/tables.py",
        "tasks/reference/logp_shards.py",
        "tasks/prepare/unpaired.py",
    },
    "matplotlib": {"tasks/reports/plots.py", "tasks/prepare/card/histograms.py"},
    "jinja2": {"tasks/system/markup.py"},
    "gguf": {"training/exporting/gguf.py"},
    "lm_eval": {"training/evaluation/lm_eval_tasks.py"},
    "vllm": {"training/evaluation/vllm_sampling.py"},
    "fsspec": {"tasks/promote/push.py", "tasks/source/fetch.py"},
    "rich": {
        "tasks/system/progress.py",
        "tasks/reports/terminal.py",
        "tasks/prepare/card/preview.py",
        "tasks/reports/sweep_table.py",
    },
    "tensorboardX": {"tasks/tracking/tensorboard.py"},
    "wandb": {"tasks/tracking/wandb_mirror.py"},
    "xllamacpp": {"training/exporting/gguf.py"},
    "cryptography": {"tasks/system/signing.py"},
    "prometheus_client": {"services/metrics_endpoint.py"},
    "dvc": set(),  # the command alone
}

# Code that every stage runs in, or that only measures or draws: it cannot change what a stage computes.
PLUMBING = {
    "training/trainer/speed.py",
    *(f"tasks/prepare/card/{name}.py" for name in ("histograms", "pages", "preview")),
    "tasks/config",
    "tasks/cluster",
    "tasks/tracking",
    "tasks/feedback/traces.py",  # reads events from MLflow; `source` writes them to data/raw
    "tasks/disk_space.py",
    "tasks/errors.py",
    "tasks/secrets/redact.py",
    "tasks/run_stage.py",
    "tasks/tracking/model_names.py",  # finds a version; its files are verified against the signed manifest
    "tasks/reports/plots.py",
    "tasks/runs",
    *(f"tasks/system/{name}.py" for name in ("commands", "disk", "environment", "lock", "processes")),
    *(f"tasks/system/{name}.py" for name in ("keyring", "progress", "signing")),
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
        if name not in seen and not any(name == home or name.startswith(home + "/") for home in PLUMBING):
            seen.add(name)
            todo += own_files(file)
    return seen


@pytest.mark.parametrize("folder", LAYERS)
def test_a_layer_imports_only_what_lies_below_it(folder):
    for path in python_files(folder):
        ours = {name.split(".")[0] for name in imported(path)} & {*LAYERS, "tests"}
        assert ours <= LAYERS[folder], f"{path.relative_to(ROOT)} imports {ours - LAYERS[folder]}"


def test_packages_import_each_other_in_one_direction():
    """Imports inside functions count: a cycle that is imported late is a cycle."""
    graph: dict[str, set[str]] = {}
    for folder in LAYERS:
        for path in python_files(folder):
            targets = {package_of(file) for file in own_files(path)} - {package_of(path)}
            graph.setdefault(package_of(path), set()).update(targets)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a cycle of packages: {' -> '.join(reversed(error.args[1]))}") from None


def package_of(path: Path) -> str:
    """The package of a file, such as tasks/runs; a file directly in a layer stands for itself."""
    return "/".join(path.relative_to(ROOT).parts[:2])


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
    """A folder is listed only if the stage imports all of it; its __init__.py hold no code."""
    listed = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"][stage]["deps"]
    folders = [name for name in listed if name.startswith(tuple(LAYERS)) and "." not in name]
    inside = {path.relative_to(ROOT).as_posix() for name in folders for path in python_files(name)}
    code = {name for name in {*listed, *inside} if name.endswith(".py") and not name.endswith("/__init__.py")}
    used = reachable(ROOT / "tasks" / f"{stage}.py")
    assert code == used, f"dvc.yaml, {stage}: add {sorted(used - code)}; remove {sorted(code - used)}"


def test_every_stage_is_named_once_in_dvc_yaml():
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert tuple(stages) == ("watch", *STAGES)
    assert [name for name, content in stages.items() if content.get("always_changed")] == ["watch"]
    assert all(content["cmd"] == f"python -m tasks.{name}" for name, content in stages.items())
