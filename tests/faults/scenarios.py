"""What is disturbed: each stage of the pipeline and each command after it, at demo size, with what it must leave.

`Bench(folder, harness).ready(name)` puts the files that a command starts from under `root`, always at the same path;
`observe()` is what the command leaves there, and must be the same after a fault and a second try.
"""

import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.health import is_healthy
from tasks.system import processes
from tasks.system.files import hash_files
from tasks.system.ports import free_port
from tasks.tracking.journal_reader import unsent
from tests.conftest import make_dummy_repo
from tests.faults.harness import PROJECT, Harness, copy, homes, locks
from tests.support import fork_server
from tests.support.workspaces import make_workspace, wait_for

FILE = "sqlite:///.mlflow/mlflow.db"
RUN_NAME = re.compile(r"dvc-\d{8}-\d{6}|[a-z]+-[a-z]+-[0-9a-f]{8}|[0-9a-f]{32}")
# A registry with two versions, the second of them champion, and a third model that is better; `promote` is next.
REGISTER = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.support import promotion as made
from mlflow import MlflowClient
from tasks.config.cluster import load_cluster
client = MlflowClient(load_cluster().tracking_uri)
client.create_registered_model("of-others")
other = client.create_run(client.create_experiment("of-others")).info
client.create_model_version("of-others", other.artifact_uri, other.run_id, tags={"manifest_sha256": "../../.."})
for number in (1, 2):
    made.export(f"weights {number}", kind=194 + number)
    made.run()
