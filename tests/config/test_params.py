"""Configuration: strict, typed, and every mistake a sentence that says what to do."""

from pathlib import Path

import pytest
import yaml

from tasks.config import names
from tasks.config.cluster import load_cluster
from tasks.config.params import Params, load_params, overlay, read_recipe
from tasks.config.strict import dotted, read_yaml, validate
from tasks.errors import UserError
from tasks.prepare.card import drift
from tasks.prepare.rows import row_shapes
from tasks.source import reject_reasons

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "flows" / "recipes").glob("*.yaml"))


def params(**overrides: object) -> Params:
    content = overlay(read_yaml(ROOT / "params.yaml"), dotted(overrides))
    return validate(Params, content, Path("params.yaml"))


def refusal(**overrides: object) -> str:
    with pytest.raises(UserError) as error:
        params(**overrides)
    return str(error.value)


def test_the_files_as_they_come_are_good_and_are_the_demo():
    assert load_params(ROOT / "params.yaml").source.data == "demo"
    assert load_cluster(ROOT).actor_train.zero_stage == 2


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_good(name):
    validate(Params, overlay(read_yaml(ROOT / "params.yaml"), read_recipe(name)), Path(name))
    load_cluster(ROOT, read_recipe(name, "cluster"))


def test_the_recipes_that_were_promised_are_there():
    assert {"demo", "smollm2-135m", "qwen2.5-0.5b-full", "qwen2.5-7b-lora-zero3"} <= set(RECIPES)


def test_the_defaults_fit_a_real_model_and_the_demo_is_a_recipe():
    ours = params()
    assert (ours.train.loss, ours.promote.model_name) == ({"sigmoid": 1.0}, "dpo-model")
    assert 1e-5 <= ours.train.learning_rate <= 2e-4
    assert params(**{"source.data": "a.jsonl", "source.model": "m"}).evaluate.judge == "none"
    demo = validate(Params, overlay(read_yaml(ROOT / "params.yaml"), read_recipe("demo")), Path("demo"))
    assert (demo.evaluate.judge, demo.train.learning_rate, demo.promote.model_name) == ("demo", 3e-3, "dpo-demo")


def test_the_judge_follows_the_data():
    assert params().evaluate.judge == "demo"  # auto, on the demo's data
    own = {"source.data": "pairs.jsonl"}
    assert params(**own).evaluate.judge == "none"
    assert "knows the answers to the demo's questions only" in refusal(**own, **{"evaluate.judge": "demo"})


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("promote.require", {"samples/policy/kind": 0.9}, "only judge demo measures, and `evaluate.judge` is none"),
        ("promote.limits", {"win_rate/rate": 0.9}, "only judge reward or endpoint measures"),
        ("promote.max_regression", {"win_rate": 0.1}, "only judge reward or endpoint measures"),
        ("promote.max_regression", {"health/empty": 0.1}, "`promote.max_regression` names health/empty, which this"),
        ("promote.require", {"rewards/accuracy": 0.5}, "not measure. Did you mean rewards/accuracies or "),
        ("promote.require", {"x": 0.5}, "does not measure. docs/metrics.md lists the metrics"),
        ("train.select", "eval/los", "`train.select` names eval/los, which this configuration does not measure. Did"),
        ("train.select", "eval/samples/policy/kind", "`train.select` names eval/samples/policy/kind"),
    ],
)
def test_a_gate_on_a_metric_that_will_not_be_measured_is_refused(key, value, sentence):
    message = refusal(**{"source.data": "pairs.jsonl", key: value})
    assert sentence in message
    assert message.count(" or ") <= 3  # suggestions


def test_a_gate_on_answers_needs_answers():
    message = refusal(**{"evaluate.prompts": 0})
    assert "names health/repetition, which is measured on sampled answers, and `evaluate.prompts` is 0" in message
    params(**{"evaluate.prompts": 0, "promote.limits": {}})


def test_a_gate_may_use_what_depends_on_data_and_judge():
    reward = {"evaluate.judge": "reward", "evaluate.reward_model": {"model": "m", "label": None}}
    gate = {"promote.require": {"samples/policy/reward": 1.0, "win_rate/rate": 0.5, "tables/source/a/accuracy": 0.5}}
    params(**{"source.data": "pairs.jsonl"}, **reward, **gate)
    mixture = [{"name": name, "data": f"{name}.jsonl", "weight": 1.0, "share": 1.0} for name in ("a", "b")]
    params(**{"source.data": mixture, "train.select": "eval/b/loss"})
    harness = {"tasks": ["arc_easy"], "limit": None, "folder": None}
    params(**{"evaluate.harness": harness, "promote.require": {"harness/policy/arc_easy/acc": 0.3}})


