"""Folders with models from others: what is loaded is what was hashed, and what is odd is one sentence."""

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tasks.artifacts.models import base_folder
from tasks.errors import UserError
from tasks.source import stage as source
from tasks.source.stage import check_addresses, fetch_model
from tests.models import test_architectures as architectures
from tests.source.test_source import edit, params
from training.models import adapters
from training.models.chat import chat_pieces, render
from training.models.folder_checks import _check_tensors
from training.models.loading import load_config, load_model
from training.models.model_files import INDEX, OF_TOKENIZERS, SINGLE, loadable
from training.models.prompt_tokens import PromptTokens
from training.models.tokenizer import load_tokenizer
from training.models.weights import read_headers

Damage = Callable[[Path], Any]


@pytest.fixture
def model(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "model"))


# Variants of a folder: each spoils one thing


def config(**values: Any) -> Damage:
    return edit("config.json", **values)


def generation(**values: Any) -> Damage:
    return edit("generation_config.json", **values)


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def other_configuration(folder: Path) -> None:
    """transformers replaces config.json by the file for its own version."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.4.0.0.json").write_text(json.dumps({**content, "attn_implementation": "evil/kernel"}))
    (folder / "config.json").write_text(json.dumps({**content, "configuration_files": ["config.4.0.0.json"]}))


def other_tokenizer(folder: Path) -> None:
    edit("tokenizer_config.json", fast_tokenizer_files=["tokenizer.4.0.0.json"])(folder)
    shutil.copy(folder / "tokenizer.json", folder / "tokenizer.4.0.0.json")


def sharded(name: str) -> Damage:
    """An index that names a file elsewhere, where transformers finds it."""

    def change(folder: Path) -> None:
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        (folder / SINGLE).rename(target)
        with safe_open(target, "np") as file:
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(file.keys(), name)}))
        (folder / "other.safetensors").touch()

    return change


def index(content: Any) -> Damage:
    def change(folder: Path) -> None:
        (folder / SINGLE).rename(folder / "a.safetensors")
        (folder / INDEX).write_text(json.dumps(content))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def save(folder: Path) -> None:
        state = load_file(folder / SINGLE)
        change(state)
        save_file(state, folder / SINGLE, metadata={"format": "pt"})

    return save


def twice(folder: Path) -> None:
    shutil.copy(folder / SINGLE, folder / "b.safetensors")
    (folder / SINGLE).rename(folder / "a.safetensors")
    weight_map = {"lm_head.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def normalizer(*contents: str) -> Damage:
    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        steps = [{"type": "Replace", "pattern": {"String": text[0]}, "content": text} for text in contents]
        content["normalizer"] = {"type": "Sequence", "normalizers": steps}
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return change


def no_file(name: str) -> Damage:
    """A pipe in place of a file: whoever opens it waits for ever."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def sparse(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, 600 << 20)


