"""Fixtures that several test files share."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tasks.system.lock import file_lock
from tests.support import fork_server
from tests.support.workspaces import demo_params, wait_for

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # as the Makefile does, and before anybody imports mlflow
os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # as our server does: five processes that poll
PROJECT = Path(__file__).parents[1]
Once = Callable[[str, Callable[[Path], object]], Path]
APPROVE = """
def approve(version, by, reason):
    return f"approve: version {version} by {by}"
"""
STAGES = ["source", "prepare", "reference", "train", "evaluate", "export"]


MEMORY = Path("/dev/shm")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # no key or password of a test is written to the user's own folder
        folder = tempfile.TemporaryDirectory(prefix="dpo-config-")
        config.add_cleanup(folder.cleanup)
        os.environ["XDG_CONFIG_HOME"] = folder.name
    fork_server.serve()
    if _has_memory():  # the stores of MLflow, DVC and Prefect wait 10 ms of a disk for each of thousands of commits
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def _has_memory() -> bool:
    """Whether the files of a whole run fit into memory, and programs may run there."""
    if not MEMORY.is_dir() or os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        return False
    return min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) > 8 * 2**30


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for names, count in fork_server.refusals().most_common():
        terminalreporter.write_line(f"{count} processes imported all libraries again, because a test had set {names}")


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes a folder of that name unless another test process has: once(name, lambda folder: ...)."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "once"

    def made(name: str, make: Callable[[Path], object]) -> Path:
        with file_lock(shared / f"{name}.lock"):
            if not (shared / f"{name}.made").exists():
                shutil.rmtree(shared / name, ignore_errors=True)  # of one that failed
                (shared / name).mkdir()
                make(shared / name)
                (shared / f"{name}.made").touch()
        return shared / name

    return made


@pytest.fixture(scope="session")
def mlflow_store(once: Once) -> Path:
    """An empty MLflow database to copy: making one takes seconds."""
    from mlflow import MlflowClient

    return once("mlflow", lambda folder: MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments())


@pytest.fixture(scope="session")
def dummy_template(once: Once, mlflow_store: Path) -> Path:
    return once("dummy", lambda folder: make_dummy_repo(folder / "repo", mlflow_store)) / "repo"


@pytest.fixture
def dummy_repo(tmp_path: Path, dummy_template: Path) -> Path:
    """A git and DVC repository with our flows and params, and stages that take no time."""
    return Path(shutil.copytree(dummy_template, tmp_path / "repo", symlinks=True))


@pytest.fixture(scope="session")
def prefect_forks() -> dict[str, str]:
    """Variables of commands that are forked from a process with Prefect imported; `fork_server.fresh` prevents it."""
    return {fork_server.ADDRESS: os.environ[fork_server.OF_FLOWS], "FORK_STAGES": "1"}


@pytest.fixture(scope="session")
def prefect_store(once: Once, prefect_forks: dict[str, str]) -> Path:
    """A PREFECT_HOME to copy, with the database of a server that has run nothing: creating one takes 14 seconds."""
    from flows import embedded_server
    from tasks.system import processes
    from tasks.system.ports import free_port

    def make(folder: Path) -> None:
        env = {**fork_server.clean_environment(), **prefect_forks, **embedded_server.SERVER}
        env |= {"PREFECT_HOME": str(folder / "home"), "DO_NOT_TRACK": "1", embedded_server.PASSWORD: "tests:a-password"}
        env["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
        command = [sys.executable, *embedded_server.COMMAND, "--port", str(port := free_port())]
        with (folder / "server.log").open("w") as log, processes.spawn(command, PROJECT, env, log) as process:
            embedded_server.wait_until_healthy(process, f"http://127.0.0.1:{port}/api", folder / "server.log")

    return once("prefect", make) / "home"


@pytest.fixture(scope="session")
def prefect_api(
    tmp_path_factory: pytest.TempPathFactory, prefect_store: Path, prefect_forks: dict[str, str]
) -> Iterator[dict[str, str]]:
    """A real Prefect server on a free loopback port, as the environment that leads to it."""
    from flows.embedded_server import wait_until_healthy
    from tasks.system import processes
    from tasks.system.ports import free_port

    home = Path(shutil.copytree(prefect_store, tmp_path_factory.mktemp("prefect") / "home"))
    api = f"http://127.0.0.1:{(port := free_port())}/api"
    env = {**fork_server.clean_environment(), **prefect_forks, "PREFECT_HOME": str(home), "DO_NOT_TRACK": "1"}
    env |= dict.fromkeys(("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"), "tests:a-password")
    env |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "PREFECT_SERVER_METRICS_ENABLED": "true"}
    env["PREFECT_SERVER_UI_API_URL"] = api  # for the pages
    command = [
        sys.executable,
        "-m",
        "services.prefect_sqlite",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with (home / "server.log").open("w") as log, processes.spawn(command, PROJECT, env, log) as process:
        wait_until_healthy(process, api, home / "server.log")
        yield {**env, "PREFECT_API_URL": api}


@pytest.fixture(scope="session")
def by_hand(
    tmp_path_factory: pytest.TempPathFactory, prefect_store: Path, prefect_forks: dict[str, str]
) -> dict[str, str]:
    """An environment without a Prefect server: a run brings its own."""
    home = shutil.copytree(prefect_store, tmp_path_factory.mktemp("by_hand") / "home")
    return {**fork_server.clean_environment(), **prefect_forks, "PREFECT_HOME": str(home)}


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> Iterator[str]:
    """The address of a real MLflow server on a free loopback port."""
    from services.health import is_healthy
    from tasks.system import processes
    from tasks.system.ports import free_port

    home = tmp_path_factory.mktemp("mlflow-server")
    shutil.copytree(mlflow_store, home, dirs_exist_ok=True)
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", f"sqlite:///{home}/mlflow.db", "--artifacts-destination", str(home / "artifacts")]
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1", "FORK_STAGES": "1"}
    with (home / "server.log").open("w") as log, processes.spawn([*command, *stores], home, env, log):
        wait_for(lambda: is_healthy(f"{address}/health"), 300)
        yield address


def make_dummy_repo(root: Path, store: Path) -> Path:
    shutil.copytree(store, root / ".mlflow")
    for folder in ("cli", "flows", "services", "tasks", "training", "infra"):
        shutil.copytree(PROJECT / folder, root / folder)  # with what Python compiled, which is valid for the copies
    for name in ("pyproject.toml", ".gitignore", ".dvcignore"):
        shutil.copy(PROJECT / name, root)
    (root / "params.yaml").write_text(yaml.safe_dump(demo_params(), sort_keys=False))
    cluster = root / "infra" / "cluster.yaml"  # an embedded Ray cluster would start for each flow
    cluster.write_text(cluster.read_text().replace("address: local", "address: auto"))
    shutil.copy(PROJECT / "tests" / "support" / "dummy_stage.py", root / "tasks" / "dummy.py")
    (root / "tasks" / "reports" / "terminal.py").write_text("print('the report')\n")
    # What the flow runs besides DVC's stages: `python -m tasks promote` and `dpo approve`.
    main = root / "tasks" / "__main__.py"
    main.write_text(
        f"import sys\nif sys.argv[1] == 'promote':\n    import tasks.dummy\n    sys.exit()\n{main.read_text()}"
    )
    (root / "tasks" / "promote" / "champion.py").write_text(APPROVE)
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": _stages()}, sort_keys=False))
    for command in ("git init -q -b main", f"{sys.executable} -m dvc init -q", "git add -A"):
        subprocess.run(command.split(), cwd=root, check=True)
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", *who, "commit", "-q", "-m", "dummy"], cwd=root, check=True)
    return root


def _stages() -> dict[str, dict[str, object]]:
    """The real `fingerprint`, and behind it stages that take no time."""
    real = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["stages"]
    stages: dict[str, dict[str, object]] = {"fingerprint": real["fingerprint"]}
    before = ["data/fingerprint.json"]
    for name in STAGES:
        metrics = ["data/metrics/evaluate.json", "data/metrics/samples.jsonl"]
        more = {"source": ["data/raw", "data/base"], "evaluate": metrics}
        outs = [f"data/{name}", *more.get(name, [])]
        stages[name] = {"cmd": f"python -m tasks.dummy {name}", "params": [name], "deps": before, "outs": outs}
        before = [f"data/{name}"]
    return stages


@pytest.fixture(scope="session")
def tiny_base(once: Once) -> Path:
    """The demo's base model, barely trained: the right shape in seconds."""
    from tasks.artifacts import demo
    from training.models import tiny

    return once("base", lambda folder: tiny.make(folder, demo.conversations(0)[:300], seed=0, steps=20))


