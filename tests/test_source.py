"""What the source stage makes of its addresses: a base model with an SFT adapter."""

from pathlib import Path

import pytest

from tasks.errors import UserError
from tasks.models import base_folder
from tasks.params import Source
from tasks.source import _check, fetch_model
from training import adapters
from training.model import load_model, load_tokenizer

PROMPT = [[5, 6, 7, 8]]


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
