"""The registry's copies of weights: interrupted uploads, deletion, and tags that name other files."""

import os
from pathlib import Path

import pytest

from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.config.paths import METRICS, MODEL
from tasks.errors import UserError
from tasks.promote.champion import approve
from tasks.system.files import hash_files, sha256
from tasks.tracking.journal import StageJournal
from tasks.tracking.pipeline_run import open_run
from tasks.tracking.registry import registry, run_id
from tests.support.promotion import NAME, export, run


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
