"""`source.model: registry:NAME` on a real MLflow registry, and `source.data: run:NAME` on a real git and DVC."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.artifacts.models import base_folder, reference_folder, reference_hash
from tasks.config.params import Params, load_params, overlay
from tasks.config.paths import BASE, MODEL
from tasks.config.strict import dotted, read_yaml, validate
from tasks.errors import UserError
from tasks.source.fingerprint import content_ids
from tasks.source.stage import fetch_model
from tasks.source.start_model import start_version
from tasks.system.files import sha256, write_json
from tests.support.promotion import NAME, export, run, set_params, workspace  # noqa: F401 (a fixture)
from tests.support.workspaces import PROJECT

CHAMPION = "registry:champion|demo"


def source(model: str) -> Any:
    return load_params().source.model_copy(update={"model": model})


def watched() -> str:
    return content_ids(source(CHAMPION))[f"source.model {CHAMPION}"]


def test_a_run_starts_from_the_champion_or_from_the_model_behind_the_bar(workspace: Path) -> None:  # noqa: F811
    with pytest.raises(UserError, match=r"source\.model: .*write it behind a bar: registry:champion\|hub:"):
        start_version("registry:champion")
    assert start_version(CHAMPION) is None
    assert watched() == "demo"

    export("one")
    run()
    digest = sha256(MODEL / "manifest.json")
    assert start_version(CHAMPION) == (f"registry:{NAME}/1", digest)
    assert start_version(f"registry:{NAME}/1") == start_version("registry:1") == start_version("registry:champion")
    assert watched() == f"registry:{NAME}/1 {digest}"  # so that `source` runs again
    BASE.mkdir(parents=True)
    manifest = fetch_model(source(CHAMPION), BASE)
    assert (manifest["model"], manifest["revision"]) == (f"registry:{NAME}/1", digest)  # the lineage
    assert {path.name for path in BASE.iterdir()} == {"model.safetensors", "manifest.json"}
    assert base_folder(CHAMPION) == reference_folder(CHAMPION) == BASE
    assert reference_hash() == manifest["sha256"]

    export("two")
    run()
    assert watched().startswith(f"registry:{NAME}/2 ")
    with pytest.raises(UserError, match="has no version, alias or run 7"):
        start_version("registry:7")


def test_a_changed_file_of_the_champion_is_refused(workspace: Path, tmp_path: Path) -> None:  # noqa: F811
    export("one")
    run()
    (stored,) = (path for path in (workspace / ".mlflow").rglob("model.safetensors"))
    stored.chmod(0o644)
    stored.unlink()
    stored.write_text("poison")
    with pytest.raises(UserError, match=r"is not what was registered: model\.safetensors has changed"):
        start_version(CHAMPION, tmp_path / "copy")


def test_an_unreachable_registry_is_not_an_empty_one(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    path = workspace / "infra" / "cluster.yaml"
    path.write_text(yaml.safe_dump({**read_yaml(path), "tracking_uri": "http://127.0.0.1:9"}))
    with pytest.raises(UserError, match=r"The registry at http://127\.0\.0\.1:9 could not be used"):
        start_version(CHAMPION)


def test_another_reference_than_the_start_model(workspace: Path, tiny_base: Path) -> None:  # noqa: F811
    write_json(BASE / "manifest.json", {"model": f"registry:{NAME}/1", "sha256": "1", "files": {}, "sizes": {}})
    (BASE / "reference").mkdir()
    base = fetch_model(source(str(tiny_base)), BASE / "reference")
    assert (reference_folder(CHAMPION), reference_hash()) == (tiny_base, base["sha256"])
    assert base_folder(CHAMPION) == BASE
    content = read_yaml(PROJECT / "params.yaml")
    for changes in ({"source.model": "registry:champion"}, {"source.model": "demo"}):
        with pytest.raises(UserError, match=r"`train.reference_model` base is the model behind the bar"):
            validate(
                Params, overlay(content, dotted({**changes, "train.reference_model": "base"})), Path("params.yaml")
            )
    with pytest.raises(UserError, match="`adapter` belongs to another model"):
        validate(Params, overlay(content, dotted({"source.model": CHAMPION, "source.adapter": "x"})), Path("p"))


@pytest.mark.slow
def test_rows_of_an_earlier_run_are_replayed(dummy_repo: Path) -> None:
    """The pairs that a run sampled, or the rows of its source.data; from DVC's cache, though the files are gone."""
    raw = dummy_repo / "data" / "raw" / "pairs"
    raw.mkdir(parents=True)
    (raw / "rows.jsonl").write_text('{"prompt": "a"}\n')
    entry = {"key": "source.data", "name": "pairs", "files": [{"file": "rows.jsonl"}]}
    write_json(raw.parent / "manifest.json", {"sources": [entry, {"key": "source.eval", "name": "eval", "files": []}]})
    (dummy_repo / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"source": {"cmd": "true", "outs": ["data/raw"]}}}))
    commit(dummy_repo, "one")
    assert replayed(dummy_repo, "one") == {"pairs/rows.jsonl": {"prompt": "a"}}

    sampled = dummy_repo / "data" / "sample"
    sampled.mkdir()
    (sampled / "pairs.jsonl").write_text('{"prompt": "b"}\n')
    (sampled / "manifest.json").write_text("{}")
    (dummy_repo / "dvc.yaml").write_text(
        yaml.safe_dump({"stages": {"sample": {"cmd": "true", "outs": ["data/sample"]}}})
    )
    commit(dummy_repo, "two")
    assert replayed(dummy_repo, "two") == {"pairs.jsonl": {"prompt": "b"}}
    assert replayed(dummy_repo, "one") == {"pairs/rows.jsonl": {"prompt": "a"}}


def commit(root: Path, run: str) -> None:
    """The repository as the finished run of that name, with its outputs in DVC's cache alone."""
    env = {**os.environ, "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t", "GIT_COMMITTER_NAME": "t"}
    env["GIT_COMMITTER_EMAIL"] = "t@t"
    for command in (
        [sys.executable, "-m", "dvc", "commit", "--force"],
        ["git", "add", "--force", "dvc.lock"],
        ["git", "commit", "-q", "-m", run],
        ["git", "branch", f"runs/{run}"],
    ):
        subprocess.run(command, cwd=root, env=env, check=True, capture_output=True)


def replayed(root: Path, run: str) -> dict[str, Any]:
    target = root / "replayed" / run
    code = f"from tasks.source.run_data import *; copy_rows('source.data', '{run}', Path('{target}'))"
    subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": "."}, check=True)
    return {str(path.relative_to(target)): json.loads(path.read_text()) for path in target.rglob("*.jsonl")}
