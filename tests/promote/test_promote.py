"""Promotion with a real MLflow registry and small fake exports: gate, aliases, crashes, approval, rollback."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.compare.compare import find_model, pair_up, print_comparison, read_results, summarize
from tasks.config.cluster import Cluster, load_cluster
from tasks.config.params import load_params, overlay
from tasks.config.paths import METRICS, MODEL
from tasks.config.strict import read_yaml
from tasks.errors import UserError
from tasks.promote import outbox
from tasks.promote.champion import approve, rollback
from tasks.promote.gate import gate, regressions
from tasks.promote.sign import print_verification, sign
from tasks.promote.stage import promote
from tasks.reports.headline import describe_decision
from tasks.reports.summary import RunSummary
from tasks.secrets.private import user_folder
from tasks.secrets.redact import redact
from tasks.system import signing
from tasks.system.files import hash_files, read_json, sha256, write_json
from tasks.system.processes import boot_id
from tasks.tracking import verify
from tasks.tracking.journal import StageJournal
from tasks.tracking.pipeline_run import open_run
from tasks.tracking.registry import Registry, registry, run_id
from tests.support.workspaces import PROJECT, make_workspace

PROMPTS = 200
NAME = "dpo-demo"


@pytest.fixture
def workspace(tmp_path: Path, mlflow_store: Path, monkeypatch) -> Path:
    root = make_workspace(tmp_path / "workspace", Path("unused"), **{"source.data": "demo"})
    shutil.copytree(mlflow_store, root / ".mlflow")
    monkeypatch.chdir(root)
    monkeypatch.delenv("DPO_RUN", raising=False)
    return root


def export(weights: str, kind: int = PROMPTS, correct: int = PROMPTS, pairs: str = "today", **checks: Any) -> None:
    """Write what evaluate and export write, for a model with this many kind and correct answers of 200."""
    records = [{"text": f"answer {n}", "tokens": 5, "kind": n < kind, "correct": n < correct} for n in range(PROMPTS)]
    lines = [{"id": str(n), "prompt": f"prompt {n}", "base": r, "policy": r} for n, r in enumerate(records)]
    held_out = [{"id": str(n), "prompt": f"prompt {n}", "margin": 1.0} for n in range(PROMPTS)]
    METRICS.mkdir(parents=True, exist_ok=True)
    for name, content in (("samples.jsonl", lines), ("pairs.jsonl", held_out)):
        (METRICS / name).write_text("".join(json.dumps(line) + "\n" for line in content))
    metrics = {
        "rewards/accuracies": 0.97,
        "samples": {"policy": {"kind": kind / PROMPTS, "correct": correct / PROMPTS}},
        "health": {"repetition": 0.01, "length_ratio": 1.0, "empty": 0.0},
    }
    write_json(METRICS / "evaluate.json", metrics)
    shutil.rmtree(MODEL, ignore_errors=True)
    MODEL.mkdir(parents=True)
    (MODEL / "model.safetensors").write_text(weights)
    manifest = {
        "model": NAME,
        "data": {"source": "pairs.jsonl", "sha256": "d" * 64, "pairs": {"eval.arrow": pairs}},
        "base": {"model": "demo", "sha256": "b" * 64},
        "params": load_params().model_dump(exclude={"promote"}),
        "metrics": metrics,
        "checks": {"same_greedy_text": True, **checks},
        "made": {"commit": "c" * 40},
    }
    write_json(MODEL / "manifest.json", {**manifest, "files": hash_files(MODEL)})
    verify.seal(MODEL)


def run() -> dict[str, Any]:
    """Promote the workspace's export without starting the uploader; returns the decision."""
    promote(StageJournal(open_run(load_params(), load_cluster()), "promote"))
    return read_json(METRICS / "promote.json")


def aliases() -> dict[str, str]:
    with registry(load_cluster(), NAME) as model_registry:
        return {alias: str(n) for alias, n in model_registry.client.get_registered_model(NAME).aliases.items()}


