"""infra/compose.yaml on a real container engine, with the image that infra/Dockerfile builds: `make test-stack`.

The tests build on each other and run in this order: healthy, two runs, S3 and a fresh clone, backup and restore, and
containers killed in mid-run. They need an engine, Compose, and a registry or the stand-ins of tests/stand-ins.yaml.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.infrastructure.containers import Stack, docker, log, missing_requirement, wait
from tests.support.workspaces import PROJECT

STAGES = ["source", "prepare", "reference", "train", "evaluate", "export"]
OVER = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
CHANGES = {"train.beta": 0.2, "train.epochs": 4, "evaluate.prompts": 50, "promote.model_name": "dpo-second"}
HELLO = [{"role": "user", "content": "Hello"}]
VERBS = ("clean", "mend", "paint", "move", "sell", "store", "tune", "wash")
THINGS = ("bike", "boat", "chair", "coat", "desk", "door", "lamp", "oven", "shoes", "sofa")
WITHOUT = missing_requirement()
pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(WITHOUT is not None, reason=str(WITHOUT)),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("stack"))
    made.prepare(os.environ.get("STAND_INS"))
    log(f"builds the image {made.image()}")
    made.compose("build", "worker")
    log(f"the image has {int(docker('image', 'inspect', '--format', '{{.Size}}', made.image())) / 1e9:.2f} GB")
    try:
        log(f"starts the project {made.project}, Prefect on {made.ports['prefect']}, MLflow on {made.ports['mlflow']}")
        made.up()
        log("every container is healthy")
        yield made
    finally:
        if os.environ.get("KEEP"):
            log(f"stays: {' '.join(made.command)}")
        else:
            made.compose("down", "--volumes", "--remove-orphans")
            log("the project is down")


def start(stack: Stack, **parameters: Any) -> str:
    """The id of a new flow run of dpo/full."""
    deployment = stack.prefect("/deployments/name/dpo/full")["id"]
    return str(stack.prefect(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"])


def follow(stack: Stack, run: str, seconds: float = 1500) -> dict[str, Any]:
    """Until the run is over, with a line for each change; the run as Prefect has it."""
    seen: dict[str, str] = {}

    def over() -> dict[str, Any] | None:
        flow_run = stack.prefect(f"/flow_runs/{run}")
        for name, state in {**tasks(stack, run), "run": flow_run["state"]["name"]}.items():
            if seen.get(name) != state:
                log(f"  {name}: {state}")
            seen[name] = state
        return dict(flow_run) if flow_run["state"]["type"] in OVER else None

    return dict(wait(over, seconds, lambda: f"the run does not end: {seen}\n{stack.logs('worker')}"))


def tasks(stack: Stack, run: str) -> dict[str, str]:
    task_runs = stack.prefect("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    return {task["name"]: task["state"]["name"] for task in sorted(task_runs, key=lambda task: str(task["start_time"]))}


def completed(stack: Stack, run: str) -> dict[str, Any]:
    done = follow(stack, run)
    assert done["state"]["type"] == "COMPLETED", f"{done['state'].get('message')}\n{run_log(stack, run)}"
    return done


def run_log(stack: Stack, run: str) -> str:
    query = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_DESC", "limit": 60}
    return "\n".join(line["message"] for line in reversed(stack.prefect("/logs/filter", query)))


def weights(stack: Stack, name: str) -> str:
    """Content hash of a run's policy, from the commit that the run is."""
    lock = stack.inside("worker", f"git -C /shared/dpo show runs/{name}:dvc.lock")
    return str(re.search(r"path: data/policy\n(?:.*\n)*?\s+md5: (\S+)", lock)[1])  # type: ignore[index]


@pytest.fixture(scope="module")
def first(stack: Stack) -> dict[str, Any]:
    log("dpo/full with the recipe demo")
    began = time.monotonic()
    done = completed(stack, start(stack, recipe="demo"))
    log(f"{done['name']} took {time.monotonic() - began:.0f} s")
    return done


