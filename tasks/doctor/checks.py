"""`dpo doctor`: is this machine ready, and does the configured run fit it? Prints each problem with its remedy.

`--fix` clears the locks of killed processes. Every request to another machine has a timeout of seconds.
"""

import os
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from tasks.cluster.nodes import check_storage, check_versions, package_versions, run_on_nodes
from tasks.cluster.ray_cluster import ray_cluster
from tasks.config.cluster import Cluster
from tasks.config.paths import ROOT, main_checkout
from tasks.doctor import capacity, network_checks, stale_locks
from tasks.doctor.report import Report
from tasks.errors import UserError
from tasks.runs import run_config

GIB = 2**30


def run_checks(recipe: str | None, fix: bool = False) -> int:
    """Print every result; returns the exit code."""
    report = Report(fix)
    git = shutil.which("git")
    report.check(git is not None, f"git: {git}", "git is not on the PATH. Install it.")
    packages(report, ROOT / "requirements.lock")
    machine(report)
    capacity.shared_memory(report)
    stale_locks.locks(report, main_checkout())
    try:
        config = run_config.resolve(recipe, None, Path())
        params, cluster = config.params, config.cluster
        report.ok("params.yaml and infra/cluster.yaml are valid" + (f" with recipe {recipe}" if recipe else ""))
        network_checks.tracking(report, cluster)
        network_checks.remotes(report, main_checkout())
        capacity.fit(report, params, cluster)
        nodes(report, cluster)
    except UserError as error:
        for sentence in str(error).splitlines():
            report.wrong(sentence)
    print("ready" if not report.problems else f"problems: {report.problems}")
    return 1 if report.problems else 0


def packages(report: Report, lock: Path) -> None:
    """Compare the installed packages with the lock file."""
    from packaging.markers import Marker

    lines = re.findall(r"^([\w.-]+)==([^\s;]+)(?: ; (.+?))?(?: \\)?$", lock.read_text(), re.M)
    wanted = {name: pinned for name, pinned, marker in lines if not marker or Marker(marker).evaluate()}
    different = []
    for name, locked in wanted.items():
        try:
            if version(name).split("+")[0] != locked.split("+")[0]:
                different.append(f"{name} {version(name)} (locked: {locked})")
        except PackageNotFoundError:
            different.append(f"{name} is missing (locked: {locked})")
    names = ", ".join(different[:3]) + (f" and {len(different) - 3} more" if len(different) > 3 else "")
    problem = f"packages differ from the lock file: {names}. Run `rm .venv/.ready`, then `dpo doctor`."
    report.check(not different, f"{len(wanted)} packages match the lock file", problem)


def machine(report: Report) -> None:
    from training.cuda_compat import mismatch, stack
    from training.evaluation.hardware import gpus  # both load torch, and `dpo doctor` prints its first lines before

    memory = psutil.virtual_memory().available / GIB
    report.ok(f"{os.cpu_count()} CPUs, {memory:.0f} GiB of memory free")
    cuda = stack()
    if problem := mismatch(cuda):
        report.wrong(f"{problem}.")
    for name, size in gpus():
        report.ok(f"{name}, {size / GIB:.0f} GiB, driver {cuda.driver}, torch {cuda.torch} for CUDA {cuda.cuda}")


def nodes(report: Report, cluster: Cluster) -> None:
    """Versions, shared storage and free space on every node of the configured Ray cluster."""
    if cluster.ray.address == "local":  # whose version is among the packages
        return
    folder = main_checkout() / cluster.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    with ray_cluster(cluster.ray, 0):
        check_versions()
        check_storage(folder)
        versions = " ".join(f"{name} {number}," for name, number in package_versions().items())
        for address, free in run_on_nodes(_free, folder).items():
            report.ok(f"Ray node {address}: {versions} as on this machine; it sees {folder}, {free / GIB:.0f} GiB free")


def _free(folder: Path) -> int:
    return os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
