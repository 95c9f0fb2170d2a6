"""`dpo up` in a repository with instant stages: start, kill and restart of services, runs on the worker, `dpo down`.

Uses the logins that `dpo up` generates. The tests build on each other in this order.
"""

import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from flows.parameters import known_and_typed
from services import stack
from tasks.system.processes import this_process
from tasks.tracking.journal_reader import read_journal
from tests.support import fork_server
from tests.support.browser import Page, browser
from tests.support.prometheus import named_in_infra, scrape, scraped
from tests.support.running_stack import (
    PATIENCE,
    SILENCE,
    Up,
    cancel,
    following,
    hanging,
    is_alive,
    listens,
    occupied,
    processes_of_hanging,
    wait_for,
    webhook,
)

DEPLOYED = ("dpo/full", "dpo/smoke", "dpo/nightly", "sweep/grid", "rounds/on-policy")


@pytest.fixture(scope="module")
def bystander() -> Iterator[psutil.Popen]:
    process = psutil.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, dummy_template: Path, prefect_store: Path) -> Iterator[Up]:
    notifications: list[str] = []
    with webhook(notifications) as url, occupied(4200), occupied(5000):
        env = {k: v for k, v in fork_server.clean_environment().items() if k not in ("BIND", "PORT")}
        env |= {"DPO_WEBHOOK_URL": url, "DPO_SILENCE_SECONDS": str(SILENCE), "DPO_TIMEZONE": "Asia/Tokyo"}
        root = Path(shutil.copytree(dummy_template, tmp_path_factory.mktemp("services") / "repo", symlinks=True))
        shutil.copytree(prefect_store, root / ".prefect")
        repo = Up(root, env, notifications)
        # Reads from a pipe that only we hold open: `down` follows when we are gone, however that came.
        guard = ["/bin/sh", "-c", 'cat >/dev/null; exec "$0" -m cli down', sys.executable]
        env[fork_server.ADDRESS] = os.environ[fork_server.OF_FLOWS]
        env["FORK_RUNS"] = str(repo.forks_runs)
        with subprocess.Popen(guard, cwd=root, env=env, stdin=subprocess.PIPE, start_new_session=True):
            repo.first_output = repo.dpo("up")
            fork_server.warm(env[fork_server.ADDRESS])
            repo.forks_runs.parent.mkdir(exist_ok=True)
            repo.forks_runs.touch()
            yield repo


@pytest.mark.slow
def test_every_service_listens_only_on_loopback_with_our_settings(up: Up) -> None:
    for name, pid in up.pids().items():
        assert listens(pid) == {"127.0.0.1"}, name
        env = psutil.Process(pid).environ()
        assert env["DO_NOT_TRACK"] == "1"
        assert (env["PREFECT_SERVER_ANALYTICS_ENABLED"], env["MLFLOW_DISABLE_TELEMETRY"]) == ("false", "true")
        assert os.getsid(pid) == pid  # it outlives whoever started it
    assert not {up.record("prefect")["port"], up.record("mlflow")["port"]} & {4200, 5000}  # which were taken
    server = up.api("admin/settings")["server"]
    assert server["concurrency"]["lease_storage"] == "prefect.server.concurrency.lease_storage.filesystem"
    assert (server["analytics_enabled"], server["ui"]["api_url"]) == (False, "/api")
    worker = psutil.Process(up.pids()["worker"]).environ()
    assert worker["PREFECT_API_URL"] == f"{up.record('prefect')['address']}/api"
    mlflow = psutil.Process(up.pids()["mlflow"])
    family = [mlflow, *mlflow.children(recursive=True)]
    assert not [one for one in family if "mlflow.db" in " ".join(one.cmdline())]  # an address may hold a password


