"""Progress lines of a stage in a log."""

from types import SimpleNamespace

import pytest

from tasks.system import progress
from tasks.system.progress import Bar


def test_an_eta_waits_until_a_second_round_of_parallel_workers(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Two workers deliver 10 pairs each after 100 s, and again after 200 s: 40 of 100 pairs, so 200 to 300 s remain."""
    clock = {"now": 0.0}
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock["now"]))
    with Bar("reference", 100, "pairs") as bar:
        for clock["now"] in (100.0, 103.0, 200.0, 203.0):
            bar.more(10)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["reference: 10/100 pairs", "reference: 20/100 pairs"]
    assert lines[3] == "reference: 40/100 pairs, eta 3:26"  # 103 s for 30 pairs
