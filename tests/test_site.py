"""The documentation site: every page is in its navigation, and every link has a place on it."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))
PAGES = {page: ROOT / source for source, page in SCRIPT["PAGES"].items()} | {
    path.name: path for path in (ROOT / "docs").glob("*.md")
}


def test_every_page_is_in_the_navigation_once() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    navigation = re.findall(r"([\w-]+\.md)$", settings[settings.index("\nnav:") :], re.MULTILINE)
    assert sorted(navigation) == sorted(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_a_file(page: str) -> None:
    for link in SCRIPT["_LINK"].finditer(PAGES[page].read_text()):
        path = SCRIPT["repository_path"](page, link[2])
        assert (ROOT / path).exists(), link[0]


@pytest.mark.parametrize(
    ("page", "markdown", "expected"),
    [
        ("index.md", "[a](docs/planning.md)", "[a](planning.md)"),
        ("index.md", "![a](docs/images/gpt2_4p.svg)", "![a](images/gpt2_4p.svg)"),
        ("index.md", "[a](ARCHITECTURE.md#the-layers)", "[a](architecture.md#the-layers)"),
        ("index.md", "[l](LICENSE)", "[l](source/LICENSE.txt)"),
        ("api.md", "[`a`](../cli.py)", "[`a`](source/cli.py.txt)"),
        ("api.md", "[g](glossary.md)", "[g](glossary.md)"),
        ("memory.md", "see [`x/`](../runtime/staleness).", "see `x/`."),
        (
            "memory.md",
            "[here](#units) [web](https://x.org/y)",
            "[here](#units) [web](https://x.org/y)",
        ),
    ],
)
def test_links_lead_to_places_on_the_site(page: str, markdown: str, expected: str) -> None:
    assert SCRIPT["with_links_of_site"](page, markdown) == expected
