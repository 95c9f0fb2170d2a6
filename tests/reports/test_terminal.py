"""The last lines of a run in the terminal."""

import re
from pathlib import Path

import pytest

from tasks.config.paths import METRICS
from tasks.reports import terminal
from tasks.system.files import write_json
from tests.support.workspaces import make_workspace

DECISION = {"model": "polite", "version": "2", "alias": "champion", "promoted": True, "waiting": False, "reasons": []}


def test_a_result_has_its_number_of_pairs_and_the_command_to_talk_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a run in a worktree: data/metrics is here, the weights are in the registry."""
    monkeypatch.chdir(make_workspace(tmp_path / "workspace", Path("unused")))
    METRICS.mkdir(parents=True)
    bounds = {"rewards/accuracies": {"low": 0.8, "high": 0.91}}
    metrics = {"rewards/accuracies": 0.86, "rewards/margins": 0.6, "pairs": 179.0, "intervals": bounds}
    write_json(METRICS / "evaluate.json", metrics)
    (METRICS / "samples.jsonl").write_text("")
    terminal.main()
    output = capsys.readouterr().out
    assert re.search(r"prefers the chosen answer, 179 pairs .* 86\.0% \(80\.0% to 91\.0%\)", output)
    assert "dpo chat" not in output  # not registered
    write_json(METRICS / "promote.json", DECISION)
    terminal.main()
    assert "chat       dpo chat polite/2\n" in capsys.readouterr().out


def test_unpaired_rows_are_no_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_workspace(tmp_path / "workspace", Path("unused")))
    write_json(METRICS / "evaluate.json", {"rewards/accuracies": 0.86, "rewards/auc": 0.9, "pairs": 179.0})
    terminal.main()
    assert "rates the answer as its label, 179 rows " in capsys.readouterr().out
