"""The pages say what the code says: quoted messages exist, commands and files that they name are there."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
import typer
import yaml

from cli.main import app
from flows.parameters import known_and_typed
from tasks.config.cluster import Cluster
from tasks.config.params import Params
from tasks.config.strict import all_keys, parse_overrides
from tasks.runs import search_space
from training.objectives.options import LOSS_OPTIONS

PROJECT = Path(__file__).resolve().parents[1]
SPEAKING = (".md", ".py", ".sh", ".yaml", "")
DOCS = sorted((PROJECT / "docs").glob("*.md"))
PAGES = [*DOCS, *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
GAP = "\0"  # where a message has a value


def said(path: Path) -> list[str]:
    """Every text in a file, as it would be printed."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else GAP for v in node.values))
    return texts


def messages() -> list[str]:
    """The first cells of the table of our own messages; a cell may quote several."""
    page = (PROJECT / "docs" / "troubleshooting.md").read_text()
    table = page.split("## Messages")[1].split("## What other tools say")[0]
    cells = [line.split(" | ")[0].removeprefix("| ").strip() for line in table.splitlines() if line.startswith("| `")]
    return [quote for cell in cells for quote in re.split(r"(?<=`)(?:,| and) (?=`)", cell)]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    folders = ("cli", "flows", "services", "tasks", "training")
    code = [path for folder in folders for path in (PROJECT / folder).rglob("*.py")]
    scripts = [path.read_text() for path in (PROJECT / "infra").glob("*.sh")]
    return [*scripts, *(text for path in code for text in said(path))]


def test_every_quoted_message_is_one_that_the_code_says(texts):
    quoted = messages()
    assert len(quoted) > 35
    for quote in quoted:
        parts = [re.escape(part) for part in quote[1:-1].split("...")]
        pattern = re.compile(".*".join(parts), re.DOTALL)
        assert any(pattern.search(text) for text in texts), f"nobody says {quote}"


def test_a_message_that_nobody_says_would_be_found(texts):
    assert not any("the moon is full" in text for text in texts)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_of_make_exist(page):
    known = set(re.findall(r"(?m)^([a-z-]+):", (PROJECT / "Makefile").read_text()))
    for name in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE):
        assert name in known, f"{page.name} names `make {name}`"


def code_lines(page: str) -> list[str]:
    """Lines of code blocks, and code inside sentences."""
    blocks = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    return [*inline, *(line for block in blocks for line in block.splitlines())]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_of_dpo_exist_with_their_options(page):
    commands = typer.main.get_command(app).commands
    for line in code_lines(page.read_text()):
        for name, arguments in re.findall(r"(?<!-n )(?<!/)\bdpo ([a-z][a-z-]*)([^#;&]*)", line):
            assert name in commands, f"{page.name}: there is no command `dpo {name}`: {line}"
            options = {option for parameter in commands[name].params for option in parameter.opts}
            unknown = set(re.findall(r"(?<=[\s\[])--?[a-z][a-z-]*", arguments)) - options
            assert not unknown, f"{page.name}: `dpo {name}` has no option {', '.join(unknown)}: {line}"


EXAMPLE = re.compile(r"(?<![\w.-])(--set|-s|--space)[\s=](?:'([^'\n]+)'|([\w.]+=[^\s`'\")\]]+))")
SECTIONS = "|".join(["cluster", *Params.model_fields])
BARE = re.compile(rf"(?<![\w.-])((?:{SECTIONS})(?:\.\w+)+=[^\s`'{{]+)")


def examples(text: str) -> list[tuple[str, str]]:
    """What a text gives as values for `--set` and `--space`."""
    return [(option, quoted or plain) for option, quoted, plain in EXAMPLE.findall(text)]


def help_texts() -> dict[str, str]:
    """Of each command and each of its options."""
    found = {}
    for name, command in typer.main.get_command(app).commands.items():
        found[name] = command.help or ""
        found |= {f"{name} {option.opts[0]}": getattr(option, "help", "") or "" for option in command.params}
    return found


def in_help(option: str, text: str) -> list[tuple[str, str]]:
    """The help of an option shows its values alone."""
    kind = "--space" if option.endswith("--space") else "--set"
    return [*examples(text), *((kind, value.rstrip(".,")) for value in BARE.findall(EXAMPLE.sub("", text)))]


EXAMPLES = {
    **{page.name: examples(page.read_text()) for page in PAGES},
    **{name: found for name, text in help_texts().items() if (found := in_help(name, text))},
}


