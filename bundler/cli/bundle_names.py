# SPDX-License-Identifier: Apache-2.0
"""`open_named`: a bundle by whatever a command takes for one: a file, an image, a Triton cache
directory, a tag of a store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import bundler
from bundler.cli.stores import existing_store
from bundler.format.bundle import Bundle
from bundler.images.bundle_sources import open_bundle
from bundler.store.store_layout import is_tag


@contextmanager
def open_named(source: str, urls: Sequence[str]) -> Iterator[Bundle]:
    """Open a bundle, what a directory holds, or what a tag names, until the block ends.

    Args:
        source: a path or a tag; what is there as a file goes first.
        urls: of the store whose tags are meant; empty where there is none.

    Raises:
        NotFound: there is no such file, store or tag.
        BundlerError: as `Bundle.load`, `pack` and `Store.pull`.
    """
    if os.path.isdir(source):
        with bundler.pack(source) as packed:
            yield packed
    elif urls and not os.path.lexists(source) and is_tag(source):
        with (
            existing_store(*urls, read_only=True) as store,
            store.pull(source, read_only=True) as one,
        ):
            yield one
    else:
        with open_bundle(source) as one:
            yield one
