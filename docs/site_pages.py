"""Pages and links of the documentation site (mkdocs.yml); `make site` builds it.

README.md and ARCHITECTURE.md are pages of the site, and files that pages link to, such as sources
and results, are copied to `source/`. Links are written for the repository and lead to these.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md"}
"""Files of the repository -> pages of the site."""
_LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\])\(([^)\s#:]+)(#[^)\s]*)?\)")


def repository_path(page: str, link: str) -> str:
    """The path in the repository that a link of a page leads to."""
    folder = "" if page in PAGES.values() else "docs"
    return posixpath.normpath(posixpath.join(folder, link))


def site_path(path: str) -> str | None:
    """The place on the site of a path in the repository; None for a folder, which has none."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    # Browsers show a text and download a Python file.
    suffix = "" if path.endswith(".svg") else ".txt"
    return None if (ROOT / path).is_dir() else f"source/{path}{suffix}"


def with_links_of_site(page: str, markdown: str) -> str:
    """The text of a page with links that lead to their places on the site."""

    def moved(link: re.Match[str]) -> str:
        target = site_path(repository_path(page, link[2]))
        return link[1][1:-1] if target is None else f"{link[1]}({target}{link[3] or ''})"

    return _LINK.sub(moved, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from the root of the repository, and the files that pages link to."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page in files.documentation_pages():
        for link in _LINK.finditer(page.content_string):
            path = repository_path(page.src_uri, link[2])
            target = site_path(path)
            is_copied = target is not None and target.startswith("source/")
            if is_copied and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page."""
    return with_links_of_site(page.file.src_uri, markdown)
