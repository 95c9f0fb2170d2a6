"""Each setting that an error about a file's layout names is followed here, and must read the rows as they are meant."""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import yaml

from tasks.config.params import load_params
from tasks.config.paths import ROOT
from tasks.config.prepare import Layout
from tasks.errors import UserError
from tasks.prepare.rows import advice, layouts
from tasks.prepare.rows.advice import Section
from tasks.prepare.rows.layouts import better_shape, decided_by, decode, find_layout, source_layout
from tasks.prepare.rows.preference import RowLayout
from tasks.prepare.rows.row_shapes import SHAPES
from tasks.prepare.rows.vote_values import vote_key
from tests.prepare.test_layouts import BAD, GOOD, SETTINGS, TIES, chat, compared
from tests.prepare.test_row_shapes import EXAMPLES

AUTO = Layout(format="auto", columns={})
SETTING = re.compile(r"prepare\.(columns|values) to (?=\{)")


def voted(column: str, first: object, second: object, **others: object) -> Callable[[int], dict]:
    """Rows with a vote for the better answer, which is the first of every second row."""

    def row(n: int) -> dict:
        more = {name: value(n) if callable(value) else value for name, value in others.items()}
        return {
            "question": f"Q {n}?",
            **compared(n, "response_a", "response_b"),
            column: (first, second)[n % 2],
            **more,
        }

    return row


def sided(n: int) -> dict:
    return {"question": f"Q {n}?", "response_a": f"{GOOD} {n}", "response_b": f"{BAD} {n}"}


def labelled(good: object, bad: object) -> Callable[[int], dict]:
    return lambda n: {"prompt": f"Q {n}?", "completion": f"{(GOOD, BAD)[n % 2]} {n}", "label": (good, bad)[n % 2]}


