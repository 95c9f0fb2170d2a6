"""Promotion with a real MLflow registry and small fake exports: gate, aliases, crashes, approval, rollback."""

import shutil
from dataclasses import replace

import pytest

from tasks.config.cluster import load_cluster
from tasks.config.paths import MODEL
from tasks.errors import UserError
from tasks.promote import outbox
from tasks.promote.champion import approve, rollback
from tasks.promote.sign import print_verification
from tasks.reports.headline import describe_decision
from tasks.reports.summary import RunSummary
from tasks.system.files import hash_files
from tasks.system.processes import boot_id
from tasks.tracking import verify
from tasks.tracking.registry import registry
from tests.support.promotion import NAME, PROMPTS, aliases, export, push_to, run, set_params


def test_without_a_champion_the_absolute_limits_decide_and_an_export_is_registered_once(workspace, capsys):
    export("one")
    decision = run()
    assert (decision["promoted"], decision["version"], decision["champion_before"]) == (True, "1", None)
    assert aliases() == {"champion": "1", "challenger": "1"}
    assert f"promote: {NAME} version 1 is champion" in capsys.readouterr().out
    with registry(load_cluster(), NAME) as model_registry:
        (version,) = model_registry.versions()
        figures, origin = model_registry.client.get_model_version(NAME, "1").description.splitlines()
        assert len(model_registry.client.get_registered_model(NAME).description.splitlines()) == 2
        assert hash_files(model_registry.fetch(version, "model")) == hash_files(MODEL)
        assert set(hash_files(model_registry.fetch(version, "evaluation"))) == {
            "evaluate.json",
            "samples.jsonl",
            "pairs.jsonl",
        }
    assert version.tags["data_sha256"] == "d" * 64
    assert version.tags["commit"] == "c" * 40
    assert figures.strip() == "prefers the chosen answer 0.97, repetition 0.01, length vs. base model 1"
    assert origin.endswith(f"data pairs.jsonl ({'d' * 12}), base demo ({'b' * 12})")
    assert "rewards/accuracies" not in version.tags  # few tags: the metrics are in the description

    assert run()["already"]  # the same export makes no other version
    assert f"promote: {NAME} version 1 is champion" in capsys.readouterr().out
    with registry(load_cluster(), NAME) as model_registry:
        assert len(model_registry.versions()) == 1


def test_a_model_that_fails_the_gate_is_registered_with_reasons_and_not_pushed(workspace, capsys):
    target = push_to(workspace)
    export("one")
    first = run()["manifest_sha256"][:12]
    assert f"promote: copied to file://{target}/{first}" in capsys.readouterr().out
    assert verify.problems(target / first) == []
    assert (target / first / "model.safetensors").read_text() == "one"
    export("two", kind=100)
    decision = run()
    assert not decision["promoted"]
    assert [path.name for path in target.iterdir()] == [first]
    assert aliases() == {"champion": "1", "challenger": "2"}
    output = capsys.readouterr().out
    assert "version 2 is not promoted, because samples/policy/kind is 0.5, below 0.95" in output
    assert "samples/policy/kind against version 1 is -0.5" in output  # and worse than the champion


def test_a_model_within_the_limits_may_fail_against_the_champion(workspace):
    """0.96 is above 0.9. Against 1.0 on the same 200 prompts it is -0.04, and its interval reaches below -0.05."""
    export("one")
    run()
    export("two", correct=192)
    decision = run()
    (reason,) = decision["reasons"]
    assert reason.startswith("samples/policy/correct against version 1 is -0.04 (-0.0")
    assert "its lower end counts and is below -0.05, which needs about " in reason
    assert reason.endswith(" prompts, and there are 200")
    assert decision["comparison"]["samples/policy/correct"]["count"] == PROMPTS


def test_a_better_model_becomes_champion_until_a_rollback_and_then_needs_approval(workspace, monkeypatch, capsys):
    export("one", kind=196)
    first = run()["manifest_sha256"]
    export("two")
    monkeypatch.setenv("DPO_RUN", "calm-otter")
    run()
    monkeypatch.delenv("DPO_RUN")
    (promotion,) = outbox.pending()  # the content of Prefect's event: 196 of 200 answers were kind, and now all are
    assert promotion.run == "calm-otter"
    assert promotion.details.startswith("against version 1: ")
    assert "samples/policy/kind +0.02" in promotion.details
    assert promotion.details.endswith("; the same data")
    assert aliases() == {"champion": "2", "previous": "1", "challenger": "2"}
    text = rollback()
    assert "champion was version 2" in text
    assert f"is version 1 (manifest {first[:12]}) again" in text
    assert aliases() == {"champion": "1", "challenger": "2"}
    with registry(load_cluster(), NAME) as model_registry:
        champion = model_registry.at("champion")
        assert champion is not None
        assert champion.tags["manifest_sha256"] == first
        assert (model_registry.fetch(champion, "model") / "model.safetensors").read_text() == "one"
    with pytest.raises(UserError, match=r"Version 1 is the first champion of .* no earlier one to restore"):
        rollback()

    decision = run()
    assert (decision["promoted"], decision["waiting"]) == (False, True)
    assert "passed the gate but was rolled back on" in capsys.readouterr().out
    assert aliases()["champion"] == "1"
    assert approve("2", "Ada") == f"{NAME} version 2 is now champion, approved by Ada"
    assert aliases() == {"champion": "2", "previous": "1", "challenger": "2"}
    assert approve("2", "Bob") == f"{NAME} version 2 is already champion, approved by Ada"
    with pytest.raises(UserError, match="was not approved: it does not wait for approval"):
        approve("1", "Ada")


