"""Configuration: strict, typed, and every mistake a sentence that says what to do."""

from pathlib import Path

import pytest
import yaml

from tasks.errors import UserError
from tasks.params import Params, dotted, load_cluster, load_params, overlay, read_recipe, read_yaml, validate

ROOT = Path(__file__).resolve().parents[1]
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


def test_the_demo_recipe_changes_nothing():
    content = read_yaml(ROOT / "params.yaml")
    assert overlay(content, read_recipe("demo")) == content


def test_a_typo_names_the_key_and_the_one_that_was_meant():
    assert refusal(**{"train.betaa": 0.1}) == "params.yaml: `train.betaa` is not a key of ours. Did you mean `beta`?"
    assert "Did you mean `rank`?" in refusal(**{"train.adapter.rnk": 4})


def test_a_mixture_is_as_strict_as_the_rest():
    one = {"name": "a", "data": "a.jsonl", "weight": 1.0, "share": 1.0}
    assert params(**{"source.data": [one]}).source.data[0].share == 1.0
    assert "`source.data.mixture.0.share` is missing" in refusal(
        **{"source.data": [{name: value for name, value in one.items() if name != "share"}]}
    )
    assert "each with a name of its own" in refusal(**{"source.data": [one, one]})
    assert "`source.data.address`" in refusal(**{"source.data": 3})


def test_layouts_and_thresholds_know_our_names():
    assert "there is no `prmpt`. Known here: prompt, chosen" in refusal(**{"prepare.columns": {"prmpt": "q"}})
    assert "there is no `hh`. Known here: auto, openai" in refusal(**{"prepare.format": "hh"})
    assert "there is no `dup`. Known here: invalid_json" in refusal(**{"prepare.thresholds": {"dup": 0.1}})
    assert "neither auto, plain, chatml nor" in refusal(**{"prepare.template": "llama"})
    assert refusal(**{"source.eval": "held.jsonl"}).startswith("params.yaml: held-out pairs come from `source.eval` or")


def test_a_number_that_yaml_reads_as_text_is_told_how_to_be_written():
    assert yaml.safe_load("5e-7") == "5e-7"
    expected = "`train.learning_rate` is the text '5e-7' and not a number: YAML wants a dot there. Write 5.0e-7."
    assert expected in refusal(**{"train.learning_rate": "5e-7"})
    assert yaml.safe_load("5.0e-7") == 5e-7
    assert "Write 1.5e+3." in refusal(**{"train.learning_rate": "1.5e3"})
    assert yaml.safe_load("1.5e+3") == 1500.0


def test_a_missing_key_is_named():
    content = read_yaml(ROOT / "params.yaml")
    del content["train"]["beta"]
    with pytest.raises(UserError, match=r"`train\.beta` is missing"):
        validate(Params, content, Path("params.yaml"))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("train.epochs", 0, "greater than or equal to 1, and it is 0"),
        ("train.dtype", "fp16", "'float32', 'bfloat16' or 'float16', and it is 'fp16'"),
        ("train.max_steps", True, "valid integer, and it is True"),
        ("train.eval_steps", 1.5, "less than 1, and it is 1.5"),
        ("train.loss", {"dpo": 1.0}, "there is no loss 'dpo'"),
        ("train.tau", 0.5, "`tau` has no effect on loss sigmoid, sft"),
        ("train.margin", "scores", "`margin_scale` belongs to `margin: scores`"),
        ("train.margin_scale", 0.1, "`margin_scale` belongs to `margin: scores`"),
        ("train.margin_scale", 0.0, "greater than 0"),
        ("train.reference_update", {"every": 0, "alpha": 0.5}, "greater than or equal to 1, and it is 0"),
        ("train.reference_update", {"every": 8, "alpha": 1.5}, "less than or equal to 1, and it is 1.5"),
        ("train.router_aux_loss_coef", 0.0, "greater than 0"),
        ("prepare.eval_fraction", 1.0, "less than 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(key, value, sentence):
    message = refusal(**{key: value})
    assert sentence in message
    assert key.rsplit(".", 1)[0] in message


def test_all_mistakes_are_told_at_once():
    message = refusal(**{"train.betaa": 1, "prepare.formatt": "auto"})
    assert "train.betaa" in message
    assert "prepare.formatt" in message


def test_broken_yaml_and_a_missing_file_are_sentences(tmp_path):
    (tmp_path / "params.yaml").write_text("train: {beta: [}")
    with pytest.raises(UserError, match="is not valid YAML"):
        load_params(tmp_path / "params.yaml")
    with pytest.raises(UserError, match="is not there"):
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
