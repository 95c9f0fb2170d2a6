"""The architecture: who may import whom, each tool's home, and that DVC knows the code that a stage runs."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from tasks import run_stage
from tasks.config import strict
from tasks.config.params import Params
from tasks.system.code import WORKERS, imported_files, is_plumbing, own_imports, worker_code

ROOT = Path(__file__).resolve().parents[1]
MISSING = object()
STAGES = [name for name in run_stage.STAGES if name != "promote"]

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
        "training/models/sharded.py",
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
    "matplotlib": {"tasks/tracking/plots.py", "tasks/prepare/card/histograms.py"},
    "jinja2": {"tasks/artifacts/markup.py"},
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


@pytest.mark.parametrize("stage", STAGES[1:])
def test_dvc_depends_on_the_folders_whose_code_a_stage_imports(stage):
    used = imported_files(ROOT, f"{run_stage.STAGES[stage].replace('.', '/')}.py")
    folders = {"/".join(name.split("/")[:2]) for name in used}
    listed = {name for name in dvc_stages()[stage]["deps"] if name.startswith(tuple(LAYERS))}
    sections = {name for name in listed if name.startswith("tasks/config/")}
    assert listed - sections == folders, f"dvc.yaml, {stage}: add {folders - listed}; remove {listed - folders}"
    assert all((ROOT / name).is_dir() for name in folders), "code of a stage lies in a folder"
    assert len(folders) <= 8


@pytest.mark.parametrize("stage", STAGES[1:])
def test_dvc_depends_on_defaults_that_params_yaml_leaves_out(stage):
    """Other values are in params.yaml, whose sections DVC compares."""
    shipped = yaml.safe_load((ROOT / "params.yaml").read_text())
    read = dvc_stages()[stage]["params"]
    owners = {
        owner
        for key, owner in unspelled_defaults(Params, shipped)
        if any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in read)
    }
    listed = {name for name in dvc_stages()[stage]["deps"] if name.startswith("tasks/config/")}
    assert listed == owners, f"dvc.yaml, {stage}: add {owners - listed}; remove {listed - owners}"


def unspelled_defaults(model: type[BaseModel], content: object, above: str = "") -> Iterator[tuple[str, str]]:
    """(key, file of the schema) of each default that the content does not hold."""
    for name, field in model.model_fields.items():
        key, inner = f"{above}{name}", strict.section(model, name)
        value = content.get(name, MISSING) if isinstance(content, dict) else MISSING
        if value is MISSING and not field.is_required() and field.get_default(call_default_factory=True):
            yield key, f"{model.__module__.replace('.', '/')}.py"
        elif inner:
            yield from unspelled_defaults(inner, value, f"{key}.")


def test_every_stage_is_named_once_in_dvc_yaml():
    stages = dvc_stages()
    assert list(stages) == STAGES
    assert [name for name, content in stages.items() if content.get("always_changed")] == ["fingerprint"]
    assert all(content["cmd"] == f"python -m tasks {name}" for name, content in stages.items())


@pytest.mark.parametrize(
    ("edited", "computed_again"),
    [
        ("training/exporting/gguf.py", set()),
        ("training/exporting/merging.py", set()),
        ("training/trainer/memory.py", set()),
        ("training/trainer/speed.py", set()),
        ("tasks/reports/run_report.py", set()),
        ("tasks/export/card.py", set()),
        ("tasks/train/driver.py", set()),
        ("tasks/evaluate/intervals.py", set()),
        ("training/evaluation/lm_eval_tasks.py", set()),
        ("training/objectives/losses/sft.py", {"train"}),
        ("training/trainer/optimizer.py", {"train"}),
        ("training/scoring/attention.py", {"train", "reference"}),
        ("training/evaluation/sampling.py", {"sample"}),
        ("training/models/loading.py", {"train", "reference", "sample"}),
        ("tasks/artifacts/pairs.py", {"train", "reference"}),
    ],
)
def test_an_edit_computes_again_only_what_it_can_change(edited, computed_again, tmp_path):
    """The hash under which finished results are stored is that of the code that computes them, and no other."""
    for layer in ("tasks", "training"):
        shutil.copytree(ROOT / layer, tmp_path / layer, ignore=shutil.ignore_patterns("__pycache__"))
    before = {name: worker_code(name, tmp_path) for name in WORKERS}
    (tmp_path / edited).write_text((tmp_path / edited).read_text() + "\n# edited\n")
    after = {name: worker_code(name, tmp_path) for name in WORKERS}
    assert {name for name in WORKERS if before[name] != after[name]} == computed_again


IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # triton, on a machine without a GPU
        assert not error.name.startswith(("tasks", "training")), error
print(*[m.__file__ for m in list(sys.modules.values()) if m.__name__.startswith(("tasks.", "training."))])
"""


@pytest.mark.parametrize("stage", WORKERS)
def test_the_hash_of_a_worker_has_every_module_that_its_modules_import(stage):
    """As Python counts, so that a module that others find by its folder is not forgotten. Plumbing has its own."""
    hashed = worker_code(stage)
    names = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in hashed]
    loaded = subprocess.check_output([sys.executable, "-c", IMPORT, *names], cwd=ROOT, text=True)
    ours = {Path(file).relative_to(ROOT).as_posix() for file in loaded.split() if not file.endswith("__init__.py")}
    plumbing = {file for file in ours if is_plumbing(file)}
    of_plumbing = set().union(*(imported_files(ROOT, name) for file in plumbing for name in own_imports(ROOT, file)))
    assert ours - plumbing - of_plumbing <= hashed.keys()


def dvc_stages() -> dict:
    return yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