@pytest.mark.parametrize("place", [name for name, found in EXAMPLES.items() if found])
def test_a_value_that_an_example_gives_is_accepted(place):
    """By the parser of the command line, and then by the type of its key."""
    for option, text in EXAMPLES[place]:
        text = text.replace("{NAME: 1.0", "{ipo: 1.0")  # of CONTRIBUTING's own loss
        if text in ("KEY=VALUE", "key=value"):
            continue
        if option == "--space":
            key, values = search_space.parse(text)
            values = [values.low, values.high] if isinstance(values, search_space.Range) else values
            assert all(known_and_typed({key: value}) for value in values), (place, text)
        else:
            assert known_and_typed(parse_overrides([text])), (place, text)


def test_examples_are_found():
    assert len(EXAMPLES["README.md"]) >= 9
    assert ("--space", "train.learning_rate=log:1e-5..1e-3") in EXAMPLES["sweep --space"]
    assert EXAMPLES["run --set"] == [("--set", "train.beta=0.2")]
    assert ("--set", "train.loss={ipo: 1.0}") in EXAMPLES["run"]
    with pytest.raises(ValueError, match=r"`train\.beta` is 'high'"):
        known_and_typed(parse_overrides([text for _, text in examples("x --set train.beta=high")]))


def test_our_side_of_the_table_for_roll_and_colossalai_exists():
    """Every name in its last column is a key of params.yaml or infra/cluster.yaml, or the name of a loss."""
    page = (PROJECT / "docs" / "configuration.md").read_text().split("## Coming from ROLL or ColossalAI")[1]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 25
    ours = {name for row in rows for name in re.findall(r"`([^`]+)`", row[-1]) if not name.startswith("--")}
    losses = {name for text in ours if text.startswith("train.loss: ") for name in yaml.safe_load(text)["train.loss"]}
    assert losses == {"ipo_sum"}  # ROLL's ipo; ours averages over tokens
    values = {"auto", "never"}
    keys = {name for section in (Params, Cluster) for name, _ in all_keys(section)}
    keys |= {*LOSS_OPTIONS, *values}
    named = {name.partition(":")[0] for name in ours}
    assert len(named) > 30
    assert named - keys == set()


def test_recipes_that_are_named_exist():
    page = (PROJECT / "docs" / "own-data.md").read_text()
    names = re.findall(r"\| `([\w.-]+)` \|", page.split("| what you have |")[1].split("\n\n")[0])
    assert len(names) == 3
    assert all((PROJECT / "flows" / "recipes" / f"{name}.yaml").exists() for name in names)


def test_modules_that_are_run_exist():
    """`python -m flows.x`, wherever somebody is told to run it or something runs it."""
    every = (
        path
        for folder in ("docs", "cli", "flows", "infra", "services", "tasks", "tests/benchmarks")
        for path in (PROJECT / folder).rglob("*")
    )
    files = [path for path in every if path.is_file() and path.suffix in SPEAKING]
    files += [PROJECT / name for name in ("Makefile", "README.md", "CONTRIBUTING.md", "dvc.yaml")]
    run = re.compile(r"-m[\", ]+((?:flows|tasks|tests)\.[\w.]*\w)(?![\w$]|\.\$)")
    named = {name for path in files for name in run.findall(path.read_text())}
    assert len(named) > 10
    missing = {name for name in named if not (PROJECT / (name.replace(".", "/") + ".py")).exists()}
    assert not missing


def test_the_notebook_ran_and_calls_the_functions_as_they_are():
    from tasks import api

    notebook = json.loads((PROJECT / "docs" / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert "error" not in {output["output_type"] for cell in cells for output in cell["outputs"]}
    called = set()
    for node in ast.walk(ast.parse("\n".join("".join(cell["source"]) for cell in cells))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(api, node.func.id):
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(getattr(api, node.func.id)).bind(*node.args, **keywords)
            called.add(node.func.id)
    assert called >= {"prepare", "train", "evaluate", "export", "curves", "samples"}


def test_the_map_shows_every_folder_of_code():
    shown = set(re.findall(r'class="name"[^>]*>(?:\w+/)?(\w+)', (PROJECT / "docs" / "map.svg").read_text()))
    folders = {path.parent.name for layer in ("tasks", "training") for path in (PROJECT / layer).glob("*/__init__.py")}
    assert folders <= shown, f"docs/map.svg lacks {folders - shown}"
