"""A page -> its elements, and what every page of ours keeps to."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree.ElementTree import Element

import html5lib

SCRIPT = (Path(__file__).parent.parent.parent.parent / "templates/report_script.js.j2").read_text()


def parsed(page: str) -> Element:
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    return parser.parse(page)


def named(tag: object) -> str:
    """The name without the namespace that SVG has."""
    return str(tag).rpartition("}")[2]


def all_of(tree: Element, tag: str, css: str | None = None) -> list[Element]:
    return [
        one
        for one in tree.iter()
        if named(one.tag) == tag and (css is None or css in one.get("class", "").split())
    ]


def text_of(element: Element) -> str:
    return re.sub(r"\s+", " ", "".join(element.itertext())).strip()


def by_id(tree: Element, name: str) -> Element:
    return next(one for one in tree.iter() if one.get("id") == name)


def check_alone(page: str, *, scripts: int, files: frozenset[str] = frozenset()) -> None:
    """The page is well formed, loads nothing from the network, runs no script but our own (its
    `scripts` other script blocks are data), and refers to no files other than `files` next to
    it."""
    tree = parsed(page)
    for element in tree.iter():
        assert named(element.tag) not in {"link", "img", "iframe", "object", "use", "image"}
        for name, value in element.attrib.items():
            is_reference = named(name) in {"src", "href", "srcset", "data", "action"}
            assert not is_reference or value in files, value
            assert "url(" not in value or "url(#" in value
    (style,) = all_of(tree, "style")
    text = style.text or ""
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert "http" not in re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)
    kinds = [script.get("type") for script in all_of(tree, "script")]
    assert kinds == ["application/json"] * scripts + [None]
    assert all_of(tree, "script")[-1].text == f"\n{SCRIPT}"
    assert not re.search(r"<[^>]+\son\w+=", page)
