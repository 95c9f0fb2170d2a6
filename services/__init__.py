"""Local servers (Prefect, MLflow, worker, metrics endpoint), and the deployments and automations of a Prefect server.

Prefect reads its settings when it is imported, so this file sets them: flows/ imports this package first.
"""

import logging
import os

from tasks.config.paths import ROOT

SETTINGS = {
    "PREFECT_HOME": str(ROOT / ".prefect"),
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",  # without a server, a flow starts its own
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # the first start creates a database
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # flows/terminal.py prints what users need
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; services/automations.py relies on it
    "DO_NOT_TRACK": "1",
}

for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)

for _name in ("EventsWorker", "APILogWorker"):  # at exit they warn on stderr that they are still sending
    logging.getLogger(_name).addFilter(lambda record: not str(record.msg).startswith("Still processing items"))
