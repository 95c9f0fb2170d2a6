"""Which code decides a result: the files that a module imports, except plumbing.

dvc.yaml lists folders, so DVC runs a stage again that has only a neighbour of its code changed. What takes hours then
finds its finished result: trainings, reference values and sampled answers are stored under the hash of `worker_code`.
"""

import ast
from functools import cache
from pathlib import Path

from tasks.config.paths import ROOT
from tasks.system.files import sha256

# Code that cannot change a result: it finds, starts, watches, records, draws or refuses.
PLUMBING = (
    "tasks/config",  # what a stage reads arrives as values; dvc.yaml lists the sections with defaults of their own
    "tasks/cluster",
    "tasks/reports",
    "tasks/runs",
    "tasks/secrets",
    "tasks/system",
    "tasks/tracking",
    "tasks/checkout.py",
    "tasks/disk_space.py",
    "tasks/errors.py",
    "tasks/run_stage.py",
    "training/trainer/memory.py",
    "training/trainer/speed.py",
)
# What computes a stored result: the modules that the workers of a stage begin with.
WORKERS = {
    "sample": ("tasks.evaluate.sampler",),
    "reference": ("tasks.reference.scorer",),
    "train": ("tasks.train.worker", "tasks.artifacts.training_data"),  # `sft`, too
}
# Modules that import every module of a folder, whatever its name.
FINDERS = {"training/objectives/registry.py": "training/objectives/losses"}


def worker_code(stage: str, root: Path = ROOT) -> dict[str, str]:
    """sha256 of each file of ours that decides what the workers of a stage compute, by path."""
    files = set().union(*(imported_files(root, f"{module.replace('.', '/')}.py") for module in WORKERS[stage]))
    return {name: sha256(root / name) for name in sorted(files)}


def imported_files(root: Path, name: str) -> frozenset[str]:
    """The file and all files of ours that it imports, directly or not, inside functions too. Without plumbing."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        if (file := todo.pop()) not in seen and not is_plumbing(file):
            seen.add(file)
            todo += own_imports(root, file)
    return frozenset(seen)


def is_plumbing(name: str) -> bool:
    return any(name == home or name.startswith(f"{home}/") for home in PLUMBING)


def own_imports(root: Path, name: str) -> list[str]:
    """The files of ours that a file imports when it runs, not those for its types alone."""
    candidates = {f"{module.replace('.', '/')}.py" for module in _imports((root / name).read_text())}
    if folder := FINDERS.get(name):
        candidates |= {f"{folder}/{path.name}" for path in (root / folder).glob("*.py")}
    return sorted(file for file in candidates if (root / file).is_file())


@cache
def _imports(source: str) -> frozenset[str]:
    return frozenset(_modules(ast.parse(source)))


def _modules(node: ast.AST) -> set[str]:
    """Dotted names that may be modules."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return set()
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set().union(*map(_modules, ast.iter_child_nodes(node)))
