"""The memory estimate: parameters as in the model, parts as derived here, totals as measured."""

from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from tasks import disk_space
from tasks.config.params import Params
from tests.benchmarks.workload import HYBRID_SHAPES, config_of, make_pairs
from tests.scoring.test_recurrent import FAMILIES, make_config
from tests.support.settings import make_settings
from tests.support.workspaces import demo_params
from training.distributed.tensor_parallel import TensorGroup, split_layers
from training.models import adapters
from training.pairs.pair import Pair
from training.scoring.logps import Scorer
from training.trainer import memory
from training.trainer.settings import Settings

CONFIG = LlamaConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SHAPE: dict[str, Any] = {"vocab_size": 50, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LORA = {"rank": 4, "alpha": 8.0, "targets": "all-linear", "use_rslora": False, "use_dora": False}
GIB = 2**30
MIXTURES = [
    Qwen3MoeConfig(**SHAPE, moe_intermediate_size=48, num_experts=16, num_experts_per_tok=8, head_dim=32),
    MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    return folder


def settings(folder, **changes) -> Settings:
    return make_settings(model=str(folder), folder=str(folder), **changes)


@pytest.mark.parametrize("adapter", [None, LORA, {**LORA, "modules_to_save": ["lm_head"]}, {**LORA, "use_dora": True}])
def test_weight_files_alone_tell_how_many_parameters_there_are_at_most(folder, adapter):
    params = demo_params()
    params["train"]["adapter"] = adapter and {**params["train"]["adapter"], **adapter}
    checked = Params.model_validate(params)
    save_file({"twice": torch.zeros(1000)}, folder / "consolidated.safetensors")  # Mistral's own format: never read
    at_most = disk_space._parameters_at_most(checked, folder)
    exact = memory.model_sizes(folder, checked.train.adapter and checked.train.adapter.model_dump(), None)
    assert at_most.parameters == exact.parameters
    assert exact.trainable <= at_most.trainable <= (2 * exact.trainable if adapter else exact.trainable)


@pytest.mark.parametrize("config", MIXTURES, ids=lambda config: config.model_type)
def test_weight_files_of_experts_tell_how_many_parameters_an_adapter_has_at_most(config, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    params = Params.model_validate(demo_params())
    at_most, adapter = disk_space._parameters_at_most(params, tmp_path), params.train.adapter
    exact = memory.model_sizes(tmp_path, adapter and adapter.model_dump())
    assert at_most.parameters == exact.parameters
    assert exact.trainable <= at_most.trainable <= 2 * exact.trainable


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_parameter_counts_match_the_model(folder, targets):
    lora = {**LORA, "targets": targets}
    model = adapters.add_adapter(AutoModelForCausalLM.from_config(CONFIG), **lora, seed=0)
    sizes = memory.model_sizes(folder, lora)
    trainable, total = model.get_nb_trainable_parameters()
    assert (sizes.trainable, sizes.parameters) == (trainable, total - trainable)
    assert memory.model_sizes(folder, None).trainable == sizes.parameters


def test_modules_that_are_trained_whole_count_twice_as_weights_and_once_as_trained(folder):
    lora = {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}
    model = adapters.add_adapter(AutoModelForCausalLM.from_config(CONFIG), **lora, seed=0)
    sizes, without = memory.model_sizes(folder, lora), memory.model_sizes(folder, LORA)
    trainable, _ = model.get_nb_trainable_parameters()
    assert sizes.trainable == trainable
    assert sizes.parameters - without.parameters == sizes.trainable - without.trainable > 0


def test_optimizer_states_take_twelve_bytes_per_parameter_and_are_sharded(folder):
    count = memory.model_sizes(folder, None).parameters
    one = memory.estimate(settings(folder, dtype="bfloat16", zero_stage=1), world=1).parts
    assert (one["weights"], one["gradients"], one["optimizer"]) == (2 * count, 2 * count, 12 * count)
    four = memory.estimate(settings(folder, dtype="bfloat16", zero_stage=3), world=4).parts
    assert (four["weights"], four["gradients"], four["optimizer"]) == (count / 2, count / 2, 3 * count)
    away = memory.estimate(settings(folder, zero_stage=2, offload="optimizer"), world=1).parts
    assert away["optimizer"] == 0


def test_rows_are_packed_as_in_training(folder):
    """64 pairs of 300 tokens make 3 rows of at most 22; a pair of 7000 tokens, at any step, is a row of its own."""
    pairs = [Pair(str(n), range(100), range(100), range(1, 101), [], []) for n in range(64)]
    estimate = memory.estimate(settings(folder, dtype="bfloat16"), 1, pairs)
    per_token = 3 * (5 * 64 + 2 * 128 + 3 * 160) * 2  # layers x (hidden + attention + intermediate), bfloat16
    assert estimate.parts["rows"] == 22 * 300 * per_token
    assert estimate.parts["logits"] == 22 * 200 * 1000 * 2
    assert estimate.parts["update"] == 0
    late = [*pairs * (memory.LOOK_AHEAD + 10), Pair("long", range(1000), range(5000), range(1, 1001), [], [])]
    longer = memory.estimate(settings(folder, dtype="bfloat16"), 1, late)
    assert (longer.parts["rows"], longer.parts["logits"]) == (7000 * per_token, 6000 * 1000 * 2)


def test_the_update_counts_if_it_takes_more_than_the_rows(folder):
    count = memory.model_sizes(folder, None).parameters
    pairs = [Pair("a", [1], [1], [1], [], [])]
    parts = memory.estimate(settings(folder, dtype="bfloat16", zero_stage=1), 1, pairs).parts
    assert parts["rows"] + parts["logits"] + parts["backward"] + parts["update"] == 6 * count


@pytest.mark.parametrize(
    ("shape", "lengths", "row_tokens", "steps", "variant", "measured"),
    [
        ("0.5b", "ultrafeedback", 16384, 6, "full", 26.6),
        ("0.5b", "hh", 16384, 6, "full", 20.8),
        ("1.5b", "ultrafeedback", 12288, 6, "full", 50.2),
        ("1.5b", "hh", 12288, 6, "full", 47.9),
        ("1.5b", "hh", 8192, 8, "full", 40.6),
        ("1.5b", "ultrafeedback", 16384, 6, "lora", 38.8),
        ("7b", "ultrafeedback", 8192, 3, "lora", 51.0),
        ("1.5b", "ultrafeedback", 16384, 6, "full-bf16moments", 53.3),
        ("7b", "ultrafeedback", 6144, 4, "full-bf16moments", 127.7),
        ("7b", "ultrafeedback", 8192, 4, "full-bf16moments", 132.2),
        ("7b", "ultrafeedback", 8192, 4, "full-checkpointed-bf16moments", 127.7),
        ("1.5b", "ultrafeedback", 16384, 4, "lora-checkpointed", 8.62),
        ("7b", "long", 36000, 3, "lora-checkpointed", 39.7),
        ("qwen3-next-3b", "hh", 8192, 7, "full", 77.5),
        ("qwen3-next-3b", "hh", 16384, 6, "full", 98.0),
    ],
)
def test_the_estimate_matches_measurements_on_an_h200(tmp_path, shape, lengths, row_tokens, steps, variant, measured):
    """GiB at the peak in `tests.benchmarks.gpu` (docs/decisions); without the 1 GiB allowance for overhead."""
    config = config_of(shape)
    config.save_pretrained(tmp_path)
    adapter = None if variant.startswith("full") else {**LORA, "rank": 16, "alpha": 32.0}
    batch = 2 if lengths == "long" else 32 if shape in HYBRID_SHAPES else 64
    changes = {"global_batch_size": batch, "activation_checkpointing": "checkpointed" in variant}
    changes["optimizer"] = "adamw_bf16" if "bf16moments" in variant else "adamw"
    given = settings(tmp_path, dtype="bfloat16", zero_stage=1, row_tokens=row_tokens, adapter=adapter, **changes)
    estimate = memory.estimate(given, 1, make_pairs(lengths, batch * steps, config.vocab_size))
    assert (estimate.total - memory.OVERHEAD) / GIB == pytest.approx(measured, rel=0.07)


THIRTY_B = Qwen3MoeConfig(  # Qwen3-30B-A3B
    vocab_size=151936,
    hidden_size=2048,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
)


def test_adapted_experts_are_counted_as_peft_adapts_them(tmp_path):
    """12 of the 48 layers on an H200, rows of 8192 tokens: 49.1 GiB at the peak."""
    lora = {**LORA, "rank": 16, "alpha": 32.0}
    THIRTY_B.save_pretrained(tmp_path)
    assert memory.model_sizes(tmp_path, lora).trainable == 996_507_648
    Qwen3MoeConfig.from_dict({**THIRTY_B.to_dict(), "num_hidden_layers": 12}).save_pretrained(tmp_path)
    given = settings(tmp_path, dtype="bfloat16", zero_stage=1, adapter=lora)
    estimate = memory.estimate(given, 1)
    assert (estimate.total - memory.OVERHEAD) / GIB == pytest.approx(49.1, rel=0.03)
    # W + B A of all experts of all layers: 128 experts with three matrices each.
    merged = 12 * 128 * 3 * 2048 * 768 * 2
    assert estimate.parts["adapted experts"] == merged
    again = memory.estimate(settings(tmp_path, dtype="bfloat16", adapter=lora, activation_checkpointing=True), 1).parts
    assert again["adapted experts"] == 0
    attention = memory.estimate(settings(tmp_path, dtype="bfloat16", adapter={**lora, "targets": ["q_proj"]}), 1).parts
    plain = attention["backward"] + attention["logits"]
    assert again["backward"] + again["logits"] > plain > 0
    assert attention["adapted experts"] == 0


def kept_values(model: Any, tokens: int) -> float:
    """Values per token that autograd keeps for the backward pass, without weights."""
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes(), tensor  # alive, so that no other one has its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.arange(tokens)[None] % 50, use_cache=False)
    return sum(size for address, (size, _) in kept.items() if address not in weights) / 4 / tokens


@pytest.mark.parametrize("config", MIXTURES, ids=lambda config: config.model_type)
def test_the_activations_of_experts_are_counted(config, tmp_path):
    """The layers here are not compiled, so that they keep more."""
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm").train()
    estimated = SHAPE["num_hidden_layers"] * memory._layer_values(memory.model_sizes(tmp_path, None))
    assert 0.7 < estimated / kept_values(model, 256) < 1.0


@pytest.mark.parametrize("name", FAMILIES)
def test_models_with_recurrent_layers_have_an_estimate(name, tmp_path):
    make_config(name).save_pretrained(tmp_path)
    sizes = memory.model_sizes(tmp_path, None)
    assert sizes.recurrent > sizes.hidden
    assert memory.estimate(settings(tmp_path), 1).parts["rows"] > 0


def test_ranks_that_share_a_row_hold_a_share_of_its_activations(folder):
    pairs = [Pair(str(n), [1] * 40, [1] * 30, [2] * 30, [1] * 30, [1] * 30) for n in range(8)]
    options = {"row_tokens": 200, "zero_stage": 1, "global_batch_size": 4}
    whole = memory.estimate(settings(folder, **options), 1, pairs).parts
    shared = memory.estimate(settings(folder, sequence_parallel=4, **options), 4, pairs).parts
    assert [whole[name] / shared[name] for name in ("rows", "logits")] == [4.0, 4.0]
    assert whole["weights"] == shared["weights"]


def test_offloaded_inputs_and_tiles_hold_a_part_of_a_rows_activations(folder):
    def parts(**options: Any) -> dict[str, float]:
        return memory.estimate(settings(folder, adapter=LORA, **options), 1).parts

    kept, offloaded = parts(activation_checkpointing=True), parts(activation_checkpointing="offload")
    assert offloaded["rows"] == kept["rows"] * 2 / CONFIG.num_hidden_layers
    tiled = parts(activation_checkpointing=True, mlp_tile_tokens=512)
    assert tiled["rows"] == kept["rows"]
    assert tiled["backward"] < kept["backward"]
    assert parts(mlp_tile_tokens=512)["rows"] < parts()["rows"]
    assert parts(mlp_tile_tokens=10**6) == parts()


@pytest.mark.parametrize("adapter", [None, LORA])
def test_ranks_that_share_layers_hold_a_part_of_their_weights(folder, adapter):
    model: Any = AutoModelForCausalLM.from_config(CONFIG)
    model = adapters.add_adapter(model, **adapter, seed=0) if adapter else model
    split_layers(Scorer(model).causal, TensorGroup(None, None, 0, 2))  # type: ignore[arg-type]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    others = sum(p.numel() for p in model.parameters()) - trainable
    options = {"dtype": "bfloat16", "zero_stage": 1, "adapter": adapter}
    part = memory.estimate(settings(folder, tensor_parallel=2, **options), 4).parts
    assert part["weights"] == 2 * (others if adapter else trainable)
    assert part["optimizer"] == 12 * trainable / 2  # over the two ranks that have the same part
    whole = memory.estimate(settings(folder, **options), 4).parts
    assert part["rows"] < whole["rows"]


def test_the_message_names_the_parts_and_the_setting_to_change(folder):
    said = memory.out_of_memory(settings(folder), world=1)
    assert "rows of 8192 tokens" in said
    assert "lower actor_train in infra/cluster.yaml row_tokens (now 8192)" in said
    assert "activation_checkpointing" in memory.advice(settings(folder, row_tokens=2048))
    assert "zero_stage to 3" in memory.advice(settings(folder, row_tokens=2048, activation_checkpointing=True))
    lora = settings(folder, row_tokens=2048, activation_checkpointing=True, adapter=LORA)
    assert "activation_checkpointing: offload" in memory.advice(lora)
