"""The stack of infra/compose.yaml without containers: MLflow and Prefect on Postgres, DVC's remote and artifacts on S3.

Servers are started with the commands and the environment that compose.yaml has, on loopback. The pipeline runs on them;
a second clone, as another machine, pulls everything and repeats nothing. `make test` does so with stages that take
no time, and the exhaustive tests with the real ones, which they also repeat.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.health import is_healthy
from tasks.artifacts import demo
from tasks.system import processes
from tasks.system.ports import free_port
from tests.support import fork_server
from tests.support.infrastructure import postgres
from tests.support.prometheus import scrape, scraped
from tests.support.promotion import export
from tests.support.workspaces import PROJECT, SMALL, make_workspace, wait_for, write_cluster, write_data

STAGES = ["source", "prepare", "reference", "train", "evaluate", "export"]
SERVICES = yaml.safe_load((PROJECT / "infra" / "compose.yaml").read_text())["services"]
SHORT = {"prepare.max_pairs": 48, "train.max_steps": 2, "evaluate.prompts": 2, "promote.require": {}}
WITHOUT = "Postgres is not installed (apt-get install postgresql)"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(postgres.binaries() is None, reason=WITHOUT),
]
COUNTS = {
    "flow runs": ("prefect", "SELECT count(*) FROM flow_run WHERE state_type = 'COMPLETED'"),
    "runs": ("mlflow", "SELECT count(*) FROM runs WHERE status = 'FINISHED'"),
    "versions": ("mlflow", "SELECT count(*) FROM model_versions"),
}
MLFLOW_USERS = ("ADMIN", "WRITER", "FORWARDER", "READER")
Env = dict[str, str]


@dataclass(frozen=True)
class Stack:
    database: postgres.Postgres
    s3: Any
    mlflow: str
    env: Env  # of a driver
    here: "Translation"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    from moto.server import ThreadedMotoServer

    folder = tmp_path_factory.mktemp("stack")
    # Postgres ends last: it waits for its clients.
    with postgres.running("prefect", PROJECT / "infra" / "postgres.sql") as database, ExitStack() as stack:
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=free_port(), verbose=False)
        moto.start()
        stack.callback(moto.stop)
        ports = {"postgres:5432": database.port, "s3:7070": moto._port, "mlflow:5000": free_port()}
        ports |= {"prefect:4200": free_port(), "metrics:9464": free_port()}
        secrets = {"POSTGRES_PASSWORD": database.password, "PREFECT_PASSWORD": "word"}
        secrets |= {"S3_ACCESS_KEY": "testing", "S3_SECRET_KEY": "testing", "SIGNING_KEY": "5" * 64}
        secrets |= {f"MLFLOW_{user}_PASSWORD": f"a-password-of-{user}" for user in MLFLOW_USERS}
        here = Translation(ports, secrets, folder)
        s3 = bucket(here)
        stack.enter_context(here.started("mlflow", FORK_STAGES="1"))
        stack.enter_context(here.started("prefect"))
        for name, path in (("mlflow", "/health"), ("prefect", "/api/health")):
            wait_for(lambda name=name, path=path: is_healthy(here.address(name) + path), 180)
        yield Stack(database, s3, here.address("mlflow"), here.environment("worker"), here)


class Translation:
    """compose.yaml on this machine: services become loopback ports, /shared a folder, secrets are filled in."""

    def __init__(self, ports: dict[str, int], secrets: dict[str, str], folder: Path) -> None:
        self.ports, self.secrets, self.folder = ports, secrets, folder

    def address(self, service: str) -> str:
        return next(f"http://127.0.0.1:{port}" for name, port in self.ports.items() if name.startswith(f"{service}:"))

    def words(self, text: str) -> str:
        for service, port in self.ports.items():
            text = text.replace(service, f"127.0.0.1:{port}")
            text = re.sub(rf"127\.0\.0\.1:{service.partition(':')[2]}\b", f"127.0.0.1:{port}", text)
            text = str(port) if text == service.partition(":")[2] else text
        text = re.sub(r"\$\{(\w+)[^}]*\}", lambda match: self.secrets.get(match[1], ""), text)
        return text.replace("0.0.0.0", "127.0.0.1").replace("/shared", str(self.folder))

    def environment(self, service: str) -> Env:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DPO_", "RAY_"))}
        path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        return {**clean, **path, **{n: self.words(str(v)) for n, v in SERVICES[service]["environment"].items()}}

    def prefect(self, path: str, body: Any, method: str) -> None:
        login = base64.b64encode(f"dpo:{self.secrets['PREFECT_PASSWORD']}".encode()).decode()
        headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
        address, content = f"{self.address('prefect')}/api/{path}", json.dumps(body).encode()
        urllib.request.urlopen(urllib.request.Request(address, content, headers, method=method)).close()

    def started(self, service: str, **more: str) -> Any:
        command = [self.words(word) for word in SERVICES[service]["command"]]
        log = (self.folder / f"{service}.log").open("w")
        # Prefect copies its pages where it may write.
        env = {**self.environment(service), "PREFECT_UI_STATIC_DIRECTORY": str(self.folder / "pages"), **more}
        return processes.spawn(command, PROJECT, env, log)


def bucket(here: Translation) -> Any:
    """As the service `bucket` makes it, with its own command."""
    import boto3

    env = here.environment("bucket")
    subprocess.run([sys.executable, *SERVICES["bucket"]["command"][1:]], env=env, check=True)
    keys = {"aws_access_key_id": env["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": env["AWS_SECRET_ACCESS_KEY"]}
    return boto3.client("s3", endpoint_url=env["AWS_ENDPOINT_URL_S3"], region_name="us-east-1", **keys)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, stack: Stack) -> Path:
    """The repository, with little data, a tiny model, and the stack's addresses in its configuration."""
    from tasks.config.params import overlay
    from tasks.config.strict import dotted, read_yaml

    folder = tmp_path_factory.mktemp("first")
    root = folder / "dpo"
    root.mkdir()
    for name in git(PROJECT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (PROJECT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, root / name)
    write_data(folder / "pairs.jsonl", demo.rows(0)[:60])
    changes = {"source.data": str(folder / "pairs.jsonl"), "source.model": str(tiny_base), **SMALL, **SHORT}
    content = overlay(read_yaml(root / "params.yaml"), dotted(changes))
    (root / "params.yaml").write_text(yaml.safe_dump(content))
    write_cluster(root, {})
    git(root, "init", "-q", "-b", "main")
    connect(root, stack)
    return root


@pytest.fixture(scope="module")
def instant(tmp_path_factory: pytest.TempPathFactory, dummy_template: Path, stack: Stack) -> Path:
    """The same with stages that take no time."""
    root = Path(shutil.copytree(dummy_template, tmp_path_factory.mktemp("instant") / "dpo", symlinks=True))
    shutil.rmtree(root / ".mlflow")
    connect(root, stack)
    return root


def connect(root: Path, stack: Stack) -> None:
    """Write the stack's addresses into the configuration, and commit it."""
    site(root).write_text(yaml.safe_dump({"tracking_uri": stack.mlflow, "actor_train": {"num_workers": 1}}))
    dvc(root, stack.env, "remote", "add", "-d", "shared", "s3://dpo/dvc")
    dvc(root, stack.env, "remote", "modify", "shared", "endpointurl", stack.env["AWS_ENDPOINT_URL_S3"])
    commit(root, "as it comes")


def site(root: Path) -> Path:
    """The overlay that takes the place of compose.cluster.yaml, whose addresses are those of containers."""
    return root.parent / "site.yaml"


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def commit(root: Path, message: str) -> None:
    git(root, "add", "-A")
    git(root, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-q", "-m", message)


def dvc(root: Path, env: Env, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LOGS_AND_READS = """
import os, sys
from mlflow import MlflowClient
def client(user):
    os.environ |= {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": f"a-password-of-{user.upper()}"}
    return MlflowClient(sys.argv[1])
writer = client("writer")
run = writer.create_run(writer.create_experiment("files")).info.run_id
writer.log_artifacts(run, sys.argv[2], "model")
print(client("reader").download_artifacts(run, "model", sys.argv[3]))
"""


def test_files_of_any_size_go_to_s3_and_come_back_through_the_gate(stack: Stack, tmp_path: Path) -> None:
    """On S3 MLflow's client asks for links to the store itself, and sends large files in parts."""
    (tmp_path / "to" / "folder").mkdir(parents=True)
    (tmp_path / "from").mkdir()
    files = {"small": b"a", "folder/large": os.urandom(6 << 20)}
    for name, content in files.items():
        (tmp_path / "to" / name).write_bytes(content)
    limits = {
        "MLFLOW_MULTIPART_UPLOAD_MINIMUM_FILE_SIZE": str(1 << 20),
        "MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE": str(5 << 20),
    }
    command = [sys.executable, "-c", LOGS_AND_READS, stack.mlflow, str(tmp_path / "to"), str(tmp_path / "from")]
    done = subprocess.run(command, env={**stack.env, **limits}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {name: (tmp_path / "from/model" / name).read_bytes() for name in files} == files
    assert (stack.here.folder / "mlflow.log").read_text().count("/mpu/complete/") == 1


def command(root: Path, env: Env, module: str, *arguments: str) -> str:
    path = os.pathsep.join([str(root), *filter(None, [env.get("PYTHONPATH")])])
    ours = {**fork_server.with_torch(env), "PYTHONPATH": path, "DPO_CLUSTER": str(site(root)), "FORK_STAGES": "1"}
    ours[fork_server.ADDRESS] = os.environ[fork_server.OF_FLOWS]
    words = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(words, cwd=root, env=ours, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_is_on_postgres_and_s3_and_a_second_clone_repeats_nothing(stack, instant, tmp_path):
    command(instant, stack.env, "cli", "run")
    database = stack.database
    assert database.query_value("prefect", "SELECT count(*) FROM flow_run WHERE state_type = 'COMPLETED'") == 1
    assert database.query_value("mlflow", "SELECT count(*) FROM runs WHERE status = 'FINISHED'") == 1
    check_accounts(stack)
    assert any(key.startswith("mlflow/") and key.endswith("report.html") for key in objects(stack.s3))
    assert pulled_by_a_second_clone(stack, instant, tmp_path) >= {*STAGES}


def check_accounts(stack: Stack) -> None:
    assert stack.database.query_value("mlflow", "SELECT string_agg(username, ' ' ORDER BY username) FROM users") == (
        "admin forwarder reader writer"
    )
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{stack.mlflow}/api/2.0/mlflow/experiments/search?max_results=1")


def pulled_by_a_second_clone(stack: Stack, root: Path, folder: Path) -> set[str]:
    """Push the results, and pull them elsewhere, where DVC runs no stage again. The folders of data/ that are equal."""
    dvc(root, stack.env, "push")
    assert any(key.startswith("dvc/files/md5/") for key in objects(stack.s3))
    commit(root, "the run")
    second = folder / "second"
    git(root, "clone", "-q", str(root), str(second))
    dvc(second, stack.env, "pull")
    assert re.findall(r"Running stage '(\w+)'", dvc(second, stack.env, "repro")) == ["fingerprint"]
    assert not list((second / ".scratch" / "runs").glob("*/*.jsonl"))  # no stage was started, so no model was loaded
    folders = [path.name for path in (root / "data").iterdir() if path.is_dir()]
    return {name for name in folders if contents(second / "data" / name) == contents(root / "data" / name) != {}}


def test_a_model_is_registered_on_postgres_and_s3(stack, tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path / "workspace", Path("unused"), **{"source.data": "demo"})
    site(workspace).write_text(yaml.safe_dump({"tracking_uri": stack.mlflow}))
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("DPO_SIGNING_KEY", stack.env["DPO_SIGNING_KEY"])
    export("weights")
    command(workspace, stack.env, "tasks", "promote")
    aliases = "SELECT string_agg(alias, ' ' ORDER BY alias) FROM registered_model_aliases"
    assert stack.database.query_value("mlflow", aliases) == "challenger champion"
    assert any(key.startswith("mlflow/") and key.endswith("model.safetensors") for key in objects(stack.s3))


@pytest.mark.exhaustive
def test_the_real_pipeline_runs_on_postgres_and_s3_and_a_second_clone_repeats_nothing(stack, checkout, tmp_path):
    before = {name: stack.database.query_value(*query) for name, query in COUNTS.items()}
    output = command(checkout, stack.env, "cli", "run")
    assert "unchanged, not run" not in output
    added = {name: stack.database.query_value(*query) - before[name] for name, query in COUNTS.items()}
    assert added == {"flow runs": 1, "runs": len(STAGES) + len(["promote", "parent"]), "versions": 1}
    assert pulled_by_a_second_clone(stack, checkout, tmp_path) >= {"pairs", "reference", "policy", "model"}


@pytest.mark.exhaustive  # tests/flows/test_flow.py reproduces and fails to reproduce a run of stages that take no time
def test_the_run_reproduces_from_its_commit(stack, checkout):
    """Every stage after `source` computed again, without caches: the same hashes and metrics."""
    said = command(checkout, stack.env, "cli", "reproduce", "HEAD")
    assert "HEAD: every artifact, every file of the export and every metric is identical" in said
    for stage in STAGES[1:]:
        assert f"{stage}: done in" in said, stage  # it ran


def test_a_worker_provisions_its_server_and_an_active_schedule_plans_runs(stack, instant):
    """As infra/worker.sh does. What a second time does and does not change: test_services.py."""
    tokyo = {**stack.env, "DPO_TIMEZONE": "Asia/Tokyo"}
    assert "Deployments deployed: dpo/full, " in command(instant, tokyo, "services.provision")
    database = stack.database
    assert database.query_value("prefect", "SELECT count(*) FROM deployment") == 5
    assert database.query_value("prefect", "SELECT count(*) FROM automation") == 2
    assert database.query_value("prefect", "SELECT schedule ->> 'timezone' FROM deployment_schedule") == "Asia/Tokyo"
    nightly = database.query_value("prefect", "SELECT deployment_id FROM deployment_schedule")
    schedule = database.query_value("prefect", "SELECT id FROM deployment_schedule")

    def is_planned() -> bool:
        """Prefect looks every five seconds for deployments that changed since, and every minute for all."""
        stack.here.prefect(f"deployments/{nightly}/schedules/{schedule}", {"active": True}, "PATCH")
        stack.here.prefect(f"deployments/{nightly}", {"paused": False}, "PATCH")
        with suppress(AssertionError):
            planned = "SELECT count(*) FROM flow_run WHERE auto_scheduled"
            wait_for(lambda: database.query_value("prefect", planned), 1.5, pause=0.5)
            return True
        return False

    wait_for(is_planned, 120)


def test_the_metrics_service_reads_prefect_and_mlflow_with_its_own_logins(stack, instant):
    place = {"DPO_HOME": str(instant), "DPO_CLUSTER": str(site(instant))}
    with stack.here.started("metrics", **place):
        address = stack.here.address("metrics")
        wait_for(lambda: is_healthy(f"{address}/health"), 60)
        samples = scraped(scrape(f"{address}/metrics", "reader:a-password-of-READER"))
    assert samples["dpo_source_up"] == {("configuration",): 1, ("prefect",): 1, ("mlflow",): 1, ("runs",): 1}
    assert samples["dpo_flow_runs"]["completed",] >= 1


def objects(s3: Any) -> list[str]:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket="dpo")
    return [item["Key"] for page in pages for item in page.get("Contents", [])]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
