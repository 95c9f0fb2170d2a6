"""The configuration of the machines: one base that holds every key, and overlays of which the later one wins."""

from pathlib import Path

import pytest
import yaml

from flows import workspace
from tasks.doctor.examine import _configured
from tasks.errors import UserError
from tasks.place import RECIPE, load_cluster
from tests.workspaces import PROJECT, make_workspace

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


def test_a_recipe_wins_over_the_site_and_the_site_over_the_base(root, monkeypatch):
    set_site(root, monkeypatch)
    (root / RECIPE).write_text(yaml.safe_dump({"actor_train": {"num_workers": 8}}))
    assert (load_cluster().actor_train.num_workers, load_cluster().actor_train.save_steps) == (8, 7)
    assert load_cluster(Path(), {"actor_train": {"num_workers": 9}}).actor_train.num_workers == 9  # an override


def test_a_relative_site_overlay_is_found_from_a_worktree_too(root, monkeypatch, tmp_path):
    set_site(root, monkeypatch)
    monkeypatch.setenv("DPO_CLUSTER", "site.yaml")
    monkeypatch.setenv("DPO_HOME", str(root))
    monkeypatch.chdir(tmp_path)
    assert load_cluster(root).actor_train.num_workers == 3


def test_the_base_must_hold_every_key(root):
    content = yaml.safe_load((root / "infra/cluster.yaml").read_text())
    del content["reference"]["shard_pairs"]
    (root / "infra/cluster.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"infra/cluster.yaml: `reference.shard_pairs` is missing"):
        load_cluster()


def test_mistakes_in_the_site_overlay_name_it(root, monkeypatch):
    set_site(root, monkeypatch, {"actor_train": {"num_worker": 3}})
    with pytest.raises(UserError, match=r"DPO_CLUSTER=.*site.yaml: `actor_train.num_worker`.*`num_workers`"):
        load_cluster()
    monkeypatch.setenv("DPO_CLUSTER", "nowhere.yaml")
    with pytest.raises(UserError, match=r"There is no file .*nowhere.yaml, and DPO_CLUSTER names it"):
        load_cluster()


def test_doctor_and_plan_see_the_site_below_the_recipe(root, monkeypatch):
    recipe = "qwen2.5-7b-lora-zero3"  # 8 training workers
    set_site(root, monkeypatch)
    found = _configured(recipe)[1]
    assert (found.actor_train.num_workers, found.tracking_uri) == (8, "http://mlflow:5000")
    assert _configured(None)[1].actor_train.num_workers == 3
    assert workspace.plan(None, None) == {}  # the site alone needs no worktree
    overlay = workspace.plan(recipe, None)[str(RECIPE)]
    assert "tracking_uri" not in overlay  # what the site knows is not written into a run's commit
    assert load_cluster(PROJECT, overlay).tracking_uri == "http://mlflow:5000"


def test_the_overlays_that_come_with_the_project_are_good(monkeypatch):
    for path in ("infra/compose.cluster.yaml", "infra/compose.gpu-cluster.yaml", "infra/k8s/cluster.yaml"):
        monkeypatch.setenv("DPO_CLUSTER", str(PROJECT / path))
        assert load_cluster(PROJECT).actor_train.keep_checkpoints == 2  # none of them names it
