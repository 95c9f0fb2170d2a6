"""No configured address leads to the operator's keys, passwords and the state of tools, however it is spelled."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from tasks.artifacts import demo
from tasks.config import access
from tasks.config.addresses import local_path
from tasks.config.cluster import SITE, Cluster, site_overlay
from tasks.config.params import Params, overlay
from tasks.config.source import Source
from tasks.config.strict import all_keys, dotted, read_yaml
from tasks.errors import UserError
from tasks.evaluate.judges import reward_folder
from tasks.evaluate.stage import _harness
from tasks.secrets.private import user_folder
from tasks.source.fetch import content_id, fetch
from tasks.source.stage import check_addresses, fetch_model
from tasks.system import signing
from tasks.train.continuation import find_checkpoint
from tests.support.settings import KEY
from tests.support.workspaces import make_workspace, refusal, run, write_data

ROW = '{"prompt": "p", "chosen": "good", "rejected": "bad"}\n'
DEMO = Source(data="demo", eval=None, model="demo", adapter=None, seed=0)
REFUSED = r"leads to|outside the folder"
# Texts in params.yaml that are no path: names, values of a fixed list, texts, addresses of HTTP with an allow list.
NO_PATH = {
    *(f"{section}.reward_model.label" for section in ("sample", "evaluate")),
    *(f"{section}.endpoint.{key}" for section in ("sample", "evaluate") for key in ("url", "model", "key_variable")),
    *(f"prepare.{key}" for key in ("format", "columns", "values", "by_source", "template", "chat_template_kwargs")),
    *(f"{section}.adapter.{key}" for section in ("sft", "train") for key in ("targets", "modules_to_save")),
    *("prepare.thresholds", "sft.select", "train.select", "train.loss", "evaluate.harness.tasks"),
    *("export.max_shard_size", "promote.model_name", "promote.alias", "promote.require", "promote.limits"),
    *("promote.max_regression", "promote.drift", "promote.error_budget.metric", "promote.error_budget.anchor"),
    "promote.push",  # only below a target of the operator's allow list, and only written
}


def texts(model: Any) -> set[str]:
    """The keys whose values may be texts."""

    def types(annotation: Any) -> Iterator[Any]:
        yield annotation
        for part in get_args(annotation):
            yield from types(part)

    return {key for key, field in all_keys(model) if str in types(field.annotation)}


def of_source(key: str) -> Callable[[str], object]:
    """As the stages `fingerprint` and `source` open it."""

    def read(address: str) -> None:
        check_addresses(DEMO.model_copy(update={key: address}))

    return read


def of_data(key: str) -> Callable[[str], object]:
    def read(address: str) -> None:
        for open_ in (of_source(key), lambda address: content_id(f"source.{key}", address)):
            with pytest.raises(UserError, match=REFUSED):
                open_(address)
        fetch(f"source.{key}", address, 0, Path("fetched"))

    return read


def of_model(address: str) -> None:
    with pytest.raises(UserError, match=REFUSED):
        of_source("model")(f"registry:champion|{address}")
    with pytest.raises(UserError, match=REFUSED):
        fetch_model(DEMO.model_copy(update={"model": address}), Path("base"))
    of_source("model")(address)


def of_reward_model(address: str) -> None:
    reward_folder(SimpleNamespace(reward_model=SimpleNamespace(model=address)))  # type: ignore[arg-type]


def of_harness(address: str) -> None:
    params: Any = SimpleNamespace(harness=SimpleNamespace(folder=address, limit=None), seed=0)
    _harness(params, SimpleNamespace(shared_path=lambda path: pytest.fail(f"{path} is read")), None, None)  # type: ignore[arg-type]


def of_checkpoint(address: str) -> None:
    find_checkpoint(address, Path("runs"), KEY)


FILES = {  # fields for a file or a folder of rows
    "source.data": of_data("data"),
    "source.eval": of_data("eval"),
    "source.sft": of_data("sft"),
    "source.exclude": of_source("exclude"),
}
FOLDERS = {
    "source.model": of_model,
    "source.adapter": of_source("adapter"),
    "sample.reward_model.model": of_reward_model,
    "evaluate.reward_model.model": of_reward_model,
    "evaluate.harness.folder": of_harness,
    "train.resume_from_checkpoint": of_checkpoint,
    "sft.resume_from_checkpoint": of_checkpoint,
}
PLACES = [".services", ".prefect", ".git", ".mlflow", ".dvc/tmp", "infra/.env", "infra/k8s/secrets.env", "prefect.toml"]
PLACES += [".services/passwords.json", "~/.ssh", "~/.config/dpo", "~/.aws/credentials", "$XDG_CONFIG_HOME/dpo"]
PLACES += ["$DPO_SIGNING_KEY", "$PREFECT_HOME", "$HF_HOME/token", "$HF_HOME/stored_tokens/x.jsonl"]
PLACES += ["~/.cache/huggingface/token"]


def test_every_text_of_the_parameters_is_a_path_of_this_test_or_none():
    assert texts(Params) == NO_PATH | FILES.keys() | FOLDERS.keys()


@pytest.fixture
def workspace(tmp_path, tiny_base, monkeypatch) -> Path:
    root = make_workspace(tmp_path / "workspace", tiny_base, rows=12)
    monkeypatch.chdir(root)
    for name in ("XDG_CONFIG_HOME", "PREFECT_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("DPO_SIGNING_KEY", str(tmp_path / "key.jsonl"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return root


def private_file(place: str) -> Path:
    """A file of rows at, or below, a private place, which would be read if nothing refused it."""
    path = Path(os.path.expandvars(os.path.expanduser(place))).absolute()
    path = path if path.suffix or path.name in (".env", "credentials", "token") else path / "x.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ROW)
    return path


def spellings(file: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """(what it is, address) of ways to lead to a file."""
    yield "the file", str(file)
    yield "its folder", str(file.parent) if file.parent.name not in ("infra", "k8s", "workspace") else str(file)
    yield "relative", os.path.relpath(file)
    yield "with dots", f"{folder}/../{folder.name}/.././{os.path.relpath(file, folder.parent)}"
    yield "as a URL", f"file://{file}"
    yield "through /proc", f"/proc/self/root{file}"
    for kind in ("link", "folder_link", "hard_link", "link_inside", "chain_inside", "hard_link_inside"):
        target = folder / kind
        if kind.endswith("inside"):
            target.mkdir(parents=True)
            (target / "a.jsonl").write_text(ROW)
        if kind == "link":
            (target := target.with_suffix(".jsonl")).symlink_to(file)
        elif kind == "folder_link":
            target.symlink_to(file.parent)
            target = target / file.name
        elif kind == "hard_link":
            os.link(file, target := target.with_suffix(".jsonl"))
        elif kind == "link_inside":
            (target / "z.jsonl").symlink_to(os.path.relpath(file, target))
        elif kind == "chain_inside":
            (folder / "between.jsonl").symlink_to(file)
            (target / "sub").mkdir()
            (target / "sub" / "z.jsonl").symlink_to(folder / "between.jsonl")
        else:
            os.link(file, target / "z.jsonl")
        yield kind, str(target)


def of_a_key(place: str) -> bool:
    """Whether a hard link is recognised: that of a key or password, not that of any file below the place."""
    return place in (
        "infra/.env",
        "infra/k8s/secrets.env",
        "prefect.toml",
        ".services/passwords.json",
        "$DPO_SIGNING_KEY",
        "$HF_HOME/token",
        "~/.cache/huggingface/token",
    )


@pytest.mark.parametrize("place", PLACES)
def test_no_field_of_the_parameters_names_a_private_place(place, workspace):
    file, folder = private_file(place), workspace.parent / "data"
    folder.mkdir()
    for what, address in spellings(file, folder):
        if what.startswith("hard_link") and not of_a_key(place):
            continue
        for key, read in {**FILES, **FOLDERS}.items():
            with pytest.raises(UserError, match=REFUSED):
                read(address)
            shutil.rmtree("fetched", ignore_errors=True)
            assert not Path("base").exists(), (what, key)
    for remote in ("local", "simplecache::file", "git", "blockcache::local", "dir"):
        with pytest.raises(UserError, match="must use one protocol"):
            fetch("source.data", f"{remote}://{file}", 0, Path("fetched"))
        shutil.rmtree("fetched", ignore_errors=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluate.harness": {"tasks": ["arc_easy"], "limit": None, "folder": ".services"}},
        {"evaluate.judge": "reward", "evaluate.reward_model": {"model": ".services", "label": None}},
        {"sample": {"judge": "reward", "reward_model": {"model": ".services", "label": None}}},
        {"train.resume_from_checkpoint": ".services"},
        {"sft": {"learning_rate": 1e-5, "resume_from_checkpoint": ".services"}},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_what_is_read_after_hours_is_checked_before_the_first_stage(changes, workspace):
    private_file(".services")
    params = Params.model_validate(overlay(read_yaml(Path("params.yaml")), dotted(changes)))
    with pytest.raises(UserError, match="leads to"):
        access.check(params)


def test_each_of_several_files_in_a_variable_is_private(workspace, tmp_path, monkeypatch):
    files = [tmp_path / name for name in ("one.yaml", "two.yaml")]
    for file in files:
        file.write_text("token: x")
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, files)))
    for file in files:
        with pytest.raises(UserError, match="leads to"):
            local_path(str(file))


def test_what_lies_in_hidden_folders_is_checked_too(workspace, tmp_path):
    """Folders are copied and hashed with all that is in them."""
    file, folder = private_file("~/.ssh"), tmp_path / "data"
    hidden = folder / ".cache" / "deep"
    hidden.mkdir(parents=True)
    (hidden / "a.json").write_text("{}")
    (folder / "inside.json").symlink_to(".cache/deep/a.json")
    assert local_path(str(folder)) == folder
    (hidden / "z.jsonl").symlink_to(file)
    with pytest.raises(UserError, match="outside the folder"):
        local_path(str(folder))
    (hidden / "z.jsonl").unlink()
    os.link(private_file(".services/passwords.json"), hidden / "z.jsonl")
    with pytest.raises(UserError, match="leads to"):
        local_path(str(folder))


def test_the_operators_site_overlay_may_be_where_secrets_are(workspace, monkeypatch):
    path = private_file("~/.config/dpo/x.yaml")
    path.write_text("currency: USD")
    monkeypatch.setenv(SITE, str(path))
    assert site_overlay() == {"currency": "USD"}


def test_the_operators_own_fields_are_no_business_of_a_run():
    """Texts of infra/cluster.yaml, which no recipe and no run sets, besides those of the groups, which name no path."""
    groups = {f"{name}.resources" for name in ("reference", "actor_train", "inference")}
    assert {key for key in texts(Cluster) if key.split(".")[0] in ("reference", "actor_train", "inference")} == groups


# What stays allowed


def test_data_may_be_anywhere_else_and_links_stay_inside(workspace, tmp_path):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "sub" / "a.jsonl").write_text(ROW)
    (data / "b.jsonl").symlink_to("sub/a.jsonl")
    (data / "again").symlink_to("sub")
    (data / "loop.jsonl").symlink_to("loop.jsonl")
    (data / "gone.jsonl").symlink_to("never-there.jsonl")
    (tmp_path / "named").symlink_to(data)
    (workspace / ".scratch/open/run/data").mkdir(parents=True)
    (workspace / ".scratch/open/run/data/a.jsonl").write_text(ROW)
    opened = ".scratch/open/run/data"
    for address in (str(data), str(tmp_path / "named"), f"file://{data}", opened, str(data / "b.jsonl")):
        of_source("data")(address)
        fetch("source.data", address, 0, Path("fetched"))
        shutil.rmtree("fetched")
    with pytest.raises(UserError, match=r"source\.data: there is no file"):
        of_source("data")("no-such-file.jsonl")


def test_a_folder_that_dvc_tracks_with_links_is_read(workspace, monkeypatch):
    """`cache.type: symlink` makes each tracked file a link into the checkout's cache, or to where it is configured."""
    from tasks.runs import dvc

    for cache in (".dvc/cache", "../shared-cache"):
        Path("mine").mkdir()
        Path("mine/a.jsonl").write_text(ROW.replace("p", cache[-1]))
        dvc.call(workspace, "init", "--no-scm", "--force")
        Path(".dvc/config.local").write_text(f"[cache]\ntype = symlink\ndir = {os.path.relpath(cache, '.dvc')}\n")
        dvc.call(workspace, "add", "mine")
        assert Path("mine/a.jsonl").is_symlink()
        fetch("source.data", "mine", 0, Path("fetched"))
        Path("mine/b.jsonl").symlink_to(workspace / ".dvc" / "config.local")
        with pytest.raises(UserError, match="outside the folder"):
            fetch("source.data", "mine", 0, Path("again"))
        for name in ("mine", "fetched", ".dvc", "again"):
            shutil.rmtree(name, ignore_errors=True)


