"""The README and the pages of docs: their examples run, their links lead somewhere, and every public name is on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.pages import run_examples

import jax_baracuda

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOR_DEVELOPERS = [ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")]
RUN_ELSEWHERE = {"adding_an_op.md": "test_adding_an_op.py", "recipes_libraries.md": "programs/test_recipes.py"}
WITH_EXAMPLES = [page for page in PAGES if "```python\n" in page.read_text() and page.name not in RUN_ELSEWHERE]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.newest_jax_alone
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_examples(page: Path) -> None:
    run_examples(page)


@pytest.mark.newest_jax_alone
@pytest.mark.parametrize("page", RUN_ELSEWHERE)
def test_examples_run_elsewhere(page: str) -> None:
    assert page in (ROOT / "tests" / RUN_ELSEWHERE[page]).read_text()


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.newest_jax_alone
@pytest.mark.parametrize("page", [*PAGES, *FOR_DEVELOPERS], ids=name_of)
def test_links(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{name_of(page)} links to {link}"


@pytest.mark.newest_jax_alone
def test_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


@pytest.mark.newest_jax_alone
@pytest.mark.parametrize("name", jax_baracuda.__all__)
def test_every_public_name_is_on_a_page(name: str) -> None:
    assert any(re.search(rf"\b{name}\b", page.read_text()) for page in PAGES[1:])
