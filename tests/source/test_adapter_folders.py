"""Adapters from others: what is not plain LoRA is refused before peft sees it, and none is left out in silence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tasks import chat
from tasks.config.evaluate import RewardModel
from tasks.config.params import load_params
from tasks.errors import UserError
from tasks.evaluate.judges import reward_folder
from tasks.source import stage as source
from tasks.source.stage import check_addresses, fetch_model
from tests.source.test_source import edit, params
from tests.support.workspaces import PROJECT
from training.models import adapters
from training.models.loading import load_model

PROMPT = [[5, 6, 7, 8]]


@pytest.fixture
def model(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "model"))


@pytest.fixture
def other_adapter(adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter, tmp_path / "adapter"))


def test_an_adapter_in_the_models_folder_can_be_named_as_one(model, adapter, tmp_path):
    for path in adapter.iterdir():
        shutil.copy(path, model)
    check_addresses(params(model, model))
    base, expected = tmp_path / "base", adapters.load_adapter(load_model(model, "float32"), adapter)
    base.mkdir()
    fetch_model(params(model, model), base)
    given = adapters.prompt_logits(load_model(base, "float32"), PROMPT)
    assert adapters.largest_difference(given, adapters.prompt_logits(expected, PROMPT)) < 1e-4


def test_an_adapter_in_the_folder_is_not_left_out_in_silence(model, adapter):
    """Of a model to chat with or to serve, and of a judge."""
    assert chat.model_folder(str(model)) == model
    judge = load_params(PROJECT / "params.yaml").evaluate.model_copy(
        update={"reward_model": RewardModel(model=str(model), label=None)}
    )
    assert reward_folder(judge) == model
    shutil.copy(adapter / "adapter_config.json", model)
    for find in (lambda: chat.model_folder(str(model)), lambda: reward_folder(judge)):
        with pytest.raises(UserError, match=r"model also holds an adapter \(adapter_config\.json\).*merge_and_unload"):
            find()


ODD_VALUES: list[tuple[str, Any]] = [
    ("auto_lora", {"a": 1}),
    ("eva_config", {"rho": 2.0}),
    ("layer_replication", [[0, 2], [1, 2]]),
    ("loftq_config", {"loftq_bits": 4}),
    ("megatron_config", {"a": 1}),
    ("megatron_core", "megatron.evil"),
    ("use_qalora", True),
    ("init_lora_weights", "pissa"),
    ("bias", "some"),
    ("lora_alpha", "8"),
    ("peft_type", "IA3"),
    ("peft_type", None),
    ("r", 10**9),
    ("r", -1),
    ("r", True),
    ("rank_pattern", {"q_proj": 10**9}),
    ("target_modules", "("),
    ("target_modules", ["q_proj", 1]),
    ("target_modules", {}),
    ("task_type", "SEQ_CLS"),
    ("use_dora", "yes"),
]


@pytest.mark.parametrize(("key", "value"), ODD_VALUES, ids=lambda value: str(value)[:20])
def test_an_adapter_may_ask_for_plain_lora_alone(tiny_base, other_adapter, tmp_path, key, value):
    edit("adapter_config.json", **{key: value})(other_adapter)
    named = "rank" if value in (10**9, {"q_proj": 10**9}) else f"`{key}`"
    with pytest.raises(UserError, match=rf"^source\.adapter: .*adapter_config\.json.*{named}") as refused:
        check_addresses(params(tiny_base, other_adapter))
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=named):
        adapters.load_adapter(load_model(tiny_base, "float32"), other_adapter)
    with pytest.raises(ValueError, match=named):
        adapters.merge_folders(tiny_base, other_adapter, tmp_path / "merged")


def test_an_expression_that_takes_for_ever_is_refused(tiny_base, other_adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "CHECK_SECONDS", 2.0)
    edit("adapter_config.json", target_modules=r"((\w|\.)+)+$x")(other_adapter)
    check_addresses(params(tiny_base, other_adapter))
    with pytest.raises(UserError, match=r"source\.adapter: .* reading it takes more than 2 s"):
        fetch_model(params(tiny_base, other_adapter), tmp_path)


def test_an_adapters_module_is_not_imported(tiny_base, other_adapter, tmp_path, monkeypatch):
    """peft imports `megatron_core`, and `python -m` puts the working folder first on the path."""
    from peft import PeftModel

    mark = tmp_path / "imported"
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/evil.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    edit("adapter_config.json", megatron_config={"a": 1}, megatron_core="megatron.evil")(other_adapter)
    for use in (
        lambda: check_addresses(params(tiny_base, other_adapter)),
        lambda: adapters.load_adapter(load_model(tiny_base, "float32"), other_adapter),
        lambda: adapters.merge_folders(tiny_base, other_adapter, tmp_path / "merged"),
    ):
        with pytest.raises((UserError, ValueError), match="`megatron_config`"):
            use()
    assert not mark.exists()
    with pytest.raises(AttributeError):  # the trap is real
        PeftModel.from_pretrained(load_model(tiny_base, "float32"), str(other_adapter))
    assert mark.exists()


def test_an_adapter_that_lacks_a_tensor_is_refused(tiny_base, other_adapter):
    state = load_file(other_adapter / "adapter_model.safetensors")
    del state[min(state)]
    save_file(state, other_adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="is not a whole adapter of this model"):
        adapters.load_adapter(load_model(tiny_base, "float32"), other_adapter)


def test_what_other_versions_of_peft_write_without_effect_is_accepted(tiny_base, other_adapter):
    later = {"new_config": None, "use_new": False, "auto_mapping": {"parent_library": "evil"}, "qalora_group_size": 16}
    edit("adapter_config.json", **later)(other_adapter)
    content = json.loads((other_adapter / "adapter_config.json").read_text())
    (other_adapter / "adapter_config.json").write_text(json.dumps({**content, "newer": None}))
    check_addresses(params(tiny_base, other_adapter))
    assert adapters.load_adapter(load_model(tiny_base, "float32"), other_adapter).peft_config["default"].r == 4