made.export("weights 3", kind=199)
"""
# Runs without Prefect, from old to new; the first failed, the second is champion.
RUNS = """
import sys
sys.path.append(sys.argv[1])  # behind the repository: its own copy of our code is what works
from tests.runs import test_gc
sys.argv = ["", "broken", "champ", "old", "new"]
exec(test_gc.MAKE)
sys.argv = ["", "champ", "old"]
exec(test_gc.REGISTER)
"""


# How a disturbed run is listed: its record says `running` where it was killed, and `dpo runs` says crashed.
DISTURBED = {"runs": (" KILLED", " FAILED"), "states": ("running", "failed", "stopped", "crashed")}


@dataclass(frozen=True)
class Scenario:
    name: str
    module: str
    arguments: tuple[str, ...] = ()
    after: str = ""  # the scenario whose result it starts from
    make: Callable[[Path, Path, str], None] | None = None  # (bench, root, tracking_uri)
    forked: bool = True  # Ray does not survive a fork
    again: bool = True  # a rollback that succeeded all the same is not run again: it would go one further
    served: bool = False  # MLflow is a server, not a file
    new_run: bool = False  # the same command makes a new run; the disturbed one stays in the lists, to be resumed


def workspace(bench: Path, root: Path, uri: str) -> None:
    cluster = {"actor_train.num_workers": 1, "tracking_uri": uri}
    make_workspace(root, bench / "base", rows=60, cluster=cluster, **{"train.epochs": 1})


def registered(bench: Path, root: Path, uri: str) -> None:
    make_workspace(root, bench / "base", cluster={"tracking_uri": uri})
    _python(bench, root, REGISTER)


def repository(bench: Path, root: Path, uri: str) -> None:
    assert uri == FILE
    shutil.rmtree(root)
    make_dummy_repo(root, bench / "bare" / ".mlflow")


def old_runs(bench: Path, root: Path, uri: str) -> None:
    repository(bench, root, uri)
    _python(bench, root, RUNS, path=root)


def _python(bench: Path, root: Path, code: str, path: Path = PROJECT) -> None:
    command = [sys.executable, "-c", code, str(PROJECT)]
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(path), "HOME": str(Path.home())}
    env |= homes(bench)
    if fork_server.ADDRESS in os.environ:  # in the tests; the sweep has none
        env |= {"PYTHONPATH": f"{path}:{fork_server.SITE}", "FORK_STAGES": "1"}
        env[fork_server.ADDRESS] = os.environ[fork_server.ADDRESS]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SCENARIOS = {
    one.name: one
    for one in (
        Scenario("source", "tasks", ("source",), make=workspace),
        Scenario("prepare", "tasks", ("prepare",), after="source"),
        Scenario("reference", "tasks", ("reference",), after="prepare", forked=False),
        Scenario("train", "tasks", ("train",), after="reference", forked=False),
        Scenario("evaluate", "tasks", ("evaluate",), after="train"),
        Scenario("export", "tasks", ("export",), after="evaluate"),
        Scenario("promote", "tasks", ("promote",), make=registered),
        Scenario("rollback", "cli", ("rollback",), after="promote", again=False),
        Scenario("publish", "cli", ("run",), make=repository, forked=False, new_run=True),
        Scenario("gc", "cli", ("gc", "--keep", "1", "--yes"), make=old_runs),
        Scenario("source, MLflow's server", "tasks", ("source",), make=workspace, served=True),
        Scenario("promote, MLflow's server", "tasks", ("promote",), make=registered, served=True),
        Scenario(
            "rollback, MLflow's server",
            "cli",
            ("rollback",),
            after="promote, MLflow's server",
            again=False,
            served=True,
        ),
    )
}


class Bench:
    """Where scenarios are made ready, once each, and put back for every try."""

    def __init__(self, folder: Path, harness: Harness, base: Path, store: Path) -> None:
        """`base` is a tiny model and `store` an empty MLflow database: both are copied, and neither may change."""
        self.folder, self.harness, self.root = folder, harness, folder / "run"
        for name, source in (("base", base), ("bare/.mlflow", store)):
            if not (folder / name).exists():
                copy(source, folder / name)
        self.others = hash_files(folder / "base")
        self.server = ExitStack()
        self.address = ""

    def close(self) -> None:
        self.server.close()

    def _serve(self) -> str:
        """The address of MLflow's server over the store in the workspace, which may be put back under it."""
        if not self.address:
            kept = self.folder / "port"
            kept.write_text(kept.read_text() if kept.exists() else str(free_port()))
            host = ["--host", "127.0.0.1", "--port", kept.read_text(), "--workers", "1"]
            store = self.root / ".mlflow"
            stores = [f"--backend-store-uri=sqlite:///{store}/mlflow.db", f"--artifacts-destination={store}/artifacts"]
            command = [sys.executable, "-m", "mlflow", "server", *host, *stores]
            env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool"}
            env["FORK_STAGES"] = "1"  # in the tests: nothing disturbs the server
            copy(self.folder / "bare", self.root)
            log = self.server.enter_context((self.folder / "server.log").open("w"))
            self.server.enter_context(processes.spawn(command, self.folder, env, log))
            self.address = f"http://127.0.0.1:{kept.read_text()}"
            wait_for(lambda: is_healthy(f"{self.address}/health"), 300)
            # Its first two requests at once break MLflow for good ("failed to locate a name SqlUserRoleAssignment").
            assert is_healthy(f"{self.address}/api/2.0/mlflow/registered-models/search")
        return self.address

    def ready(self, name: str) -> Scenario:
        scenario, kept = SCENARIOS[name], self.folder / "ready" / name
        self.root = self.folder / ("served" if scenario.served else "run")
        if not kept.exists():
            if scenario.after:
                self.ready(scenario.after)
                self.expected(scenario.after)
                copy(self.folder / "done" / scenario.after, self.root)
            else:
                assert scenario.make is not None
                uri = self._serve() if scenario.served else FILE
                copy(self.folder / "bare", self.root)
                scenario.make(self.folder, self.root, uri)
            copy(self.root, kept)
        if scenario.served:
            self._serve()
        copy(kept, self.root)
        return scenario

    def expected(self, name: str) -> dict[str, Any]:
        """What an undisturbed run leaves, and how many operations it takes (`operations`, `trace`)."""
        file = self.folder / "expected" / f"{name}.json"
        if not file.exists():
            done = self.run(self.ready(name))
            assert done.code == 0, done.said
            left = self.harness.leftovers(self.root)
            assert not left, left
            copy(self.root, self.folder / "done" / name)
            file.parent.mkdir(exist_ok=True)
            trace = [line.replace(str(self.root), "") for line in done.trace]
            content = {"left": self.observe(), "operations": done.operations, "trace": trace}
            file.write_text(json.dumps(content))
        return json.loads(file.read_text())

    def run(self, scenario: Scenario, fault: str = "", at: int = 0, only: str = "") -> Any:
        given = (scenario.module, scenario.arguments)
        # A repository has its own copy of our code.
        env = {"PYTHONPATH": f"{self.root}:{PROJECT}"} if (self.root / "flows").exists() else {}
        port = int(self._serve().rpartition(":")[2]) if scenario.served else 0
        more = {"forked": scenario.forked, "env": env, "port": port}
        return self.harness.run(self.root, *given, fault=fault, at=at, only=only, **more)

    def try_fault(self, name: str, fault: str, at: int, only: str = "") -> list[str] | None:
        """What is wrong after the fault and a second try of the same command; None where the fault was not reached."""
        scenario, expected = self.ready(name), self.expected(name)["left"]
        self.ready(name)
        first = self.run(scenario, fault, at, only)
        wrong = _said(first.said, "the disturbed run")
        if first.code == 124:
            wrong.append("the disturbed run hangs")
        again = self.run(scenario) if first.code or scenario.again else first
        wrong += _said(again.said, "the second run")
        if again.code:
            wrong.append(f"the second run ends with {again.code}: {again.said.strip()[-300:]}")
        if any(unsent(path.parent) for path in self.root.glob(".scratch/runs/*/settings.json")):
            self.harness.run(self.root, "cli", ("sync",))  # the next run would send it as well
        wrong += [f"process left: {process}" for process in self.harness.leftovers(self.root)]
        found = self.observe()
        for part, states in DISTURBED.items() if scenario.new_run else ():
            found[part] = [state for state in found[part] if state not in states]
        wrong += [f"left behind: {path}" for path in locks(self.root)]
        if hash_files(self.folder / "base") != self.others:
            wrong.append("the base model of others was changed")
        wrong += [
            f"{part} differs: {_difference(expected[part], found[part])}"
            for part in expected
            if json.dumps(expected[part], sort_keys=True) != json.dumps(found[part], sort_keys=True)
        ]
        return wrong if first.fired else (wrong or None)

    def observe(self) -> dict[str, Any]:
        data = hash_files(self.root / "data") if (self.root / "data").exists() else {}
        ignored = (
            "metrics/promote.json",
            ".gitignore",
        )  # DVC writes the second where a repository, unlike ours, has none
        found: dict[str, Any] = {"data": {name: sha for name, sha in data.items() if name not in ignored}}
        found |= _store(self.root / ".mlflow")
        own = ("params.yaml", "pairs.jsonl", "infra/cluster.yaml")
        found["inputs"] = {name: _sha(self.root / name) for name in own if (self.root / name).exists()}
        if (self.root / ".git").exists():
            found |= _repository(self.root)
        return found


