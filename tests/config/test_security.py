"""What comes from others does nothing here but be read: models, checkpoints, paths, and who may connect."""

import ast
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tasks.config.params import Params, load_params, read_recipe
from tasks.config.strict import read_yaml
from tasks.errors import UserError
from tasks.promote.sign import sign_checkpoint
from tasks.source import fetch
from tasks.source.fetch import data_sources
from tasks.source.stage import check_addresses
from tasks.train import continuation
from tests.support.settings import KEY
from tests.support.workspaces import PROJECT
from training.models.remote_code import needs_remote_code
from training.trainer import checkpoint_files

CODE = ("cli", "flows", "services", "tasks", "training")
SOURCES = [path for folder in CODE for path in sorted((PROJECT / folder).rglob("*.py"))]


# Nothing that came with data or a model runs


class Planted:
    """A pickle that would write a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def whole_checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}"
    (path / "state").mkdir(parents=True)
    (path / "state" / "weights.pt").write_bytes(b"ours")
    digest = checkpoint_files.sha256(path / "state" / "weights.pt")
    return signed(path, {"step": step, "files": {"state/weights.pt": digest}}, KEY)


def signed(path: Path, manifest: dict[str, Any], key: bytes) -> Path:
    content = json.dumps(manifest)
    (path / "manifest.json").write_text(content)
    (path / "manifest.mac").write_text(checkpoint_files.mac_of(content.encode(), key))
    return path


def test_a_checkpoint_that_our_manifest_does_not_name_is_never_read(tmp_path, capsys):
    mark = tmp_path / "owned"
    evil = pickle.dumps(Planted(mark))
    ours = whole_checkpoint(tmp_path / "train", 1)
    for step, name in ((2, "state/weights.pt"), (3, "state/zero_pp_rank_7_optim_states.pt")):  # replaced, and added
        (whole_checkpoint(tmp_path / "train", step) / name).write_bytes(evil)
    (tmp_path / "train" / "step-00000004").mkdir()  # no manifest at all
    (tmp_path / "train" / "step-00000004" / "weights.pt").write_bytes(evil)
    assert list(checkpoint_files.whole_checkpoints(tmp_path / "train", KEY)) == [ours]
    said = capsys.readouterr().err
    assert "state/weights.pt has changed" in said
    assert "state/zero_pp_rank_7_optim_states.pt does not belong to this checkpoint" in said
    assert "its manifest is missing" in said
    assert not mark.exists()
    pickle.loads(evil)  # the trap is real
    assert mark.exists()


def test_a_forged_checkpoint_is_refused_before_it_is_read(tmp_path, capsys):
    """Whoever can write the folder forges the manifest, too, and signs it with a key of their own, or not at all."""
    mark, folder = tmp_path / "owned", tmp_path / "train"
    ours = whole_checkpoint(folder, 1)
    forged = [whole_checkpoint(folder, step) for step in (2, 3, 4)]
    for path in forged:
        (path / "state" / "weights.pt").write_bytes(pickle.dumps(Planted(mark)))
        digest = checkpoint_files.sha256(path / "state" / "weights.pt")
        signed(path, {"step": 2, "files": {"state/weights.pt": digest}}, bytes(31) + b"x")
    (forged[1] / "manifest.mac").unlink()
    shutil.copy(ours / "manifest.mac", forged[2])
    assert list(checkpoint_files.whole_checkpoints(folder, KEY)) == [ours]
    assert capsys.readouterr().err.count("not made with the signing key") == 3
    for path in forged:
        with pytest.raises(UserError, match=r"resume_from_checkpoint: the checkpoint .* cannot be used: .*signing key"):
            continuation.find_checkpoint(str(path), tmp_path, KEY)
    assert not mark.exists()
    for path in forged:
        sign_checkpoint(path, KEY)  # `dpo sign`, by whoever knows where it came from
        assert continuation.find_checkpoint(str(path), tmp_path, KEY) == path


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Every call with the dotted name of what is called."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PROJECT).as_posix())
def test_no_code_of_ours_runs_what_it_reads(path):
    forbidden = re.compile(
        r"^(pickle\.loads?|cloudpickle\.\w+|joblib\.load|yaml\.(unsafe_|full_)?load(_all)?|eval|exec)$"
    )
    for name, call in calls(ast.parse(path.read_text())):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        where = f"{path.name}:{call.lineno} {name}"
        assert not forbidden.match(name), where
        assert given.get("shell") != "True", where
        assert given.get("trust_remote_code", "False") == "False", where
        assert name != "torch.load" or given.get("weights_only") == "True", where
        if name.endswith((".from_pretrained", ".from_config")) and name.startswith(("Auto", "kind.")):
            assert given.get("trust_remote_code") == "False", f"{where}: say that code of the model is not run"
        if name.endswith(".from_pretrained") and "gguf_file" not in given:  # a GGUF file is our own export
            named = " ".join(ast.unparse(argument) for argument in call.args)
            assert re.search(r"\bfiles\b|^None$", named), f"{where}: hand it the links of `loadable(folder)`"


@pytest.mark.parametrize(("kind", "refused"), [("evil-net", True), ("llama", False)])
def test_a_models_own_code_is_never_run(kind, refused, tmp_path, tiny_base):
    """Of an architecture that transformers lacks it is refused; of one that it has, the code is passed over."""
    model, mark = shutil.copytree(tiny_base, tmp_path / "model"), tmp_path / "owned"
    config = json.loads((model / "config.json").read_text())
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (model / "config.json").write_text(json.dumps({**config, "model_type": kind, "auto_map": auto}))
    (model / "code.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n")
    assert (needs_remote_code(model) is not None) == refused
    if refused:
        source = load_params(PROJECT / "params.yaml").source.model_copy(update={"model": str(model)})
        with pytest.raises(UserError, match=r"needs its own Python code \(the architecture `evil-net`"):
            check_addresses(source)
    else:
        from training.trainer.memory import model_sizes

        assert config["model_type"] == kind
        assert model_sizes(model, None).parameters > 0
    assert not mark.exists()


def test_mlflow_may_not_run_models_code():
    code = "import os, tasks.run_stage; print(os.environ['MLFLOW_ALLOW_MODEL_CODE_EXECUTION'])"
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, env=env, capture_output=True, text=True)
    assert done.stdout == "false\n"
    assert "export MLFLOW_ALLOW_MODEL_CODE_EXECUTION := false" in (PROJECT / "Makefile").read_text()


# Paths


def test_a_link_out_of_a_data_folder_is_refused_and_one_inside_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("DPO_HOME", str(tmp_path / "project"))
    data, outside = tmp_path / "data", tmp_path / "private.jsonl"
    data.mkdir()
    outside.write_text('{"prompt": "secret"}\n')
    (data / "rows.jsonl").write_text("{}\n")
    (data / "same.jsonl").symlink_to("rows.jsonl")
    fetch.check_address("source.data", str(data))
    (data / "more.jsonl").symlink_to(outside)
    with pytest.raises(UserError, match=r"more\.jsonl is a symbolic link to .*private\.jsonl, outside the folder"):
        fetch.check_address("source.data", str(data))


def test_a_stores_file_names_cannot_leave_the_folder(tmp_path):
    assert fetch._path_inside(tmp_path, "a/b.jsonl") == tmp_path / "a/b.jsonl"
    with pytest.raises(ValueError, match="would lie outside"):
        fetch._path_inside(tmp_path / "raw", "../../x.jsonl")


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "../x", ""])
def test_names_that_become_folders_stay_below_theirs(name):
    content = read_yaml(PROJECT / "params.yaml")
    mixture = [{"name": name, "data": "demo", "weight": 1.0, "share": 1.0}]
    with pytest.raises(ValidationError, match="name"):
        Params.model_validate({**content, "source": {**content["source"], "data": mixture}})
    with pytest.raises(ValidationError, match="model_name"):
        Params.model_validate({**content, "promote": {**content["promote"], "model_name": name}})
    with pytest.raises(UserError, match="There is no recipe"):
        read_recipe(f"../{name}")


def test_the_name_of_an_address_is_one_folder():
    source = load_params(PROJECT / "params.yaml").source
    for address in ("s3://bucket/../../etc/x.jsonl", "/tmp/..", "hub:../../x@main"):
        (origin,) = data_sources(source.model_copy(update={"data": address}))
        assert re.fullmatch(r"[\w-]+", origin["name"])


# Servers


def test_every_server_that_we_start_is_told_where_to_listen():
    """`--host` stands behind every command that serves pages, and never names all addresses."""
    served = re.compile(
        r"mlflow\W+server\W+-|tasks\.tracking\.mlflow_server\W+-|services\.prefect_sqlite\W+server\W+start|api:create_app"
    )
    files = [PROJECT / "Makefile", *SOURCES, *(PROJECT / "infra").rglob("*.y*ml")]
    found = 0
    for path in files:
        text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
        for match in served.finditer(text):
            behind = text[match.start() : match.start() + 400]
            if re.search(r"^\S+\s*$|`", behind.splitlines()[0]) and "--host" not in behind:
                continue  # a sentence that names the command
            found += 1
            assert "--host" in behind, f"{path.name}: {behind.splitlines()[0]}"
            if "infra" not in path.parts:  # there a container's own network is meant
                assert not re.search(r"--host\W+0\.0\.0\.0", behind), path.name
        if "--with-healthcheck" in text:  # listens on every address, as it comes
            assert re.search(r"PREFECT_WORKER_WEBSERVER_HOST\W+(LOOPBACK|127\.0\.0\.1)", text), path.name
    assert found >= 3  # MLflow and Prefect of dpo up, the embedded one
