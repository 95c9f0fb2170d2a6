"""The parameters of our flows as a form: a field for every key, and a refusal that names what is wrong."""

import itertools
import re
import subprocess
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from flows.parameters import NAME_OR_NONE, comments, known_and_typed, schema, settable
from tasks.errors import UserError
from tasks.runs.names import LONGEST, check_name


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


def is_branch(name: str) -> bool:
    return not subprocess.run(["git", "check-ref-format", f"refs/heads/runs/{name}"]).returncode


def is_valid(name: str) -> bool:
    try:
        return bool(check_name(name))
    except UserError:
        return False


def test_a_name_may_be_what_git_takes_as_a_branch() -> None:
    """Of names of our characters with a letter or digit at the start: neither more nor less."""
    names = ["".join(letters) for size in range(4) for letters in itertools.product("a.-_", repeat=size)]
    names += [".lock", "b.lock", ".lock.", ".locks", "lock", ".Lock", "..lock", ".lock.lock", ".lock-1"]
    for name in (f"a{name}" for name in names):
        assert is_valid(name) == is_branch(name), name
    for name in (
        "",
        ".a",
        "-a",
        "_a",
        "a/b",
        "../a",
        "a b",
        "a\n",
        "a\nb",
        "ä",
        "a@{b",
        "a~1",
        "a:b",
        "a\\b",
        "a*",
        "a\0b",
    ):
        assert not is_valid(name), name


def test_the_form_the_flow_and_the_command_line_take_the_same_names() -> None:
    from flows.dpo import dpo
    from flows.rounds import rounds
    from flows.sweep import sweep

    longest = "a" * LONGEST
    for name in (
        "x",
        "r-1",
        "A.b_c",
        "20261101-quiet-fox",
        longest,
        "a..b",
        "a.lock",
        "a.",
        "../a",
        "a\n",
        f"{longest}a",
    ):
        assert bool(re.search(NAME_OR_NONE, name)) == is_valid(name), name  # as Prefect's server does
        for flow, more in ((dpo, {}), (rounds, {}), (sweep, {"space": {}})):
            if is_valid(name):
                assert flow.validate_parameters({"name": name, **more})["name"] == name
            else:
                with pytest.raises(Exception, match="A run cannot be named"):
                    flow.validate_parameters({"name": name, **more})
    assert re.search(NAME_OR_NONE, "")
    assert not re.search(NAME_OR_NONE, "\n")
    for command in (["run"], ["sweep", "--space", "train.beta=0.1"], ["rounds"], ["follow", "dpo/full"]):
        refused = CliRunner().invoke(app, [*command, "--name", "a..b"])
        assert str(refused.exception).startswith("A run cannot be named 'a..b'. Use up to 200 letters"), command
