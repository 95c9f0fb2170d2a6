"""The memory estimate: parameters counted as the model has them, the rest as derived here."""

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from training import adapters, memory
from training.objective import Objective
from training.packing import Pair
from training.settings import Settings

CONFIG = LlamaConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LORA = {"rank": 4, "alpha": 8.0, "targets": "all-linear", "use_rslora": False, "use_dora": False}
GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    return folder


def settings(folder, **changes) -> Settings:
    given = {"row_tokens": 8192, "global_batch_size": 64, "learning_rate": 1e-6, **changes}
    objective = Objective({"sigmoid": 1.0}, {"beta": 0.1})
    return Settings(str(folder), "test", str(folder), "test", objective, **given)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_parameters_are_those_of_the_model(folder, targets):
    lora = {**LORA, "targets": targets}
    model = adapters.add_adapter(AutoModelForCausalLM.from_config(CONFIG), **lora, seed=0)
    sizes = memory.measure(folder, lora)
    trainable, total = model.get_nb_trainable_parameters()
    assert (sizes.trainable, sizes.parameters) == (trainable, total - trainable)
    assert memory.measure(folder, None).trainable == sizes.parameters


def test_states_are_sixteen_bytes_a_parameter_and_shared_by_the_ranks(folder):
    count = memory.measure(folder, None).parameters
    one = memory.estimate(settings(folder, dtype="bfloat16", zero_stage=1), world=1).parts
    assert (one["weights"], one["gradients"], one["optimizer"]) == (2 * count, 2 * count, 16 * count)
    four = memory.estimate(settings(folder, dtype="bfloat16", zero_stage=3), world=4).parts
    assert (four["weights"], four["gradients"], four["optimizer"]) == (count / 2, count / 2, 4 * count)
    away = memory.estimate(settings(folder, zero_stage=2, offload="optimizer"), world=1).parts
    assert away["optimizer"] == 0


def test_rows_are_what_the_pairs_make_of_the_budget(folder):
    """64 pairs of 300 tokens are 19200; with 5% for unevenness they go into 3 rows of 6720."""
    pairs = [Pair(str(n), range(100), range(100), range(100), [], []) for n in range(64)]
    estimate = memory.estimate(settings(folder, dtype="bfloat16"), 1, pairs)
    per_token = 3 * (6 * 64 + 2 * 128 + 3 * 160) * 2  # layers x (hidden + attention + intermediate), bfloat16
    assert estimate.parts["rows"] == pytest.approx(6720 * per_token)
    assert estimate.parts["logits"] == pytest.approx(6720 * 2 / 3 * 1000 * 2)


def test_what_is_said_names_the_parts_and_the_setting_to_change(folder):
    said = memory.out_of_memory(settings(folder), world=1)
    assert "rows of 8192 tokens" in said
    assert "lower actor_train in infra/cluster.yaml row_tokens (now 8192)" in said
    assert "activation_checkpointing" in memory.advice(settings(folder, row_tokens=2048))
    assert "zero_stage to 3" in memory.advice(settings(folder, row_tokens=2048, activation_checkpointing=True))
