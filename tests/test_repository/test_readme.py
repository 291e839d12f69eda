# SPDX-License-Identifier: Apache-2.0
"""README.md is read in two minutes, and its picture shows the results that are committed."""

from tools.docs_site import picture
from tools.shared.processes import ROOT


def test_it_is_short():
    """At most 120 lines of 100 columns; all else is in docs."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 100] == []


def test_its_picture_is_drawn_from_the_results():
    """Whoever measures anew draws anew: `python -m tools.docs_site.picture`."""
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.drawn()
    assert "docs/readme.svg" in (ROOT / "README.md").read_text(encoding="utf-8")
