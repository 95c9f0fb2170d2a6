"""The registry, real, with small made-up exports: the gate, the aliases, a crash between moves, and the way back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import signing
from tasks.errors import UserError
from tasks.evaluation.compare import compare, main, read_side, side_named
from tasks.files import hash_files, read_json, sha256, write_json
from tasks.machines.process import boot
from tasks.params import Cluster, load_cluster, load_params, overlay, read_yaml
from tasks.paths import METRICS, MODEL
from tasks.promote import promote
from tasks.redact import redact
from tasks.release import outbox, verify
from tasks.release.approve import approve
from tasks.release.gate import gate
from tasks.release.rollback import rollback
from tasks.release.sign import sign
from tasks.tracking.journal import Run, open_run
from tasks.tracking.registry import Registry, registry
from tests.workspaces import PROJECT, make_workspace

PROMPTS = 200
NAME = "dpo-demo"


@pytest.fixture
def workspace(tmp_path: Path, mlflow_store: Path, monkeypatch) -> Path:
    root = make_workspace(tmp_path / "workspace", Path("unused"))
    shutil.copytree(mlflow_store, root / ".mlflow")
    monkeypatch.chdir(root)
    monkeypatch.delenv("DPO_RUN", raising=False)
    return root


def export(weights: str, kind: int = PROMPTS, correct: int = PROMPTS, pairs: str = "today", **checks: Any) -> None:
    """What evaluate and export leave behind, for a model that is kind and correct so many times of 200."""
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
        "data": {"source": "pairs.jsonl", "sha256": "d" * 64, "pairs": {"eval.parquet": pairs}},
        "base": {"model": "demo", "sha256": "b" * 64},
        "params": load_params().model_dump(exclude={"promote"}),
        "metrics": metrics,
        "checks": {"same_greedy_text": True, **checks},
        "made": {"commit": "c" * 40},
    }
    write_json(MODEL / "manifest.json", {**manifest, "files": hash_files(MODEL)})
    verify.seal(MODEL)


def run() -> dict[str, Any]:
    """Promote what the workspace holds, without the process that forwards metrics; the decision."""
    promote(Run(open_run(load_params(), load_cluster()), "promote"))
    return read_json(METRICS / "promote.json")


def aliases() -> dict[str, str]:
    with registry(load_cluster(), NAME) as found:
        return {alias: str(n) for alias, n in found.client.get_registered_model(NAME).aliases.items()}


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


def test_without_a_champion_the_absolute_limits_decide(workspace, capsys):
    export("one")
    decision = run()
    assert (decision["promoted"], decision["version"], decision["champion_before"]) == (True, "1", None)
    assert aliases() == {"champion": "1", "challenger": "1"}
    assert f"promote: {NAME} version 1 is now champion" in capsys.readouterr().out
    with registry(load_cluster(), NAME) as found:
        (version,) = found.versions()
        figures, origin = found.client.get_model_version(NAME, "1").description.splitlines()
        assert len(found.client.get_registered_model(NAME).description.splitlines()) == 2
        assert hash_files(found.fetch(version, "model")) == hash_files(MODEL)
        assert set(hash_files(found.fetch(version, "evaluation"))) == {"evaluate.json", "samples.jsonl", "pairs.jsonl"}
    assert version.tags["data_sha256"] == "d" * 64
    assert version.tags["commit"] == "c" * 40
    assert figures.strip() == "reward accuracy 0.97"
    assert origin.endswith(f"data pairs.jsonl ({'d' * 12}), base demo ({'b' * 12})")
    assert "rewards/accuracies" not in version.tags  # few tags: what a person reads is in the description


def test_the_same_export_twice_is_one_version(workspace, capsys):
    export("one")
    run()
    again = run()
    assert again["already"]
    assert f"{NAME} version 1 is champion already" in capsys.readouterr().out
    with registry(load_cluster(), NAME) as found:
        assert len(found.versions()) == 1


def test_a_model_that_does_not_pass_is_a_finished_run_with_reasons_and_is_not_pushed(workspace, capsys):
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
    said = capsys.readouterr().out
    assert "version 2 is registered and not promoted, because samples/policy/kind is 0.5, below 0.95" in said
    assert "samples/policy/kind against version 1 is -0.5" in said  # and worse than the champion


def test_a_model_within_its_limits_may_still_be_worse_than_the_champion(workspace):
    """0.96 is above 0.9. Against 1.0 on the same 200 prompts it is -0.04, and its interval reaches below -0.05."""
    export("one")
    run()
    export("two", correct=192)
    decision = run()
    (reason,) = decision["reasons"]
    assert reason.startswith("samples/policy/correct against version 1 is -0.04 (-0.0")
    assert reason.endswith("and -0.05 is allowed")
    assert decision["comparison"]["samples/policy/correct"]["count"] == PROMPTS


def test_a_better_model_takes_over_and_a_rollback_restores_the_one_before_with_its_hash(workspace, monkeypatch):
    export("one", kind=196)
    first = run()["manifest_sha256"]
    export("two")
    monkeypatch.setenv("DPO_RUN", "calm-otter")
    run()
    monkeypatch.delenv("DPO_RUN")
    (told,) = outbox.pending()  # what Prefect's webhook is told: 196 of 200 answers were kind, and all are now
    assert told.run == "calm-otter"
    assert told.details.startswith("against version 1: ")
    assert "samples/policy/kind +0.02" in told.details
    assert told.details.endswith("; the same data")
    assert aliases() == {"champion": "2", "previous": "1", "challenger": "2"}
    said = rollback()
    assert "champion was version 2" in said
    assert f"is version 1 (manifest {first[:12]}) again" in said
    assert aliases() == {"champion": "1", "challenger": "2"}
    with registry(load_cluster(), NAME) as found:
        champion = found.at("champion")
        assert champion is not None
        assert champion.tags["manifest_sha256"] == first
        assert (found.fetch(champion, "model") / "model.safetensors").read_text() == "one"
    with pytest.raises(UserError, match="Version 1 is the first champion"):
        rollback()


def test_what_was_rolled_back_returns_by_a_persons_word_alone(workspace, capsys):
    for weights in ("one", "two"):
        export(weights)
        run()
    rollback()
    decision = run()
    assert (decision["promoted"], decision["waiting"]) == (False, True)
    assert "having been rolled back on" in capsys.readouterr().out
    assert aliases()["champion"] == "1"
    assert approve("2", "Ada") == f"{NAME} version 2 is now champion, approved by Ada"
    assert aliases() == {"champion": "2", "previous": "1", "challenger": "2"}
    assert approve("2", "Bob") == f"{NAME} version 2 is champion already, approved by Ada"
    with pytest.raises(UserError, match="cannot be approved: it does not wait"):
        approve("1", "Ada")


def test_with_approval_the_gate_passes_and_a_person_decides(workspace):
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
    assert (pushed / "model.safetensors").read_text() == "one"  # what was judged, whatever the workspace holds by now
    run()
    export("three")
    run()
    approve("3", "Ada")
    with pytest.raises(UserError, match="champion is version 3 by now: run the pipeline again"):
        approve("2", "Ada")
    with pytest.raises(UserError, match=r"has no version 9"):
        approve("9", "Ada")


def test_a_crash_between_two_aliases_is_made_good_by_who_comes_next(workspace, monkeypatch, capsys):
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


def test_a_copy_that_failed_after_the_alias_moved_is_made_by_the_same_command(workspace, capsys, monkeypatch):
    target = push_to(workspace)
    target.write_text("a file where a folder should be")
    export("one")
    with pytest.raises(UserError, match="could not be copied"):
        run()
    assert aliases()["champion"] == "1"
    export("two", kind=100)  # another export is in the workspace by now: the champion is what is copied
    target.unlink()
    capsys.readouterr()
    assert not run()["promoted"]
    (copy,) = target.iterdir()
    assert f"promote: copied to file://{copy}" in capsys.readouterr().out
    assert (copy / "model.safetensors").read_text() == "one"
    assert outbox.pending() == []

    # The same of an approval, which a crash ends between the move and the copy.
    set_params(workspace, "approval_hours: null", "approval_hours: 1.0")
    export("three")
    run()
    monkeypatch.setattr(outbox, "push", lambda *given: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        approve("3", "Ada")
    monkeypatch.undo()
    monkeypatch.chdir(workspace)
    said = approve("3", "Ada")
    assert said.startswith(f"{NAME} version 3 is champion already, approved by Ada; copied to file://{target}")
    assert len(list(target.iterdir())) == 2


def test_a_promotion_that_ended_before_the_alias_moved_leaves_nothing_to_do(workspace):
    export("one", kind=100)
    run()
    left = replace(outbox.add(NAME, "1", "champion", "never moved"), process=f"{boot()} 999999999 1")
    left.write()
    run()
    assert outbox.pending() == []


def test_a_tag_cannot_lead_gc_out_of_the_store(workspace):
    """The review's attack: model/../../../.. was .mlflow itself."""
    export("one")
    run()
    with registry(load_cluster(), NAME) as found:
        found.client.set_model_version_tag(NAME, "1", "manifest_sha256", "../../../../")
        found.client.delete_registered_model_alias(NAME, "champion")
        found.client.delete_registered_model_alias(NAME, "challenger")
        version = found.version("1")
        assert version is not None
        for use in (found.remove, found.size, lambda version: found.fetch(version, "model")):
            with pytest.raises(UserError, match=r"manifest_sha256 '\.\./\.\./\.\./\.\./', which is no SHA-256 hash"):
                use(version)
        (artifacts,) = (workspace / ".mlflow").rglob("artifacts/model")
        (artifacts / ("a" * 12)).symlink_to(workspace)
        found.client.set_model_version_tag(NAME, "1", "manifest_sha256", "a" * 64)
        with pytest.raises(UserError, match="leads out of"):
            found.remove(found.versions()[0])
        assert len(found.versions()) == 1
    assert (workspace / "params.yaml").exists()
    assert list((workspace / ".mlflow").rglob("model.safetensors"))


