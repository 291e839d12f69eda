# SPDX-License-Identifier: Apache-2.0
"""`site_pages`: the Markdown pages of the site: those of docs/, those made of files outside of it,
and links among them.

`__main__.py` writes them into one folder, which the generator of the site reads.
"""

from __future__ import annotations

import posixpath
import re
from itertools import pairwise

from tools.shared.processes import ROOT

# What lies outside of docs/ and is linked from there: the place in the checkout, and the page of
# the site.
OUTSIDE = {
    "README.md": "index.md",
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "docs/results": "results/index.md",
    "docs/schemas": "schemas/index.md",
    "backends/backend_errors.py": "project/backend_errors.py.md",
    "backends/port.py": "project/port.py.md",
    "deploy/grafana/dashboards/triton-bundler.json": "project/dashboard.json.md",
    "deploy/prometheus/alerts.yml": "project/alerts.yml.md",
    "deploy/prometheus/prometheus.yml": "project/prometheus.yml.md",
    "examples/build.toml": "project/build.toml.md",
    "examples/child.py": "project/child.py.md",
    "examples/exported_kernel.cpp": "project/exported_kernel.cpp.md",
    "examples/kernels.py": "project/kernels.py.md",
    "examples/notebook.ipynb": "project/notebook.ipynb.md",
}
PAGES = {page: place for place, page in OUTSIDE.items() if not page.endswith("index.md")}
# Folders of files that are no pages: each has a page that lists them.
LISTED = {"results": "Raw results", "schemas": "JSON Schemas"}
# How code is coloured, where the end of the file's name is no name of a language.
LANGUAGES = {"ipynb": "json", "yml": "yaml"}
LINK = re.compile(r"(\]\()([^()\s#:]+)((?:#[^()\s]*)?\))")
CODE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,}).*?^(?P=indent)(?P=ticks) *$|(?P<tick>`+)[^`\n]+(?P=tick)",
    re.MULTILINE | re.DOTALL,
)


def site_pages() -> dict[str, str]:
    """Return the Markdown of each page, by its place in the site; links lead from page to page."""
    docs = ROOT / "docs"
    pages = {
        path.relative_to(docs).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(docs.rglob("*.md"))
    }
    for page, place in PAGES.items():
        text = (ROOT / place).read_text(encoding="utf-8")
        pages[page] = text if place.endswith(".md") else _shown(place, text)
    for folder, title in LISTED.items():
        names = sorted(path.name for path in (docs / folder).iterdir())
        listing = "".join(f"- [{name}]({name})\n" for name in names)
        pages[f"{folder}/index.md"] = f"# {title}\n\n{listing}"
    return {page: with_links_turned(text, page) for page, text in pages.items()}


def _shown(place: str, text: str) -> str:
    """Return a page that shows a file of code."""
    language = place.rpartition(".")[2]
    return f"# {place}\n\n````{LANGUAGES.get(language, language)}\n{text}````\n"


def with_links_turned(markdown: str, page: str) -> str:
    """Turn links between files of the checkout into links between pages of the site.

    Args:
        markdown: the text.
        page: its place in the site.
    """
    place = PAGES.get(page, f"docs/{page}")

    def turned(found: re.Match[str]) -> str:
        if found[2] == "...":  # `kernel[grid](...)` in the text of a table
            return found[0].replace("](", "]\\(")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), found[2]))
        led = OUTSIDE.get(target) or target.removeprefix("docs/")
        return found[1] + posixpath.relpath(led, posixpath.dirname(page) or ".") + found[3]

    ends = [0, *(end for block in CODE.finditer(markdown) for end in block.span()), len(markdown)]
    parts = [markdown[start:end] for start, end in pairwise(ends)]
    # Every second part is code.
    return "".join(
        part if number % 2 else LINK.sub(turned, part) for number, part in enumerate(parts)
    )