@pytest.mark.slow
def test_prefect_requires_a_login_shown_once_and_accepts_only_its_own_pages(up: Up) -> None:
    page, login = up.record("prefect")["address"], up.login("prefect/admin")
    assert up.first_output.count(login) == up.first_output.count(up.login("mlflow/reader")) == 1
    for path in (up.password_file, up.root / "prefect.toml"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for path in (up.password_file.parent, up.root / ".services", up.root / ".prefect"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for body, who in (({}, None), ({}, "admin:guess")):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            up.request(f"{page}/api/flows/filter", body, who)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            up.request(f"{page}/api/block_documents/filter?include_secrets=true", body, who)
    blocks = up.api("block_documents/filter", {"include_secrets": False})
    assert "secret-path" not in json.dumps(blocks)
    assert "********" in json.dumps([block["data"] for block in blocks if block["name"] == "dpo-webhook"])
    with pytest.raises(urllib.error.HTTPError, match="400"):
        up.request(f"{page}/api/flows/filter", {}, login, Host="evil.example")
    for origin, allowed in ((page, page), ("http://evil.example", None)):
        with up.request(f"{page}/api/flows/filter", {}, login, Origin=origin) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == allowed
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"{page.replace('http', 'ws')}/api/events/in")


@pytest.mark.slow
def test_mlflow_has_readers_a_writer_and_a_forwarder(up: Up) -> None:
    api = f"{up.record('mlflow')['address']}/api/2.0/mlflow"

    def status(user: str | None, path: str, body: Any = None, **headers: str) -> int:
        who = None if user is None else user if ":" in user else up.login(f"mlflow/{user}")
        try:
            with up.request(f"{api}/{path}", body, who, **headers) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    search, experiment, model = "experiments/search?max_results=1", "experiments/create", "registered-models/create"
    assert status(None, search) == status("reader:guess", search) == status(None, model, {"name": "a"}) == 401
    assert status("reader", search) == status("reader", "runs/search", {"experiment_ids": ["0"]}) == 200
    assert status("reader", experiment, {"name": "b"}) == status("reader", model, {"name": "b"}) == 403
    assert status("forwarder", experiment, {"name": "c"}) == 200
    assert status("forwarder", "runs/create", {"experiment_id": "1"}) == 200
    assert status("reader", "runs/create", {"experiment_id": "1"}) == 403
    assert status("forwarder", model, {"name": "c"}) == 403
    assert status("writer", model, {"name": "d"}) == 200
    assert status("writer", "runs/create", {"experiment_id": "1"}) == 200  # in what another user made
    alias = {"name": "d", "alias": "champion", "version": "1"}
    assert status("reader", "registered-models/alias", alias) == 403
    assert status("forwarder", "registered-models/alias", alias) == 403
    account = {"username": "mallory", "password": "a-long-password"}
    assert status("writer", "users/create", account) == status("reader", "users/create", account) == 403
    assert status("admin", "users/create", account) == 200
    assert status("writer", search, Host="evil.example") == 403
    with up.request(up.record("mlflow")["address"], None, up.login("mlflow/reader")) as answer:
        assert b"<title>MLflow</title>" in answer.read()


@pytest.mark.slow
def test_deployments_match_their_file(up: Up) -> None:
    deployments = {name: up.api(f"deployments/name/{name}") for name in DEPLOYED}
    for name, deployment in deployments.items():
        flow = name.split("/")[0]
        assert deployment["entrypoint"] == f"flows.{flow}.{flow}"
        assert (deployment["work_pool_name"], deployment["enforce_parameter_schema"]) == ("dpo", True)
        assert deployment["job_variables"] == {}
        assert "dpo" in deployment["tags"]
        assert deployment["description"]
        assert str(up.root) not in json.dumps(deployment)  # no path of the machine that deployed it
        limited = deployment["global_concurrency_limit"] and deployment["global_concurrency_limit"]["limit"]
        assert limited == (1 if name == "dpo/nightly" else None)
    assert deployments["dpo/full"]["parameters"] == {}
    assert deployments["dpo/nightly"]["parameters"] == {"only_if_new": True}
    assert deployments["dpo/nightly"]["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    (schedule,) = deployments["dpo/nightly"]["schedules"]
    assert (schedule["active"], schedule["slug"]) == (False, "nightly")
    assert schedule["schedule"] == {"cron": "0 2 * * *", "timezone": "Asia/Tokyo", "day_or": True}
    assert deployments["dpo/smoke"]["parameters"]["recipe"] == "demo"
    known_and_typed(deployments["dpo/smoke"]["parameters"]["overrides"])


@pytest.mark.slow
def test_invalid_parameters_are_rejected_before_a_run_exists(up: Up) -> None:
    full = up.api("deployments/name/dpo/full")
    for deployment, parameters, named in (
        ("dpo/full", {"overrides": {"train.bta": 0.2}}, "train.bta"),
        ("dpo/full", {"overrides": {"train.beta": "much"}}, "train.beta"),
        ("dpo/full", {"overrides": {"evaluate.judge": "me"}}, "evaluate.judge"),
        ("dpo/full", {"recipe": "nope"}, "nope"),
        ("dpo/full", {"name": "../away"}, "../away"),
        ("dpo/full", {"name": "a.lock"}, "a.lock"),
        ("sweep/grid", {"name": "a..b"}, "a..b"),
        ("rounds/on-policy", {"name": "a" * 300}, "a" * 300),
        *((name, {"nmae": "x"}, "nmae") for name in DEPLOYED),
    ):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            up.start(deployment, **parameters)
        assert refusal.value.code in (409, 422)
        assert named in refusal.value.read().decode()
    with pytest.raises(urllib.error.HTTPError) as refusal:
        up.api(f"deployments/{full['id']}/create_flow_run", {"job_variables": {"command": "id"}})
    assert "'command' was unexpected" in refusal.value.read().decode()
    assert up.api("flow_runs/count", {}) == 0


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [{"recipe": "../../x"}, {"name": "a..b"}, {"nmae": "x"}])
def test_no_schedule_holds_invalid_parameters(parameters: dict[str, Any], up: Up) -> None:
    nightly = up.api("deployments/name/dpo/nightly")
    deployment, (before,) = f"deployments/{nightly['id']}", nightly["schedules"]
    invalid = {"schedule": before["schedule"], "active": False, "parameters": parameters}
    for method, path, body in (
        ("POST", f"{deployment}/schedules", [invalid]),
        ("PATCH", f"{deployment}/schedules/{before['id']}", invalid),
        ("PATCH", deployment, {"schedules": [{**invalid, "slug": "other"}]}),
        ("PATCH", deployment, {"schedules": [{**invalid, "slug": before["slug"]}]}),
    ):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            up.api(path, body, method=method)
        assert refusal.value.code == 409
        assert next(iter(parameters)) in refusal.value.read().decode()
    assert up.api(deployment)["schedules"] == [before]
    (made,) = up.api(f"{deployment}/schedules", [{**invalid, "parameters": {"recipe": "demo"}}])
    up.api(f"{deployment}/schedules/{made['id']}", method="DELETE")
    grid = f"deployments/{up.api('deployments/name/sweep/grid')['id']}"
    up.api(grid, {"schedules": [{**invalid, "parameters": {"seed": 1}}]}, method="PATCH")
    up.api(grid, {"schedules": []}, method="PATCH")
    assert up.api(grid)["schedules"] == []


@pytest.fixture(scope="module")
def zombie(up: Up) -> str:
    """A run that sent one heartbeat and then nothing."""
    full = up.api("deployments/name/dpo/full")
    body = {"flow_id": full["flow_id"], "deployment_id": full["id"], "state": {"type": "RUNNING"}, "name": "zombie"}
    run = str(up.api("flow_runs/", body)["id"])
    related = [
        {"prefect.resource.id": f"prefect.flow.{full['flow_id']}", "prefect.resource.role": "flow"}
        | {"prefect.resource.name": "dpo"}
    ]
    heartbeat = {"event": "prefect.flow-run.heartbeat", "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"}}
    moment = {"occurred": datetime.now(UTC).isoformat(), "id": str(uuid.uuid4())}
    up.api("events", [heartbeat | {"related": related} | moment])
    return run


