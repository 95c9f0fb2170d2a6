"""Links of the pages, to files and to headings, lead somewhere. pre-commit runs this file alone."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")]
LINK = re.compile(r"\]\(([^()\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, no punctuation, a number behind a heading that is there already."""
    text = re.sub(r"(?s)```.*?```", "", page.read_text())
    seen: dict[str, int] = {}
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"(?m)^#+ (.+)$", text):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, 0) + 1
    return found


def broken(page: Path, text: str) -> list[str]:
    links = LINK.findall(CODE.sub("", text))
    return [link for link in links if not re.match(r"https?://|mailto:", link) and not leads_somewhere(page, link)]


def leads_somewhere(page: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = page.parent / file if file else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page):
    assert not broken(page, page.read_text())


@pytest.mark.parametrize("folder", ["docs", "docs/decisions"])
def test_the_index_of_a_folder_names_its_pages(folder):
    index, pages = ROOT / folder / "README.md", {page.name for page in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert pages <= {link.partition("#")[0] for link in LINK.findall(index.read_text())}


def test_a_broken_link_would_be_found():
    page = ROOT / "README.md"
    text = (
        "[a](docs/none.md) [b](docs/data.md#none) [c](#none) [d](https://x/y) `[e](none)` [f](docs/data.md#row-shapes)"
    )
    assert broken(page, text) == ["docs/none.md", "docs/data.md#none", "#none"]
