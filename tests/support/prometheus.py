"""Scrape the metrics endpoint, and list the metrics that the dashboard and the alerts use."""

import base64
import re
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.support.workspaces import PROJECT

Samples = dict[str, dict[tuple[str, ...], float]]


def scraped(text: str) -> Samples:
    """Values by metric name, then by label values in the order of the label names."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        samples[family.name] = {tuple(sample.labels.values()): sample.value for sample in family.samples}
    return samples


def scrape(address: str, login: str) -> str:
    headers = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as response:
        return str(response.read().decode())


def named_in_infra() -> set[str]:
    """Metrics that the dashboard and the alerts query."""
    texts = [PROJECT / "infra" / name for name in ("grafana/dpo.json", "prometheus/alerts.yaml")]
    return {name for path in texts for name in re.findall(r"\bdpo_\w+", path.read_text())}
