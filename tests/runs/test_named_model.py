"""Every command that takes a model takes the same names, and refuses in one sentence what it cannot use."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.main import app
from services.arena import answers
from services.serving.engine import find_target, weights
from tasks import chat
from tasks.compare.blame import blame
from tasks.compare.compare import print_comparison
from tasks.config.paths import METRICS, MODEL
from tasks.errors import UserError
from tasks.promote.champion import approve
from tasks.promote.push import push_model
from tasks.promote.sign import print_verification, sign
from tasks.runs.open_run import open_run
from tasks.system.files import read_json, sha256, write_json
from tasks.tracking import verify
from tests.support.promotion import NAME, export, run, workspace

__all__ = ["workspace"]  # the fixture
SAMPLING = {"max_new_tokens": 4, "temperature": 0.7, "top_p": 1.0, "seed": 0}
RUNS = ("calm-otter", "runs/calm-otter")
VERSIONS = ("champion", "1", NAME, f"{NAME}/champion", f"{NAME}/1", *RUNS, "registry:champion")
UNREGISTERED = ("quiet-fox", "runs/quiet-fox")
BASES = ("base", f"{NAME}/base", "calm-otter/base", "runs/calm-otter/base", "quiet-fox/base")
EXPORTS = ("data/model",)
FOLDERS = ("models/plain",)
HUB = ("hub:owner/name@main",)
NOBODY = ("nobody", "nobody/base", "nobody/3", "./nowhere")
EVERY = (*VERSIONS, *UNREGISTERED, *BASES, *EXPORTS, *FOLDERS, *HUB, *NOBODY)

LOADS = {*VERSIONS, *UNREGISTERED, *BASES, *EXPORTS, *FOLDERS}  # those of the hub too, where there is one
COMPARES = {*VERSIONS, *UNREGISTERED, *BASES, *EXPORTS}
# What a command does with a name, for which names it works, and the parameters that hand the name to it.
COMMANDS: list[tuple[Callable[[str], object], set[str], set[str]]] = [
    (lambda name: chat._load([name]), LOADS, {"chat models", "generate model"}),
    (lambda name: answers.sides(name, "1", SAMPLING), LOADS, {"arena champion", "arena challenger"}),
    (lambda name: weights(find_target(name), None), LOADS, {"serve model", "serve challenger"}),
    (lambda name: print_comparison("1", name), COMPARES, {"compare model"}),
    (lambda name: print_comparison(name, "quiet-fox"), COMPARES, {"compare other"}),
    (print_verification, {*VERSIONS, *EXPORTS}, {"verify what"}),
    (sign, {*VERSIONS, *EXPORTS}, {"sign what"}),
    (lambda name: push_model(f"file://{Path.cwd()}/copies", name), {*VERSIONS}, {"push version"}),
    (lambda name: approved(name), {*VERSIONS}, {"approve version"}),
    (lambda name: opened(name), {*VERSIONS}, {"open name", "blame run"}),
    (lambda name: blamed(name), {*VERSIONS, *UNREGISTERED, *EXPORTS}, {"blame against"}),
]


def approved(name: str) -> None:
    with suppress_if(f"Version 1 of {NAME} is champion already"):
        approve(name, "Ada")


def opened(name: str) -> None:
    """The run of this test is no commit of a repository; test_runs.py opens some."""
    with suppress_if("There is no finished run 'calm-otter'"):
        open_run(name)


def blamed(name: str) -> None:
    with suppress_if("There is no trained policy in"):
        blame(None, name, 1)


@contextmanager
def suppress_if(message: str) -> Iterator[None]:
    """The command has understood the name if it gets as far as this message."""
    try:
        yield
    except UserError as error:
        if message not in str(error):
            raise


@pytest.fixture
def models(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A champion that the run calm-otter made, a run that registered nothing, a base model, and no hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("DPO_HOME", str(workspace))
    monkeypatch.setattr(chat, "load_chat_model", lambda folder: folder)
    write_json(Path("models/plain/config.json"), {})
    write_json(Path("data/base/manifest.json"), {"model": "demo", "sizes": {}, "files": {}, "sha256": "b" * 64})
    export_from("one", workspace / "models/plain")
    monkeypatch.setenv("DPO_RUN", "calm-otter")
    assert run()["promoted"]
    monkeypatch.delenv("DPO_RUN")
    export_from("two", workspace / "models/plain", kind=100)
    for part in (MODEL, METRICS):
        shutil.copytree(part, Path(".scratch/worktrees/quiet-fox", part))
    Path(".scratch/runs/quiet-fox").mkdir()


def export_from(weights: str, base: Path, **answers: int) -> None:
    """An export that was trained from the model in a folder."""
    export(weights, **answers)
    write_json(MODEL / "config.json", {})
    manifest = read_json(MODEL / "manifest.json")
    files = {**manifest["files"], "config.json": sha256(MODEL / "config.json")}
    origin = {"model": str(base), "sha256": "b" * 64, "revision": None}
    write_json(MODEL / "manifest.json", {**manifest, "files": files, "base": origin})
    verify.seal(MODEL)


def test_the_walk_knows_every_command_that_takes_a_model() -> None:
    """Each command and parameter whose help names `champion` among its values, or refers to one that does."""
    named = re.compile(r"\bchampion,|, champion\b|named like the first|The same names|A second model")
    parameters = {
        f"{name} {parameter.name}"
        for name, command in typer.main.get_command(app).commands.items()
        for parameter in command.params
        if named.search(getattr(parameter, "help", "") or "")
    }
    assert parameters == set().union(*(names for *_, names in COMMANDS))


@pytest.mark.parametrize(("call", "works"), [case[:2] for case in COMMANDS], ids=[min(case[2]) for case in COMMANDS])
def test_a_command_takes_every_name_or_says_why_not(
    call: Callable[[str], object], works: set[str], models: None
) -> None:
    refusals: dict[str, str] = {}
    for name in EVERY:
        try:
            call(name)
        except UserError as error:
            refusals[name] = str(error)
    assert {*EVERY} - refusals.keys() == works, refusals
    assert all(re.fullmatch(r"\S.*[.`]", text) and len(text) < 600 for text in refusals.values()), refusals


def test_a_base_model_is_the_one_that_the_model_was_trained_from(models: None) -> None:
    """After a run in a worktree the checkout itself has no base model."""
    for name in BASES[1:]:
        assert chat.model_folder(name) == Path("models/plain").resolve()
    assert chat.model_folder("base") == Path("unused").resolve()  # source.model of params.yaml
    shutil.rmtree("data/base")
    with pytest.raises(UserError, match="also takes that of a registered one: MODEL/base"):
        chat.model_folder("base")


def test_a_base_model_is_compared_by_the_answers_beside_those_of_the_other_model(
    models: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of calm-otter and of its base model all 200 answers are kind, of quiet-fox and of its base model 100."""
    path = Path(".scratch/worktrees/quiet-fox", MODEL, "manifest.json")
    same, params = read_json(path), read_json(path)["params"]
    apart = {"params": {**params, "evaluate": {**params["evaluate"], "max_new_tokens": 99}}}
    other = {"base": {**same["base"], "sha256": "c" * 64}}

    def compare(name: str, first: str, **changes: Any) -> str:
        write_json(path, {**same, **changes})
        print_comparison(name, first)
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("samples/policy/kind"))

    assert "-0.5000 (" in compare("calm-otter", "quiet-fox")
    for changes in ({}, apart):  # one base model: its answers beside those of the other model, of the same length
        assert "+0.0000 (" in compare("quiet-fox/base", "calm-otter", **changes)
        assert "+0.0000 (" in compare("calm-otter/base", "quiet-fox", **changes)
        assert "+0.0000 (" in compare("quiet-fox", "calm-otter/base", **changes)
    assert "+0.5000 (" in compare("quiet-fox/base", "calm-otter", **other)
    with pytest.raises(UserError, match=r"they were evaluated apart \(max_new_tokens 99 instead of"):
        compare("quiet-fox/base", "calm-otter", **other, **apart)
