"""Where a run works: in a git worktree of its own, or, by hand and as params.yaml stands, in the checkout itself.

A worktree is made from a snapshot commit (uncommitted changes included, the branch untouched) and shares the
checkout's DVC cache. A finished run is the commit `runs/<name>`, its artefacts are in the cache, and its worktree goes;
one that failed, was stopped or crashed keeps it, and `make resume RUN=name` goes on there.
"""

import configparser
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, run
from typing import Any

import yaml

from flows import ROOT, commits, inputs, runs
from flows.commits import git
from flows.runs import Record
from tasks.configuration import Layer, Value, changed, merge
from tasks.errors import UserError
from tasks.files import write_text
from tasks.machines import crashes
from tasks.machines.lock import TOKEN, alone, held
from tasks.place import CLUSTER, OVERRIDES, RECIPE, SITE, groups, resolve
from tasks.stage import QUIET

Files = dict[str, dict[str, Any]]  # what a run's own configuration files hold, by name


@dataclass(frozen=True)
class Workspace:
    root: Path
    key: str  # the run's name; the same when it is retried or resumed
    token: str | None = None  # of the workspace's lock: handed to what works here, since one process may hold several

    @property
    def own(self) -> bool:
        return self.root != ROOT

    @property
    def logs(self) -> Path:
        return runs.runs_folder() / self.key

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        return {**QUIET, **os.environ, "PATH": path, **self.identity()}

    def identity(self) -> dict[str, str]:
        """What a stage must know: which run it belongs to, and where state that outlives the workspace is kept."""
        token = {TOKEN: self.token} if self.token else {}
        return {"DPO_RUN": self.key, "DPO_HOME": str(ROOT), **token}

    def stages(self) -> list[str]:
        """The stages in the order of dvc.yaml, which is the order of the pipeline."""
        return list(inputs.stages(self.root))

    def stale(self) -> set[str]:
        status = self.dvc("status", "--json")
        return set(json.loads(status[status.index("{") :])) & set(self.stages())

    def watch(self) -> list[str]:
        """Let DVC see whether the content behind an address of `source` changed; what the stage says about it."""
        said = self.dvc("repro", "--single-item", "watch").splitlines()
        return [line for line in said if line.startswith("watch: ")]

    def dvc(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "dvc", *arguments]
        done = run(command, cwd=self.root, env=self.environment(), stdin=DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            errors = re.findall(r"(?m)^(?:[-\d]+ [:,\d]+ )?ERROR: (.+)$", done.stderr)  # --verbose adds a traceback
            said = "; ".join(errors) or done.stderr.strip()
            raise UserError(f"`dvc {' '.join(arguments)}` failed in {self.root}: {said}")
        return done.stdout


def plan(recipe: str | None, overrides: dict[str, Any] | None) -> Files:
    """What a run changes in the checkout's configuration, checked: params.yaml as a whole, the machines' as overlays.

    They stay overlays, so that the site's values lie below them on whichever machine the run is resumed.
    """
    from tasks.params import Params, load_cluster, validate

    params, machines = layers(recipe, overrides)
    laid_over = " and ".join(layer.origin for layer in params[1:])
    files: Files = {}
    given = validate(Params, dict(params[0].content), ROOT / "params.yaml")
    content = merge(params, Params)
    if validate(Params, content, Path(f"params.yaml with {laid_over}")) != given:
        files["params.yaml"] = content
    part, own = (dict(layer.content) for layer in machines)
    with_recipe = load_cluster(ROOT, part)
    if with_recipe != load_cluster(ROOT):
        files[str(RECIPE)] = part
    if load_cluster(ROOT, part, own) != with_recipe:
        files[str(OVERRIDES)] = own
    return files


def not_default(recipe: str | None, overrides: dict[str, Any] | None) -> dict[str, Value]:
    """Each value of a planned run that is not the default, with where it comes from; the machines' under `cluster.`.

    The default of params.yaml is what the file holds, that of the machines the schema's.
    """
    from tasks.params import Params

    params, machines = layers(recipe, overrides)
    found = {f"cluster.{name}": value for name, value in resolve(ROOT, *machines).origins.items()}
    return {**changed(params, Params), **found}


def layers(recipe: str | None, overrides: dict[str, Any] | None) -> tuple[list[Layer], list[Layer]]:
    """Of params.yaml: the file, the recipe, overrides. Of the machines: what the recipe and overrides lay over."""
    from tasks.params import dotted, read_recipe, read_yaml

    nested = dotted(overrides or {})
    machines = nested.pop("cluster", {})
    if operators := [name for name in machines if name not in groups()]:
        raise UserError(
            f"An override cannot set `cluster.{operators[0]}`, only keys of {', '.join(groups())}. "
            f"Set it in {CLUSTER} or the site's overlay ({SITE})."
        )
    params = [Layer("params.yaml", read_yaml(ROOT / "params.yaml"))]
    params += [Layer(f"the recipe {recipe}", read_recipe(recipe))] if recipe else []
    params += [Layer("overrides", nested)] if nested else []
    part = read_recipe(recipe, "cluster") if recipe else {}
    return params, [Layer(f"the recipe {recipe}", part), Layer("overrides", machines)]


def prepared(name: str | None, files: Files, *, own: bool, flow_run: str, label: str) -> Record:
    """The record of a new run, or of this flow run's where Prefect tries it again. Nothing is made yet."""
    name = name or label
    with bookkeeping():
        found = runs.find(name)
        if found and flow_run in found.flow_runs:
            return found
        _check_name(name)
        root = runs.WORKTREES / name if own else ROOT
        record = Record(name, str(root), commit=commits.snapshot() if own else "", files=files if own else {})
        return runs.begin(record, flow_run)


def _check_name(name: str) -> None:
    branch = f"runs/{name}"
    strange = run(["git", "check-ref-format", "--branch", branch], capture_output=True).returncode
    if strange or "/" in name or name.startswith((".", "-")):
        raise UserError(f"A run cannot be named '{name}'. Use letters, digits, dots and dashes.")
    if (runs.runs_folder() / name).exists() or (runs.WORKTREES / name).exists() or commits.find(name):
        found = runs.find(name)
        how = f"continue it with `make resume RUN={name}`, " if found and found.state != runs.FINISHED else ""
        raise UserError(
            f"There is a run named '{name}' already. Choose another name, {how}or look at it with `make runs`."
        )


@contextmanager
def opened(record: Record, flow_run: str) -> Iterator[Workspace]:
    """The locked workspace of a run, made where it is not whole. However the run ends, its record says so."""
    root = Path(record.root)
    if record.own and not (record.made and _is_worktree(root)):
        record = _make_worktree(record)
    with held(root) as token:
        record = runs.begin(record, flow_run)
        for sentence in crashes.mend(root):
            print(f"{record.name}: {sentence}", flush=True)
        if not record.own:
            _take_over(Workspace(root, record.name, token))
        state = runs.STOPPED  # by Ctrl-C, by Prefect, by whoever ends this process in order
        try:
            yield Workspace(root, record.name, token)
            if record.own:
                commits.commit_run(root, record.name)
            else:
                with suppress(UserError):  # a checkout without a commit can be worked in all the same
                    commits.note_run(record.name)
            runs.keep_results(record)
            state = runs.FINISHED
        except Exception:
            state = runs.FAILED
            raise
        finally:
            record.write(state=state, until=runs.now())


def closed(place: Workspace) -> Path:
    """Remove a finished run's worktree; where its small results are from now on."""
    if not place.own:
        return ROOT
    with held(place.root), bookkeeping():  # whoever works in it meanwhile keeps it
        remove_worktree(place.root)
    return runs.known(place.key).results()


def _make_worktree(record: Record) -> Record:
    root = Path(record.root)
    with bookkeeping():
        if root.exists():
            remove_worktree(root)
        git(ROOT, "worktree", "prune")
        git(ROOT, "worktree", "add", "--force", "--force", "--detach", str(root), record.commit)
    for path, content in record.files.items():
        write_text(root / path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    crashes.mend(root)  # the checkout's dvc.lock came along, damaged or not
    inputs.seed(root)
    share_cache(Workspace(root, record.name), "reflink,hardlink,copy")
    return record.write(made=True)


def _take_over(checkout: Workspace) -> None:
    """What runs in worktrees have made is not made again in the checkout."""
    with suppress(UserError):  # no commit yet, or files that DVC would not overwrite: then DVC sees what is to do
        if new := inputs.seed(checkout.root):
            checkout.dvc("checkout", "--allow-missing", "--quiet", *new)


def _is_worktree(root: Path) -> bool:
    """Whether git still knows the folder: its own notes of it may be gone, or half-written."""
    command = ["git", "rev-parse", "--show-toplevel", "--verify", "HEAD"]
    done = run(command, cwd=root, capture_output=True, text=True) if root.exists() else None
    return done is not None and done.returncode == 0 and Path(done.stdout.splitlines()[0]) == root.resolve()


def remove_worktree(root: Path) -> None:
    """The folder and git's notes of it; git itself refuses where one of them is gone or half-made."""
    try:
        git(ROOT, "worktree", "remove", "--force", "--force", str(root))
    except UserError:
        if not any(root.is_relative_to(place) for place in (runs.WORKTREES, ROOT / ".scratch")):
            raise
        shutil.rmtree(root, ignore_errors=True)
        notes = Path(git(ROOT, "rev-parse", "--path-format=absolute", "--git-common-dir")) / "worktrees"
        for note in notes.glob("*/"):
            gitdir = note / "gitdir"
            if not gitdir.exists() or gitdir.read_text().strip() in ("", str(root / ".git")):
                shutil.rmtree(note)


def bookkeeping() -> Any:
    """Git's list of worktrees and our list of names are changed by one process at a time."""
    return alone(ROOT / ".scratch" / "worktrees.lock", lambda who: None)


def share_cache(workspace: Workspace, links: str | None = None) -> None:
    """Let the worktree use the checkout's cache, and put there what its dvc.lock already has.

    `links` are for a worktree in which nothing is changed in place: stages publish what they write by renaming it.
    """
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / ".dvc" / "config.local")
    for section in ("cache", "core"):
        if not config.has_section(section):
            config.add_section(section)
    config["cache"]["dir"] = cache_folder()
    if links:
        config["cache"].setdefault("type", links)
    config["core"]["site_cache_dir"] = str(workspace.root / ".dvc" / "tmp" / "site")  # it goes with the worktree
    with (workspace.root / ".dvc" / "config.local").open("w") as file:
        config.write(file)
    if (workspace.root / "dvc.lock").exists():
        workspace.dvc("checkout", "--allow-missing", "--quiet")


@cache
def cache_folder() -> str:
    return Workspace(ROOT, "").dvc("cache", "dir").strip()
