"""docs/api.md is current, has every public name, and says something about each of them."""

import ast
import re
import runpy
from pathlib import Path

import asyncpipe

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "docs" / "api_reference.py"))
PAGE = (ROOT / "docs" / "api.md").read_text()
NAMES = set(re.findall(r"^### (?:asyncpipe\.)?(\w+)$", PAGE, re.MULTILINE))


def test_the_page_is_current() -> None:
    assert SCRIPT["page"]() == PAGE, "python docs/api_reference.py makes docs/api.md again"


def test_every_exported_name_is_there() -> None:
    assert {f"asyncpipe.{name}" for name in asyncpipe.__all__} == set(
        re.findall(r"^### (asyncpipe\.\w+)$", PAGE, re.MULTILINE)
    )


def test_every_name_that_the_documents_import_is_there() -> None:
    documents = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")]
    imported = {
        alias.name
        for document in documents
        for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("asyncpipe")
        for alias in node.names
    }
    assert len(imported) > 20
    assert imported <= NAMES


def test_every_error_is_there() -> None:
    assert set(SCRIPT["parsed"]("runtime.errors").classes) <= NAMES


def test_every_name_and_every_member_has_a_text() -> None:
    assert not re.findall(r"^- `.*`: *$", PAGE, re.MULTILINE)
    for body in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        text = re.sub(r"```.*?```|From \[.*?\]\(.*?\)\.", "", body, flags=re.DOTALL)
        assert len(text.split()) > 4, body


def test_every_parameter_of_an_exported_function_has_a_text() -> None:
    for module, name in (pair for _, _, names in SCRIPT["SECTIONS"] for pair in names):
        member = SCRIPT["parsed"](module)[name]
        if name in asyncpipe.__all__ and member.is_function:
            named = {
                each
                for text in SCRIPT["paragraphs_of"](member)
                for names, _ in SCRIPT["named_lines"](text)
                for each in names
            }
            assert {parameter.name for parameter in member.parameters} == named, name
