"""Writes the pages of docs/reference from the docstrings: signatures, arguments and examples as Markdown, which code
hosts show without Sphinx.

    python docs/make_reference.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jax_baracuda

FOLDER = Path(__file__).parent / "reference"
TITLES = {
    "message_passing": "Graph networks",
    "segment_reductions": "Segment reductions",
    "causal_conv1d": "Causal convolution",
    "rope": "Rotary embedding",
    "where": "Selection",
    "write_slice": "KV cache",
    "write_rows": "Paged KV cache",
    "general": "For all functions",
}
"""The titles of the pages, in their order. The page of another op family comes last, with its module's name."""
INDEX = "index"


def _strings(choices: Any) -> list[str]:
    """The strings of a type such as ``Literal["silu", "swish"] | None``."""
    return [choices] if isinstance(choices, str) else [text for part in get_args(choices) for text in _strings(part)]


def page_of(name: str) -> str:
    """The page of a public name: that of its op family."""
    value = getattr(jax_baracuda, name)
    module = getattr(value, "__module__", "").removeprefix("jax_baracuda.ops.").split(".")
    if module[0] == "segment":
        is_of_edges = "segment" not in name or "gather_ids" in inspect.signature(value).parameters
        return "message_passing" if is_of_edges else "segment_reductions"
    if module[0] in ("", "jax_baracuda", "typing", "types", "builtins"):
        return "general"
    return "rope" if module[0] in ("rope_frequencies", "rope_write") else module[0]


TYPES = {
    name: [f"`{choice!r}`" for choice in _strings(getattr(jax_baracuda, name))]
    for name in jax_baracuda.__all__
    if get_args(getattr(jax_baracuda, name))
}
"""The choices of each type of arguments."""
PAGE_OF = {name: page_of(name) for name in jax_baracuda.__all__}


def pages() -> dict[str, str]:
    """The text of each page by its name."""
    names = sorted(set(PAGE_OF.values()), key=lambda page: [*TITLES, page].index(page))
    of_family = {page: [name for name in sorted(PAGE_OF, key=_order) if PAGE_OF[name] == page] for page in names}
    texts = {page: "\n\n".join(_page(page, of_page)) + "\n" for page, of_page in of_family.items()}
    return texts | {INDEX: "\n\n".join(_index(of_family)) + "\n"}


def _order(name: str) -> tuple[bool, bool, str]:
    """Functions first, and gradients after all others."""
    return not name.islower(), name.endswith("_backward"), name.lower()


def _title(page: str) -> str:
    return TITLES.get(page, page)


def _index(names_of: dict[str, list[str]]) -> Iterator[str]:
    yield "# All functions"
    yield (
        "With signatures, arguments, guarantees and an example each. Every function of arrays but the gradients has a "
        "twin for\nforward mode in `jax_baracuda.forward_mode`."
    )
    for page, names in names_of.items():
        yield f"## {_title(page)}"
        rows = (f"| {_linked(name, INDEX)} | {_summary(name, INDEX)} |" for name in names)
        yield "\n".join(["| | |", "| --- | --- |", *rows])


def _page(page: str, names: list[str]) -> Iterator[str]:
    yield f"# Reference: {_title(page)}"
    yield "Made from the docstrings by `python docs/make_reference.py`."
    for name in names:
        value = getattr(jax_baracuda, name)
        if name not in TYPES:
            yield f"## {name}"
        if inspect.isclass(value):
            yield from _class(name, value, page)
        elif inspect.isfunction(value):
            yield from _function(name, value, page)
        elif name not in TYPES:
            yield from _docstring(_docstring_of(name), page)
    if page == "general":
        yield "## Types"
        yield "Of arguments, for annotations of your own."
        yield "\n".join(f"- `{name}`: {' or '.join(choices)}" for name, choices in TYPES.items())


def _docstring_of(name: str) -> str:
    """The docstring of a public name, also of a constant."""
    if name.isupper():
        return _attributes(inspect.getsource(jax_baracuda))[name]
    return inspect.getdoc(getattr(jax_baracuda, name)) or ""


def _summary(name: str, page: str) -> str:
    """The first sentence about a public name."""
    if name in TYPES:
        return f"The type of an argument: {' or '.join(TYPES[name])}."
    paragraph = " ".join(_docstring_of(name).split("\n\n")[0].split())
    return _inline(re.match(r".*?[.:](?= [A-Z`]|$)", paragraph + " ")[0] if ". " in paragraph else paragraph, page)


