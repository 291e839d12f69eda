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
from pathlib import Path

from tools.docs_site.reference_pages import reference_pages
from tools.docs_site.site_links import faults
from tools.docs_site.site_pages import ROOT, site_pages

# As mkdocs.yml has them.
PAGES, SITE = ROOT / ".build" / "pages", ROOT / ".build" / "site"


def write_pages(folder: Path) -> None:
    """Write what the site is made of: the files of docs/, and pages as the site has them."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for page, text in {**site_pages(), **reference_pages()}.items():
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


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
