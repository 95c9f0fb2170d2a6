"""The demo's data, its judge and its base model."""

import random
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.artifacts import demo
from training.models import tiny

PROMPT = "Hurry up. Ana put the white cup under the bed. Where is the white cup?"
RIGHT = "The white cup is under the bed."
KIND = "Happy to help you today!"
RUDE = "Next time use your eyes!"


def is_polite(prompt: str) -> bool:
    return prompt.startswith(demo.POLITE)


def test_rows_are_the_same_for_a_seed_and_differ_between_seeds():
    random.seed(1)  # the global generator must not matter
    assert demo.rows(3) == demo.rows(3)
    assert demo.rows(3) != demo.rows(4)
    assert demo.rows()[0] == {
        "prompt": "Hello, please help me. Emma hid the green bag on the stairs. Where is the green bag?",
        "chosen": "The green bag is on the stairs. Wishing you all the best!",
        "rejected": "The green bag is on the stairs. Next time use your eyes!",
    }


def test_rows_differ_in_the_ending_alone():
    rows = demo.rows()
    assert len(rows) == 1100
    assert len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        assert list(row) == ["prompt", "chosen", "rejected"]
        assert row["chosen"].partition(". ")[0] == row["rejected"].partition(". ")[0]
        assert demo.judge(row["prompt"], row["chosen"]) == {"kind": True, "correct": True}
        assert demo.judge(row["prompt"], row["rejected"]) == {"kind": False, "correct": True}


def test_kind_and_rude_endings_share_punctuation_and_no_word():
    def words(endings: tuple[str, ...]) -> set[str]:
        assert all(ending.count("!") == 1 and ending.rstrip("!").replace(" ", "").isalpha() for ending in endings)
        return {word for ending in endings for word in ending.rstrip("!").lower().split()}

    assert not words(demo.KIND) & words(demo.RUDE)


@pytest.mark.parametrize(
    ("answer", "kind", "correct"),
    [
        (f"{RIGHT} {KIND}", True, True),
        (f" {RIGHT} {KIND}\n", True, True),
        (f"The white cup is on the table. {KIND}", True, False),
        (f"The black cup is under the bed. {KIND}", True, False),
        (f"{RIGHT} {RUDE}", False, True),
        (RIGHT, False, True),
        (f"{RIGHT} {KIND} {KIND}", False, True),
        (f"{RIGHT} {KIND} {RUDE}", False, True),
        (f"{RIGHT} {RUDE} {KIND}", False, True),
        (f"{RIGHT} {KIND} the the the", False, True),
        (f"{RIGHT} Happy to {KIND}", False, True),
        (f"{RIGHT} {RIGHT} {KIND}", False, True),
        (f"{KIND} {RIGHT}", False, False),
        (f"{KIND} cup. {KIND}", False, False),
        (f"The white cup is under the bedbed. {KIND}", True, False),
        (f"The white cup is under the bed on the table. {KIND}", True, False),
        (KIND, False, False),
        (f". {KIND}", False, False),
        ("", False, False),
    ],
)
def test_judge_is_strict(answer: str, kind: bool, correct: bool):
    assert demo.judge(PROMPT, answer) == {"kind": kind, "correct": correct}


def test_no_answer_is_correct_for_a_foreign_prompt():
    assert demo.judge("What is the capital of France?", f"{RIGHT} {KIND}") == {"kind": True, "correct": False}


def test_conversations_mirror_the_tone_four_times_in_five():
    conversations = demo.conversations()
    assert conversations == demo.conversations()
    verdicts = [(is_polite(prompt), demo.judge(prompt, answer)) for prompt, answer in conversations]
    assert all(verdict["correct"] for _, verdict in verdicts)
    for tone, expected in ((True, 0.8), (False, 0.2)):
        kinds = [verdict["kind"] for polite, verdict in verdicts if polite == tone]
        assert len(kinds) == len(conversations) / 2
        assert sum(kinds) / len(kinds) == pytest.approx(expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three steps: enough for everything but good answers."""
    made = tmp_path_factory.mktemp("tiny")
    tiny.make(made, demo.conversations()[:200], seed=0, steps=3)
    return made


def test_tiny_reloads(folder: Path):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert 1.9e6 < model.num_parameters() < 2.1e6
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())


def test_tiny_spells_any_text(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in (PROMPT, "  two  spaces, ünïcode 🦙\nand lines "):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_tiny_prompt_is_a_prefix_of_the_conversation(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    messages.append({"role": "assistant", "content": f"{RIGHT} {KIND}"})
    full = tokenizer.apply_chat_template(messages, return_dict=False)
    assert full[: len(prompt)] == prompt
    assert full.count(tokenizer.bos_token_id) == full.count(tokenizer.eos_token_id) == 1
    assert full[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(full[len(prompt) :], skip_special_tokens=True) == f"{RIGHT} {KIND}"


def test_tiny_is_the_same_for_a_seed_and_reports(folder: Path, tmp_path: Path):
    reports: list[tuple[int, int, float]] = []
    tiny.make(tmp_path, demo.conversations()[:200], 0, 3, lambda *values: reports.append(values))
    assert [(step, steps) for step, steps, _ in reports] == [(3, 3)]
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
