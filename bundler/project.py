# SPDX-License-Identifier: Apache-2.0
"""Where the project is: the addresses that the package's metadata has, too, and how to install what is optional."""

from __future__ import annotations

from bundler.backends.extras import install

__all__ = ["HOME", "URLS", "install", "page"]

HOME = "https://github.com/triton-bundler/triton-bundler"
#: As in the metadata, which takes longer to read.
URLS = {
    "Homepage": HOME,
    "Documentation": f"{HOME}/tree/main/docs",
    "Changelog": f"{HOME}/blob/main/CHANGELOG.md",
    "Issues": f"{HOME}/issues",
}


def page(name: str) -> str:
    """Return the address of a page of the documentation, since an installed package has no such files."""
    return f"{HOME}/blob/main/docs/{name}.md"