def _said(said: str, what: str) -> list[str]:
    if "Traceback" not in said:
        return []
    return [f"{what} shows a traceback: {said.strip().splitlines()[-1][:200]}"]


def _difference(expected: Any, found: Any) -> str:
    if isinstance(expected, dict):
        names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
        return "; ".join(f"{name}: {expected.get(name)} -> {found.get(name)}" for name in names[:3])
    return f"{expected} -> {found}"[:400]


def _store(folder: Path) -> dict[str, Any]:
    """The registry and the tracked runs, read without MLflow: it takes seconds."""
    with closing(sqlite3.connect(folder / "mlflow.db")) as store:  # SQLite undoes what was not committed
        ask = lambda query: [list(row) for row in store.execute(query)]  # noqa: E731
        tags = ask("SELECT name, version, value FROM model_version_tags WHERE key = 'manifest_sha256'")
        versions = ask("SELECT name, version FROM model_versions WHERE current_stage != 'Deleted_Internal'")
        hashes = {(name, version): value for name, version, value in tags if [name, version] in versions}
        aliases = ask("SELECT name, alias, version FROM registered_model_aliases")
        runs = ask("SELECT name, status FROM runs WHERE lifecycle_stage = 'active'")
    files = hash_files(folder / "artifacts") if (folder / "artifacts").exists() else {}
    weights = {"/".join(name.split("/")[-3:]): sha for name, sha in files.items() if "/model/" in f"/{name}"}
    return {
        "versions": sorted([name, value] for (name, _), value in hashes.items()),
        "aliases": sorted([name, alias, hashes.get((name, version), "?")] for name, alias, version in aliases),
        "weights": weights,
        "runs": sorted({f"{RUN_NAME.sub('', str(name))} {status}" for name, status in runs}),
    }


def _repository(root: Path) -> dict[str, Any]:
    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return (done.stdout if done.returncode == 0 else done.stderr).splitlines()

    trees = set(git("for-each-ref", "--format=%(tree)", "refs/runs"))
    return {
        "branches": sorted(git("for-each-ref", "--format=%(refname) %(objectname)", "refs/heads")),
        "checkout": git("status", "--porcelain"),
        "trees": sorted(trees),
        "worktrees": len(git("worktree", "list")),
        "cache": sorted(hash_files(root / ".dvc" / "cache")) if (root / ".dvc" / "cache").exists() else [],
        "lock": _sha(root / "dvc.lock") if (root / "dvc.lock").exists() else "",
        "states": sorted({json.loads(path.read_text())["state"] for path in root.glob(".scratch/runs/*/record.json")}),
    }


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