HEADS = "model.layers.0.self_attn.q_proj.weight"
VARIANTS: dict[str, tuple[Damage, str]] = {
    "config: no JSON": (text("config.json", "{"), "not valid JSON"),
    "config: a list": (text("config.json", "[]"), "no JSON object"),
    "config: deep": (text("config.json", '{"a": ' * 100_000), "not valid JSON"),
    "config: digits": (text("config.json", '{"a": ' + "9" * 5000 + "}"), "not valid JSON"),
    "config: other files": (other_configuration, "`configuration_files` names other files"),
    "config: kernel": (config(experts_implementation="evil/kernel"), "names the kernel evil/kernel"),
    "config: nested kernel": (config(more={"kernel_config": ["evil/kernel"]}), "names the kernel evil/kernel"),
    "config: attention": (config(attn_implementation="nonesuch"), "describes no model: .*nonesuch"),
    "config: quantization": (config(quantization_config={"quant_method": "nonesuch"}), "quantization 'nonesuch'"),
    "config: quantization's type": (config(quantization_config=4), "config.json"),
    "config: weights elsewhere": (config(transformers_weights="b.safetensors"), "`transformers_weights` names other"),
    "config: fusion": (config(fusion_config={"nonesuch": True}), "config.json"),
    "config: layers": (config(num_hidden_layers=10**9), "`num_hidden_layers` is 1000000000, and at most 10000"),
    "config: no number": (config(rms_norm_eps=float("nan")), "`rms_norm_eps` is NaN"),
    "config: labels": (config(num_labels=10**9), "`num_labels` is 1000000000, and at most 10000"),
    "config: rotation": (config(head_dim=10**9), "more than 1 GiB of memory|more than 10 s|another shape"),
    "config: more layers": (config(num_hidden_layers=3), "lack 9 tensors of LlamaForCausalLM, such as model.layers.2"),
    "config: no layers": (config(num_hidden_layers=-1), "it has no layers"),
    "config: half a layer": (config(num_hidden_layers=2.5), "config.json"),
    "config: layers as text": (config(num_hidden_layers="2"), "config.json"),
    "config: vocabulary": (config(vocab_size=10**12), "another shape|no model"),
    "config: width": (config(intermediate_size=10**9), "another shape"),
    "config: zero": (config(hidden_size=0), "config.json"),
    "config: heads": (config(num_attention_heads=3), "config.json"),
    "config: activation": (config(hidden_act="nonesuch"), "nonesuch"),
    "config: rotary": (config(rope_parameters={"rope_type": "nonesuch"}), "config.json"),
    "config: dtype": (config(dtype="nonesuch"), "config.json"),
    "config: type of a type": (config(model_type=["llama"]), "config.json"),
    "config: code": (config(model_type=["llama"], auto_map={"AutoConfig": "code.Config"}), "needs its own Python code"),
    "config: pipe": (no_file("config.json"), "there is no model in"),
    "config: large": (sparse("config.json"), "config.json has 600 MiB"),
    "generation: no JSON": (text("generation_config.json", "{"), "generation_config.json is not valid JSON"),
    "generation: a list": (text("generation_config.json", "[1]"), "generation_config.json is no JSON object"),
    "generation: end": (generation(eos_token_id="x"), "`eos_token_id` cannot be 'x'"),
    "generation: ends": (generation(eos_token_id=[1, True]), r"`eos_token_id` cannot be \[1, True\]"),
    "generation: temperature": (generation(temperature="hot"), "`temperature` cannot be 'hot'"),
    "generation: cache": (generation(cache_implementation="nonesuch"), "`cache_implementation` cannot be 'nonesuch'"),
    "generation: sampling": (generation(do_sample="yes"), "`do_sample` cannot be 'yes'"),
    "generation: length": (generation(max_length=[1]), "`max_length` cannot be"),
    "generation: kernel": (generation(attn_implementation="evil/kernel"), "names the kernel evil/kernel"),
    "tokenizer: a list": (text("tokenizer.json", "[]"), "tokenizer does not load"),
    "tokenizer: settings": (text("tokenizer_config.json", "[]"), "tokenizer does not load"),
    "tokenizer: ids": (edit("tokenizer_config.json", added_tokens_decoder={"x": 1}), "tokenizer does not load"),
    "tokenizer: other files": (other_tokenizer, "tokenizer does not load"),
    "tokenizer: doubling": (normalizer(*["ee"] * 40), "more than .* GiB of memory|more than .* s|ended the process"),
    "tokenizer: expanding": (normalizer("e" * 100_000), "a normalizer in tokenizer.json expands text"),
    "tokenizer: pipe": (no_file("tokenizer.json"), "has no tokenizer"),
    "tokenizer: large": (sparse("tokenizer.json"), "tokenizer.json has 600 MiB"),
    "weights: missing": (tensors(lambda state: state.pop(HEADS)), f"lack 1 tensors of .*such as {HEADS}"),
    "weights: shape": (tensors(lambda state: state.update({HEADS: state[HEADS][:8]})), r"with \[8, 256\] instead of"),
    "weights: integers": (tensors(lambda state: state.update({HEADS: state[HEADS].long()})), "torch.int64, no floats"),
    "weights: bytes": (tensors(lambda s: s.update({HEADS: s[HEADS].to(torch.float8_e4m3fn)})), "float8.*no floats"),
    "weights: long header": (lambda f: (f / SINGLE).write_bytes(b"\xff" * 7 + b"\x0f{}"), "no safetensors file"),
    "weights: pipe": (no_file(SINGLE), "has no .safetensors file"),
    "weights: folder": (sharded("sub/a.safetensors"), "read only from .safetensors files beside it"),
    "weights: hidden": (sharded(".a.safetensors"), "read only from .safetensors files beside it"),
    "weights: above": (sharded("../a.safetensors"), "read only from .safetensors files beside it"),
    "weights: absolute": (index({"weight_map": {"a": "/etc/a.safetensors"}}), "read only from .safetensors files"),
    "weights: pickle": (index({"weight_map": {"a": "a.bin"}}), "read only from .safetensors files"),
    "weights: no map": (index({"metadata": {}}), "is damaged"),
    "weights: a list": (index({"weight_map": ["a.safetensors"]}), "is damaged"),
    "weights: numbers": (index({"weight_map": {"a": 1}}), "read only from .safetensors files"),
    "weights: nowhere": (index({"weight_map": {"nonesuch": "a.safetensors"}}), "are in no file, such as nonesuch"),
    "weights: twice": (twice, "is in two of its files of weights"),
    "adapter": (text("adapter_config.json", "{}"), r"also holds an adapter .*Set source\.adapter: .*model to"),
    "adapter: pickle": (text("adapter_model.bin", ""), "also holds an adapter"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_hostile_model_folder_is_refused_in_one_sentence(model, monkeypatch, name):
    monkeypatch.setattr(source, "CHECK_SECONDS", 10.0)
    monkeypatch.setattr(source, "CHECK_MEMORY", 1 << 30)
    damage, sentence = VARIANTS[name]
    damage(model)
    began = time.monotonic()
    with pytest.raises(UserError, match=rf"^source\.model: .*({sentence})") as refused:
        check_addresses(params(model, None))
    assert time.monotonic() - began < 20
    assert "\n" not in str(refused.value)


def test_tensors_that_the_model_does_not_have_are_named(model, capsys):
    tensors(lambda state: state.update({"mtp.head.weight": torch.zeros(2)}))(model)
    check_addresses(params(model, None))
    assert "1 tensors of its files are no part of LlamaForCausalLM, such as mtp.head.weight" in capsys.readouterr().out


def test_random_numbers_never_take_the_place_of_a_tensor(model):
    tensors(lambda state: state.pop(HEADS))(model)
    with pytest.raises(ValueError, match="random numbers would take their place"):
        load_model(model, "float32")


PARTS_ALONE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_reads_content_parts_alone_gets_them_everywhere(model):
    """As those of models for images: prepare finds the form by itself, and so do chat, judges and the Modelfile."""
    text("chat_template.jinja", PARTS_ALONE)(model)
    check_addresses(params(model, None))
    tokenizer, turn = load_tokenizer(model), {"role": "user", "content": "Where?"}
    expected = f"{tokenizer.bos_token}<user>Where?{tokenizer.eos_token}<assistant>"
    assert render(tokenizer, [turn], add_generation_prompt=True) == expected
    in_parts = {**turn, "content": [{"type": "text", "text": "Where?"}]}
    assert render(tokenizer, [in_parts], add_generation_prompt=True) == expected
    assert chat_pieces(model).start == f"{tokenizer.bos_token}<user>"
    assert PromptTokens(model).count([turn]) == len(tokenizer(expected, add_special_tokens=False).input_ids)
    text("chat_template.jinja", PARTS_ALONE.replace("part.text", "part.words"))(model)
    with pytest.raises(UserError, match="the text of a turn is missing"):
        check_addresses(params(model, None))


def test_a_quantization_whose_package_is_missing_is_named(model):
    config(quantization_config={"quant_method": "gptq", "bits": 4})(model)
    check_addresses(params(model, None))  # the workers may have it
    with pytest.raises(ValueError, match=r"(?i)gptq.*Install the package"):
        load_model(model, "float32")


def test_a_generation_config_decides_nothing_but_the_end_of_an_answer(model):
    """transformers saves no temperature without `do_sample`, and generates with no stop strings without a tokenizer."""
    generation(eos_token_id=[2, 7], temperature=0.9, stop_strings=["x"], repetition_penalty=5.0)(model)
    check_addresses(params(model, None))
    given = load_model(model, "float32").generation_config
    assert (given.eos_token_id, given.temperature, given.stop_strings) == ([2, 7], None, None)
    given.save_pretrained(model)


@pytest.mark.parametrize("name", architectures.ALL)
def test_only_real_gaps_count_as_missing_tensors(name, tmp_path):
    """Tied weights, fused experts and renamed prefixes are no gaps; each tensor of the files is needed."""
    architectures.make_model(name, torch.float32).save_pretrained(tmp_path)
    config, headers = load_config(tmp_path), read_headers(tmp_path)
    assert _check_tensors(config, headers) == []
    load_model(tmp_path, "float32")
    for lost in random.Random(0).sample(sorted(headers), 5):
        with pytest.raises(ValueError, match=r"lack \d+ tensors|such as a layer's experts|another shape"):
            _check_tensors(config, {name: tensor for name, tensor in headers.items() if name != lost})


# What is read is what was hashed

_opened: list[str] | None = None  # while `opened_files` watches


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str | Path):
        _opened.append(os.path.realpath(arguments[0]))


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """The files that Python code opens meanwhile, links followed; a hook stays for the life of a process."""
    global _opened
    if not getattr(sys, "has_hook_of_model_folders", False):
        sys.addaudithook(_on_event)
        sys.has_hook_of_model_folders = True  # type: ignore[attr-defined]
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


def add_distractions(folder: Path) -> None:
    """What transformers, peft and safetensors would follow or pick up, if they saw it."""
    other_configuration(folder)
    content = json.loads((folder / "config.json").read_text())
    del content["configuration_files"]
    (folder / "config.json").write_text(json.dumps(content))
    for name in ("sub/model.safetensors", ".hidden.safetensors", "pytorch_model.bin", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("no")
    (folder / INDEX).write_text("{")  # beside a single file of weights


def test_only_files_with_recorded_hashes_are_read(model, adapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    add_distractions(model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tools.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "base").mkdir()
    manifest = fetch_model(params(model, None), tmp_path / "base")
    for path in adapter.iterdir():
        shutil.copy(path, model)
    with opened_files() as opened:
        load_config(model)
        tokenizer = load_tokenizer(model)
        loaded = load_model(model, "float32")
        adapters.merge_folders(model, adapter, tmp_path / "merged")
    read = {str(Path(path).relative_to(model)) for path in opened if path.startswith(f"{model}/")}
    assert read <= manifest["files"].keys()
    assert {"config.json", "tokenizer_config.json", "additional_chat_templates/tools.jinja"} <= read
    assert set(tokenizer.chat_template) == {"default", "tools"}
    with loadable(model) as files:  # safetensors and tokenizers open files without Python, but only in there
        names = {path.relative_to(files).as_posix() for path in files.rglob("*") if not path.is_dir()}
    assert names == manifest["files"].keys()
    plain = dict(load_file(model / SINGLE))
    assert all(torch.equal(value, plain[name]) for name, value in loaded.state_dict().items())


def test_a_file_that_appears_after_source_is_noticed(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/base").mkdir(parents=True)
    (model / "generation_config.json").unlink()
    fetch_model(params(model, None), tmp_path / "data/base")
    (model / "README.md").write_text("read by nobody")
    assert base_folder(str(model)) == model
    (model / "generation_config.json").write_text('{"eos_token_id": 3}')
    with pytest.raises(UserError, match=r"generation_config\.json was not there when the source stage read this model"):
        base_folder(str(model))


def test_every_tokenizer_of_a_language_model_finds_its_files():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    kinds = {TOKENIZER_MAPPING_NAMES.get(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {None}
    names: set[str] = set()
    for kind in map(tokenizer_class_from_name, sorted(kinds)):
        # A class whose libraries are missing answers only to `type`.
        owner = next((one for one in type.mro(kind) if "vocab_files_names" in vars(one)), None)
        names |= set(vars(owner)["vocab_files_names"].values()) if owner else set()
    assert {"tokenizer.json", "merges.txt"} <= names
    assert names <= set(OF_TOKENIZERS)
