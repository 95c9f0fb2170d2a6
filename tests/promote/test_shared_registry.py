"""A registry on a real MLflow server, shared by checkouts and machines: deletion, locking, concurrent promotions."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

import tasks.promote.stage
from flows.promote import PROMOTED
from tasks.config.cluster import load_cluster
from tasks.promote import outbox
from tasks.system.processes import boot_id, start_time
from tasks.tracking import lease
from tasks.tracking.registry import registry
from tests.runs.test_runs import command
from tests.support.deployed import ask
from tests.support.promotion import export, run
from tests.support.workspaces import PROJECT, make_workspace, wait_for

pytestmark = pytest.mark.slow

# Registers a version of a run that no retention rule keeps.
REGISTER = """
import hashlib, sys
from pathlib import Path
from mlflow import MlflowClient
from tasks.config.cluster import load_cluster
from tasks.runs import records
from tasks.tracking.registry import registry
name, experiment = sys.argv[1:]
client = MlflowClient(load_cluster().tracking_uri)
if not client.search_registered_models("name = 'dpo-demo'"):
    client.create_registered_model("dpo-demo")
run = client.create_run(experiment, tags={"pipeline_run": "same-name"})
folder = records.runs_folder() / "same-name"
folder.mkdir(parents=True)
export = Path(".scratch") / "export"
export.mkdir()
(export / "model.safetensors").write_text(name)
with registry(load_cluster(), "dpo-demo") as model_registry:
    tags = {"manifest_sha256": hashlib.sha256(name.encode()).hexdigest(), "run": "same-name"}
    print(model_registry.add(run.info.run_id, export, [], tags).number)
