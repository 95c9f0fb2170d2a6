"""`make doctor` says whether the machine is ready and the run fits, before hours are spent."""

from pathlib import Path

import pytest

from tasks import doctor
from tests.workspaces import make_workspace


@pytest.fixture
def workspace(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = make_workspace(tmp_path / "workspace", tiny_base)
    monkeypatch.chdir(root)
    return root


def test_a_good_workspace_is_told_what_training_needs(workspace, capsys):
    doctor.look(None)
    said = capsys.readouterr().out
    assert "ok     params.yaml and infra/cluster.yaml are good" in said
    assert "ok     train needs about 1.0 GiB" in said
    assert "on each of 2 workers" in said


def test_what_cannot_fit_is_wrong_with_the_setting_to_change(workspace, capsys):
    text = (workspace / "infra/cluster.yaml").read_text()
    (workspace / "infra/cluster.yaml").write_text(text.replace("row_tokens: 256", "row_tokens: 900000000"))
    assert doctor.look(None) == 1
    said = capsys.readouterr().out
    assert "more than this machine's memory: lower actor_train in infra/cluster.yaml row_tokens" in said


def test_a_typo_is_one_line(workspace, capsys):
    text = (workspace / "params.yaml").read_text()
    (workspace / "params.yaml").write_text(text.replace("  beta:", "  bta:"))
    assert doctor.look(None) == 1
    assert "WRONG  params.yaml: `train.bta` is not a key of ours. Did you mean `beta`?" in capsys.readouterr().out


def test_packages_that_are_not_as_locked_are_named(tmp_path, capsys):
    lock = tmp_path / "requirements.lock"
    lock.write_text("pytest==0.1\nno-such-package==1.0\n")
    found = doctor.Findings()
    doctor.packages(found, lock)
    assert found.bad == 1
    assert "no-such-package is missing (locked: 1.0)" in capsys.readouterr().out
