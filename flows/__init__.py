"""WHEN: the only code that imports prefect. Its settings stand here because prefect reads them when it is imported."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SETTINGS = {
    "PREFECT_HOME": str(ROOT / ".prefect"),
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",  # a flow without a server brings its own
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # the first start makes a database
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # flows/terminal.py shows what concerns a person
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; flows/automations.py counts on it
    "DO_NOT_TRACK": "1",
}

for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)