@pytest.fixture(scope="module")
def second(stack: Stack, first: dict[str, Any]) -> dict[str, Any]:
    log(f"dpo/full with the recipe demo and {CHANGES}")
    began = time.monotonic()
    done = completed(stack, start(stack, recipe="demo", name="second", overrides=CHANGES))
    log(f"{done['name']} took {time.monotonic() - began:.0f} s")
    return done


def test_the_production_image_holds_no_test_tool_and_no_secret(stack):
    tools = ("pytest", "moto", "mypy", "ruff", "xdist", "kubernetes_validate", "check_jsonschema")
    probe = f"import importlib.util as u; print([n for n in {tools!r} if u.find_spec(n)])"
    assert stack.inside("worker", f'python -c "{probe}"').strip() == "[]"
    assert not stack.inside("worker", "command -v pytest ruff mypy hadolint || true").strip()
    assert stack.inside("worker", "bash -lc 'command -v ray'").strip() == "/opt/venv/bin/ray"  # as KubeRay may start it
    assert stack.inside("worker", "id -u").strip() == "1000"
    history = docker("history", "--no-trunc", stack.image())
    assert not any(secret in history for secret in stack.secrets.values())


def test_dpo_full_is_in_mlflow_and_prefect(stack, first):
    parent, children = tracked(stack, first["name"])
    assert parent["info"]["status"] == "FINISHED"
    assert {*STAGES, "promote"} == {child["info"]["run_name"].split()[0] for child in children}
    assert {child["info"]["status"] for child in children} == {"FINISHED"}
    path = f"/metrics/get-history?run_id={parent['info']['run_id']}&metric_key=loss"
    curve = [point["step"] for point in stack.mlflow(path)["metrics"]]
    assert len(set(curve)) > 5
    assert champion(stack) == "1"
    log(f"MLflow: {len(children)} stage runs, {len(curve)} points of the loss, champion is version 1")
    assert tasks(stack, first["id"]) == dict.fromkeys([*STAGES, "promote"], "Completed")
    texts = artifacts(stack, first["id"])
    assert {"dpo-links", "dpo-stages", "dpo-result", "dpo-report", "train-progress"} <= set(texts)
    page = f"http://127.0.0.1:5000/#/experiments/{parent['info']['experiment_id']}/runs/{parent['info']['run_id']}"
    assert page in texts["dpo-links"]  # where the operator's browser finds it, not the containers' name
    assert f"{page}/artifacts/report.html" in texts["dpo-report"]
    assert "http://mlflow:" not in "".join(texts.values())


