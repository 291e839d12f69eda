# SPDX-License-Identifier: Apache-2.0
"""`open_bundle`, `open_bundle_file`: a bundle by what a user calls it: the path of a file,
`oci://…`, `oci-dir:…` or `hf+file:///…`.

Commands that read a bundle call it in place of `Bundle.load`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from bundler.errors import DigestMismatch, FormatError
from bundler.format.bundle import Bundle
from bundler.images.image_places import is_image_url
from bundler.images.model_snapshots import is_snapshot_url, open_snapshot_bundle


@contextmanager
def open_bundle(source: str | os.PathLike[str]) -> Iterator[Bundle]:
    """Open a bundle until the block ends; raises as `Bundle.load`, `open_image` or
    `open_snapshot_bundle`.
    """
    with open_bundle_file(source) as (bundle, _):
        yield bundle


@contextmanager
def open_bundle_file(source: str | os.PathLike[str]) -> Iterator[tuple[Bundle, str]]:
    """Open a bundle as `open_bundle` does, and tell which file it is in until the block ends."""
    text = os.fspath(source)
    if is_snapshot_url(text):
        with open_snapshot_bundle(text) as found:
            yield found
    # A file may be called so, too: what is there goes first.
    elif is_image_url(text) and not os.path.lexists(text):
        from bundler.images.image_pull import open_image

        with open_image(text) as (bundle, path, _):
            yield bundle, path
    else:
        with _loaded(text) as bundle:
            yield bundle, text


def _loaded(path: str) -> Bundle:
    """Open a file; what is wrong with it is said with its name, since a command may have been given
    several.
    """
    try:
        return Bundle.load(path)
    except (FormatError, DigestMismatch) as error:
        if path in error.message:
            raise
        raise type(error)(f"{path}: {error.message}", **{"path": path, **error.facts}) from error