def test_a_damaged_version_is_not_gone_back_to(workspace):
    for weights in ("one", "two"):
        export(weights)
        run()
    with registry(load_cluster(), NAME) as found:
        version = found.version("1")
        assert version is not None
        (found.fetch(version, "model") / "model.safetensors").write_text("eno")
    with pytest.raises(UserError, match=r"Version 1 .* is not what was registered: model.safetensors has changed"):
        rollback()
    assert aliases()["champion"] == "2"


def test_a_version_that_was_replaced_consistently_is_not_gone_back_to(workspace, monkeypatch, tmp_path):
    """Weights, manifest, sum and tag agree with each other, and only the key is missing."""
    for weights in ("one", "two"):
        export(weights)
        run()
    with registry(load_cluster(), NAME) as found:
        first, second = found.versions()
        folder, other = found.fetch(first, "model"), found.fetch(second, "model")
    shutil.copytree(folder, tmp_path / "before")

    def refused(why: str) -> None:
        with pytest.raises(UserError, match=why):
            rollback()
        assert aliases()["champion"] == "2"

    shutil.rmtree(folder)
    shutil.copytree(other, folder)  # signed by us, and of another version
    refused("not the one whose hash the tag manifest_sha256 holds")

    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "before", folder)
    signature = (folder / verify.SIGNATURE).read_text()
    (folder / "model.safetensors").write_text("evil")
    manifest = read_json(folder / "manifest.json")
    for name in verify.OF_THE_MANIFEST:
        (folder / name).unlink()
    write_json(folder / "manifest.json", {**manifest, "files": hash_files(folder)})
    monkeypatch.setenv("DPO_SIGNING_KEY", "e" * 64)
    verify.seal(folder)
    monkeypatch.delenv("DPO_SIGNING_KEY")
    digest = sha256(folder / "manifest.json")
    folder = folder.rename(folder.with_name(digest[:12]))
    with registry(load_cluster(), NAME) as found:
        found.client.set_model_version_tag(NAME, "1", "manifest_sha256", digest)
    refused(r"signed by key [0-9a-f]{16}, and this project's key is")
    (folder / verify.SIGNATURE).write_text(signature)
    refused(r"it is not what key [0-9a-f]{16} signed")
    (folder / verify.SIGNATURE).unlink()
    refused("manifest.sig is missing")
    assert sign("1").startswith(f"{NAME} version 1: signed by key")  # a person's word
    assert "is version 1" in rollback()


