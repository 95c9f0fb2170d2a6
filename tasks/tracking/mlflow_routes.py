"""What each login may do on MLflow's server: the routes it may call, and with which method. Nothing else is served.

A line has a method, a path, and the ends of paths that share its beginning. A path that does not begin with `/` exists
twice, below `/api/` for clients and below `/ajax-api/` for pages. Placeholders are written as MLflow writes them.
tests/tracking/test_mlflow_routes.py compares these lists with what the installed MLflow mounts.
"""

OPEN = """
GET  /health
HEAD /health
"""

# Runs, metrics, artifacts, registered models and traces with their feedback.
READ = """
GET   /
GET   / static-files/<path:path> get-artifact model-versions/get-artifact version
POST  /graphql
GET   3.0/mlflow/server-info
GET   2.0/mlflow/experiments/ get get-by-name search
POST  2.0/mlflow/experiments/ search
POST  /ajax-api/2.0/mlflow/experiments/ search-datasets
GET   2.0/mlflow/runs/ get
POST  2.0/mlflow/runs/ search
GET   2.0/mlflow/metrics/ get-history get-history-bulk-interval
GET   /ajax-api/2.0/mlflow/metrics/ get-history-bulk
GET   2.0/mlflow/artifacts/list
GET   2.0/mlflow-artifacts/artifacts
GET   2.0/mlflow-artifacts/artifacts/{artifact_path:path}
GET   2.0/mlflow-artifacts/presigned/<path:artifact_path>
GET   2.0/mlflow/registered-models/ get search alias get-latest-versions
POST  2.0/mlflow/registered-models/ get-latest-versions
GET   2.0/mlflow/model-versions/ get get-download-uri search
POST  2.0/mlflow/logged-models/ search
GET   2.0/mlflow/logged-models/ <model_id> <model_id>/artifacts/directories
GET   /ajax-api/2.0/mlflow/logged-models/<model_id>/artifacts/files
GET   3.0/mlflow/traces/ <trace_id> <trace_id>/assessments/<assessment_id> get batchGet
POST  3.0/mlflow/traces/ search batchGetInfos metrics calculate-filter-correlation
GET   /ajax-api/2.0/mlflow/get-trace-artifact
GET   /ajax-api/3.0/mlflow/get-trace-artifact
"""

# What a run logs (tasks/tracking/mlflow_writer.py) and a server collects (tasks/feedback/traces.py).
RECORD = """
POST  2.0/mlflow/experiments/ create set-experiment-tag
POST  2.0/mlflow/runs/ create update log-batch log-inputs set-tag
PUT   2.0/mlflow-artifacts/artifacts/{artifact_path:path}
POST  2.0/mlflow-artifacts/mpu/ create/<path:artifact_path> complete/<path:artifact_path> abort/<path:artifact_path>
POST  3.0/mlflow/traces
POST  3.0/mlflow/traces/<trace_id>/assessments
POST  /v1/traces
"""

# The registry, and what a person changes or deletes.
CHANGE = """
POST   2.0/mlflow/experiments/ update delete restore delete-experiment-tag
POST   2.0/mlflow/runs/ delete restore delete-tag log-metric log-parameter
DELETE 2.0/mlflow-artifacts/artifacts/<path:artifact_path>
POST   2.0/mlflow/registered-models/ create rename alias set-tag
PATCH  2.0/mlflow/registered-models/ update
DELETE 2.0/mlflow/registered-models/ delete alias delete-tag
POST   2.0/mlflow/model-versions/ create set-tag
PATCH  2.0/mlflow/model-versions/ update
DELETE 2.0/mlflow/model-versions/ delete delete-tag
POST   2.0/mlflow/traces/ delete-traces
POST   3.0/mlflow/traces/ delete-traces
PATCH  3.0/mlflow/traces/<trace_id>/ tags assessments/<assessment_id>
DELETE 3.0/mlflow/traces/<trace_id>/ tags assessments/<assessment_id>
"""

ACCOUNTS = """
GET    /signup
POST   /api/2.0/mlflow/users/create-ui
POST   2.0/mlflow/users/ create
GET    2.0/mlflow/users/ current get list
PATCH  2.0/mlflow/users/ update-admin update-password
DELETE 2.0/mlflow/users/ delete
GET    3.0/mlflow/users/ current/permissions permissions/get permissions/list roles/list
POST   3.0/mlflow/users/permissions/ grant revoke
GET    3.0/mlflow/roles/ get list permissions/list users/list
POST   3.0/mlflow/roles/ create assign permissions/add
PATCH  3.0/mlflow/roles/ update permissions/update
DELETE 3.0/mlflow/roles/ delete unassign permissions/remove
POST   2.0/mlflow/webhooks
GET    2.0/mlflow/webhooks
GET    2.0/mlflow/webhooks/<webhook_id>
PATCH  2.0/mlflow/webhooks/<webhook_id>
DELETE 2.0/mlflow/webhooks/<webhook_id>
POST   2.0/mlflow/webhooks/<webhook_id>/test
"""

Route = tuple[str, str]  # method and path

# The list of runs asks for the models of a gateway, and would show an error on every visit.
EMPTY = {("GET", "/ajax-api/2.0/mlflow/gateway-proxy"): {"endpoints": list[str]()}}


def routes(*tables: str) -> frozenset[Route]:
    found = set()
    for line in filter(None, "\n".join(tables).splitlines()):
        method, path, *ends = line.split()
        for begin in [path] if path.startswith("/") else [f"/api/{path}", f"/ajax-api/{path}"]:
            names = [begin + end for end in ends] or [begin]
            found |= {(method, name) for name in names}
    return frozenset(found)


ALLOWED = {
    "reader": routes(READ),
    "forwarder": routes(READ, RECORD),
    "writer": routes(READ, RECORD, CHANGE),
    "admin": routes(READ, RECORD, CHANGE, ACCOUNTS),
}
WITHOUT_LOGIN = routes(OPEN)
SERVED = WITHOUT_LOGIN.union(*ALLOWED.values())


def may(user: str, route: Route) -> bool:
    """Users that the admin has added may read."""
    return route in ALLOWED.get(user, ALLOWED["reader"])
