# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.docs_site`: builds the documentation as a site, .build/site/index.html, and ends
with 1 where a link leads nowhere.

mkdocs.yml says how the site looks and what is where; zensical, which reads it, has no hooks, so
pages that are made are written first.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tools.docs_site.reference_pages import reference_pages
from tools.docs_site.site_pages import site_pages
from tools.shared.processes import ROOT

# As mkdocs.yml has them.
PAGES, SITE = ROOT / ".build" / "pages", ROOT / ".build" / "site"


# Links in them are no navigation, and a browser that has no network would wait for what they load.
LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href")}


def write_pages(folder: Path) -> None:
    """Write what the site is made of: the files of docs/, and pages as the site has them."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for page, text in {**site_pages(), **reference_pages()}.items():
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


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


def main() -> int:
    """Build the site, and tell what is wrong with it."""
    write_pages(PAGES)
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    built = subprocess.run(
        command, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if built.returncode:
        print(built.stdout, file=sys.stderr)
        return 1
    found = faults(SITE)
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
