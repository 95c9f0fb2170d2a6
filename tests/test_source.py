"""What the source stage sees behind its addresses: that it changed, and a base model with an SFT adapter."""

import shutil
from pathlib import Path

import pytest
import torch

from tasks.dataset import demo
from tasks.errors import UserError
from tasks.models import base_folder
from tasks.params import Source
from tasks.source import _check, changed, fetch_data, fetch_model
from tests.workspaces import write_data
from training import adapters
from training.model import load_model, load_tokenizer

PROMPT = [[5, 6, 7, 8]]


@pytest.fixture(scope="module")
def adapter(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    policy = adapters.add_adapter(load_model(tiny_base, "float32"), 4, 8.0, "all-linear", False, False, seed=0)
    torch.manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    policy.save_pretrained(folder)
    return folder


def params(model: Path, adapter: Path | None) -> Source:
    return Source(data="demo", eval=None, model=str(model), adapter=str(adapter) if adapter else None, seed=0)


def test_the_base_is_the_model_with_its_adapter(tiny_base, adapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/base").mkdir(parents=True)
    manifest = fetch_model(params(tiny_base, adapter), tmp_path / "data/base")
    folder = base_folder(str(tiny_base))
    assert folder == Path("data/base")
    together = adapters.load_adapter(load_model(tiny_base, "float32"), adapter)
    expected, bare = adapters.logits_of(together, PROMPT), adapters.logits_of(load_model(tiny_base, "float32"), PROMPT)
    given = adapters.logits_of(load_model(folder, "float32"), PROMPT)
    assert adapters.largest_difference(given, expected) < 1e-4
    assert adapters.largest_difference(given, bare) > 1e-2
    assert load_tokenizer(folder).get_vocab() == load_tokenizer(tiny_base).get_vocab()
    assert manifest["sha256"] != manifest["origin"]


def test_a_folder_without_an_adapter_is_refused_before_anything_is_fetched(tiny_base, tmp_path):
    with pytest.raises(UserError, match=r"source\.adapter: there is no adapter in"):
        _check(params(tiny_base, tmp_path))


def test_an_adapter_of_another_model_is_refused(tiny_base, adapter, tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=61, **shape)).save_pretrained(tmp_path / "other")
    load_tokenizer(tiny_base).save_pretrained(tmp_path / "other")
    (tmp_path / "base").mkdir()
    with pytest.raises(UserError, match="does not fit the model"):
        fetch_model(params(tmp_path / "other", adapter), tmp_path / "base")


def test_a_changed_file_model_or_adapter_is_noticed(tiny_base, adapter, tmp_path, monkeypatch):
    """The flow asks whether the addresses still hold what the stage saw: DVC does not watch them."""
    monkeypatch.chdir(tmp_path)
    data, model, own = tmp_path / "pairs.jsonl", tmp_path / "model", tmp_path / "adapter"
    write_data(data, demo.rows(0)[:20])
    shutil.copytree(tiny_base, model)
    shutil.copytree(adapter, own)
    given = Source(data=str(data), eval=None, model=str(model), adapter=str(own), seed=0)

    def fetch() -> None:
        for folder in ("data/raw", "data/base"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
            (tmp_path / folder).mkdir(parents=True)
        fetch_data(given, tmp_path / "data/raw")
        fetch_model(given, tmp_path / "data/base")

    fetch()
    assert not changed(given, tmp_path)
    write_data(data, demo.rows(0)[:21])
    assert changed(given, tmp_path)
    fetch()
    for weights in (model / "model.safetensors", own / "adapter_model.safetensors"):
        assert not changed(given, tmp_path)
        content = bytearray(weights.read_bytes())
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert changed(given, tmp_path), weights
        weights.write_bytes(content)