@pytest.mark.slow
@pytest.mark.parametrize("pages", ["", pytest.param("/v2", marks=pytest.mark.exhaustive)])
def test_a_form_posts_only_changed_fields(pages: str, up: Up, zombie: str, tmp_path: Path) -> None:
    """In real Chromium, one of Prefect's UIs: Submit on the form of dpo/full with one boolean chosen.

    The zombie is silent from now on.
    """
    deployment, address = up.api("deployments/name/dpo/full")["id"], up.record("prefect")["address"]
    with paused_pool(up), browser(tmp_path / "profile") as page:  # we look at what is posted, nothing runs
        page.open(address)
        page.until("document.readyState", "complete")
        page.evaluate(f"localStorage.setItem('prefect-password', btoa({json.dumps(up.login('prefect/admin'))}))")
        form = f"{address}{pages}/deployments/deployment/{deployment}/run"
        posted = submitted(up, page, form, choose="false")
    untouched = {"recipe": "none", "name": "", "resume": "", "only_if_new": False, "registered": True}
    assert posted == {**untouched, "overrides": {"prepare.apply_loss_mask": False}}


@contextmanager
def paused_pool(up: Up) -> Iterator[None]:
    """The worker takes no run."""
    up.api("work_pools/dpo", {"is_paused": True}, method="PATCH")
    try:
        yield
    finally:
        up.api("work_pools/dpo", {"is_paused": False}, method="PATCH")


