"""services/prefect_internals.py relies on this version of Prefect: what an upgrade must not change unseen."""

import inspect
import re
import subprocess
import sys

import pytest
from prefect.cli import _server_utils
from prefect.logging import configuration
from prefect.runner import runner
from prefect.runtime import flow_run
from prefect.server.api import clients, deployments, server
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.interface import PrefectDBInterface
from prefect.server.events import clients as event_clients
from prefect.server.models import deployments as stores
from prefect.utilities.schema_tools import ValidationError, validate

from services import prefect_internals
from tests.support.workspaces import PROJECT

ADVICE = "Prefect has changed: read services/prefect_internals.py, and follow the change there"


def source(thing: object) -> str:
    return re.sub(r"\s+", " ", inspect.getsource(thing))  # type: ignore[arg-type]


def names(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_server_makes_its_application_with_create_app_which_a_module_attribute_holds() -> None:
    assert names(server.create_app)[:4] == ["settings", "ephemeral", "webserver_only", "final"], ADVICE
    assert "from prefect.server.api.server import create_app" in source(_server_utils), ADVICE
    assert "app=create_app(final=True, webserver_only=no_services)" in source(_server_utils), ADVICE
    for users in (clients, event_clients):  # Prefect's own services, which pass no gate
        assert "from prefect.server.api.server import create_app" in source(users), ADVICE
        assert re.search(r"\bcreate_app\(\)", source(users)), ADVICE


def test_transactions_of_sqlite_begin_where_we_replace_it() -> None:
    assert names(AioSqliteConfiguration.begin_transaction) == ["self", "session", "with_for_update"], ADVICE
    assert "self.database_config.begin_transaction(" in source(PrefectDBInterface.session_context), ADVICE
    assert "with_for_update" in source(AioSqliteConfiguration.begin_transaction), ADVICE


def test_schedules_are_stored_by_two_functions_that_routes_look_up_in_their_module() -> None:
    """By keywords, as the check reads them."""
    assert {"session", "deployment_id", "schedules"} <= set(names(stores.create_deployment_schedules)), ADVICE
    assert {"session", "deployment_id", "schedule"} <= set(names(stores.update_deployment_schedule)), ADVICE
    assert names(stores.read_deployment)[-2:] == ["session", "deployment_id"], ADVICE
    routes = source(deployments)
    for store in ("create_deployment_schedules", "update_deployment_schedule"):
        calls = re.findall(rf"await (models\.deployments\.)?{store}\( (\w+)=", routes)
        assert calls, ADVICE
        assert set(calls) == {("models.deployments.", "session")}, ADVICE


def test_parameters_are_validated_as_the_server_does() -> None:
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}}
    validate({"count": 1}, schema, raise_on_error=True)
    with pytest.raises(ValidationError):
        validate({"count": "many"}, schema, raise_on_error=True)


def test_variables_of_the_embedded_server_and_of_a_workers_flow() -> None:
    for name in prefect_internals.EMBEDDED:
        assert f'os.getenv("{name}")' in source(server.create_app), ADVICE
    assert f'"{prefect_internals.FLOW_RUN}"' in source(flow_run), ADVICE
    assert prefect_internals.FLOW_RUN in source(runner), ADVICE
    assert prefect_internals.FLOW_RUN.startswith(prefect_internals.OWN_VARIABLES)


def test_logging_is_set_up_once_without_the_server() -> None:
    assert names(configuration.ensure_logging_setup) == []
    code = (
        "import logging; from services import prefect_internals as p; p.set_up_logging(); "
        "log = logging.getLogger('prefect.flow_runs'); handler = logging.NullHandler(); log.addHandler(handler); "
        "p.set_up_logging(); import sys; assert handler in log.handlers; assert 'prefect.server' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)


def test_nothing_else_reaches_into_prefect() -> None:
    """Modules of its server, private modules and variables, outside of the one file that lists them."""
    reaches = re.compile(r"(?m)^\s*(from|import) prefect\.(server|logging\.configuration|runner|[\w.]*\b_)|\"PREFECT__")
    code = [path for folder in ("cli", "flows", "services", "tasks") for path in (PROJECT / folder).rglob("*.py")]
    assert [path.name for path in code if reaches.search(path.read_text())] == ["prefect_internals.py"]
