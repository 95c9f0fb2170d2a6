"""The configuration of the machines: defaults, then layers of which the later one wins, and where a value is from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows.parameters import known_and_typed
from tasks.config import params
from tasks.config.cluster import OVERRIDES, RUN_FILES, Cluster, ReferenceGroup, changed_values, load_cluster
from tasks.config.params import Params, read_recipe
from tasks.config.strict import Layer, changed
from tasks.errors import UserError
from tasks.runs import run_config
from tasks.runs.workspace import Workspace
from tests.support.workspaces import PROJECT, make_workspace

SITE = {"tracking_uri": "http://mlflow:5000", "actor_train": {"num_workers": 3, "save_steps": 7}}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace whose infra/cluster.yaml has shard_pairs 16, save_steps 4 and row_tokens 256 in actor_train."""
    made = make_workspace(tmp_path / "workspace", tmp_path)
    monkeypatch.delenv("DPO_CLUSTER", raising=False)
    monkeypatch.delenv("DPO_HOME", raising=False)
    monkeypatch.chdir(made)
    return made


def set_site(root: Path, monkeypatch: pytest.MonkeyPatch, content: object = SITE) -> None:
    (root / "site.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("DPO_CLUSTER", str(root / "site.yaml"))


def test_keys_missing_from_the_site_overlay_keep_the_values_of_infra_cluster_yaml(root, monkeypatch):
    set_site(root, monkeypatch)
    found = load_cluster()
    assert (found.tracking_uri, found.actor_train.num_workers, found.actor_train.save_steps) == (
        "http://mlflow:5000",
        3,
        7,
    )
    assert (found.actor_train.row_tokens, found.reference.shard_pairs, found.exp_name) == (256, 16, "dpo")


def test_a_run_wins_over_the_site_and_the_site_over_the_base(root, monkeypatch):
    set_site(root, monkeypatch)
    (root / OVERRIDES).write_text(yaml.safe_dump({"actor_train": {"num_workers": 8}}))
    assert (load_cluster().actor_train.num_workers, load_cluster().actor_train.save_steps) == (8, 7)
    set_site(root, monkeypatch, {"actor_train": {"num_workers": 3, "save_steps": 11}})  # resumed on another machine
    assert (load_cluster().actor_train.num_workers, load_cluster().actor_train.save_steps) == (8, 11)
    assert load_cluster(Path(), {"actor_train": {"num_workers": 9}}).actor_train.num_workers == 9


def test_a_run_that_starts_in_the_folder_of_another_keeps_its_settings(root):
    """`dpo open RUN` makes such a folder."""
    (root / OVERRIDES).write_text(yaml.safe_dump({"actor_train": {"num_workers": 8, "save_steps": 6}}))
    config = run_config.resolve(None, {"cluster.actor_train.save_steps": 9}, root)
    assert config.files == {str(OVERRIDES): {"actor_train": {"num_workers": 8, "save_steps": 9}}}
    origins = {name: tuple(found) for name, found in config.origins.items() if "actor_train" in name}
    assert origins["cluster.actor_train.num_workers"] == (8, "infra/overrides.yaml")
    assert origins["cluster.actor_train.save_steps"] == (9, "overrides")


def test_a_relative_site_overlay_is_found_from_a_worktree_too(root, monkeypatch, tmp_path):
    set_site(root, monkeypatch)
    monkeypatch.setenv("DPO_CLUSTER", "site.yaml")
    monkeypatch.setenv("DPO_HOME", str(root))
    monkeypatch.chdir(tmp_path)
    assert load_cluster(root).actor_train.num_workers == 3


def test_infra_cluster_yaml_as_it_comes_lists_every_key_with_its_default(monkeypatch):
    monkeypatch.delenv("DPO_CLUSTER", raising=False)
    assert yaml.safe_load((PROJECT / "infra/cluster.yaml").read_text()) == Cluster().model_dump()
    assert changed_values(PROJECT) == {}


def test_a_key_that_is_left_out_keeps_its_default(root):
    (root / "infra/cluster.yaml").write_text("reference: {shard_pairs: 7}\n")
    assert load_cluster() == Cluster(reference=ReferenceGroup(shard_pairs=7))


def test_each_value_that_is_not_the_default_has_an_origin(root, monkeypatch):
    site = {"actor_train": {"num_workers": 3, "save_steps": 20, "resources": {"trainer": 1.0}}, "reference": {}}
    set_site(root, monkeypatch, site)
    of_earlier_version, of_run = (root / path for path in RUN_FILES)
    of_earlier_version.write_text(yaml.safe_dump({"actor_train": {"num_workers": 8}}))
    of_run.write_text(yaml.safe_dump({"reference": {"num_workers": 5}}))
    assert {name: tuple(found) for name, found in changed_values().items()} == {
        "tensorboard": (True, "infra/cluster.yaml"),
        "system_metrics": (0.2, "infra/cluster.yaml"),
        "reference.shard_pairs": (16, "infra/cluster.yaml"),
        "actor_train.row_tokens": (256, "infra/cluster.yaml"),
        "actor_train.resources": ({"trainer": 1.0}, f"{root}/site.yaml (DPO_CLUSTER)"),
        "actor_train.num_workers": (8, "infra/recipe.yaml"),
        "reference.num_workers": (5, "infra/overrides.yaml"),
    }  # save_steps: the site puts back the default


def test_an_optional_section_that_becomes_null_or_a_section_is_one_change():
    adapter = {"rank": 4, "alpha": 8.0, "targets": "all-linear", "use_rslora": False, "use_dora": False}
    off, on = Layer("a", {"train": {"adapter": None}}), Layer("b", {"train": {"adapter": adapter}})
    assert changed([on, off], Params) == {"train.adapter": (None, "a")}
    assert set(changed([off, on], Params)) == {f"train.adapter.{name}" for name in adapter}


def test_overrides_reach_worker_groups_and_nothing_that_the_operator_decides(root):
    files = run_config.resolve(None, {"cluster.actor_train.zero_stage": 3}).files
    assert files == {str(OVERRIDES): {"actor_train": {"zero_stage": 3}}}
    with pytest.raises(UserError, match=r"An override cannot set `cluster.tracking_uri`, only keys of prepare, "):
        run_config.resolve(None, {"cluster.tracking_uri": "http://elsewhere"})
    with pytest.raises(UserError, match=r"`actor_train.zero_stag`.*Did you mean `actor_train.zero_stage`"):
        run_config.resolve(None, {"cluster.actor_train.zero_stag": 3})


WORKTREE = """
import subprocess, sys
from tasks.runs import run_config
from tasks.runs.workspace import Workspace
from tasks.lifecycle import run_workspace
files = run_config.resolve("qwen2.5-7b-lora-zero3", {"cluster.actor_train.save_steps": 9}).files
record = run_workspace.new_record("zero3", files, worktree=True, flow_run="1")
with run_workspace.open_workspace(record, "1") as run:
    command = [sys.executable, "-m", "tasks.dummy", "cluster"]
    sys.exit(subprocess.run(command, cwd=run.root, env=run.environment()).returncode)
"""


@pytest.mark.slow
def test_a_stage_of_a_run_with_a_recipe_reads_zero_3_where_the_site_says_zero_2(dummy_repo):
    """What a stage reads in the worktree of a run, on a worker whose DPO_CLUSTER is Kubernetes' overlay."""
    (dummy_repo / "tasks" / "dummy.py").write_text(
        "from tasks.config.cluster import load_cluster\nprint(load_cluster().model_dump_json())\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("DPO_")}
    site = yaml.safe_load((PROJECT / "infra/k8s/cluster.yaml").read_text())
    site["logging_dir"] = str(dummy_repo.parent / "runs")  # not the machine's /shared
    (dummy_repo / "site.yaml").write_text(yaml.safe_dump(site))
    env |= {"DPO_CLUSTER": str(dummy_repo / "site.yaml"), "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", WORKTREE], cwd=dummy_repo, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = Cluster.model_validate_json(done.stdout.splitlines()[-1])
    train = found.actor_train
    assert (train.zero_stage, train.num_workers, train.save_steps) == (3, 8, 9)  # recipe, recipe, override
    assert train.resources == {"actor_train": 1}  # the site's
    assert (found.tracking_uri, found.output_dir) == ("http://mlflow:5000", "/shared/output")  # no recipe's business


def test_mistakes_in_the_site_overlay_name_it(root, monkeypatch):
    set_site(root, monkeypatch, {"actor_train": {"num_worker": 3}})
    with pytest.raises(
        UserError, match=r"DPO_CLUSTER=.*site.yaml: Unknown key `actor_train.num_worker`.*`actor_train.num_workers`"
    ):
        load_cluster()
    monkeypatch.setenv("DPO_CLUSTER", "nowhere.yaml")
    with pytest.raises(UserError, match=r"DPO_CLUSTER names .*nowhere.yaml, which does not exist"):
        load_cluster()


def test_an_old_name_of_a_worker_group_is_refused_with_the_new_one_wherever_somebody_wrote_it(root, monkeypatch):
    old, said = {"evaluate": {"num_workers": 2}}, "the worker group `evaluate` is now `inference`"
    set_site(root, monkeypatch, old)
    with pytest.raises(UserError, match=rf"site.yaml \(DPO_CLUSTER\): {said}"):
        load_cluster()
    monkeypatch.delenv("DPO_CLUSTER")
    monkeypatch.setattr(params, "RECIPES", root / "recipes")
    (root / "recipes").mkdir()
    (root / "recipes/mine.yaml").write_text(yaml.safe_dump({"cluster": old}))
    with pytest.raises(UserError, match=f"recipes/mine.yaml, `cluster`: {said}"):
        read_recipe("mine", "cluster")
    with pytest.raises(UserError, match=f"override of `cluster`: {said}"):
        run_config.resolve(None, {"cluster.evaluate.num_workers": 2})
    with pytest.raises(ValueError, match=r"Did you mean `cluster.inference.num_workers`\?"):
        known_and_typed({"cluster.evaluate.num_workers": 2})
    (root / "infra/cluster.yaml").write_text(yaml.safe_dump(old))
    with pytest.raises(UserError, match=f"infra/cluster.yaml: {said}"):
        load_cluster()


def test_a_stored_run_is_read_with_its_old_names_and_its_stages_get_them(root, monkeypatch, tmp_path):
    """The worktree of a run from before the group was renamed: its code refuses the new name, its flow the old one."""
    stored = make_workspace(tmp_path / "stored", tmp_path)
    before = yaml.safe_load((stored / "infra/cluster.yaml").read_text())
    before["evaluate"] = {**before.pop("inference"), "row_tokens": 2048}
    (stored / "infra/cluster.yaml").write_text(yaml.safe_dump(before))
    (stored / RUN_FILES[0]).write_text("evaluate: {num_workers: 2}\n")
    (stored / OVERRIDES).write_text("evaluate: {cpus_per_worker: 3}\n")
    set_site(root, monkeypatch, {"inference": {"placement": "SPREAD"}, "currency": "USD"})
    monkeypatch.setenv("DPO_HOME", str(root))
    found = load_cluster(stored).inference
    assert (found.row_tokens, found.num_workers, found.cpus_per_worker, found.placement) == (2048, 2, 3, "SPREAD")
    changed = run_config.changed_on_resume(stored, {"cluster.inference.num_workers": 4})
    assert changed == {str(OVERRIDES): {"evaluate": {"cpus_per_worker": 3, "num_workers": 4}}}
    site = Workspace(stored, "stored").environment()["DPO_CLUSTER"]
    assert yaml.safe_load(Path(site).read_text()) == {"evaluate": {"placement": "SPREAD"}, "currency": "USD"}
    new = make_workspace(tmp_path / "new", tmp_path)
    assert Workspace(new, "new").environment()["DPO_CLUSTER"] == os.environ["DPO_CLUSTER"]


def test_a_recipe_stands_above_the_site_and_a_run_does_not_copy_it(root, monkeypatch):
    recipe = "qwen2.5-7b-lora-zero3"  # 8 training workers
    set_site(root, monkeypatch)
    found = load_cluster(Path(), read_recipe(recipe, "cluster"))
    assert (found.actor_train.num_workers, found.tracking_uri) == (8, "http://mlflow:5000")
    assert load_cluster().actor_train.num_workers == 3
    assert run_config.resolve(None, None).files == {}  # the site alone needs no worktree
    overlay = run_config.resolve(recipe, None).files[str(OVERRIDES)]
    assert "tracking_uri" not in overlay  # what the site knows is not written into a run's commit
    assert load_cluster(PROJECT, overlay).tracking_uri == "http://mlflow:5000"


def test_the_overlays_that_come_with_the_project_are_good(monkeypatch):
    for path in [*PROJECT.glob("infra/compose.*cluster.yaml"), *PROJECT.glob("infra/k8s*/cluster.yaml")]:
        monkeypatch.setenv("DPO_CLUSTER", str(path))
        assert load_cluster(PROJECT).actor_train.keep_checkpoints == 2  # none of them names it