def test_a_snapshot_of_the_hubs_cache_is_a_model_folder(workspace, tiny_base, tmp_path):
    cached = tmp_path / "home/.cache/huggingface/hub/models--a--b"
    blobs, snapshot = shutil.copytree(tiny_base, cached / "blobs"), cached / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    of_source("model")(str(snapshot))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    (snapshot / "other.json").symlink_to("../../refs/main")
    with pytest.raises(UserError, match="outside the folder"):
        of_source("model")(str(snapshot))


# The attack of a data folder, end to end


def written(root: Path) -> Iterator[tuple[Path, str]]:
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and ".services" not in path.parts:
            yield path, path.read_bytes().decode(errors="replace")


def test_a_data_folder_cannot_publish_the_signing_key(workspace, tmp_path, monkeypatch):
    """Neither the key's old place nor its new one, neither with a link nor with a URL, and no line is quoted."""
    monkeypatch.delenv("DPO_SIGNING_KEY")
    signing.public_key()
    key, old = user_folder() / "signing.key", workspace / ".services" / "signing.key"
    digits = key.read_text().strip()
    old.parent.mkdir()
    old.write_text(key.read_text())
    (old.parent / "passwords.json").write_text(json.dumps({"mlflow/admin": digits}))
    evil = tmp_path / "evil"
    evil.mkdir()
    write_data(evil / "a.jsonl", demo.rows(0)[:60])
    for target, address in (
        (key, str(evil)),
        (old, f"file://{evil}"),
        (old, str(evil / "zz.jsonl")),
        (old, f"file://{old.parent}/passwords.json"),
    ):
        (evil / "zz.jsonl").symlink_to(target)
        set_data(workspace, address)
        said = refusal(workspace, "source")
        assert re.search(REFUSED, said)
        assert digits[:16] not in said
        assert not [path for path, text in written(workspace) if digits[:16] in text]
        (evil / "zz.jsonl").unlink()
    (evil / "zz.jsonl").write_text(f"{digits}\nthe key is {digits}\n")  # a copy that somebody made by hand
    set_data(workspace, str(evil), prepare__max_bad_fraction=0.9)
    said = run(workspace, "source", "prepare")
    assert digits not in said
    assert {path.relative_to(workspace).parts[1] for path, text in written(workspace) if digits[:16] in text} == {"raw"}
    quarantine = (workspace / "data/card/quarantine.jsonl").read_text()
    assert "a line of 75 bytes" in quarantine
    assert '"row": 2' in quarantine


def set_data(workspace: Path, address: str, **more: Any) -> None:
    import yaml

    changes = dotted({"source.data": address, **{key.replace("__", "."): value for key, value in more.items()}})
    content = overlay(yaml.safe_load((workspace / "params.yaml").read_text()), changes)
    (workspace / "params.yaml").write_text(yaml.safe_dump(content))