def _class(name: str, value: type, page: str) -> Iterator[str]:
    if dataclasses.is_dataclass(value):
        yield from _docstring(inspect.getdoc(value) or "", page)
    else:
        yield from _function(name, value, page)
    attributes = _attributes(textwrap.dedent(inspect.getsource(value)))
    if attributes:
        lines = (f"- `{attribute}`: {_inline(_indented(text), page)}" for attribute, text in attributes.items())
        yield "\n".join(lines)
    for member in vars(value):
        of_class = getattr(value, member)
        if not member.startswith("_") and inspect.isroutine(of_class):
            yield f"### {name}.{member}"
            yield from _function(member, of_class, page)
        elif not member.startswith("_") and isinstance(of_class, property):
            yield f"### {name}.{member}"
            yield from _docstring(inspect.getdoc(of_class) or "", page)


def _attributes(source: str) -> dict[str, str]:
    """The names that are followed by a docstring, in a module or in its class."""
    [*body] = ast.parse(source).body
    body = body[0].body if isinstance(body[0], ast.ClassDef) else body
    described = {}
    for statement, following in zip(body, body[1:], strict=False):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if is_text and isinstance(target, ast.Name) and isinstance(following.value.value, str):
            described[target.id] = inspect.cleandoc(following.value.value)
    return described


def _function(name: str, function: Any, page: str) -> Iterator[str]:
    signature = inspect.signature(function)
    parameters = [x.replace(annotation=x.empty) for x in signature.parameters.values() if x.name != "self"]
    text = name + str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    lines = textwrap.wrap(text, 100, subsequent_indent=" " * 4, break_on_hyphens=False)
    yield "\n".join(["```py", *lines, "```"])
    yield from _docstring(inspect.getdoc(function) or "", page)


def _docstring(docstring: str, page: str) -> Iterator[str]:
    """The paragraphs of a docstring in Google's style, as Markdown."""
    text, *sections = re.split(r"\n\n(?=[A-Z][a-z ]*:\s)", docstring)
    yield _inline(text, page)
    for section in sections:
        title, _, body = section.partition(":")
        following = []
        if body.startswith("\n"):
            body, *following = re.split(r"\n\n(?=\S)", body.removeprefix("\n"))
            body = textwrap.dedent(body)
        if title == "Example":
            yield f"```pycon\n{body}\n```"
        elif title in ("Args", "Raises", "Attributes"):
            entries = (entry.partition(":") for entry in re.split(r"\n(?=\S)", body))
            listed = (f"- `{names}`: {_inline(_indented(textwrap.dedent(text)), page)}" for names, _, text in entries)
            yield f"**{title.replace('Args', 'Arguments')}**\n\n" + "\n".join(listed)
        else:
            yield f"**{title}:** {_inline(body.strip(), page)}"
        yield from (_inline(paragraph, page) for paragraph in following)


def _indented(text: str) -> str:
    """The lines of a list's entry."""
    return "\n  ".join(line.strip() for line in text.strip().splitlines())


def _inline(text: str, page: str) -> str:
    """reStructuredText's roles and literals as Markdown."""

    def role(match: re.Match[str]) -> str:
        target = re.sub(r"^.*<|>$", "", match[2]).lstrip("~.").removeprefix("jax_baracuda.")
        return _linked(target, page) if target in PAGE_OF else f"`{target}`"

    text = re.sub(r":(\w+):`([^`]+)`", role, text)
    return re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)


def _linked(name: str, page: str) -> str:
    file = "" if PAGE_OF[name] == page else f"{PAGE_OF[name]}.md"
    return f"[`{name}`]({file}#{'types' if name in TYPES else name.lower()})"


def main() -> None:
    """Writes the pages, and removes those of families that are gone."""
    FOLDER.mkdir(exist_ok=True)
    texts = pages()
    for path in FOLDER.glob("*.md"):
        if path.stem not in texts:
            path.unlink()
    for page, text in texts.items():
        (FOLDER / f"{page}.md").write_text(text)
    print(f"The reference is in {FOLDER}.")


if __name__ == "__main__":
    main()