def set_params(root: Path, old: str, new: str) -> None:
    path = root / "params.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def push_to(root: Path) -> Path:
    target = root / "elsewhere"
    set_params(root, "push: null", f"push: file://{target}")
    path = root / "infra/cluster.yaml"
    allowed = overlay(read_yaml(path), {"access": {"push": [f"file://{root}"]}}, Cluster)
    path.write_text(yaml.safe_dump(allowed))
    return target


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


def test_the_temporary_file_of_a_killed_upload_is_removed_by_the_next_upload(workspace):
    """MLflow writes an artifact beside its final name, as `.artifact.uploading.*`, and renames it at the end."""
    export("one")
    opened = StageJournal(open_run(load_params(), load_cluster()), "promote")
    with registry(load_cluster(), NAME, opened.folder) as model_registry:
        digest = sha256(MODEL / "manifest.json")
        root = model_registry.client.get_run(run_id(opened.folder)).info.artifact_uri.removeprefix("file://")
        leftovers = [Path(root) / what / digest[:12] / ".artifact.uploading.x" for what in ("model", "evaluation")]
        for path in leftovers:
            path.parent.mkdir(parents=True)
            path.write_text("half of the weights")
        model_registry.add(
            run_id(opened.folder), MODEL, [METRICS / "evaluate.json"], {"manifest_sha256": digest, "run": "one"}
        )
    assert not any(path.exists() for path in leftovers)
    assert hash_files(leftovers[0].parent) == hash_files(MODEL)


def test_weights_of_a_refused_version_can_be_deleted_and_stored_again(workspace, tmp_path):
    """Weights that are links into DVC's cache are linked into a local registry, which frees nothing when deleted."""
    export("one")
    run()
    export("two", kind=100)
    os.link(MODEL / "model.safetensors", tmp_path / "cached")
    run()
    export("three", kind=100)  # so that `challenger` moves on
    run()
    with registry(load_cluster(), NAME) as model_registry:
        _, second, third = model_registry.versions()
        stored = model_registry.fetch(second, "model") / "model.safetensors"
        assert stored.samefile(tmp_path / "cached")
        assert (model_registry.size(second, weights=True), model_registry.size(third, weights=True)) == (0, 5)
        model_registry.remove_weights(second)
        assert not stored.exists()
        assert (tmp_path / "cached").read_text() == "two"
        assert (stored.parent / "manifest.json").exists()
        with pytest.raises(UserError, match="it got an alias"):
            model_registry.remove_weights(third)
    with pytest.raises(UserError, match="neither in the registry nor in DVC's cache"):
        approve("2", "Ada", "it is better")
    export("two", kind=100)
    run()  # the weights are here again
    assert approve("2", "Ada", "it is better").startswith(f"{NAME} version 2 is now champion")
    assert stored.read_text() == "two"


def test_a_manifest_tag_cannot_make_gc_delete_files_outside_the_store(workspace):
    """With this tag, model/../../../.. would be .mlflow itself."""
    export("one")
    run()
    with registry(load_cluster(), NAME) as model_registry:
        model_registry.client.set_model_version_tag(NAME, "1", "manifest_sha256", "../../../../")
        model_registry.client.delete_registered_model_alias(NAME, "champion")
        model_registry.client.delete_registered_model_alias(NAME, "challenger")
        version = model_registry.version("1")
        assert version is not None
        for use in (model_registry.remove, model_registry.size, lambda version: model_registry.fetch(version, "model")):
            with pytest.raises(UserError, match=r"manifest_sha256 '\.\./\.\./\.\./\.\./', which is no SHA-256 hash"):
                use(version)
        (artifacts,) = (workspace / ".mlflow").rglob("artifacts/model")
        (artifacts / ("a" * 12)).symlink_to(workspace)
        model_registry.client.set_model_version_tag(NAME, "1", "manifest_sha256", "a" * 64)
        with pytest.raises(UserError, match="leads out of"):
            model_registry.remove(model_registry.versions()[0])
        assert len(model_registry.versions()) == 1
    assert (workspace / "params.yaml").exists()
    assert list((workspace / ".mlflow").rglob("model.safetensors"))


