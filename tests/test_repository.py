"""One version in every file that names it, and the files of .github by their linters."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SCHEMAS = {
    "workflows/*": "vendor.github-workflows",
    "ISSUE_TEMPLATE/*.yaml": "vendor.github-issue-forms",
    "ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
}


def test_dpo_prints_its_version():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output.strip()) == (0, VERSION)


def test_images_have_the_version_of_pyproject():
    files = [path for path in (ROOT / "infra").rglob("*") if path.name == "Dockerfile" or path.suffix == ".yaml"]
    files += (ROOT / "docs").rglob("*.md")
    tags = {(path.name, tag) for path in files for tag in re.findall(r"dpo-pipeline:(\d[\w.]*)", path.read_text())}
    tags |= {
        (path.parent.name, tag)
        for path in (ROOT / "infra").rglob("kustomization.yaml")
        for tag in re.findall(r"name: dpo-pipeline\b.*\n\s+newTag: (\S+)", path.read_text())
    }
    assert len(tags) > 8
    assert {tag for _, tag in tags} == {VERSION}


def test_the_changelog_has_a_section_for_the_version_and_one_for_what_comes():
    heads = re.findall(r"(?m)^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text())
    assert heads[0] == ("Unreleased", "")
    assert all(date for _, date in heads[1:])
    assert heads[1][0] == VERSION


@pytest.mark.parametrize("pattern", SCHEMAS)
def test_files_of_the_forge_follow_their_schemas(pattern):
    files = sorted((ROOT / ".github").glob(pattern))
    assert files
    command = [BIN / "check-jsonschema", "--builtin-schema", SCHEMAS[pattern], *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_workflows_have_no_finding_of_their_linter():
    """Actions by commit, the least permissions, no value of an event inside a script, no credentials left behind."""
    command = [BIN / "zizmor", "--offline", "--pedantic", "--no-progress", ROOT / ".github" / "workflows"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_commands_of_workflows_exist():
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    named = [
        name
        for path in (ROOT / ".github" / "workflows").iterdir()
        for name in re.findall(r"make ([a-z-]+)", path.read_text())
    ]
    assert set(named) >= {"lint", "test"}
    assert set(named) <= targets
