"""The model card: a Jinja2 template that escapes foreign text, shows what was exported, and refuses a missing value."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import UndefinedError

from tasks.config.params import Params, load_params
from tasks.export.card import TEMPLATE, model_card
from tests.support.workspaces import PROJECT

REPORT = {"pairs": {"train": 10, "eval": 2}, "tokens": {"prompt": {"mean": 12.5}, "chosen": {"mean": 3}}}


def manifest(**changes: Any) -> dict[str, Any]:
    content = {
        "model": "dpo-demo",
        "data": {"source": "pairs | <b>.jsonl", "sha256": "d" * 64, "rows": 12},
        "base": {"model": "demo", "sha256": "b" * 64},
        "licences": {"base": "apache-2.0", "data": None},
        "metrics": {"rewards/accuracies": 0.5, "intervals": {"rewards/accuracies": {"low": 0.25, "high": 0.75}}},
        "checks": {"largest_logit_difference": 0.0},
        "made": {"commit": "c" * 40, "clean": True, "packages": {"torch": "2", "peft": "1"}},
    }
    return {**content, **changes}


def card(left_out: dict[str, int] | None = None, gguf: list[str] | None = None, **changes: Any) -> str:
    params: Params = load_params(PROJECT / "params.yaml")
    params = params.model_copy(update={"export": params.export.model_copy(update={"gguf": gguf or []})})
    return model_card(params, manifest(**changes), {**REPORT, "left_out": left_out or {}})


def test_the_card_shows_metrics_data_and_licences():
    text = card(left_out={"duplicate": 3, "too_long": 1})
    header = yaml.safe_load(text.split("---\n")[1])
    assert (header["base_model"], header["license"]) == ("demo", "apache-2.0")
    for line in (
        "| prefers the chosen answer | 0.5 (0.25 to 0.75) |",
        r"| source | pairs \| \<b\>.jsonl (12 rows, sha256 `dddddddddddddddd`) |",
        "| left out | 3 duplicate, 1 too_long |",
        "| tokens (mean) | prompt 12.5, chosen 3 |",
        "| environment | torch 2, peft 1 |",
        "- data: not stated in its files; look where it came from",
    ):
        assert line in text.splitlines(), line
    assert "ollama" not in text
    assert "\n\n\n\n" not in text


def test_an_export_with_gguf_files_names_the_commands_that_serve_them():
    text = card(gguf=["f16", "q8_0"])
    assert "| left out | nothing |" in text
    assert "ollama create dpo-demo -f data/model/Modelfile && ollama run dpo-demo\n" in text
    assert "llama-server -m data/model/model-f16.gguf\n```\n" in text


def test_after_qlora_the_card_says_that_another_model_was_measured():
    checks = {
        "largest_logit_difference": 0.0,
        "quantized_policy": {"kl": 0.0123, "same_next_token": 0.987},
        "prompts": 8,
    }
    assert (
        "KL of their next-token distributions is 0.0123 nats, and the most likely next token is the same at 98.7% of"
        in (card(checks=checks))
    )


def test_a_value_that_the_manifest_lacks_is_an_error_and_not_a_gap():
    with pytest.raises(UndefinedError, match="commit"):
        card(made={"clean": True, "packages": {}})


def test_dvc_exports_again_when_the_template_changes():
    deps = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["stages"]["export"]["deps"]
    assert "tasks/export" in deps
    assert (Path(PROJECT) / "tasks" / "export" / TEMPLATE).exists()


def test_the_card_says_what_was_done_before_dpo():
    assert "demo aligned with preference data" in card()
    assert "demo, fine-tuned on 80 answers and aligned with preference data" in card(sft={"answers": 80})