def test_rollback_refuses_a_damaged_or_forged_version(workspace, monkeypatch, tmp_path):
    """In a forged one weights, manifest, checksum and tag agree with each other; only the signature is wrong."""
    for weights in ("one", "two"):
        export(weights)
        run()
    with registry(load_cluster(), NAME) as model_registry:
        first, second = model_registry.versions()
        folder, other = model_registry.fetch(first, "model"), model_registry.fetch(second, "model")
    shutil.copytree(folder, tmp_path / "before")

    def refused(why: str) -> None:
        with pytest.raises(UserError, match=why):
            rollback()
        assert aliases()["champion"] == "2"

    (folder / "model.safetensors").write_text("eno")
    refused(r"Version 1 .* is not what was registered: model.safetensors has changed")

    shutil.rmtree(folder)
    shutil.copytree(other, folder)  # signed by us, but of another version
    refused("the hash of manifest.json is not the one in the tag manifest_sha256")

    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "before", folder)
    signature = (folder / verify.SIGNATURE).read_text()
    (folder / "model.safetensors").write_text("evil")
    manifest = read_json(folder / "manifest.json")
    for name in (verify.MANIFEST, verify.CHECKSUM, verify.SIGNATURE):
        (folder / name).unlink()
    write_json(folder / "manifest.json", {**manifest, "files": hash_files(folder)})
    monkeypatch.setenv("DPO_SIGNING_KEY", "e" * 64)
    verify.seal(folder)
    monkeypatch.delenv("DPO_SIGNING_KEY")
    digest = sha256(folder / "manifest.json")
    folder = folder.rename(folder.with_name(digest[:12]))
    with registry(load_cluster(), NAME) as model_registry:
        model_registry.client.set_model_version_tag(NAME, "1", "manifest_sha256", digest)
    refused(r"signed by key [0-9a-f]{16}, and this project's key is")
    (folder / verify.SIGNATURE).write_text(signature)
    refused(r"it is not what key [0-9a-f]{16} signed")
    (folder / verify.SIGNATURE).unlink()
    refused("manifest.sig is missing")
    assert sign("1").startswith(f"{NAME} version 1: signed by key")  # a person vouches for it
    assert "is version 1" in rollback()


def test_an_export_without_a_signature_is_not_promoted_until_it_is_signed(workspace, monkeypatch):
    export("one")
    key = user_folder() / "signing.key"
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    (MODEL / verify.SIGNATURE).unlink()
    with pytest.raises(UserError, match=r"manifest.sig is missing: .*sign it with your key: `dpo sign data/model`"):
        run()
    with pytest.raises(UserError, match=r"manifest.sig is missing"):
        verify.require_intact(MODEL)
    sign("")
    assert run()["promoted"]
    monkeypatch.setenv("DPO_SIGNING_KEY", "a" * 64)  # another team's key
    assert "and this project's key is" in verify.problems(MODEL)[0]
    monkeypatch.delenv("DPO_SIGNING_KEY")
    public = signing.public_key()
    opened = workspace / ".scratch" / "opened"  # a worktree finds the key of its checkout
    opened.mkdir(parents=True)
    (opened / ".git").write_text(f"gitdir: {workspace}/.git/worktrees/opened\n")
    monkeypatch.setenv("DPO_HOME", str(opened))
    assert signing.public_key() == public
    monkeypatch.delenv("DPO_HOME")
    monkeypatch.setenv("DPO_SIGNING_KEY", "a" * 64)
    monkeypatch.setenv("DPO_TRUSTED_KEYS", public)
    assert verify.problems(MODEL) == []
    assert redact("the key is " + "a" * 64) == "the key is ***"


def test_verify_finds_changed_missing_and_unknown_files(workspace):
    export("weights")
    assert verify.problems(MODEL) == []
    content = bytearray((MODEL / "model.safetensors").read_bytes())
    content[3] ^= 1
    (MODEL / "model.safetensors").write_bytes(content)
    (MODEL / "evil.py").write_text("")
    changed, unknown = verify.problems(MODEL)
    assert changed.startswith("model.safetensors has changed")
    assert unknown == "evil.py is not part of this export"
    with pytest.raises(UserError, match="is not what was exported"):
        run()
    (MODEL / "model.safetensors").unlink()
    assert verify.problems(MODEL)[0] == "model.safetensors is missing"
    manifest = (MODEL / "manifest.json").read_text()
    (MODEL / "manifest.json").write_text(manifest.replace("0.97", "0.99"))
    assert verify.problems(MODEL) == ["manifest.json or manifest.sha256 has changed"]


