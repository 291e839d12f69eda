# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: pages from outside of docs/, links that lead there, and a look at every link of the built site.

mkdocs.yml names this file, and mkdocs calls `on_config`, `on_files`, `on_page_markdown` and `on_post_build`.  A warning here ends a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# mkdocs counts warnings of loggers below its own.
LOG = logging.getLogger("mkdocs.hooks.triton_bundler")

# What lies outside of docs/ and is linked from there: the place in the checkout, and the page of the site.
OUTSIDE = {
    "README.md": "index.md",
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "docs/results": "results/index.md",
    "examples/build.toml": "project/build.toml.md",
    "examples/child.py": "project/child.py.md",
    "examples/exported_kernel.cpp": "project/exported_kernel.cpp.md",
    "examples/kernels.py": "project/kernels.py.md",
}
PAGES = {page: place for place, page in OUTSIDE.items() if not page.endswith("index.md")}
LINK = re.compile(r"(\]\()([^()\s#:]+)((?:#[^()\s]*)?\))")
CODE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,}).*?^(?P=indent)(?P=ticks) *$|(?P<tick>`+)[^`\n]+(?P=tick)",
    re.MULTILINE | re.DOTALL,
)
# Links in them are no navigation, and a browser that has no network would wait for what they load.
LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href")}


def on_config(config: MkDocsConfig) -> None:
    """Put guides that the navigation does not name yet at the end of its guides."""
    listed = set(re.findall(r"[\w./-]+\.md\b", str(config.nav)))
    guides = next(section["Guides"] for section in config.nav or () if "Guides" in section)
    guides += sorted({path.name for path in (ROOT / "docs").glob("*.md")} - listed)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files outside of docs/."""
    from mkdocs.structure.files import File

    for page, place in PAGES.items():
        text = (ROOT / place).read_text(encoding="utf-8")
        if not place.endswith(".md"):
            text = f"# {place}\n\n````{place.rpartition('.')[2]}\n{text}````\n"
        files.append(File.generated(config, page, content=text))
    names = sorted(path.name for path in (ROOT / "docs" / "results").iterdir())
    listing = "".join(f"- [{name}]({name})\n" for name in names)
    files.append(File.generated(config, "results/index.md", content=f"# Raw results\n\n{listing}"))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links between files of the checkout into links between pages of the site."""
    here = page.file.src_uri
    place = PAGES.get(here, f"docs/{here}")

    def turned(found: re.Match[str]) -> str:
        if found[2] == "...":  # `kernel[grid](...)` in the text of a table
            return found[0].replace("](", "]\\(")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), found[2]))
        led = OUTSIDE.get(target) or target.removeprefix("docs/")
        return found[1] + posixpath.relpath(led, posixpath.dirname(here) or ".") + found[3]

    ends = [0, *(end for block in CODE.finditer(markdown) for end in block.span()), len(markdown)]
    parts = [markdown[start:end] for start, end in pairwise(ends)]
    # Every second part is code.
    return "".join(part if number % 2 else LINK.sub(turned, part) for number, part in enumerate(parts))


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
    """Return what is wrong with the links of a built site: what leads nowhere, and what is loaded from elsewhere."""
    pages = {path.resolve(): BuiltPage(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
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


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of each link of the built site that leads nowhere, and of each thing that a page would load from a network."""
    for fault in faults(Path(config.site_dir)):
        LOG.warning(fault)
