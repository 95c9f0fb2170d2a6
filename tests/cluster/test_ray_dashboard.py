"""Ray's dashboard, which the Ray head of compose, Kubernetes and systemd starts: its routes need Ray's token."""

import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.system import processes
from tasks.system.ports import free_port
from tests.support.fork_server import fresh
from tests.support.workspaces import PROJECT, environment, wait_for

pytestmark = pytest.mark.slow
TOKEN = "a-token-of-the-tests"
# The page asks for the token.
FREE = {("GET", path) for path in ("/", "/favicon.ico", "/api/authentication_mode", "/api/gcs_healthz")}
ENUMERATE = """
import json
import ray.dashboard.http_server_head
from ray.dashboard import optional_utils, utils
from ray.dashboard.subprocesses.module import SubprocessModule
from ray.dashboard.subprocesses.routes import SubprocessRouteTable

for kind in (utils.DashboardHeadModule, SubprocessModule):
    utils.get_all_modules(kind)
tables = (optional_utils.DashboardHeadRouteTable, SubprocessRouteTable)
routes = [route for table in tables for route in table.routes() if hasattr(route, "method")]
print(json.dumps([(route.method, route.path) for route in routes]))
"""


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """Of `ray start --head` with token authentication, in an environment that infra/compose.yaml gives it."""
    port, page = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="dpo-r-") as folder:  # short: Ray's socket names have a length limit
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "0"]
        command += ["--port", str(port), "--node-ip-address", "127.0.0.1", "--temp-dir", f"{folder}/ray"]
        command += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(page)]
        env = {**fresh(environment()), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        with (Path(folder) / "log").open("w") as log, processes.spawn(command, Path(folder), env, log):
            address = f"http://127.0.0.1:{page}"
            wait_for(lambda: status(address, "GET", "/api/authentication_mode") == 200, 120)
            yield address


def status(address: str, method: str, path: str, **headers: str) -> int:
    request = urllib.request.Request(f"{address}{path}", None if method == "GET" else b"{}", headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_every_route_that_is_not_listed_needs_the_token(dashboard: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENUMERATE], cwd=PROJECT, env=fresh(environment()), capture_output=True, text=True
    )
    mounted = {(method, path) for method, path in json.loads(done.stdout.splitlines()[-1])}
    assert {("POST", "/api/jobs/"), ("PUT", "/api/packages/{protocol}/{package_name}")} <= mounted
    wrong = []
    for method, path in sorted(mounted):
        sample = re.sub(r"\{[^}]+\}", "x", path)
        expected = {200, 404} if (method, path) in FREE else {401, 403}
        for headers in ({}, {"Authorization": "Bearer guess"}, {"Cookie": "ray-authentication-token=guess"}):
            if (code := status(dashboard, method, sample, **headers)) not in expected:
                wrong.append((method, sample, headers, code))
    assert wrong == []
    assert mounted > FREE
    for spelling in ("//api/jobs/", "/static/../api/jobs/", "/static/%2e%2e/api/jobs/", "/API/JOBS/", "/api//jobs/"):
        assert status(dashboard, "GET", spelling) in (401, 403, 404), spelling
    assert status(dashboard, "GET", "/api/jobs/", Authorization=f"Bearer {TOKEN}") == 200
