"""The source stage: a base model with an adapter merged into it, and models that cannot be trained."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.artifacts.models import base_folder
from tasks.config.source import Source
from tasks.errors import UserError
from tasks.source.stage import check_addresses, fetch_model
from training.models import adapters
from training.models.loading import load_model
from training.models.tokenizer import load_tokenizer

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
    expected, bare = (
        adapters.prompt_logits(together, PROMPT),
        adapters.prompt_logits(load_model(tiny_base, "float32"), PROMPT),
    )
    given = adapters.prompt_logits(load_model(folder, "float32"), PROMPT)
    assert adapters.largest_difference(given, expected) < 1e-4
    assert adapters.largest_difference(given, bare) > 1e-2
    assert load_tokenizer(folder).get_vocab() == load_tokenizer(tiny_base).get_vocab()
    assert manifest["sha256"] != manifest["origin"]


def test_a_folder_without_an_adapter_is_refused_before_anything_is_fetched(tiny_base, tmp_path):
    with pytest.raises(UserError, match=r"source\.adapter: there is no adapter in"):
        check_addresses(params(tiny_base, tmp_path))


def test_an_adapter_of_another_model_is_refused(tiny_base, adapter, tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=61, **shape)).save_pretrained(tmp_path / "other")
    load_tokenizer(tiny_base).save_pretrained(tmp_path / "other")
    (tmp_path / "base").mkdir()
    with pytest.raises(UserError, match="does not fit the model"):
        fetch_model(params(tmp_path / "other", adapter), tmp_path / "base")


def edit(name: str, **values) -> Callable[[Path], None]:
    """Change keys of a JSON file of the model; None removes a key."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def shard(folder: Path) -> None:
    """The weights as two files with an index, of which one is missing."""
    from training.models import weights

    tensors = list(weights.read(folder))
    (folder / weights.SINGLE).unlink()
    weights.write(tensors, folder, "1000KB")
    max(folder.glob("model-*.safetensors")).unlink()


def cut(size: int) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:size]) and None
    )


def lose_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def add_token(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<|beyond|>"])
    tokenizer.save_pretrained(folder)


def break_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only with a system turn') }}")


def lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_tokenizer, r"it has no tokenizer \(none of tokenizer\.json.*save_pretrained"),
        (lambda folder: (folder / "tokenizer.json").write_text("{") and None, r"its tokenizer does not load: .*again"),
        (add_token, r"1 tokens beyond the \d+ rows of its embeddings, such as '<\|beyond\|>' \(\d+\).*resize"),
        (edit("tokenizer_config.json", eos_token=None), r"has no EOS token.*`eos_token` in tokenizer_config\.json"),
        (break_template, r"cannot render a question and an answer: only with a system turn\. Set prepare\.template"),
        (shard, r"1 of its \d+ files of weights are missing, such as model-0"),
        (cut(0), r"model\.safetensors is no safetensors file or was cut off \("),
        (cut(1000), r"model\.safetensors is no safetensors file or was cut off \("),
        (cut(100_000), r"model\.safetensors is no safetensors file or was cut off \(.*not fully covered"),
        (lfs_pointer, r"model\.safetensors is a Git LFS pointer.*git lfs pull"),
        (edit("config.json", model_type="nonesuch"), r"its config\.json cannot be used: .*nonesuch"),
        (edit("config.json", model_type="vit"), r"`vit` is no causal language model"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_within_seconds(tiny_base, tmp_path, damage, message):
    folder = Path(shutil.copytree(tiny_base, tmp_path / "model"))
    check_addresses(params(folder, None))
    damage(folder)
    start = time.process_time()
    with pytest.raises(UserError, match=rf"source\.model: .*model cannot be used: .*{message}"):
        check_addresses(params(folder, None))
    assert time.process_time() - start < 5


def test_a_template_that_is_replaced_is_not_checked(tiny_base, tmp_path):
    folder = Path(shutil.copytree(tiny_base, tmp_path / "model"))
    break_template(folder)
    check_addresses(params(folder, None), template="plain")


def test_special_tokens_that_no_text_has_may_be_beyond_the_embeddings(tiny_base, tmp_path):
    """As in Gemma 3, whose token of images has no row in the model that reads text alone."""
    folder = Path(shutil.copytree(tiny_base, tmp_path / "model"))
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    tokenizer.save_pretrained(folder)
    check_addresses(params(folder, None))