def test_a_missing_registry_is_a_user_error(workspace):
    shutil.rmtree(workspace / ".mlflow")
    with pytest.raises(UserError, match="There is no registry yet"):
        rollback()


def test_compare_finds_a_model_by_alias_version_run_or_worktree(workspace, capsys, monkeypatch):
    export("one", kind=150)
    run()
    export("two")
    ours = read_results(METRICS)
    with registry(load_cluster(), NAME) as model_registry:
        name = model_registry.versions()[0].tags["run"]
    for model in ("challenger", "1", name, f"{NAME}/1", f"{NAME}/challenger", f"{name}/1", "demo/1"):
        paired = pair_up(load_params().evaluate, ours, read_results(find_model(model).results))
        kind = summarize(paired)["samples/policy/kind"]
        assert (kind["ours"], kind["theirs"], kind["difference"]) == (1.0, 0.75, 0.25)
        assert kind["low"] < 0.25 < kind["high"]
    with pytest.raises(UserError, match=f"{NAME} has no champion: no version passed the gate.* as in {NAME}/1"):
        find_model(f"{NAME}/champion")
    for folder in (METRICS, MODEL):
        shutil.copytree(folder, workspace / ".scratch/worktrees/other" / folder)
    print_comparison("other")
    assert "+0.0000 (-0.0188 to +0.0188), n = 200" in capsys.readouterr().out  # that does not prove equality
    print_comparison("1", "other")  # two models, neither of which is this workspace's
    assert "+0.2500" in capsys.readouterr().out
    with pytest.raises(UserError, match="There is no model 'nobody': dpo-demo has no version, alias or run nobody"):
        print_comparison("nobody")
    (METRICS / "samples.jsonl").write_text("")  # evaluate.prompts 0
    with pytest.raises(UserError, match=r"A comparison with base needs sampled answers: `evaluate\.prompts` above 0"):
        print_comparison("base")
    shutil.rmtree(MODEL)
    with pytest.raises(UserError, match="Name two models, as in `dpo compare RUN champion`"):
        print_comparison("1")


def test_results_with_other_settings_are_not_paired(workspace, capsys, monkeypatch):
    """With other sampling lengths the answers cannot be compared: the other model is evaluated again, or refused."""
    set_params(workspace, "max_new_tokens: 8", "max_new_tokens: 16")
    export("one")
    run()
    set_params(workspace, "max_new_tokens: 16", "max_new_tokens: 8")
    export("two")
    again = read_results(METRICS)
    monkeypatch.setattr("tasks.compare.compare.current_held_out", lambda params: None)
    monkeypatch.setattr("tasks.compare.compare.add_reference", lambda workers, params, held_out, manifest: held_out)
    monkeypatch.setattr("tasks.compare.compare.reevaluate", lambda *arguments: again)
    print_comparison("1")
    output = capsys.readouterr().out
    assert "evaluating version 1 again: it was evaluated with max_new_tokens 16 instead of 8" in output
    assert "n = 200" in output
    manifest = read_json(MODEL / "manifest.json")
    write_json(MODEL / "manifest.json", {**manifest, "base": {"model": "other", "sha256": "0" * 64}})
    with pytest.raises(UserError, match="do not have the same base model"):
        print_comparison("1")