def test_with_approval_hours_a_version_that_passes_waits_for_approval(workspace):
    target = push_to(workspace)
    set_params(workspace, "approval_hours: null", "approval_hours: 1.0")
    export("one")
    waiting = run()
    assert waiting["waiting"]
    assert aliases() == {"challenger": "1"}
    assert not target.exists()
    export("two")
    pushed = target / waiting["manifest_sha256"][:12]
    assert approve("1", "Ada").endswith(f"is now champion, approved by Ada; copied to file://{pushed}")
    assert aliases()["champion"] == "1"
    assert verify.problems(pushed) == []
    assert (
        pushed / "model.safetensors"
    ).read_text() == "one"  # the approved version, not the workspace's current export
    run()
    export("three")
    run()
    approve("3", "Ada")
    with pytest.raises(UserError, match="compared with another champion, and now version 3 is champion"):
        approve("2", "Ada")
    with pytest.raises(UserError, match=r"has no version, alias or run 9. Its versions: 1 \(run .*\), 2 .*, 3 "):
        approve("9", "Ada")


def test_the_next_process_completes_an_interrupted_alias_move(workspace, monkeypatch, capsys):
    from mlflow import MlflowClient

    export("one")
    run()
    export("two")
    real = MlflowClient.set_registered_model_alias

    def crash(self, name, alias, version):
        if alias == "champion":
            raise KeyboardInterrupt  # after `previous` has moved
        return real(self, name, alias, version)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", crash)
    with pytest.raises(KeyboardInterrupt):
        run()
    raw = MlflowClient(f"sqlite:///{workspace}/.mlflow/mlflow.db").get_registered_model(NAME).aliases
    assert (str(raw["champion"]), str(raw["previous"])) == ("1", "1")  # half moved
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", real)
    assert aliases() == {"champion": "2", "previous": "1", "challenger": "2"}
    assert "finished a move" in capsys.readouterr().out
    assert run()["already"]


def test_running_the_command_again_completes_a_failed_copy(workspace, capsys, monkeypatch):
    target = push_to(workspace)
    target.write_text("a file where a folder should be")
    export("one")
    with pytest.raises(UserError, match="could not be copied"):
        run()
    assert aliases()["champion"] == "1"
    export("two", kind=100)  # a new export in the workspace: the copy must still be the champion
    target.unlink()
    capsys.readouterr()
    assert not run()["promoted"]
    (copy,) = target.iterdir()
    assert f"promote: copied to file://{copy}" in capsys.readouterr().out
    assert (copy / "model.safetensors").read_text() == "one"
    assert outbox.pending() == []

    # The same for an approval that crashes between the move and the copy.
    set_params(workspace, "approval_hours: null", "approval_hours: 1.0")
    export("three")
    run()
    monkeypatch.setattr(outbox, "push", lambda *arguments: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        approve("3", "Ada")
    monkeypatch.undo()
    monkeypatch.chdir(workspace)
    text = approve("3", "Ada")
    assert text.startswith(f"{NAME} version 3 is already champion, approved by Ada; copied to file://{target}")
    assert len(list(target.iterdir())) == 2


def test_a_promotion_that_died_before_the_alias_moved_is_dropped(workspace):
    export("one", kind=100)
    run()
    dead = replace(outbox.add(NAME, "1", "champion", "never moved"), process=f"{boot_id()} 999999999 1")
    dead.write()
    run()
    assert outbox.pending() == []


def test_a_missing_registry_is_a_user_error(workspace):
    shutil.rmtree(workspace / ".mlflow")
    with pytest.raises(UserError, match="There is no registry yet"):
        rollback()


def test_a_person_can_override_the_gate_with_a_reason_on_record(workspace, capsys):
    export("one")
    run()
    export("two", kind=100)
    assert not run()["promoted"]
    with pytest.raises(UserError, match=r'kind is 0.5, below 0.95.*`dpo approve dpo-demo/2 Ada --reason "..."`'):
        approve("2", "Ada")
    assert aliases()["champion"] == "1"
    text = approve("2", "Ada", "the judge is wrong about irony")
    assert text.startswith(f"{NAME} version 2 is now champion, approved by Ada, who overrides the gate (samples/policy")
    assert text.endswith("): the judge is wrong about irony")
    assert aliases()["champion"] == "2"
    assert describe_decision(RunSummary.here().decision) == f"{text.replace('is now', 'is')}."  # in the report
    assert run()["already"]  # promoting it again changes nothing on record
    with registry(load_cluster(), NAME) as model_registry:
        tags = model_registry.versions()[1].tags
        page = model_registry.client.get_model_version(NAME, "2").description
    assert (tags["approved_by"], tags["override_reason"]) == ("Ada", "the judge is wrong about irony")
    assert "samples/policy/kind is 0.5, below 0.95" in tags["overruled"]
    assert page.splitlines()[-1] == "A" + text.removeprefix(f"{NAME} version 2 is now champion, a")
    print_verification("champion")
    assert "approved by Ada against the gate (samples/policy/kind" in capsys.readouterr().out
