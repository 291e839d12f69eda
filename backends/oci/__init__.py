# SPDX-License-Identifier: Apache-2.0
"""Images: manifests and blobs in a registry of containers, or in a directory of the same layout.

`open_image_place` opens the one that a URL names, `shown_image_url` says what may be printed of it,
`SCHEMES` are those that mean one.  It is not a byte store: a registry has no compare-and-set and no
listing of blobs, so tags are last-writer-wins.

Nothing but the standard library is needed.  The package `oras` was looked at and not used: its
requests have no timeout, its retries take minutes, and it compares no digest of what it downloads
(`docs/oci.md`).

`bundler/images/image_manifests.py` is the caller.
"""

from __future__ import annotations

from bundler.backends.oci.image_port import ImagePlace
from bundler.backends.oci.registry_urls import SCHEMES, ImageUrl, parse_image_url, shown_image_url

__all__ = [
    "SCHEMES",
    "ImagePlace",
    "ImageUrl",
    "open_image_place",
    "parse_image_url",
    "shown_image_url",
]


def open_image_place(url: ImageUrl, *, make: bool = False) -> ImagePlace:
    """Open the registry or the directory that a URL names; nothing is sent yet.

    Args:
        url: where.
        make: make a directory that is not there.

    Raises:
        NotThere: there is no such directory.
        BackendDenied, BackendUnavailable, BadSettings: it cannot be opened, or the file of
            credentials cannot be read.
    """
    if url.directory:
        from bundler.backends.oci.image_directory import ImageDirectory

        return ImageDirectory(url.directory, url.shown, make=make)
    from bundler.backends.oci.registry import Registry

    return Registry(url)