def test_commands_find_the_model_of_a_run_or_recipe_and_name_the_registered_ones(workspace, monkeypatch):
    set_params(workspace, f"model_name: {NAME}", "model_name: mine")
    monkeypatch.setenv("DPO_RUN", "calm-otter")
    for weights in ("one", "two"):
        export(weights)
        run()
    monkeypatch.delenv("DPO_RUN")
    set_params(workspace, "model_name: mine", f"model_name: {NAME}")
    others = r"Other registered models: mine\. Name one of them, as in mine/champion"
    for use in (rollback, lambda: approve("1", "Ada"), lambda: sign("3"), lambda: find_model("champion")):
        with pytest.raises(UserError, match=f"The registry has no model {NAME}. {others}"):
            use()
    for name in ("mine", "mine/champion", "calm-otter/2"):
        assert find_model(name).manifest == read_json(MODEL / "manifest.json")
    assert sign("mine/2").startswith("mine version 2: signed")
    assert "mine: champion was version 2" in rollback("mine")


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


def test_the_gate_names_every_reason():
    params = load_params(PROJECT / "params.yaml").promote.model_copy(
        update={
            "require": {"rewards/accuracies": 0.9, "samples/policy/kind": 0.95, "samples/policy/corect": 0.9},
            "limits": {"health/repetition": 0.2},
        }
    )
    metrics = {
        "pairs": 50,
        "rewards/accuracies": 0.93,
        "intervals": {"rewards/accuracies": {"low": 0.87, "high": 0.96}},
        "samples": {"policy": {"kind": float("nan"), "correct": 1.0}},
        "health": {"repetition": 0.5, "length_ratio": 1.0, "empty": 0.0},
    }
    # The interval is twice as wide as the distance to 0.9, so it takes four times as many prompts.
    lower_end = "its lower end counts and is below 0.9, which needs about 200 prompts, and there are 50"
    assert gate(params, metrics, {"same_greedy_text": True, "reloaded": False}) == [
        "the export is not verified: the check reloaded failed",
        f"rewards/accuracies is 0.93 (0.87 to 0.96): {lower_end}",
        "samples/policy/kind is nan, below 0.95",
        "samples/policy/corect was not measured (similar: samples/policy/correct, samples/policy/kind)",
        "health/repetition is 0.5, above 0.2",
    ]


def _row(difference: float, low: float, high: float, count: int) -> dict[str, float]:
    return {"difference": difference, "low": low, "high": high, "count": count, "prompts": count}


def test_an_equal_model_passes_with_few_pairs_or_learns_how_many_a_number_needs():
    """All of 62 pairs agree, so Wilson's share of unseen exceptions is 3.84 / (62 + 3.84) = 0.058; 0.02 needs 188."""
    promote = load_params(PROJECT / "params.yaml").promote
    auto = promote.model_copy(update={"max_regression": {"rewards/accuracies": "auto"}})
    strict = promote.model_copy(update={"max_regression": {"rewards/accuracies": 0.02}})
    equal = {"rewards/accuracies": _row(0.0, -0.058345, 0.058345, 62)}
    assert regressions(auto, equal, "1") == []
    (reason,) = regressions(strict, equal, "1")
    assert reason == (
        "rewards/accuracies against version 1 is +0 (-0.0583 to +0.0583): its lower end counts and is below -0.02, "
        "which needs about 188 prompts, and there are 62"
    )
    assert regressions(strict, {"rewards/accuracies": _row(0.0, -0.02, 0.02, 189)}, "1") == []
    worse = {"rewards/accuracies": _row(-0.1, -0.17, -0.03, 62)}
    (reason,) = regressions(auto, worse, "1")
    assert reason == "rewards/accuracies is worse than that of version 1: -0.1 (-0.17 to -0.03), n = 62"
    (reason,) = regressions(auto, {"samples/policy/kind": equal["rewards/accuracies"]}, "1")
    assert reason == "rewards/accuracies was not compared with version 1"


def test_a_champion_evaluated_on_other_prompts_and_without_weights_cannot_be_compared(workspace):
    export("one", pairs="yesterday")
    run()
    with registry(load_cluster(), NAME) as model_registry:
        _forget_weights(model_registry)
    export("two")
    (reason,) = run()["reasons"]
    assert "the weights of version 1 of dpo-demo are neither in the registry nor in DVC's cache" in reason


def _forget_weights(model_registry: Registry) -> None:
    (version,) = model_registry.versions()
    (model_registry.fetch(version, "model") / "model.safetensors").unlink()
