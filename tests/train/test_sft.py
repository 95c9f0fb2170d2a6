"""Supervised fine-tuning before DPO: its data, its parameters, and the stage in front of the others."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks import api
from tasks.artifacts import demo
from tasks.artifacts.pairs import PairTable, open_table, pairs_file
from tasks.artifacts.training_data import TrainingData, chosen_answers
from tasks.config.params import Params, load_params, overlay
from tasks.config.strict import dotted, read_yaml, validate
from tasks.errors import UserError
from tasks.prepare.demonstrations import check_demonstrations, prepare_demonstrations, read_demonstration
from tasks.prepare.templates import choose_template
from tasks.source.readers import read_chunks
from tasks.source.reject_reasons import RejectedRow
from tasks.train.progress import name_keys
from tasks.train.sft import with_sft_as_train
from tests.support.workspaces import GROUPS, NO_JUDGE, PROJECT, SMALL, make_workspace, refusal, run, write_data
from training.models.tokenizer import load_tokenizer
from training.pairs.pair_columns import columns_of

SETTINGS = {"learning_rate": 3.0e-3, "epochs": 2, "global_batch_size": 8, "logging_steps": 2}
QUESTION = {"role": "user", "content": "Where is it?"}
ANSWER = {"role": "assistant", "content": "Here."}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, ANSWER]},
        {"conversations": [{"from": "human", "value": "Where is it?"}, {"from": "gpt", "value": "Here."}]},
        {"prompt": "Where is it?", "response": "Here."},
        {"instruction": "Where is it?", "input": "", "output": "Here."},
        {"question": "Where is it?", "answer": "Here."},
        {"prompt": [QUESTION], "completion": [ANSWER]},
    ],
)
def test_rows_with_one_answer(row: dict) -> None:
    demonstration = read_demonstration(row)
    assert (demonstration.prompt, demonstration.chosen) == ([QUESTION], [ANSWER])


def test_tools_reach_the_template_and_images_do_not_vanish() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert read_demonstration({"messages": [QUESTION, ANSWER], "tools": json.dumps(tools)}).tools == tools
    with pytest.raises(RejectedRow, match="`images` of the row"):
        read_demonstration({"messages": [QUESTION, ANSWER], "images": ["x.png"]})


def test_a_template_that_drops_tools_of_demonstrations_names_the_setting(tmp_path: Path, tiny_base: Path) -> None:
    rows = [{"messages": [QUESTION, ANSWER], "tools": [{"name": "look"}]} for _ in range(4)]
    write_data(tmp_path / "rows.jsonl", rows)
    template, params = choose_template(load_tokenizer(tiny_base), "auto"), make_params().prepare
    chunks = read_chunks(tmp_path / "rows.jsonl", "rows.jsonl")
    made = prepare_demonstrations(chunks, template, params, tmp_path)
    with pytest.raises(UserError, match=r"4 template_drops.*`tools` \(tool 1\).*Set prepare\.tools to text"):
        check_demonstrations(*made, params)


def test_the_answer_is_the_last_turn_or_all_turns_after_the_question() -> None:
    row = {"messages": [QUESTION, ANSWER, QUESTION, ANSWER], "system": "Be brief."}
    last, every = read_demonstration(row), read_demonstration(row, loss_on="all")
    assert [turn["role"] for turn in last.prompt] == ["system", "user", "assistant", "user"]
    assert [turn["role"] for turn in every.prompt] == ["system", "user"]
    assert every.chosen == [ANSWER, QUESTION, ANSWER]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Where?"}, "missing_field"),
        ({"text": "Once upon a time"}, "missing_field"),
        ({"messages": [QUESTION]}, "turn_order"),
        ({"prompt": "Where?", "response": " "}, "empty_answer"),
        ({"prompt": "Where?", "response": "half \ud800"}, "invalid_utf8"),
        ({"messages": [QUESTION, {"role": "narrator", "content": "x"}]}, "wrong_role"),
    ],
)
def test_rows_that_are_no_demonstration(row: dict, reason: str) -> None:
    with pytest.raises(RejectedRow) as rejected:
        read_demonstration(row)
    assert rejected.value.name == reason


def test_chosen_answers_count_once_and_cost_one_token_more(referenced: Path) -> None:
    table = open_table(pairs_file("train", referenced))
    pairs, answers = PairTable(table), chosen_answers(table)
    assert len(answers) == len({(pair.prompt_ids.tobytes(), pair.chosen_ids.tobytes()) for pair in pairs})
    first = answers[0]
    assert first.chosen_ids.tolist() == first.rejected_ids.tolist() == pairs[0].chosen_ids.tolist()
    assert len(first) == len(first.prompt_ids) + len(first.chosen_ids) + 1
    stored, computed = columns_of(answers), columns_of(list(answers))
    for name in ("prompt", "chosen", "rejected", "shared_prefix", "label", "margin", "weight"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(computed, name))


def make_params(**changes: object) -> Params:
    content = overlay(read_yaml(PROJECT / "params.yaml"), dotted(changes))
    return validate(Params, content, Path("params.yaml"))


def test_the_section_has_defaults_except_the_learning_rate() -> None:
    made = with_sft_as_train(make_params(sft={"learning_rate": 2.0e-4}))
    assert (made.train.loss, made.train.learning_rate, made.train.adapter.rank) == ({"sft": 1.0}, 2.0e-4, 16)
    assert made.train.beta is None
    with pytest.raises(UserError, match=r"`sft.learning_rate` is missing"):
        make_params(sft={"epochs": 1})
    with pytest.raises(UserError, match=r"Did you mean `sft.epochs`"):
        make_params(sft={"learning_rate": 2.0e-4, "epoch": 1})
    with pytest.raises(UserError, match=r"`source.sft` is the data of the stage sft, which is off"):
        make_params(**{"source.sft": "rows.jsonl"})


def test_messages_of_the_trainer_name_the_keys_of_sft() -> None:
    message = "lower train.learning_rate, or set actor_train.zero_stage"
    assert name_keys(message, "sft") == "lower sft.learning_rate, or set actor_train.zero_stage"
    assert name_keys(message, "train") == message


@pytest.mark.slow
def test_rows_that_cannot_be_learnt_stop_prepare(tmp_path: Path, tiny_base: Path, mlflow_store: Path) -> None:
    workspace = make_workspace(tmp_path / "w", tiny_base, sft=SETTINGS, **{"source.sft": "answers.jsonl"})
    shutil.copytree(mlflow_store, workspace / ".mlflow")
    write_data(workspace / "answers.jsonl", [{"text": "no prompt"}] * 10)
    run(workspace, "source")
    said = refusal(workspace, "prepare")
    assert "source.sft: 10 of 10 rows cannot be used (10 missing_field)" in said
    assert "a prompt (instruction, prompt, question, input) and an answer (chosen, response" in said


@pytest.mark.slow
def test_a_model_learns_to_answer_and_then_to_prefer(
    tmp_path: Path, tiny_base: Path, mlflow_store: Path, capsys, monkeypatch
) -> None:
    """Through the functions for notebooks: full fine-tuning on data of its own, then DPO with the result as base."""
    monkeypatch.setenv("FORK_STAGES", "1")
    workspace = tmp_path / "w"
    shutil.copytree(mlflow_store, workspace / ".mlflow")
    rows = [{"prompt": row["prompt"], "response": row["chosen"]} for row in demo.rows(1)[:80]]
    write_data(tmp_path / "pairs.jsonl", demo.rows(0)[:40])
    write_data(tmp_path / "answers.jsonl", [*rows, {"prompt": "Where?", "response": ""}])
    changes = {"source.sft": str(tmp_path / "answers.jsonl"), "sft": {**SETTINGS, "adapter": None}}
    api.prepare(
        workspace,
        str(tmp_path / "pairs.jsonl"),
        str(tiny_base),
        recipe="demo",
        params={**SMALL, **NO_JUDGE, **changes, "train.max_steps": 2},
        cluster={**GROUPS, "actor_train.save_steps": 100},
    )
    assert "prepare: sft: rejected 1: empty_answer" in capsys.readouterr().out
    counts = {split: open_table(pairs_file(f"sft-{split}", workspace)).num_rows for split in ("train", "eval")}
    assert sum(counts.values()) == 80
    assert counts["eval"] > 0

    metrics = api.train(workspace)
    said = capsys.readouterr().out
    assert f"sft: the base model has learnt {counts['train']} answers" in said
    assert "train: the policy starts as the reference" in said
    assert api.curves(workspace)[2]["loss"] == pytest.approx(metrics["loss"])
    manifest = json.loads((workspace / "data/sft/manifest.json").read_text())
    assert manifest["answers"] == counts["train"]
    losses = {name: mean_nll(folder, workspace) for name, folder in folders(tiny_base, workspace).items()}
    assert manifest["metrics"]["eval/loss"] == pytest.approx(losses["tuned"], abs=1e-4)
    assert losses["tuned"] < losses["base"]


def test_the_functions_name_a_mistake_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no prepared data. Call prepare\(folder, data, model\) first"):
        api.train(tmp_path / "w")
    with pytest.raises(UserError, match=r"Unknown key `train.bta`. Did you mean `train.beta`"):
        api.prepare(tmp_path / "w", "demo", "demo", recipe="demo", params={"train.bta": 0.2})
    assert not (tmp_path / "w").exists()


def folders(base: Path, workspace: Path) -> dict[str, Path]:
    return {"base": base, "tuned": workspace / "data/sft"}


@torch.no_grad()
def mean_nll(folder: Path, workspace: Path) -> float:
    """The loss of the held-out answers, computed by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for pair in TrainingData(preferences=False, own_file=True).read("eval", workspace):
        ids = torch.tensor([[*pair.prompt_ids, *pair.chosen_ids]], dtype=torch.long)
        labels = ids.clone()
        labels[:, : len(pair.prompt_ids)] = -100
        losses.append(model(input_ids=ids, labels=labels).loss.item())
    return float(np.mean(losses))


def test_without_the_section_the_stage_writes_an_empty_manifest(tmp_path: Path, tiny_base: Path) -> None:
    workspace = make_workspace(tmp_path / "w", tiny_base)
    assert load_params(workspace / "params.yaml").sft is None
    assert run(workspace, "sft") == "sft: off\n"
    assert json.loads((workspace / "data/sft/manifest.json").read_text()) == {}
