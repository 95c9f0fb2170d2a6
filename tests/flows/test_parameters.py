"""The parameters of our flows as a form: a field for every key, and a refusal that names what is wrong."""

import re
from typing import Any

import pytest

from flows.parameters import comments, known_and_typed, schema, settable


def test_the_form_has_a_field_for_every_key_with_its_comment() -> None:
    fields = schema()["properties"]
    assert {"train.beta", "train.adapter.rank", "promote.require", "source.data"} <= set(settable())
    assert fields["train.beta"]["anyOf"][0] == {"exclusiveMinimum": 0.0, "type": "number"}
    assert fields["prepare.ties"]["enum"] == ["drop", "soft"]
    assert fields["source.seed"] == {
        "type": "integer",
        "title": "source.seed",
        "description": "seed of the demo's data and base model. When deployed: 0",
    }
    assert comments("a:\n  b: 1  # one\n  c:\n    d: 2 # two\n")["a.c.d"] == "two"
    assert "prepare.by_source.format" not in fields  # its keys are names of sources


def test_no_field_of_the_form_is_a_boolean_or_has_a_default() -> None:
    """The form posts `false` for a boolean that nobody touched, and it posts every default."""
    fields = schema()["properties"]
    assert fields["prepare.apply_loss_mask"]["enum"] == [True, False]
    assert fields["train.wpo"]["enum"] == [True, False, None]
    assert fields["train.quantization"]["enum"] == ["nf4", "fp8", None]
    for name, field in fields.items():
        kinds = [field, *field.get("anyOf", [])]
        assert not [kind for kind in kinds if kind.get("type") == "boolean" or {"default", "const"} & set(kind)], name
        assert "When deployed: " in field["description"], name


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"train.bta": 1}, "`train.bta` is not a key of params.yaml. Did you mean `train.beta`?"),
        ({"x": 1}, "`x` is not a key of params.yaml. Write it as in `train.beta`."),
        ({"train.beta": -1.0}, "`train.beta` is -1.0: Input should be greater than 0."),
        ({"train.adapter": {"rnk": 1}}, "`train.adapter`"),
        ({"sft": {"epochs": 1}}, "`sft` is {'epochs': 1}: Field required."),
    ],
)
def test_overrides_are_checked_one_by_one(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        known_and_typed(overrides)


def test_a_section_that_may_be_null_is_set_as_a_whole_or_by_its_keys() -> None:
    for overrides in ({"sft": {"learning_rate": 1.0e-4}}, {"sft": None}, {"sft.learning_rate": 1.0e-4}):
        assert known_and_typed(overrides) == overrides


def test_empty_form_fields_reach_the_flow_as_none() -> None:
    from flows.dpo import dpo

    untouched = dpo.validate_parameters({"recipe": "none", "name": "", "overrides": {}})
    assert (untouched["recipe"], untouched["name"], untouched["overrides"]) == (None, None, None)
    given = {"recipe": "demo", "name": "none", "overrides": {"train.beta": 0.2}}
    assert dpo.validate_parameters(given) | given == dpo.validate_parameters(given)