def test_a_typo_names_the_key_and_the_one_that_was_meant():
    assert refusal(**{"train.betaa": 0.1}) == "params.yaml: Unknown key `train.betaa`. Did you mean `train.beta`?"
    assert "Did you mean `prepare.max_tokens`?" in refusal(**{"train.max_tokens": 512})  # the key of another section
    assert "Did you mean `train.adapter.rank`?" in refusal(**{"train.adapter.rnk": 4})


def test_dropout_needs_an_adapter_that_leaves_the_base_model_alone():
    assert params(**{"train.adapter.dropout": 0.05}).train.adapter.dropout == 0.05
    message = refusal(**{"train.adapter.dropout": 0.05, "train.adapter.use_dora": True})
    assert "the policy would not start as the reference: set dropout to 0.0, or use_dora to false" in message


def test_pissa_needs_a_base_model_whose_weights_it_may_change():
    pissa = {"train.adapter.init": "pissa"}
    assert params(**pissa).train.adapter.init == "pissa"
    for other in ({"train.adapter.dropout": 0.05}, {"train.adapter.use_dora": True}):
        message = refusal(**pissa, **other)
        assert "set dropout to 0.0 and use_dora to false, or init to zero" in message
    quantized = dict.fromkeys(("train.quantization", "reference.quantization"), "fp8")
    assert "changes weights that `quantization` has rounded: set one of them only" in refusal(**pissa, **quantized)


def test_vllm_is_refused_for_an_adapter_that_it_cannot_load():
    saved = {"train.adapter.modules_to_save": ["embed_tokens"]}
    assert params(**saved).evaluate.engine == "auto"
    assert "set evaluate.engine to auto or transformers" in refusal(**saved, **{"evaluate.engine": "vllm"})


def test_the_gate_compares_by_a_number_or_auto():
    for allowed in (0.02, "auto"):
        assert params(**{"promote.max_regression": {"rewards/accuracies": allowed}})
    assert "'auto'" in refusal(**{"promote.max_regression": {"rewards/accuracies": "often"}})


def test_a_mixture_is_as_strict_as_the_rest():
    one = {"name": "a", "data": "a.jsonl", "weight": 1.0, "share": 1.0}
    assert params(**{"source.data": [one]}).source.data[0].share == 1.0
    assert "`source.data.mixture.0.share` is missing" in refusal(
        **{"source.data": [{name: value for name, value in one.items() if name != "share"}]}
    )
    assert "each name must be unique" in refusal(**{"source.data": [one, one]})
    assert "`source.data.address`" in refusal(**{"source.data": 3})


def test_layouts_and_thresholds_know_our_names():
    assert "unknown name `prmpt`. Known names: prompt, chosen" in refusal(**{"prepare.columns": {"prmpt": "q"}})
    assert "unknown name `hh`. Known names: auto, openai" in refusal(**{"prepare.format": "hh"})
    assert "unknown name `dup`. Known names: invalid_json" in refusal(**{"prepare.thresholds": {"dup": 0.1}})
    assert "neither auto, plain, chatml nor" in refusal(**{"prepare.template": "llama"})
    assert refusal(**{"source.eval": "held.jsonl"}).startswith("params.yaml: held-out pairs come from `source.eval` or")


def test_a_number_that_yaml_reads_as_text_is_told_how_to_be_written():
    assert yaml.safe_load("5e-7") == "5e-7"
    expected = "`train.learning_rate` is the text '5e-7' and not a number: YAML needs a dot in it. Write 5.0e-07."
    assert expected in refusal(**{"train.learning_rate": "5e-7"})
    assert yaml.safe_load("5.0e-07") == 5e-7
    assert "Write 1500.0." in refusal(**{"train.learning_rate": "1.5e3"})