def tracked(stack: Stack, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run's parent in MLflow and its stages, once all that was journaled has arrived."""
    experiment = stack.mlflow("/experiments/get-by-name?experiment_name=dpo")["experiment"]["experiment_id"]

    def search(condition: str) -> list[dict[str, Any]]:
        query = {"experiment_ids": [experiment], "filter": condition, "max_results": 100}
        return list(stack.mlflow("/runs/search", query).get("runs", []))

    (parent,) = wait(lambda: search(f"attributes.run_name = '{name}' and attributes.status = 'FINISHED'"), 120)
    return parent, search(f"tags.`mlflow.parentRunId` = '{parent['info']['run_id']}'")


def champion(stack: Stack) -> str:
    return str(stack.mlflow("/registered-models/alias?name=dpo-demo&alias=champion")["model_version"]["version"])


def artifacts(stack: Stack, run: str) -> dict[str, str]:
    condition = {"flow_runs": {"id": {"any_": [run]}}}
    entries = stack.prefect("/artifacts/filter", {**condition, "sort": "CREATED_DESC", "limit": 200})
    return {entry["key"]: str(entry["data"]) for entry in reversed(entries) if entry["key"]}  # the newest of a key


def test_a_second_run_with_a_recipe_and_overrides_computes_only_what_changed(stack, first, second):
    states = tasks(stack, second["id"])
    assert {states[name] for name in STAGES[:3]} <= {"Cached", "Restored"}
    assert states["train"] == "Completed"
    parent, _ = tracked(stack, "second")
    assert {p["key"]: p["value"] for p in parent["data"]["params"]}["train.beta"] == "0.2"
    assert weights(stack, "second") != weights(stack, first["name"])


def test_a_fresh_clone_pulls_from_s3_and_repeats_nothing(stack, first):
    log("dvc push, then pull into a fresh clone")
    output = stack.inside(
        "worker",
        f"""cd /shared/dpo && dvc push --all-branches
        git clone --quiet --branch runs/{first["name"]} /shared/dpo /tmp/clone
        cp .dvc/config.local /tmp/clone/.dvc/ && cd /tmp/clone
        dvc cache dir --local /tmp/clone/.dvc/cache
        dvc pull && dvc repro
        test -s data/model/model.safetensors && rm -rf /tmp/clone""",
    )
    assert re.findall(r"Running stage '(\w+)'", output) == ["fingerprint"], output


def test_votes_on_the_served_champion_train_the_next_one_which_replaces_it(stack, first):
    """Chat, thumbs, a KTO run on them, approval and rollback; no request fails while a version is replaced."""
    with served(stack, "dpo-demo"):
        assert stack.serve("/v1/chat/completions", {"messages": HELLO}, token="wrong-0123456789")[0] == 401
        log("80 answers, and a thumb for each")
        answers = [chat(stack, f"How can I {verb} my {thing}?") for verb in VERBS for thing in THINGS]
        for number, answer in enumerate(answers):
            vote = {"answer_id": answer["id"], "kind": "thumb", "value": "up" if number % 2 else "down"}
            assert stack.serve("/v1/feedback", {**vote, "user": f"user-{number % 3}"})[0] == 200
        assert {answer["model"] for answer in answers} == {"dpo-demo/1"}
        thumbs = {"source.data": "feedback:dpo-demo?kind=thumbs", "train.loss": {"kto": 1.0}, "train.epochs": 2}
        judge = {"evaluate.judge": "auto", "evaluate.prompts": 0, "promote.max_regression": {}, "promote.limits": {}}
        gate = {"promote.require": {"rewards/accuracies": 1.0}}  # refuses these thumbs, which follow no rule
        done = completed(stack, start(stack, recipe="demo", name="votes", overrides={**thumbs, **judge, **gate}))
        log(f"{done['name']} trained on the thumbs")
        assert champion(stack) == "1"
        for command, version in (
            ("dpo approve dpo-demo/2 ann --reason trial", "2"),
            ("dpo rollback dpo-demo", "1"),
        ):
            stack.inside("worker", f"cd /shared/dpo && {command}")
            began = time.monotonic()
            wait(lambda version=version: chat(stack, "Hello")["model"] == f"dpo-demo/{version}", 240, stack.logs)
            log(f"version {version} answers {time.monotonic() - began:.0f} s after {command!r}")


@contextmanager
def served(stack: Stack, model: str) -> Iterator[None]:
    """The profile `serve` of the stack."""
    log(f"starts the profile serve with {model}")
    with stack.env_file.open("a") as file:
        file.write(f"SERVE_MODEL={model}\n")
    stack.compose("--profile", "serve", "up", "--detach", "--no-build", "serve")
    wait(lambda: not stack.unhealthy(), 300, lambda: f"not healthy: {stack.unhealthy()}\n{stack.logs('serve')}")
    try:
        yield
    finally:
        stack.compose("--profile", "serve", "rm", "--stop", "--force", "serve")


def chat(stack: Stack, prompt: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24}
    status, content = stack.serve("/v1/chat/completions", body)
    assert status == 200, content
    return content


def test_a_backup_brings_back_databases_objects_and_runs(stack, first, tmp_path):
    def state() -> dict[str, Any]:
        objects = "import boto3; print(len(list(boto3.resource('s3').Bucket('dpo').objects.all())))"
        return {
            "run": stack.prefect(f"/flow_runs/{first['id']}")["state"]["name"],
            "stages": len(tracked(stack, first["name"])[1]),
            "champion": champion(stack),
            "objects": stack.inside("worker", f'python -c "{objects}"').strip(),
            "branches": stack.inside("worker", "git -C /shared/dpo for-each-ref refs/heads/runs"),
        }

    before = state()
    log(f"backup of {before['objects']} objects")
    backup(stack, "backup", tmp_path / "kept")
    lost = "import boto3; b = boto3.resource('s3').Bucket('dpo'); b.objects.all().delete(); b.delete()"
    stack.inside("worker", f'python -c "{lost}"; git -C /shared/dpo branch -D runs/{first["name"]}')
    for table, database in (("model_versions", "mlflow"), ("flow_run", "prefect")):
        run = ["psql", "--username", "dpo", "--dbname", database, "--command", f"TRUNCATE {table} CASCADE"]
        stack.compose("exec", "-T", "postgres", *run)
    assert stack.prefect("/flow_runs/filter", {}) == []
    log("restore after the loss of both")
    backup(stack, "restore", tmp_path / "kept")
    wait(lambda: not stack.unhealthy(), 300, lambda: f"not healthy: {stack.unhealthy()}\n{stack.logs()}")
    assert state() == before
    log("everything is back")
    damaged = tmp_path / "kept" / "objects.tar"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert "Nothing was changed" in backup(stack, "restore", tmp_path / "kept", code=2)


def backup(stack: Stack, verb: str, folder: Path, code: int = 0) -> str:
    env = {**os.environ, "COMPOSE": " ".join(stack.command)}
    command = [PROJECT / "infra" / "backup.sh", verb, folder]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_killed_containers_cost_a_run_no_bit_of_its_weights(stack, second):
    """The training of the second run again. The worker, in which the flow itself lives, is killed first, and the run is
    resumed; then the other containers, one after the other, while the run goes on."""
    undisturbed = weights(stack, "second")
    forget = "rm -r .dvc/cache/runs /shared/output/train; git branch --quiet -D runs/second"  # or nothing is trained
    stack.inside("worker", f"cd /shared/dpo; {forget}")
    killed = start(stack, recipe="demo", name="disturbed", overrides=CHANGES)
    wait(lambda: step(stack) > 0, 300, lambda: f"no training step\n{run_log(stack, killed)}")
    kill(stack, "worker")
    log("resumes the run")
    run, at = start(stack, resume="disturbed"), step(stack)
    wait(lambda: step(stack) > at, 300, lambda: f"no training step after {at}\n{run_log(stack, run)}")
    for service in ("ray-worker", "mlflow", "prefect", "postgres"):
        kill(stack, service)
        state = wait(lambda: stack.prefect(f"/flow_runs/{run}")["state"], 60)
        assert state["type"] == "RUNNING", f"{state}\n{run_log(stack, run)}"
    completed(stack, run)
    assert weights(stack, "disturbed") == undisturbed
    log("the run ended with the weights of the undisturbed one")
    parent, children = tracked(stack, "disturbed")
    assert parent["info"]["status"] == "FINISHED"
    assert {"train", "promote"} <= {child["info"]["run_name"].split()[0] for child in children}
    left = follow(stack, killed, 400)["state"]  # an automation notices that the killed flow run is silent
    assert left["type"] == "CRASHED", left


def kill(stack: Stack, service: str) -> None:
    running = [name for name, state in current(stack).items() if state == "Running"]
    log(f"kills {service} at step {step(stack)}, in {running}")
    log(f"  healthy again after {stack.restart(service):.0f} s")


def current(stack: Stack) -> dict[str, str]:
    task_runs = stack.prefect("/task_runs/filter", {"sort": "EXPECTED_START_TIME_DESC", "limit": 8})
    return {task["name"]: task["state"]["name"] for task in reversed(task_runs)}


def step(stack: Stack) -> int:
    """The last step that rank 0 of a training logged."""
    line = stack.inside("worker", "cat /shared/output/train/*/metrics.jsonl 2>/dev/null | tail -n 1", check=False)
    try:
        return int(json.loads(line).get("step", 0))
    except ValueError:
        return 0
