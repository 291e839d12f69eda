# SPDX-License-Identifier: Apache-2.0
"""`faults`: what is wrong with the links of a built site; `__main__.py` calls it, and a fault ends
`make docs`.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Links in them are no navigation, and a browser that has no network would wait for what they load.
LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href")}


class BuiltPage(HTMLParser):
    """The anchors of a built page, and the addresses that it links to and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {"", "__comments"}
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element brings."""
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value)
            elif (tag, name) in LOADS:
                self.loads.add(value)
            elif (tag, name) == ("a", "href"):
                self.links.add(value)


def faults(site: Path) -> list[str]:
    """Return what is wrong with the links of a built site: what leads nowhere, and what is loaded
    from elsewhere.
    """
    pages = {
        path.resolve(): BuiltPage(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    found = []
    for path, page in pages.items():
        if path.name == "404.html":  # for web servers: its addresses begin at the root of one
            continue
        name = path.relative_to(site.resolve())
        found += [f"{name} loads {load}" for load in sorted(page.loads) if urlsplit(load).netloc]
        for link in sorted(page.links | page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{name} links to {link}, which is no file")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name} links to {link}, which is no anchor")
    return found
