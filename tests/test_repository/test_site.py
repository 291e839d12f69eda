# SPDX-License-Identifier: Apache-2.0
"""The look at a built site finds what leads nowhere, and links between files of the checkout become
links between pages.
"""

import re

import pytest

from tools.docs_site.__main__ import faults, write_pages
from tools.docs_site.code_blocks import FENCE
from tools.docs_site.site_pages import LINK, with_links_turned


def site(folder, **pages):
    """Write pages of HTML, and return what is wrong with their links."""
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(f"<body>{body}</body>")
    return faults(folder)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('<a href="b.html#here">', []),
        ('<a href="b.html#gone">', ["a.html links to b.html#gone, which is no anchor"]),
        ('<a href="c.html">', ["a.html links to c.html, which is no file"]),
        ('<img src="gone.svg">', ["a.html links to gone.svg, which is no file"]),
        ('<script src="https://example.org/x.js">', ["a.html loads https://example.org/x.js"]),
        ('<a href="https://example.org/">', []),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path, body, expected):
    """A missing file, a missing anchor, and what would be loaded from a network are faults; a link
    to another site is none.
    """
    assert site(tmp_path, a=body, b='<h2 id="here">') == expected


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("guarantees.md", "[x](../SECURITY.md#a)", "[x](project/security.md#a)"),
        ("concepts/replay.md", "[x](../../SECURITY.md)", "[x](../project/security.md)"),
        ("project/changelog.md", "[x](docs/trust.md#b)", "[x](../trust.md#b)"),
        ("benchmarks.md", "[x](results/)", "[x](results/index.md)"),
        ("benchmarks.md", "kernel[grid](...)", "kernel[grid]\\(...)"),
        ("api.md", "`kernel[grid](...)` [x](#errors)", "`kernel[grid](...)` [x](#errors)"),
        ("start.md", "```\n[x](../SECURITY.md)\n```", "```\n[x](../SECURITY.md)\n```"),
    ],
)
def test_links_that_leave_the_pages_are_turned(page, text, expected):
    """A link to a file outside of docs/ leads to its page; code stays as it is."""
    assert with_links_turned(text, page) == expected


def test_links_of_the_written_pages_lead_to_files_of_the_site(tmp_path):
    """Each page is written with links to what is written beside it: pages, pictures, and lists of
    folders.
    """
    write_pages(tmp_path)
    texts = {
        path: re.sub(r"`[^`\n]+`", "", FENCE.sub("", path.read_text(encoding="utf-8")))
        for path in tmp_path.rglob("*.md")
    }
    links = [(path, found[2]) for path, text in texts.items() for found in LINK.finditer(text)]
    assert len(links) > 300
    assert (tmp_path / "reference" / "bundles.md").is_file()
    assert [
        (path.relative_to(tmp_path).as_posix(), led)
        for path, led in links
        if not (path.parent / led).is_file()
    ] == []