def test_an_export_without_a_signature_is_not_promoted_until_it_is_signed(workspace, monkeypatch):
    export("one")
    key = workspace / ".services" / "signing.key"
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    (MODEL / verify.SIGNATURE).unlink()
    with pytest.raises(UserError, match=r"manifest.sig is missing: .*`make sign WHAT=data/model` signs it"):
        run()
    with pytest.raises(UserError, match=r"manifest.sig is missing"):
        verify.require_whole(MODEL)
    sign("")
    assert run()["promoted"]
    monkeypatch.setenv("DPO_SIGNING_KEY", "a" * 64)  # of another team
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


def test_verify_finds_a_flipped_byte_a_missing_and_a_strange_file(workspace):
    export("weights")
    assert verify.problems(MODEL) == []
    content = bytearray((MODEL / "model.safetensors").read_bytes())
    content[3] ^= 1
    (MODEL / "model.safetensors").write_bytes(content)
    (MODEL / "evil.py").write_text("")
    changed, strange = verify.problems(MODEL)
    assert changed.startswith("model.safetensors has changed")
    assert strange == "evil.py is not of this export"
    with pytest.raises(UserError, match="is not what was exported"):
        run()
    (MODEL / "model.safetensors").unlink()
    assert verify.problems(MODEL)[0] == "model.safetensors is missing"
    manifest = (MODEL / "manifest.json").read_text()
    (MODEL / "manifest.json").write_text(manifest.replace("0.97", "0.99"))
    assert verify.problems(MODEL) == ["manifest.json has changed, or manifest.sha256 has"]


