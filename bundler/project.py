# SPDX-License-Identifier: Apache-2.0
"""`VERSION`, `page`, `install`: release and addresses of the project, as the package's metadata has
them, and how to install what is optional.

Messages of all rooms, and the command's help, take addresses from it; the compile service compares
its workers' release with it.
"""

from __future__ import annotations

from bundler.backends.backend_errors import install

__all__ = ["HOME", "URLS", "VERSION", "install", "page"]

#: The release.  `bundler.__version__` and the metadata are made of this line, which a build reads
#: without importing the module: it has to stay a literal.
VERSION = "1.0.0"
HOME = "https://github.com/triton-bundler/triton-bundler"
#: The same as in the metadata, which takes longer to read.
URLS = {
    "Homepage": HOME,
    "Documentation": f"{HOME}/tree/main/docs",
    "Changelog": f"{HOME}/blob/main/CHANGELOG.md",
    "Issues": f"{HOME}/issues",
}


def page(name: str) -> str:
    """Return the address of a page of the documentation, since an installed package has no such
    files.
    """
    return f"{HOME}/blob/main/docs/{name}.md"
