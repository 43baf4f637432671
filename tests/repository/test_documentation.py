"""The README and the pages of docs: examples run, links and commands exist, tables agree with the records, and every
public name is on a page."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
from support.pages import run_examples

import jax_baracuda
from benchmarks import tables
from benchmarks.__main__ import select_cases
from benchmarks.record import RESULTS, GridRun, load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOR_DEVELOPERS = [ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")]
RUN_ELSEWHERE = {
    "README.md": "test_whole_programs.py",
    "adding_an_op.md": "repository/test_adding_an_op.py",
    "recipes_libraries.md": "programs/test_recipes.py",
}
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
WITH_EXAMPLES = [page for page in PAGES if "```python\n" in page.read_text() and page.name not in RUN_ELSEWHERE]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_examples(page: Path) -> None:
    run_examples(page)


@pytest.mark.parametrize("page", RUN_ELSEWHERE)
def test_examples_run_elsewhere(page: str) -> None:
    assert page in (ROOT / "tests" / RUN_ELSEWHERE[page]).read_text()


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *FOR_DEVELOPERS], ids=name_of)
def test_links(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{name_of(page)} links to {link}"


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command on a page: in inline code and in blocks without language, without comments."""
    text = page.read_text()
    lines = "".join(code for language, code in BLOCK.findall(text) if not language).splitlines()
    lines += re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    commands = (line for line in lines if line.startswith(("make ", "python ", "pip install ")))
    return [words for words in (shlex.split(line, comments=True) for line in commands) if len(words) > 1]


COMMANDS = sorted({tuple(command) for page in [*PAGES, *FOR_DEVELOPERS] for command in commands_of(page)})


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_exist(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Make targets, modules, their options, the cases that options name, files and extras exist."""
    program, *arguments = command
    if program == "make":
        rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        targets = {target for rule in rules for target in rule.split()}
        assert all(word in targets or "=" in word for word in arguments)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked_for = [extra for word in arguments for extra in re.findall(r"^\.\[(.*)\]$", word)]
        assert all(extra in extras for extra in asked_for)
    elif arguments[0] != "-m":
        assert (ROOT / arguments[0]).exists()
    else:
        module, *options = arguments[1:]
        if module == "jax_baracuda":
            module = f"jax_baracuda._tools.{options.pop(0)}"
        is_package = (ROOT / module.replace(".", "/") / "__main__.py").exists()
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(f"{module}.__main__" if is_package else module).main(["--help"])
        assert stop.value.code == 0
        known = capsys.readouterr().out
        assert all(re.search(rf"{option}\b", known) for option in options if option.startswith("--"))
        if module == "benchmarks" and options[:1] == ["--only"] and options[1:] != ["grid"]:
            assert all(any(select_cases("gpu", [text])) for text in options[1:])


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_tables_are_those_of_the_records() -> None:
    """Overviews in docs/performance.md and all rows of docs/numbers.md agree with the records. Cells may be empty."""
    runs = [load(path) for path in RESULTS.glob("*.json") if path.name != "two_gpus.json"]
    printed = [tables.markdown(run).splitlines() for run in runs if not isinstance(run, GridRun)]
    known = [cells_of(row) for lines in printed for row in lines if row.startswith("|")]
    overviews = re.findall(
        r"^\| op \|  \| cases .*\n(?:\|.*\n)*", (ROOT / "docs/performance.md").read_text(), re.MULTILINE
    )
    numbers = (ROOT / "docs/numbers.md").read_text()
    rows = re.findall(r"^\|.*", "".join([*overviews, numbers]), re.MULTILINE)
    assert len(overviews) > 3 and len(rows) > 300

    def is_known(row: list[str]) -> bool:
        of_length = (cells for cells in known if len(cells) == len(row))
        return any(all(cell in ("", other) for cell, other in zip(row, cells, strict=True)) for cells in of_length)

    assert [row for row in rows if not is_known(cells_of(row))] == []


def test_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def test_reference_is_that_of_the_docstrings() -> None:
    """`python docs/make_reference.py` brings docs/reference up to date."""
    pages = runpy.run_path(str(ROOT / "docs/make_reference.py"))["pages"]()
    kept = {path.stem: path.read_text() for path in (ROOT / "docs/reference").glob("*.md")}
    assert kept.keys() == pages.keys()
    assert [page for page in pages if pages[page] != kept[page]] == [], "run python docs/make_reference.py"
    for name in jax_baracuda.__all__:
        assert f"[`{name}`](" in kept["index"]


@pytest.mark.parametrize("name", jax_baracuda.__all__)
def test_every_public_name_is_on_a_page(name: str) -> None:
    assert any(re.search(rf"\b{name}\b", page.read_text()) for page in PAGES[1:])