@pytest.mark.slow
def test_follow_starts_a_run_of_a_deployment_and_shows_how_it_ends(up: Up) -> None:
    """The run is cancelled before the worker takes it."""
    options = ["--recipe", "demo", "--set", "train.beta=0.2", "--name", "in-vain"]
    with paused_pool(up), following(up, "dpo/full", *options) as shown:
        name, _, page = shown.stdout.readline().rstrip().partition(": ")
        run = page.rpartition("/")[2]
        up.api(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLED", "name": "Cancelled"}, "force": True})
        rest, _ = shown.communicate(timeout=PATIENCE)
    assert shown.returncode == 1
    assert f"{name}: Cancelled" in rest
    parameters = {"recipe": "demo", "name": "in-vain", "overrides": {"train.beta": 0.2}}
    assert up.api(f"flow_runs/{run}")["parameters"] == parameters


def submitted(up: Up, page: Page, form: str, choose: str) -> dict[str, Any]:
    """The parameters of the run that the form makes, with this value chosen for prepare.apply_loss_mask."""
    page.open(form)
    page.shows("train.beta", "When deployed: true")
    field = (
        "(() => { let e = [...document.querySelectorAll('label')].find(e => e.innerText.includes('apply_loss_mask'));"
        " while (e && !e.querySelector('fieldset')) e = e.parentElement; return e?.querySelector('fieldset') })()"
    )
    if page.evaluate(f"!!{field}.querySelector('select')"):  # V1 in a browser without a mouse
        set_value = f"e.value = '{choose}'; e.dispatchEvent(new Event('change', {{bubbles: true}}))"
        page.evaluate(f"(() => {{ const e = {field}.querySelector('select'); {set_value} }})()")
    else:
        option = f"[...document.querySelectorAll('[role=option]')].find(e => e.innerText.trim() === '{choose}')"
        opened = "if (menu && menu.ariaExpanded !== 'true') menu.click()"
        page.until(f"(() => {{ const menu = {field}?.querySelector('button'); {opened}; return !!{option} }})()", True)
        page.evaluate(f"{option}.click()")
        page.until("document.querySelectorAll('[role=option]').length", 0)  # the menu closes on a choice
    known = {run["id"] for run in up.api("flow_runs/filter", {})}
    page.click("Submit")
    made: list[dict[str, Any]] = []
    wait_for(lambda: made.extend(r for r in up.api("flow_runs/filter", {}) if r["id"] not in known) or made, PATIENCE)
    up.api(f"flow_runs/{made[0]['id']}", method="DELETE")
    return dict(made[0]["parameters"])


@pytest.mark.slow
def test_a_second_up_changes_nothing(up: Up) -> None:
    before = up.pids(), [up.api(f"deployments/name/{name}")["updated"] for name in DEPLOYED]
    automations = up.api("automations/filter", {})
    output = up.dpo("up")
    assert output.count(": running since ") == 4
    assert up.login("prefect/admin") not in output
    assert (
        "Deployments unchanged: dpo/full, dpo/smoke, dpo/nightly, sweep/grid, rounds/on-policy\nAutomations unchanged\n"
        in output
    )
    assert f"Prefect  {up.record('prefect')['address']} " in output
    assert (up.pids(), [up.api(f"deployments/name/{name}")["updated"] for name in DEPLOYED]) == before
    assert up.api("automations/filter", {}) == automations
    assert len(automations) == 4
    assert "secret-path" not in output


@pytest.mark.slow
def test_killed_services_are_restarted_a_switched_schedule_stays_and_no_run_outlives_its_worker(
    up: Up, bystander: psutil.Popen
) -> None:
    """The file of a killed service names an id that another process has now."""
    up.forks_runs.unlink()
    _, family = hanging(up, "orphaned", "train:sleep", beta=0.8)
    before, page = up.pids(), up.record("mlflow")["address"]
    assert psutil.Process(before["mlflow"]).children()  # outlive it, and hold its port
    nightly = up.api("deployments/name/dpo/nightly")
    schedule = f"deployments/{nightly['id']}/schedules/{nightly['schedules'][0]['id']}"
    up.api(schedule, {"active": True}, method="PATCH")
    for name in ("worker", "mlflow"):
        os.kill(before[name], signal.SIGKILL)
    stale = up.root / ".services" / "mlflow.json"
    stale.write_text(json.dumps(up.record("mlflow") | {"pid": bystander.pid}))
    with (up.root / "infra" / "prefect.yaml").open("a") as file:
        file.write("# changed, so that it is deployed anew\n")
    wait_for(lambda: not any(map(is_alive, family)), 60)
    output = up.dpo("up")
    after = up.pids()
    assert after["prefect"] == before["prefect"]
    assert not {after["worker"], after["mlflow"]} & {before["worker"], before["mlflow"], bystander.pid}
    assert up.record("mlflow")["address"] == page
    assert output.count(": running since ") == 2
    assert "Deployments deployed: " in output
    assert up.api("deployments/name/dpo/nightly")["schedules"][0]["active"]
    assert bystander.is_running()
    up.forks_runs.touch()


@pytest.fixture(scope="module")
def nightly(up: Up) -> dict[str, Any]:
    """The nightly deployment as shipped; from now on its model becomes champion."""
    up.misbehave("promote:win", usual_beta(up))
    return dict(up.api("deployments/name/dpo/nightly"))


def start_by_schedule(up: Up, nightly: dict[str, Any]) -> None:
    """Sets the schedule to three runs a minute until one has started, then switches it off.

    Again and again: Prefect's scheduler may insert, after our change, runs of the schedule that it had read before, and
    then it plans no others. It looks every few seconds for deployments that were changed, and every minute for all.
    """
    since = -math.inf

    def is_started() -> bool:
        nonlocal since
        soon = (datetime.now(UTC) + timedelta(minutes=2)).isoformat()
        planned = [run for run in nights(up, nightly, "SCHEDULED") if run["expected_start_time"] < soon]
        if not planned and time.monotonic() > since + 6:
            set_schedule(up, nightly, active=True, cron="* * * * * */20")  # the sixth field is the second
            up.api(f"deployments/{nightly['id']}", {"paused": False}, method="PATCH")  # a change, though it was not
            since = time.monotonic()
        return bool(nights(up, nightly, "PENDING", "RUNNING", "COMPLETED"))

    wait_for(is_started, PATIENCE)
    assert re.search(r"nightly: \* \* \* \* \* \*/20 \(Asia/Tokyo\), on, next 20\d\d-\d\d-", up.dpo("status"))
    set_schedule(up, nightly, active=False)  # one night is enough


def usual_beta(up: Up) -> float:
    return float(yaml.safe_load((up.root / "params.yaml").read_text())["train"]["beta"])


def nights(up: Up, nightly: dict[str, Any], *states: str) -> list[dict[str, Any]]:
    """The runs of the schedule in one of these states, oldest first."""
    of_nightly = {"deployments": {"id": {"any_": [nightly["id"]]}}, "sort": "START_TIME_ASC"}
    return [run for run in up.api("flow_runs/filter", of_nightly) if run["state_type"] in states]


def set_schedule(up: Up, nightly: dict[str, Any], active: bool, **changes: str) -> None:
    shipped = nightly["schedules"][0]
    body = {"active": active, "schedule": shipped["schedule"] | changes}
    up.api(f"deployments/{nightly['id']}/schedules/{shipped['id']}", body, method="PATCH")


@pytest.mark.slow
def test_the_webhook_is_notified_how_runs_on_the_worker_ended(
    up: Up, zombie: str, nightly: dict[str, Any], tmp_path: Path
) -> None:
    """A run that fails requests its own command, folder and environment, without effect."""

    def outcomes() -> list[str]:
        """Without that of the run whose worker was killed."""
        return [text for text in up.notifications if "The run orphaned " not in text]

    mark, smoke = tmp_path / "owned", up.api("deployments/name/dpo/smoke")
    hostile = {
        "command": f"touch {mark}",
        "working_dir": str(tmp_path),
        "env": {"PATH": str(tmp_path), "DUMMY": "train:crash"},
    }
    request = {"flow_id": smoke["flow_id"], "deployment_id": smoke["id"], "work_pool_name": "dpo"}
    request |= {
        "job_variables": hostile,
        "state": {"type": "SCHEDULED"},
        "parameters": up.misbehave("train:user", 0.6),
    }
    lost = str(up.api("flow_runs/", request)["id"])  # unlike create_flow_run, it checks no job variables
    start_by_schedule(up, nightly)
    wait_for(lambda: up.state(lost) == "FAILED" and nights(up, nightly, "COMPLETED"), PATIENCE)
    won = nights(up, nightly, "COMPLETED")[0]["id"]
    assert not mark.exists()
    wait_for(lambda: up.state(zombie) == "CRASHED", PATIENCE)
    wait_for(lambda: len(outcomes()) >= 3, 60)
    page = up.record("prefect")["address"]
    champion, failed, dead = (
        next(text for text in outcomes() if word in text) for word in ("is now", "Failed", "Crashed")
    )
    gained = "it passed the gate, against version 6: kind +0.02; other data"
    (name,) = re.findall(rf"^dpo-demo version 7 is now champion: {re.escape(gained)}\. Run (\S+)\. http", champion)
    assert name.endswith(won[:8])
    assert f"{up.record('mlflow')['address']}/#/experiments/" in champion
    assert champion.endswith(f"{page}/runs/flow-run/{won}")
    assert "is Failed." in failed
    assert "pairs.jsonl line 3 is broken" in failed
    assert failed.endswith(f"{page}/runs/flow-run/{lost}")
    assert dead.startswith("The run zombie of dpo is Crashed. Its process sent no heartbeat")
    assert len(outcomes()) == 3, "\n".join(outcomes())  # each once
    beats = {
        "filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": [f"prefect.flow-run.{won}"]}}
    }
    assert up.api("events/filter", beats)["total"] >= 1
    shown = following(up, "--run", lost)  # from the login of prefect.toml alone
    output, _ = shown.communicate(timeout=PATIENCE)
    assert shown.returncode == 1
    assert "train: 1/2 steps, eta 0:01\na word before\n" in output
    assert re.search(r": Failed after \d+ s\. UserError: pairs.jsonl line 3 is broken\.\nMend it\.\n$", output)


