"""Scrapes of the metrics endpoint, and what the dashboard and the alerts ask Prometheus for."""

import base64
import re
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.workspaces import PROJECT

Samples = dict[str, dict[tuple[str, ...], float]]


def scraped(text: str) -> Samples:
    """Values by name of the metric, then by label values, which are in the order of the labels' names."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        found[family.name] = {tuple(sample.labels.values()): sample.value for sample in family.samples}
    return found


def scrape(address: str, login: str) -> str:
    headers = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
        return str(answer.read().decode())


def named_in_infra() -> set[str]:
    """Metrics in the queries of the dashboard and the alerts."""
    texts = [PROJECT / "infra" / name for name in ("grafana/dpo.json", "prometheus/alerts.yaml")]
    return {name for path in texts for name in re.findall(r"\bdpo_\w+", path.read_text())}