"""


def test_gc_deletes_only_versions_of_this_checkout(tmp_path, dummy_repo, mlflow_server):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DPO_", "MLFLOW_"))}
    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump({"tracking_uri": mlflow_server}))
    env |= {"DPO_CLUSTER": str(site), "FORK_STAGES": "1"}
    client = MlflowClient(mlflow_server)
    experiment = client.create_experiment("two checkouts")  # created by the server, which then stores the artifacts
    roots = {"mine": dummy_repo, "colleague": shutil.copytree(dummy_repo, tmp_path / "colleague", symlinks=True)}
    numbers = {}
    for name, root in roots.items():
        script = [sys.executable, "-c", REGISTER, name, experiment]
        done = subprocess.run(script, cwd=root, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        numbers[name] = done.stdout.strip()
    client.create_registered_model("their-model")
    foreign = {"manifest_sha256": "f" * 64, "run": "same-name"}
    theirs = [artifacts(client, experiment, name, foreign) for name in ("dpo-demo", "their-model")]
    evil = {**foreign, "manifest_sha256": "../../../../", "dpo.owner": (roots["mine"] / ".scratch/owner").read_text()}
    artifacts(client, experiment, "dpo-demo", evil)
    before = {version.version for version in client.search_model_versions("name = 'dpo-demo'")}

    done = gc(roots["mine"], env)
    assert "note: Version " in done
    assert "manifest_sha256 '../../../../', which is no SHA-256 hash" in done
    after = {version.version for version in client.search_model_versions("name = 'dpo-demo'")}
    assert {str(number) for number in before - after} == {numbers["mine"]}
    for version in (*theirs, client.get_model_version("dpo-demo", numbers["colleague"])):
        digest = version.source.rpartition("model/")[2]
        assert client.list_artifacts(version.run_id, f"model/{digest}"), version
    gone = client.search_runs([experiment], "tags.pipeline_run = 'same-name'", order_by=["attributes.start_time"])[0]
    assert client.list_artifacts(gone.info.run_id, "model") == []  # its artifacts on the server are deleted too


def artifacts(client: MlflowClient, experiment: str, model: str, tags: dict[str, str]) -> Any:
    """A version made by another tool, with a file under its hash."""
    run = client.create_run(experiment)
    client.log_text(run.info.run_id, "weights", f"model/{'f' * 12}/model.safetensors")
    return client.create_model_version(model, f"{run.info.artifact_uri}/model/{'f' * 12}", run.info.run_id, tags)


def gc(root: Path, env: dict[str, str]) -> str:
    done = command(root, env, "gc", "--keep", "0", "--yes")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_of_two_concurrent_promotions_the_better_model_stays_champion(tmp_path, mlflow_server, monkeypatch):
    """Without a champion both pass. The worse model decides first and moves last, so it must be compared again."""
    monkeypatch.delenv("DPO_RUN", raising=False)
    roots = {name: workspace(tmp_path / name, mlflow_server, "race") for name in ("worse", "better")}
    monkeypatch.chdir(roots["better"])
    export("better")
    monkeypatch.chdir(roots["worse"])
    export("worse", correct=192)
    decide, decisions = tasks.promote.stage.decide, []

    def decide_then_promote_the_other(*arguments: Any) -> dict[str, Any]:
        decisions.append(decide(*arguments))
        if len(decisions) == 1:
            monkeypatch.chdir(roots["better"])
            assert run()["promoted"]
            monkeypatch.chdir(roots["worse"])
        return decisions[0] if len(decisions) == 2 else decisions[-1]

    monkeypatch.setattr(tasks.promote.stage, "decide", decide_then_promote_the_other)
    last = run()
    assert [decision["promoted"] for decision in decisions] == [True, True, False]
    assert last == decisions[-1]
    (reason,) = last["reasons"]
    with registry(load_cluster(), "race") as model_registry:
        champion = model_registry.at("champion")
        assert champion is not None
        assert (model_registry.fetch(champion, "model") / "model.safetensors").read_text() == "better"
        assert reason.startswith(f"samples/policy/correct against version {champion.number} is -0.04")
        assert not any(tag.startswith(lease.PREFIX) for tag in model_registry.client.get_registered_model("race").tags)


def workspace(root: Path, server: str, model: str) -> Path:
    changes = {"source.data": "demo", "promote.model_name": model}
    return make_workspace(root, Path("unused"), cluster={"tracking_uri": server}, **changes)


def test_the_lock_is_exclusive_and_a_dead_holder_blocks_nobody(mlflow_server, tmp_path, monkeypatch):
    client, name, count = MlflowClient(mlflow_server), f"lease-{uuid.uuid4().hex[:8]}", tmp_path / "count"
    client.create_registered_model(name)
    count.write_text("0")

    def add_three() -> None:
        mine = MlflowClient(mlflow_server)
        for _ in range(3):
            with lease.hold_lease(mine, name) as claim:
                before = int(count.read_text())
                time.sleep(0.02)
                claim.check()
                count.write_text(str(before + 1))

    threads = [threading.Thread(target=add_three) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.read_text() == "12"

    with subprocess.Popen(["sleep", "600"]) as child:  # a dead process on this machine is detected at once
        dead = f"1 1 {boot_id()} {child.pid} {start_time(child.pid)}"
        child.kill()
    client.set_registered_model_tag(name, f"{lease.PREFIX}dead", dead)
    with lease.hold_lease(client, name):
        pass
    monkeypatch.setattr(lease, "LEASE", 1.0)  # of a process on another machine: only the timeout tells
    client.set_registered_model_tag(name, f"{lease.PREFIX}away", "1 1 another-machine 1 1")
    since = time.monotonic()
    with lease.hold_lease(client, name) as claim:
        assert time.monotonic() - since > 1.0
        claim.written -= lease.HOLD + 1
        with pytest.raises(Exception, match="Nothing more was written"):
            claim.check()
    assert client.get_registered_model(name).tags == {}


def test_prefect_gets_one_event_per_promotion(tmp_path, mlflow_server, prefect_api, monkeypatch):
    """One flow is killed after the alias moved, another after the server received the event."""
    root = workspace(tmp_path / "told", mlflow_server, "told")
    monkeypatch.chdir(root)
    monkeypatch.setenv("DPO_RUN", "told")
    export("one")
    assert run()["promoted"]
    (promotion,) = outbox.pending()
    assert run()["already"]  # the decision in a resumed run
    note = promotion.path.read_text()
    tell = [sys.executable, "-c", "from flows.promote import send_promotions; send_promotions()"]
    env = {**prefect_api, "DPO_HOME": str(root), "PYTHONPATH": str(PROJECT)}
    for _ in range(2):
        subprocess.run(tell, cwd=PROJECT, env=env, check=True, timeout=900)
        assert outbox.pending() == []
        promotion.path.write_text(note)
    wanted = {"filter": {"event": {"name": [PROMOTED]}, "resource": {"id": ["dpo.model.told"]}}}
    wait_for(lambda: ask(prefect_api, "events/filter", wanted)["events"], 60)
    time.sleep(1)
    (event,) = ask(prefect_api, "events/filter", wanted)["events"]
    assert event["id"] == promotion.id
    assert json.loads(note)["copied"]
    reason = "it passed the gate, there was no champion before. Run told."
    assert event["payload"]["message"] == f"told version 1 is now champion: {reason}"