@pytest.mark.slow
def test_a_schedule_starts_runs_and_missed_ones_do_not_accumulate(up: Up, nightly: dict[str, Any]) -> None:
    night = nights(up, nightly, "COMPLETED")[0]
    assert night["auto_scheduled"]
    assert night["parameters"] == {"only_if_new": True}
    wait_for(lambda: not nights(up, nightly, "PENDING", "RUNNING"), PATIENCE)
    pids = up.root / ".scratch" / "pids"
    pids.unlink(missing_ok=True)
    # One of these goes on, and hangs in its train stage; the next test cancels it.
    missed = [up.start("dpo/nightly", "train:sleep", 0.7, name="cancelled") for _ in range(3)]
    wait_for(lambda: sorted(map(up.state, missed)) == ["CANCELLED", "CANCELLED", "RUNNING"], PATIENCE)


@pytest.mark.slow
def test_a_cancelled_run_ends_with_all_its_processes_even_if_its_worker_does_not_react(
    up: Up, nightly: dict[str, Any]
) -> None:
    """As after an outage that lost the cancellation: the worker is suspended."""
    (run,) = [night["id"] for night in nights(up, nightly, "RUNNING")]
    family = processes_of_hanging(up, 2)
    assert (up.root / ".scratch/worktrees/cancelled/data/source").exists()  # a worktree of its own
    assert not (up.root / "data").exists()
    with following(up, "--run", "cancelled") as shown:
        lines = iter(shown.stdout.readline, "")
        assert any(line == "train: 1/2 steps, eta 0:01\n" for line in lines)
        shown.send_signal(signal.SIGINT)
        rest = "".join(lines)
    assert shown.returncode == 130
    assert "The run cancelled continues. `dpo follow --run cancelled` " in rest
    assert f"`prefect flow-run cancel {run}` cancels it.\n" in rest
    assert all(map(is_alive, family))
    worker = psutil.Process(up.pids()["worker"])
    worker.suspend()
    try:
        cancel(up, run)
        wait_for(lambda: up.state(run) == "CANCELLED", PATIENCE)
        wait_for(lambda: not any(map(is_alive, family)), PATIENCE)
    finally:
        worker.resume()
    assert json.loads((up.root / ".scratch/runs/cancelled/record.json").read_text())["state"] == "stopped"
    assert "Cancelled in Prefect" in up.api(f"flow_runs/{run}")["state"]["message"]
    tasks = up.api("task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    assert not [task for task in tasks if task["name"] in ("evaluate", "promote")]


@pytest.mark.slow
@pytest.mark.exhaustive  # the test before this one cancels a run, too, and Prefect's worker does nothing for it
def test_a_run_that_its_worker_cancels_ends_with_all_its_processes(up: Up) -> None:
    run, family = hanging(up, "cancelled-by-worker", "train:sessions", beta=0.85)
    cancel(up, run)
    wait_for(lambda: not any(map(is_alive, family)), 30)
    wait_for(lambda: up.state(run) == "CANCELLED", 60)
    record = json.loads((up.root / ".scratch/runs/cancelled-by-worker/record.json").read_text())
    assert record["state"] == "stopped"


@pytest.mark.slow
def test_dpo_run_uses_the_same_server_and_status_shows_all(up: Up) -> None:
    """Its model is refused, of which the webhook is notified, too."""
    up.misbehave("", usual_beta(up))
    output = up.dpo("run")
    page = up.record("prefect")["address"]
    assert output.startswith(f"Using the Prefect server at {page}\n")
    shown = up.dpo("status")
    for name, pid in up.pids().items():
        assert re.search(rf"{stack.TITLES[name]} +running since [-\d]+ [:\d]+, process {pid}", shown)
    assert "nightly: 0 2 * * * (Asia/Tokyo), off" in shown
    by_hand = re.search(rf"Completed +by hand +(\S+) +[1-9]\d* s  {page}/runs/flow-run/", shown)
    assert f"{by_hand[1]} " in up.dpo("runs")  # one name for a run, wherever it is shown
    assert re.search(r"Cancelled +nightly ", shown)
    refused = f"dpo-demo version 7 is not promoted: rewards/accuracies is 0.5, below <0.9>. Run {by_hand[1]}. http"
    wait_for(lambda: any(text.startswith(refused) for text in up.notifications), PATIENCE)


@pytest.mark.slow
def test_prometheus_finds_every_metric_of_the_dashboard(up: Up, trained: Path) -> None:
    """With the truncated journal of a real training, and a champion from a run of this stack."""
    (whole,) = trained.glob(".scratch/runs/*/train.jsonl")
    lines, _ = read_journal(whole)  # with the steps of the training's own journal
    start = next(number for number, line in enumerate(lines) if line["kind"] == "start")
    steps = [number for number, line in enumerate(lines) if line["kind"] == "metrics" and "loss" in line["values"]]
    cut = steps[len(steps) // 2]
    lines[start] |= this_process()
    folder = up.root / ".scratch" / "runs" / "cut"
    folder.mkdir()
    shutil.copy(whole.with_name("settings.json"), folder)
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[: cut + 1]))
    model = make_champion(up)
    address, login = up.record("metrics")["address"], up.login("mlflow/reader")
    text = scrape(address, login)
    shutil.rmtree(folder)
    samples = scraped(text)
    assert set(samples["dpo_source_up"].values()) == {1}
    needs_gpu = {"dpo_train_mfu"}
    assert not {name for name in named_in_infra() - needs_gpu if not samples.get(name)}
    assert samples["dpo_flow_runs"]["completed",] >= 1
    total = samples["dpo_stage_total"]["cut", "train", "steps"]
    assert (
        0 < samples["dpo_stage_done"]["cut", "train", "steps"] == lines[cut]["step"] < total == lines[steps[-1]]["step"]
    )
    assert samples["dpo_train_pairs_per_second"]["cut",] > 0
    assert samples["dpo_champion_version"][model] == 1
    assert samples["dpo_champion_metric"]["samples/policy/kind", model[0], "1"] == 0.97
    assert not [word for word in up.passwords() if word in text]
    prefect = f"{up.record('prefect')['address']}/api/metrics"
    assert "process_cpu_seconds_total" in scrape(prefect, up.login("prefect/admin"))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        scrape(prefect, "admin:guess")