@pytest.fixture(scope="session")
def adapter(once: Once, tiny_base: Path) -> Path:
    """An adapter of that model which changes its answers."""
    import torch

    from training.models import adapters
    from training.models.loading import load_model

    def make(folder: Path) -> None:
        policy = adapters.add_adapter(load_model(tiny_base, "float32"), 4, 8.0, "all-linear", False, False, seed=0)
        torch.manual_seed(1)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        policy.save_pretrained(folder)

    return once("adapter", make)


@pytest.fixture(scope="session")
def referenced(once: Once, tiny_base: Path, mlflow_store: Path) -> Path:
    """A workspace with everything before `train`. Copy it before changing it."""
    from tests.support.workspaces import make_workspace, run

    def make(folder: Path) -> None:
        make_workspace(folder, tiny_base, cluster={"actor_train.num_workers": 2})
        shutil.copytree(mlflow_store, folder / ".mlflow")
        run(folder, "source", "prepare", "reference")

    return once("referenced", make)


@pytest.fixture(scope="session")
def trained(once: Once, referenced: Path) -> Path:
    """The same after `train`, undisturbed and on one host."""
    from tests.support.workspaces import run

    def make(folder: Path) -> None:
        shutil.copytree(referenced, folder, dirs_exist_ok=True)
        run(folder, "train")

    return once("trained", make)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, then the files with the most slow tests, so that the processes end together."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path] if item.get_closest_marker("slow") else -len(items))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process runs whole files, and one process all files that name `prefect_api`: one server serves them."""
    from xdist.scheduler import LoadFileScheduling

    class OnePrefect(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "prefect" if "prefect_api" in (PROJECT / file).read_text() else file

    return OnePrefect(config, log) if config.getoption("dist") == "loadfile" else None
