"""Options of a loss where earlier versions had them: a message prints the new form, and what is stored is read."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.parameters import known_and_typed
from tasks.compare.reevaluate import _objective
from tasks.config import params as params_module
from tasks.config.old_train import GONE, MOVED, to_new_form
from tasks.config.params import Params, load_stored_params, overlay, read_recipe
from tasks.config.strict import dotted, read_yaml, validate
from tasks.config.train import with_whole_loss
from tasks.errors import UserError
from tasks.runs import run_config
from training.objectives.registry import LOSSES

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "flows" / "recipes").glob("*.yaml"))
SHIPPED = read_yaml(ROOT / "params.yaml")
OLD: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # of `train`; its losses in the new form, as YAML
    ({"sigmoid": 1.0}, {"label_smoothing": 0.1}, "{sigmoid: {weight: 1.0, label_smoothing: 0.1}}"),
    ({"sigmoid": 1.0, "sft": 0.2}, {"gamma": 0.5}, "{sigmoid: {weight: 1.0, gamma: 0.5}, sft: 0.2}"),
    ({"sigmoid": 1.0}, {"length_normalization": True}, "{sigmoid: {weight: 1.0, length_normalization: true}}"),
    ({"simpo": 1.0}, {"gamma": 0.5, "reference": True}, "{simpo: {weight: 1.0, gamma: 0.5, reference: true}}"),
    ({"discopop": 1.0}, {"tau": 0.1}, "{discopop: {weight: 1.0, tau: 0.1}}"),
    ({"cpo": 1.0}, {"cpo_alpha": 0.5}, "{cpo: {weight: 1.0, cpo_alpha: 0.5}}"),
    ({"dpop": 1.0}, {"dpop_lambda": 5.0}, "{dpop: {weight: 1.0, dpop_lambda: 5.0}}"),
    (
        {"kto": 1.0},
        {"desirable_weight": 1.5, "undesirable_weight": 0.5},
        "{kto: {weight: 1.0, desirable_weight: 1.5, undesirable_weight: 0.5}}",
    ),
    ({"ipo": 1.0}, {"f_divergence": "js"}, "{ipo: {weight: 1.0, f_divergence: js}}"),
    (
        {"hinge": 1.0},
        {"f_divergence": "alpha", "f_alpha": 0.5},
        "{hinge: {weight: 1.0, f_divergence: alpha, f_alpha: 0.5}}",
    ),
    ({"sigmoid": 1.0}, {"margin": "scores", "margin_scale": 0.1}, "{sigmoid: {weight: 1.0, margin_scale: 0.1}}"),
    (  # an option of several losses of a mixture becomes one of each
        {"sigmoid": 0.5, "robust": 0.5},
        {"label_smoothing": 0.1},
        "{sigmoid: {weight: 0.5, label_smoothing: 0.1}, robust: {weight: 0.5, label_smoothing: 0.1}}",
    ),
]
NULLS = dict.fromkeys((*MOVED, *GONE))


def shipped(**train: object) -> dict[str, Any]:
    return {**SHIPPED, "train": {**SHIPPED["train"], **train}}


def refusal(content: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        validate(Params, content, Path("params.yaml"))
    return str(error.value)


def test_every_old_option_is_here():
    assert {key for _, options, _ in OLD for key in options} == set(MOVED)
    assert set(MOVED) - {"margin"} == {key for loss in LOSSES.values() for key in loss.options}


@pytest.mark.parametrize(("loss", "options", "new"), OLD)
@pytest.mark.parametrize("nulls", [{}, NULLS])
def test_an_old_file_is_refused_with_its_new_form_to_paste(loss, options, new, nulls):
    message = refusal(shipped(loss=loss, **{**nulls, **options}))
    assert message.startswith(
        "params.yaml: `train`: The options of a loss stand with the loss now. In place of `loss`, "
    )
    assert all(f"`{name}`" in message for name in {**nulls, **options})
    pasted = yaml.safe_load(message.splitlines()[-1])
    assert pasted == {"loss": yaml.safe_load(new)}
    assert message.splitlines()[-1] == f"    loss: {new}"
    assert validate(Params, shipped(**pasted), Path("params.yaml")).train.loss == yaml.safe_load(new)


@pytest.mark.parametrize(("loss", "options", "new"), OLD)
def test_an_old_override_is_refused_with_its_new_form(loss, options, new):
    old = {f"train.{name}": value for name, value in options.items()}
    for refused in (
        lambda: with_whole_loss(old, {"train": {"loss": loss}}),
        lambda: known_and_typed({"train.loss": loss, **old}),
    ):
        with pytest.raises((UserError, ValueError), match=r"The options of a loss stand with") as error:
            refused()
    overrides = str(error.value).rpartition(" write ")[2].removesuffix(".").split(" and ")
    written = {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in overrides)}
    assert with_whole_loss(written, {"train": {"loss": loss}}) == {"train.loss": yaml.safe_load(new)}


@pytest.mark.parametrize(("loss", "options", "new"), OLD)
def test_what_is_stored_in_the_old_form_is_read(tmp_path, loss, options, new):
    stored = shipped(loss=loss, **{**NULLS, **options})
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(stored))
    assert load_stored_params(tmp_path / "params.yaml").train.loss == yaml.safe_load(new)
    objective = _objective({"params": stored})
    assert (objective.loss, objective.options) == (yaml.safe_load(new), {"beta": 0.1})
    assert to_new_form(shipped(loss=yaml.safe_load(new)))["train"]["loss"] == yaml.safe_load(new)


@pytest.mark.parametrize("name", RECIPES)
def test_an_old_recipe_is_refused_by_its_name_and_with_its_own_losses(tmp_path, monkeypatch, name):
    recipe = read_yaml(ROOT / "flows" / "recipes" / f"{name}.yaml")
    train = recipe["params"].setdefault("train", {})
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**recipe, "params": {"train": {**train, "gamma": 0.5}}}))
    monkeypatch.setattr(params_module, "RECIPES", tmp_path)
    with pytest.raises(UserError, match=rf"{name}.yaml: `params.train`: The options of a loss") as error:
        read_recipe(name)
    (pasted,) = yaml.safe_load(str(error.value).splitlines()[-1].strip()).values()
    losses = train.get("loss", SHIPPED["train"]["loss"])
    assert pasted == {**losses, "sigmoid": {"weight": losses["sigmoid"], "gamma": 0.5}}


@pytest.mark.parametrize("key", GONE)
def test_what_is_gone_is_said(key):
    assert f"`train.{key}` is gone: nobody aligns with beta-DPO. Remove it" in refusal(shipped(**{key: 0.5}))
    with pytest.raises(ValueError, match=f"`train.{key}` is gone"):
        known_and_typed({f"train.{key}": 0.5})


def test_muon_is_gone():
    sentence = "The optimizer muon is gone: nobody aligns with it. Set `optimizer` to adamw"
    assert sentence in refusal(shipped(optimizer="muon"))
    with pytest.raises(ValueError, match=sentence):
        known_and_typed({"train.optimizer": "muon"})


def test_a_key_below_the_loss_changes_one_value_of_the_recipes_mixture():
    resolved = run_config.resolve("demo", {"train.loss.sigmoid.label_smoothing": 0.1, "train.loss.sft": 0.5})
    assert resolved.content["train"]["loss"] == {"sigmoid": {"weight": 1.0, "label_smoothing": 0.1}, "sft": 0.5}
    with pytest.raises(UserError, match=r"`ipo.weight` is missing: write \{ipo: \{weight: 1.0, ...\}\}"):
        run_config.resolve("demo", {"train.loss.ipo.f_divergence": "js"})
    assert known_and_typed({"train.loss.sigmoid.label_smoothing": 0.1, "train.loss.sft.weight": 0.5})
    for key, value, sentence in (
        ("train.loss.sigmoid.label_smoothing", 0.7, "less than or equal to 0.5"),
        ("train.loss.sigmoid.labelsmoothing", 0.1, "Did you mean `train.loss.sigmoid.label_smoothing`"),
        ("train.loss.hing", 1.0, "Did you mean `train.loss.hinge`"),
    ):
        with pytest.raises(ValueError, match=sentence):
            known_and_typed({key: value})


@pytest.mark.parametrize("loss", ["sigmoid", 1.0, ["sigmoid"], None])
def test_a_loss_that_is_no_mapping_is_refused(loss):
    with pytest.raises(UserError, match=r"`train.loss`: Input should be a valid dictionary"):
        run_config.resolve("demo", {"train.loss": loss})
    assert "`train.loss`: Input should be a valid dictionary" in refusal(shipped(loss=loss))


def test_a_recipe_replaces_the_whole_mixture():
    merged = overlay(shipped(loss={"sigmoid": {"weight": 1.0, "gamma": 0.5}}), dotted({"train.loss": {"ipo": 1.0}}))
    assert merged["train"]["loss"] == {"ipo": 1.0}