def make_champion(up: Up) -> tuple[str, str]:
    """Register the newest pipeline run, as `promote` does. Returns the names of model and run."""
    api, writer = f"{up.record('mlflow')['address']}/api/2.0/mlflow", up.login("mlflow/writer")

    def call(path: str, **body: Any) -> dict[str, Any]:
        with up.request(f"{api}/{path}", body, writer) as answer:
            return dict(json.loads(answer.read()))

    evaluated = "metrics.`samples/policy/kind` > 0"
    with up.request(f"{api}/experiments/get-by-name?experiment_name=dpo", None, writer) as answer:
        place = json.loads(answer.read())["experiment"]["experiment_id"]
    (run,) = call("runs/search", experiment_ids=[place], filter=evaluated, max_results=1)["runs"]
    name, model = run["info"]["run_name"], "dpo-demo"
    call("registered-models/create", name=model)
    source = f"{run['info']['artifact_uri']}/model"
    tags = [{"key": "run", "value": name}]
    call("model-versions/create", name=model, source=source, run_id=run["info"]["run_id"], tags=tags)
    call("registered-models/alias", name=model, alias="champion", version="1")
    return model, name


@pytest.mark.slow
def test_down_stops_all_that_up_started_and_nothing_else(up: Up, bystander: psutil.Popen) -> None:
    """An active run is recorded as crashed, and the webhook is notified before the server stops."""
    up.forks_runs.unlink()
    run, family = hanging(up, "cut-off", "train:sleep", beta=0.9)
    assert re.search(r"Running +full +cut-off +[1-9]\d* s ", up.dpo("status"))
    ours = [psutil.Process(pid) for pid in up.pids().values()]
    ours += [below for process in ours for below in process.children(recursive=True)]
    assert up.dpo("down").count(": stopped\n") == 4
    (notification,) = [text for text in up.notifications if text.endswith(run)]
    assert "is Crashed. `dpo down` stopped the worker that ran it." in notification
    assert not [process for process in ours if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not any(map(is_alive, family))
    assert bystander.is_running()
    assert not list((up.root / ".services").glob("*.json"))
    assert not (up.root / "prefect.toml").exists()
    assert "database is locked" not in (up.root / ".services" / "prefect.log").read_text()
    assert up.dpo("status").count("not running") == 4
    assert up.dpo("down").count(": was not running\n") == 4
