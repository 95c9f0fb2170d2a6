"""The DVC command: how to call it, what its output means, and its cache. File formats are in tasks/runs/dvc_lock.py.

DVC trusts its cache: it checks an object out without reading it, and does not write an object again that exists. A
damaged object therefore comes back with each checkout, until `dpo check-cache --fix` removes it from the cache.
"""

import configparser
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tasks.checkout import child_environment
from tasks.config.paths import ROOT
from tasks.config.strict import parse_yaml
from tasks.errors import UserError
from tasks.runs.dvc_lock import Entry, outs
from tasks.system.environment import QUIET

# What `dvc repro` prints about a stage, and what became of the stage.
STAGE_STATES = {
    re.compile(r"^Running stage '"): "ran",
    re.compile(r"^Stage '.*' is cached - skipping run"): "restored",
    re.compile(r"^Stage '.*' didn't change, skipping"): "cached",
}
# Lines of `dvc repro` that say nothing about the stage's own work.
NOISE = re.compile(
    r"^$|^> |^\t(git add|dvc config)|^(Running|Stage|Verifying|Updating lock|Generating lock|To track the changes|"
    r"To enable auto staging|Use `dvc push`|Data and pipelines are up to date|ERROR: failed to reproduce|"
    r"WARNING: Process .* in RWLock-file|WARNING: '.*' is empty\.$)"
)
EXIT_CODE = re.compile(r"^ERROR: .*exited with (?P<code>-?\d+)")  # of the stage's own command
ERROR = re.compile(r"(?m)^(?:[-\d]+ [:,\d]+ )?ERROR: (.+)$")  # --verbose puts a time before it and a traceback after


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dvc", *arguments]


def repro_command(stage: str, *, force: bool = False) -> list[str]:
    return command("repro", "--single-item", *(["--force"] if force else []), stage)


def environment(**changes: str) -> dict[str, str]:
    """Our environment without telemetry. This interpreter is first on PATH, because dvc.yaml calls `python`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**QUIET, **child_environment(), "PATH": path, **changes}


def call(root: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Run DVC in a workspace and return its output."""
    process = subprocess.run(
        command(*arguments),
        cwd=root,
        env=environment() if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if process.returncode != 0:
        message = "; ".join(ERROR.findall(process.stderr)) or process.stderr.strip()
        raise UserError(f"`dvc {' '.join(arguments)}` failed in {root}: {message}")
    return process.stdout


def remotes(root: Path) -> dict[str, dict[str, str]]:
    """The options of each remote that has a URL; empty outside of a DVC repository."""
    try:
        output = call(root, "config", "--list")
    except UserError:
        return {}
    by_name: dict[str, dict[str, str]] = {}
    for name, option, value in re.findall(r"(?m)^remote\.(.+?)\.([^.=]+)=(.*)$", output):
        by_name.setdefault(name, {})[option] = value.strip()
    return {name: options for name, options in by_name.items() if "url" in options}


@cache
def cache_folder() -> Path:
    return Path(call(ROOT, "cache", "dir").strip())


def cached_object(md5: str) -> Path:
    return cache_folder() / "files" / "md5" / md5[:2] / md5[2:]


def cached_files(md5: str) -> dict[str, Path]:
    """The cache's objects of a folder by relative path, missing ones too. KeyError if the folder's list is missing."""
    listing = cached_object(md5)
    if not listing.exists():
        raise KeyError(md5)
    return {item["relpath"]: cached_object(item["md5"]) for item in json.loads(listing.read_text())}


def is_cached(entry: Entry) -> bool:
    """Whether the cache still has every output of an entry of dvc.lock."""
    return all(md5 and cached_object(md5).exists() for md5 in outs(entry).values())


def run_cache() -> Iterator[Entry]:
    """DVC's run cache: an entry, in the format of dvc.lock, for each execution of a stage."""
    for path in (cache_folder() / "runs").glob("*/*/*"):
        entry = parse_yaml(path.read_text())
        if isinstance(entry, dict) and "cmd" in entry:
            yield entry


def write_worktree_config(root: Path, links: str | None) -> None:
    """Let a worktree use the checkout's cache and local settings. `links`: cache.type, unless the checkout sets it."""
    config = configparser.ConfigParser(interpolation=None)
    config.read_dict({"cache": {"type": links}} if links else {})
    config.read(ROOT / ".dvc" / "config.local")
    site = root / ".dvc" / "tmp" / "site"  # deleted with the worktree
    config.read_dict({"cache": {"dir": str(cache_folder())}, "core": {"site_cache_dir": str(site)}})
    with (root / ".dvc" / "config.local").open("w") as file:
        config.write(file)


def collect_garbage(tip: str, count: int, *, dry_run: bool = False) -> list[Path]:
    """The cache objects that neither the checkout, nor an experiment, nor one of the last `count` commits up to `tip`
    names; they are deleted unless it is a dry run."""
    arguments = ["gc", "--workspace", "--all-experiments", "--rev", tip, "--num", str(count), "--force"]
    output = call(ROOT, *arguments, *(["--dry", "--verbose"] if dry_run else []))
    return [Path(path) for path in re.findall(r"(?m)Removing (/.+)$", output)]


def damaged_objects(cache: Path) -> list[Path]:
    """Objects whose content does not match the hash in their name."""
    return [path for path in sorted((cache / "files" / "md5").glob("??/*")) if _is_damaged(path)]


def _is_damaged(path: Path) -> bool:
    md5 = f"{path.parent.name}{path.name}".removesuffix(".dir")
    if not re.fullmatch("[0-9a-f]{32}", md5):  # a temporary file of DVC
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest() != md5


def check_cache(fix: bool) -> None:
    """Print every damaged object of the cache; remove them if `fix` is set."""
    damaged = damaged_objects(cache_folder())
    for path in damaged:
        if fix:
            path.unlink()
        print(f"{'removed' if fix else 'damaged'}  {path}")
    if damaged and not fix:
        raise UserError("The content of these objects does not match their hash. `dpo check-cache --fix` removes them.")
    print("No damaged object is left in DVC's cache." if damaged else "Every object of DVC's cache matches its hash.")
