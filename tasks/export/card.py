"""The model card of an export: model_card.md.jinja, filled from the manifest and the data report."""

import json
import re
from pathlib import Path
from typing import Any

from tasks.artifacts.evaluation import headlines, with_interval
from tasks.artifacts.markup import templates
from tasks.config.params import Params
from tasks.tracking.journal import flatten_metrics

TEMPLATE = "model_card.md.jinja"
NEEDS_YAML_QUOTES = re.compile(r"[^\w./@-]")  # the card's header is YAML
LICENSE_ID = re.compile(r"[\w.+-]+")


def model_card(params: Params, manifest: dict[str, Any], report: dict[str, Any]) -> str:
    base, license_id, metrics = manifest["base"]["model"], manifest["licences"]["base"], manifest["metrics"]
    values = flatten_metrics(metrics)
    template = templates(Path(__file__).parent).get_template(TEMPLATE)
    return template.render(
        params=params,
        manifest=manifest,
        report=report,
        base_model_yaml=json.dumps(base, ensure_ascii=False) if NEEDS_YAML_QUOTES.search(base) else base,
        license_id=license_id if license_id and LICENSE_ID.fullmatch(license_id) else None,
        headlines=[(one.label, with_interval(one.value, one.interval, ".4g")) for one in headlines(values)],
        samples=metrics.get("samples"),
        quantized_policy=manifest["checks"].get("quantized_policy"),
    )