def test_a_missing_key_is_named():
    content = read_yaml(ROOT / "params.yaml")
    del content["train"]["beta"]
    with pytest.raises(UserError, match=r"`train\.beta` is missing"):
        validate(Params, content, Path("params.yaml"))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("train.epochs", 0, "greater than or equal to 1, but it is 0"),
        ("train.dtype", "fp16", "'float32', 'bfloat16' or 'float16', but it is 'fp16'"),
        ("train.max_steps", True, "valid integer, but it is True"),
        ("train.eval_steps", 1.5, "less than 1, but it is 1.5"),
        ("train.loss", {"dpo": 1.0}, "there is no loss 'dpo'"),
        ("train.tau", 0.5, "`tau` has no effect on loss sigmoid"),
        ("train.margin", "scores", "`margin_scale` belongs to `margin: scores`"),
        ("train.margin_scale", 0.1, "`margin_scale` belongs to `margin: scores`"),
        ("train.margin_scale", 0.0, "greater than 0"),
        ("train.reference_update", {"every": 0, "alpha": 0.5}, "greater than or equal to 1, but it is 0"),
        ("train.reference_update", {"every": 8, "alpha": 1.5}, "less than or equal to 1, but it is 1.5"),
        ("train.router_aux_loss_coef", 0.0, "greater than 0"),
        ("prepare.eval_fraction", 1.0, "less than 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(key, value, sentence):
    message = refusal(**{key: value})
    assert sentence in message
    assert key.rsplit(".", 1)[0] in message


@pytest.mark.parametrize("section", ["reference", "train", "evaluate"])
def test_policy_and_reference_have_one_precision_where_they_are_compared(section):
    message = refusal(**{f"{section}.dtype": "bfloat16"})
    assert "reference.dtype is " in message
    assert f"{section}.dtype is bfloat16" in message
    assert "set all of them to " + ("bfloat16" if section == "train" else "float32") in message
    simpo = {"train.loss": {"simpo": 1.0}, "train.beta": 2.0, "train.gamma": 1.0}
    changes = dotted({**simpo, f"{section}.dtype": "bfloat16"})
    validate(Params, overlay(read_yaml(ROOT / "params.yaml"), changes), Path("params.yaml"))


def test_all_mistakes_are_told_at_once():
    message = refusal(**{"train.betaa": 1, "prepare.formatt": "auto"})
    assert "train.betaa" in message
    assert "prepare.formatt" in message


def test_broken_yaml_and_a_missing_file_are_sentences(tmp_path):
    (tmp_path / "params.yaml").write_text("train: {beta: [}")
    with pytest.raises(UserError, match="is not valid YAML"):
        load_params(tmp_path / "params.yaml")
    with pytest.raises(UserError, match="does not exist"):
        load_params(tmp_path / "nothing.yaml")


def test_an_unknown_recipe_lists_those_there_are():
    with pytest.raises(UserError, match=r"There is no recipe 'qwen'.*demo"):
        read_recipe("qwen")


def test_an_overlay_merges_sections_and_replaces_mixtures():
    merged = overlay(read_yaml(ROOT / "params.yaml"), {"train": {"loss": {"ipo": 1.0}, "adapter": {"rank": 4}}})
    assert merged["train"]["loss"] == {"ipo": 1.0}
    assert merged["train"]["adapter"]["rank"] == 4
    assert merged["train"]["adapter"]["targets"] == "all-linear"


def test_parameters_leave_the_device_under_zero_3_alone():
    with pytest.raises(UserError, match="offload: all needs zero_stage: 3"):
        load_cluster(ROOT, {"actor_train": {"offload": "all"}})


def test_workers_that_share_rows_form_whole_groups():
    with pytest.raises(UserError, match=r"sequence_parallel is 4 and num_workers is 6.*num_workers must be a multiple"):
        load_cluster(ROOT, {"actor_train": {"num_workers": 6, "sequence_parallel": 4}})
    assert load_cluster(ROOT, {"actor_train": {"num_workers": 8, "sequence_parallel": 4}}).actor_train.num_workers == 8


def test_tiles_of_an_mlp_are_refused_under_zero_3():
    with pytest.raises(UserError, match=r"mlp_tile_tokens does not work with zero_stage: 3.*or zero_stage: 2"):
        load_cluster(ROOT, {"actor_train": {"zero_stage": 3, "mlp_tile_tokens": 512}})
    assert load_cluster(ROOT, {"actor_train": {"mlp_tile_tokens": 512}}).actor_train.mlp_tile_tokens == 512


def test_workers_that_share_layers_form_whole_groups_and_compute_whole_rows():
    with pytest.raises(UserError, match=r"tensor_parallel is 4 and num_workers is 6.*num_workers must be a multiple"):
        load_cluster(ROOT, {"actor_train": {"num_workers": 6, "tensor_parallel": 4}})
    with pytest.raises(UserError, match=r"tensor_parallel is 2 and sequence_parallel is 2, which exclude each other"):
        load_cluster(ROOT, {"actor_train": {"num_workers": 4, "tensor_parallel": 2, "sequence_parallel": 2}})
    assert load_cluster(ROOT, {"actor_train": {"num_workers": 8, "tensor_parallel": 4}}).actor_train.num_workers == 8


def test_the_names_that_params_may_use_are_those_of_the_dataset_code():
    """tasks/config does not import the stages: a new row format or reject reason needs its name in both."""
    assert list(names.ROW_FORMATS) == list(row_shapes.SHAPES)
    assert list(names.REJECT_REASONS) == list(reject_reasons.REJECT_REASONS)
    assert list(names.DRIFT_METRICS) == list(drift.DRIFT_METRICS)
