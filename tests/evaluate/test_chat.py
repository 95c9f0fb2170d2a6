"""`dpo chat` and `dpo generate` with the demo's tiny model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import chat
from tasks.compare.compare import _is_export, find_model
from tasks.config.paths import METRICS, MODEL
from tasks.errors import UserError
from tasks.runs.named_model import NamedModel
from tasks.tracking.model_names import BASE_MODEL, HUB_MODEL

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_two_models_answer_side_by_side_and_keep_their_conversation(tiny_base: Path) -> None:
    command = [sys.executable, "-m", "cli", "chat", str(tiny_base), f"{tiny_base}/", "--max-new-tokens", "8"]
    talk = "Where is the cup?\n\nAnd now?\n/reset\nWhere is the cup?\n"
    options = ["--temperature", "0", "--system", "Be kind."]
    how = {"env": {**os.environ, "FORK_STAGES": "1"}, "input": talk, "capture_output": True, "text": True}
    done = subprocess.run([*command, *options], cwd=PROJECT, timeout=900, **how)
    assert done.returncode == 0, done.stderr
    answers = [
        line for line in done.stdout.splitlines() if f"{tiny_base}" in line and ": " in line and "Loading" not in line
    ]
    assert len(answers) == 6
    texts = [answer.split(": ", 1)[1] for answer in answers]
    assert texts[0] == texts[1] == texts[4] == texts[5]  # greedy, and /reset forgets the first question
    assert all(texts)


def test_answers_are_written_once_each_and_continue_after_an_interruption(tiny_base: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "Where is the cup?"}]
    prompts.write_text(f'Where is the cup?\n"Where is the cup?"\n\n{json.dumps({"messages": turns})}\n')
    how = {"max_new_tokens": 8, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    out = chat.generate(prompts, str(tiny_base), None, **how)
    whole = out.read_text()
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line["prompt"] for line in lines] == ["Where is the cup?", "Where is the cup?", turns]
    assert len({line["response"] for line in lines}) == 1
    assert lines[0]["response"]
    out.write_text(whole[: len(whole.splitlines()[0]) + 20])  # killed in the middle of the second line
    assert chat.generate(prompts, str(tiny_base), None, **how).read_text() == whole
    prompts.write_text("Something else\n")
    with pytest.raises(UserError, match="has answers to other prompts"):
        chat.generate(prompts, str(tiny_base), None, **how)


def test_a_folder_is_the_same_for_every_command(tiny_base: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = Path(shutil.copytree(tiny_base, tmp_path / MODEL))
    assert chat.model_folder(f"~/{MODEL}") == folder
    with pytest.raises(UserError, match="is a folder without an evaluation"):
        find_model(f"~/{MODEL}")
    (tmp_path / METRICS).mkdir(parents=True)
    (tmp_path / METRICS / "pairs.jsonl").write_text("")
    (folder / "manifest.json").write_text("{}")
    found = find_model(f"~/{MODEL}")
    assert (found.weights(), found.results) == (folder, tmp_path / METRICS)
    for below_root in ("/", "/model"):
        assert not _is_export(Path(below_root))


def test_a_base_model_beside_an_adapter_is_refused_like_any_folder(tiny_base: Path, tmp_path: Path, monkeypatch):
    folder = Path(shutil.copytree(tiny_base, tmp_path / "model"))
    (folder / "adapter_config.json").write_text("{}")
    manifest = {"base": {"model": str(folder)}, "params": {"source": {"adapter": None}}}
    monkeypatch.setattr(chat, "manifest_of", lambda found: manifest)
    monkeypatch.setattr(chat, "hub_snapshot", lambda *address: folder)  # there is no hub
    for found in (NamedModel("one/base", BASE_MODEL, run="one"), NamedModel("hub:owner/name", HUB_MODEL)):
        with pytest.raises(UserError, match="also holds an adapter"):
            chat.weights_folder(found)
    (folder / "adapter_config.json").unlink()
    assert chat.weights_folder(found) == folder


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not valid JSON"),
        ('{"question": "a"}\n', r"line 1: no `prompt` or `messages` \(it has question\)"),
    ],
)
def test_a_file_without_prompts_is_refused_before_a_model_is_loaded(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(UserError, match=sentence):
        chat.generate(tmp_path / "prompts.jsonl", "nowhere", None, 8, 0.0, 1.0, 0)