# Rows, the settings that they start with, and what the values mean that the error cannot know.
CASES: dict[str, tuple[Callable[[int], dict], Layout, dict[object, str]]] = {
    **{
        name: (make, AUTO, dict(settings.get("values", {}).get("winner", {})))
        for name, (make, _, settings) in SETTINGS.items()
    },
    "1 is the first answer": (voted("label", 1, 0), AUTO, {1: "first", 0: "second"}),
    "0 is the first answer": (voted("label", 0, 1), AUTO, {0: "first", 1: "second"}),
    "true or false": (voted("preferred", True, False), AUTO, {True: "first", False: "second"}),
    "yes or no": (voted("better", "yes", "no"), AUTO, {"yes": "first", "no": "second"}),
    "floats in CSV": (voted("label", "1.0", "0.0"), AUTO, {"1.0": "first", "0.0": "second"}),
    "capitals": (voted("Verdict", "Left", "Right"), AUTO, {"Left": "first", "Right": "second"}),
    "YAML's signs": (voted("choice", "a, {b}: 'c'", "# no"), AUTO, {"a, {b}: 'c'": "first", "# no": "second"}),
    "two columns": (voted("vote", 1, 0, label=lambda n: (n // 2) % 2), AUTO, {1: "first", 0: "second"}),
    "a ratio beside the votes": (voted("labels", 1, 0, upvote_ratio=0.98), AUTO, {1: "first", 0: "second"}),
    "a wrong column was named": (
        voted("labels", 1, 0, upvote_ratio=0.98),
        Layout(format="auto", columns={"winner": "upvote_ratio"}),
        {1: "first", 0: "second"},
    ),
    "a scale": (
        voted("preference", 0.9, 0.2),
        Layout(format="auto", columns={"winner": "preference"}),
        {1: "first", 0: "second"},
    ),
    "nobody voted": (sided, AUTO, {}),
    "nobody voted on answers to a history": (
        lambda n: {"history": f"Q {n}?", "human_ref_A": f"{GOOD} {n}", "human_ref_B": f"{BAD} {n}"},
        AUTO,
        {},
    ),
    "the vote is always the same": (lambda n: {**sided(n), "vote": 7}, AUTO, {}),
    "another column has the prompt": (
        lambda n: {"user_text_input": f"Q {n}?", **compared(n, "response_a", "response_b"), "label": n % 2},
        AUTO,
        {0: "first", 1: "second"},
    ),
    "labels": (labelled("fine", "poor"), AUTO, {"fine": "desirable", "poor": "undesirable"}),
    "labels of other names": (
        lambda n: {"prompt": f"Q {n}?", "completion": f"{(GOOD, BAD)[n % 2]} {n}", "kto_tag": ("Y", "N")[n % 2]},
        AUTO,
        {"Y": "desirable", "N": "undesirable"},
    ),
    "columns with YAML's signs": (
        lambda n: {"my: question": f"Q {n}?", "good, one": f"{GOOD} {n}", "bad, one": f"{BAD} {n}"},
        AUTO,
        {},
    ),
    "lists of answers": (
        lambda n: {"query": f"Q {n}?", "chosen": [f"{GOOD} {n}", f"{GOOD} {n}!"], "rejected": [f"{BAD} {n}"]},
        AUTO,
        {},
    ),
}


def ways(error: str, wanted: Layout, meanings: dict[object, str]) -> Iterator[Layout]:
    """The settings after each way that the error offers."""
    known = {vote_key(value): meaning for value, meaning in meanings.items()}
    found = [(match[1], mapping_at(error, match.end())) for match in SETTING.finditer(error)]
    for key, setting in found:
        for column, choices in setting.items() if key == "values" else ():
            setting[column] = {value: known[vote_key(value)] for value in choices if vote_key(value) in known}
    for settings in [dict(found)] if "} and prepare.values" in error else [dict([one]) for one in found]:
        Layout(**{"format": "auto", "columns": {}, **settings})  # as the configuration checks it
        yield wanted.model_copy(update=settings)


def mapping_at(text: str, start: int) -> dict:
    """The YAML mapping that starts there: to the first brace with which it is complete."""
    for end in (match.end() for match in re.finditer(r"\}", text[start:])):
        try:
            return yaml.safe_load(text[start : start + end])
        except yaml.YAMLError:
            continue
    raise AssertionError(text[start:])


def follow(rows: list[dict], wanted: Layout, meanings: dict[object, str], said: list[str]) -> Iterator[Layout]:
    """The layouts at the end of every way of following the errors."""
    assert len(said) < 12, said
    try:
        find_layout(rows, "a.jsonl", wanted)
        yield wanted
    except UserError as error:
        said.append(str(error))
        for settings in ways(str(error), wanted, meanings):
            yield from follow(rows, settings, meanings, said)


def is_right(rows: list[dict], wanted: Layout, ties: int) -> bool:
    """Whether every row but the ties is read and prefers the good answer."""
    made = decode(rows, find_layout(rows, "a.jsonl", wanted))
    good = all(
        one.chosen[0]["content"].startswith(GOOD if one.sign >= 0 else BAD)
        and (one.sign or one.rejected[0]["content"].startswith(BAD))
        for one in made
    )
    return good and len({one.prompt_text for one in made}) == len(rows) - ties


@pytest.mark.parametrize("name", CASES)
def test_an_error_names_settings_that_read_the_rows(name):
    make, wanted, meanings = CASES[name]
    rows, said = [make(n) for n in range(8)], []
    ends = list(follow(rows, wanted, meanings, said))
    assert said
    assert any(is_right(rows, end, ties=2 if name in TIES else 0) for end in ends), said
    assert all(decode(rows, find_layout(rows, "a.jsonl", end)) for end in ends), said


def test_an_error_without_a_setting_says_what_to_change():
    tree = [{"message_id": "b", "parent_id": "a", "role": "assistant", "text": "Hi", "rank": 0}]
    with pytest.raises(UserError, match=r"one message in each row .*\.trees\.jsonl\.gz"):
        find_layout(tree, "a.jsonl")
    ranked = [{"prompt": chat("Hi", "Hello", "Q 0?"), "completions": [f"{GOOD} 0", f"{BAD} 0"]}]  # what it asks for
    assert is_right(ranked, AUTO, ties=0)
    pairs = [{"prompt": "Q 0?", "chosen": f"{GOOD} 0", "rejected": f"{BAD} 0"}]
    named = Layout(format="auto", columns={"prompt": "q"})
    with pytest.raises(
        UserError, match=r"by_source\.chat\.columns maps prompt to `q`.*or set .*\.chat\.columns to \{\}"
    ):
        find_layout(pairs, "a.jsonl", named, Section("prepare.by_source.chat"))
    with pytest.raises(UserError, match=r"prepare\.values has no effect: a\.jsonl is read as pairs.*Remove it"):
        find_layout(pairs, "a.jsonl", Layout(format="auto", columns={}, values={"winner": {1: "first"}}))
    assert is_right(pairs, AUTO, ties=0)  # with the setting removed
    with pytest.raises(UserError, match=r"Map the columns, for example: set prepare\.columns to \{prompt: question"):
        find_layout([{"input": "Q 0?", "text": "a"}], "a.jsonl")


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ([{"context": "Q 0?", "chosen": f"{GOOD} 0", "rejected": f"{BAD} 0"}], {}),
        ([{"input": "Q 0?", "chosen": f"{GOOD} 0", "rejected": f"{BAD} 0"}], {"columns": {"chosen": "good"}}),
        ([{"input": "Q 0?", "chosen": f"{GOOD} 0", "rejected": f"{BAD} 0"}], {"values": {"winner": {0: "first"}}}),
        ([{"user_text_input": "Q 0?", "answer_a": f"{GOOD} 0", "answer_b": f"{BAD} 0", "label": 3}], {}),
    ],
)
def test_in_a_mixture_the_advice_changes_one_source(rows, settings):
    """What other sources are read with stays as it is: the entry in prepare.by_source is complete."""
    prepare = load_params(ROOT / "params.yaml").prepare.model_copy(update=settings)
    with pytest.raises(UserError) as error:
        source_layout("chat", rows, "chat.jsonl", prepare, others=True)
    found = next(re.finditer(r"prepare\.by_source\.chat to (?=\{format)", str(error.value)))
    wanted = Layout(**mapping_at(str(error.value), found.end()))
    assert is_right(rows, wanted, ties=0)
    source_layout("chat", rows, "chat.jsonl", prepare.model_copy(update={"by_source": {"chat": wanted}}), others=True)


def test_every_error_about_a_layout_is_followed_here(monkeypatch: pytest.MonkeyPatch):
    """The longest fixed part of each error and of each advice in the code is in a message that these tests provoke."""
    said: list[str] = []
    create = UserError.__init__
    monkeypatch.setattr(UserError, "__init__", lambda self, *args: (said.append(str(args[0])), create(self, *args))[1])
    for make, wanted, meanings in CASES.values():
        list(follow([make(n) for n in range(8)], wanted, meanings, []))
    test_an_error_without_a_setting_says_what_to_change()
    for module in (advice, layouts):
        for text in fixed_parts(module):
            assert any(text in message for message in said), text


def fixed_parts(module: ModuleType) -> Iterator[str]:
    """Of each error that a module raises, and of each sentence that its functions return."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        is_error = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError"
        text = node.args[0] if is_error else node.value if isinstance(node, ast.Return) else None
        if isinstance(text, ast.JoinedStr):
            parts = [part.value for part in text.values if isinstance(part, ast.Constant)]
            if (longest := max(parts, key=len)).count(" ") > 3:
                yield longest


@pytest.mark.parametrize(("shape", "row"), [example for example in EXAMPLES if example[0] != "tree"])
def test_a_better_shape_reads_the_rows_once_it_is_set(shape, row):
    rows = [json.loads(json.dumps(row).replace("good", f"{GOOD} {n}").replace("bad", f"{BAD} {n}")) for n in range(4)]
    wrong = [other for other in SHAPES if not decode(rows, RowLayout(other))]
    better = {named for other in wrong if (named := better_shape(rows, RowLayout(other)))}
    assert better
    for named in better:
        assert len(decode(rows, find_layout(rows, "a.jsonl", Layout(format=named, columns={})))) == len(rows)


def test_a_column_that_does_not_vary_or_has_fractions_is_not_proposed():
    rows = [CASES["a ratio beside the votes"][0](n) for n in range(8)]
    with pytest.raises(UserError) as error:
        find_layout(rows, "shp.jsonl")
    assert "upvote_ratio" not in str(error.value)
    assert "`labels` holds 1 (4 times), 0 (4 times)" in str(error.value)
    several = [{**row, "vote": n % 3} for n, row in enumerate(rows)]
    with pytest.raises(UserError, match=r"`vote` holds 0 \(3 times\), 1 \(3 times\), 2 \(2 times\); `labels` holds"):
        find_layout(several, "shp.jsonl")


def test_values_are_shown_as_the_file_writes_them():
    rows = [voted("Verdict", "Left", "Right")(n) for n in range(4)]
    with pytest.raises(UserError, match=r"`Verdict` holds Left \(2 times\), Right .*\{Left: first\|second\|tie, Right"):
        find_layout(rows, "a.jsonl")
    for given in ("left", "LEFT"):  # case does not matter
        wanted = Layout(format="auto", columns={}, values={"winner": {given: "first", "Right": "second"}})
        layout = find_layout(rows, "a.jsonl", wanted)
        assert is_right(rows, wanted, ties=0)
        assert decided_by(rows, layout) == "`Verdict`: Left = first, Right = second"
    rows = [voted("label", "A>B", "B>>A")(n) for n in range(4)]
    assert decided_by(rows, find_layout(rows, "a.jsonl")) == "`label`: A>B = first, B>>A = second"
