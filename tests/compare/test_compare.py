"""`dpo compare`: finding models by their names, and pairing their results."""

import shutil

import pytest

from tasks.compare.compare import comparison_table, find_model, pair_up, print_comparison, read_results, summarize
from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.config.paths import METRICS, MODEL
from tasks.errors import UserError
from tasks.promote.champion import approve, rollback
from tasks.promote.sign import sign
from tasks.system.files import read_json, write_json
from tasks.tracking.registry import Registry, registry
from tests.support.promotion import NAME, export, run, set_params

ROW = {"ours": 0.75, "theirs": 0.5, "difference": 0.25, "low": 0.125, "high": 0.375, "count": 9, "prompts": 9}


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


def test_long_names_are_whole_and_stand_above_their_values() -> None:
    names = "sweep-1a2b3c-1-beta-0.05", "sweep-1a2b3c-2-beta-0.1"
    head, line = comparison_table({"win_rate": ROW}, *names).splitlines()
    assert head.split()[:2] == list(names)
    assert [head.index(name) + len(name) for name in names] == [
        line.index(f" {value} ") + 7 for value in ("0.7500", "0.5000")
    ]
    assert line.endswith("+0.2500 (+0.1250 to +0.3750), n = 9")


def test_short_names_have_the_width_of_a_number() -> None:
    head, line = comparison_table({"win_rate": ROW}, "this model", "champion").splitlines()
    assert head == f"{'':8} {'this model':>14} {'champion':>14}  difference (95% interval)"
    assert line.startswith(f"win_rate {'0.7500':>14} {'0.5000':>14}  ")