def test_a_registry_that_cannot_be_used_is_a_sentence(workspace):
    shutil.rmtree(workspace / ".mlflow")
    with pytest.raises(UserError, match="There is no registry yet"):
        rollback()


def test_another_side_is_found_by_alias_version_run_or_worktree(workspace, capsys, monkeypatch):
    export("one", kind=150)
    run()
    export("two")
    ours = read_side(METRICS)
    with registry(load_cluster(), NAME) as found:
        name = found.versions()[0].tags["run"]
    for given in ("challenger", "1", name):
        kind = compare(load_params().evaluate, ours, side_named(given))["samples/policy/kind"]
        assert (kind["ours"], kind["theirs"], kind["difference"]) == (1.0, 0.75, 0.25)
        assert kind["low"] < 0.25 < kind["high"]
    shutil.copytree(METRICS, workspace / ".scratch/worktrees/other" / METRICS)
    same = compare(load_params().evaluate, ours, side_named("other"))["samples/policy/kind"]
    assert same["difference"] == 0.0
    assert same["low"] < 0 < same["high"]  # 200 prompts without a difference prove no equality
    monkeypatch.setattr("sys.argv", ["compare", "1"])
    main()
    assert "+0.2500" in capsys.readouterr().out
    with pytest.raises(UserError, match="There is nothing named 'nobody'"):
        side_named("nobody")


def test_the_gate_names_every_reason():
    params = load_params(PROJECT / "params.yaml").promote
    metrics = {
        "rewards/accuracies": 0.93,
        "intervals": {"rewards/accuracies": {"low": 0.88, "high": 0.96}},
        "samples": {"policy": {"kind": float("nan")}},
        "health": {"repetition": 0.5, "length_ratio": 1.0, "empty": 0.0},
    }
    assert gate(params, metrics, {"same_greedy_text": True, "reloaded": False}) == [
        "the export is not verified: reloaded failed",
        "rewards/accuracies is 0.93 (0.88 to 0.96), below 0.9",
        "samples/policy/kind is nan, below 0.95",
        "samples/policy/correct was not measured (there are rewards/accuracies, samples/policy/kind, "
        "health/repetition, health/length_ratio, health/empty)",
        "health/repetition is 0.5, above 0.2",
    ]


def test_a_champion_evaluated_on_other_prompts_and_without_weights_cannot_be_compared(workspace):
    export("one", pairs="yesterday")
    run()
    with registry(load_cluster(), NAME) as found:
        _forget_weights(found)
    export("two")
    (reason,) = run()["reasons"]
    assert "was evaluated on other prompts, and its weights are not in the registry" in reason


def _forget_weights(found: Registry) -> None:
    (version,) = found.versions()
    (found.fetch(version, "model") / "model.safetensors").unlink()
