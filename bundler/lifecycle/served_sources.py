# SPDX-License-Identifier: Apache-2.0
"""`served_source`: bundles, cache directories and stores as one byte store that can be handed on.

The command `serve` calls it.  What is no store is held in memory as a store would have it, so that
its units have the keys that every other store gives them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from bundler.backends.breaker import ReadOnly
from bundler.backends.memory import MemoryBackend
from bundler.backends.port import Backend
from bundler.backends.tiers import Tier, Tiers
from bundler.errors import ConfigError, NotFound
from bundler.format.bundle import Bundle
from bundler.lifecycle.directory_pack import pack
from bundler.store import store_layout
from bundler.store.bundle_store import BundleStore
from bundler.store.store_urls import STORE_RULES, Opening, local_directory, open_backend

_MEMORY = "memory:"


class ServedSource(NamedTuple):
    """A byte store to hand on; close it when nobody asks any more.

    Attributes:
        backend: the byte store; it is only read.
        bundles: what is held in memory, with the tag or digest that it goes by.
        stores: names of the stores in it.
    """

    backend: Backend
    bundles: tuple[tuple[str, str], ...]
    stores: tuple[str, ...]


def served_source(urls: Sequence[str]) -> ServedSource:
    """Open what is to be handed on.

    Args:
        urls: bundle files, cache directories of Triton, and URLs of stores, the nearest first.

    Raises:
        NotFound: there is no such file or directory.
        ConfigError, FormatError, EmptyBundle, StoreUnavailable, AccessDenied: it cannot be opened,
            or nothing is in it.
    """
    with ExitStack() as stack:
        tiers, bundles = [], []
        memory = MemoryBackend()
        for url in urls:
            path = local_directory(url)
            if path is None or _is_store(path):
                # Without peers: two servers that ask each other would go round in circles.
                backend, name = open_backend([url], Opening(read_only=True))
                tiers.append(Tier(name, stack.enter_context(backend), STORE_RULES))
            else:
                bundles.append((path, _hold(memory, path)))
        if bundles:
            tiers.insert(0, Tier(_MEMORY, ReadOnly(memory), STORE_RULES))
        stack.pop_all()
    stores = tuple(tier.name for tier in tiers if tier.name != _MEMORY)
    return ServedSource(Tiers(tiers), tuple(bundles), stores)


def _hold(memory: MemoryBackend, path: str) -> str:
    """Put a bundle, or what a cache directory holds, into memory; returns the tag or digest that it
    goes by.
    """
    with BundleStore(memory, _MEMORY) as store:
        if os.path.isdir(path):
            return store.push(pack(path)).digest
        with Bundle.load(path) as bundle:
            tag = _tag_of(path)
            report = store.push(bundle, tag, "replace")
            return tag or report.digest


def _tag_of(path: str) -> str | None:
    """Return the name of a bundle's file without its ending, where that can be a tag."""
    stem = Path(path).stem
    try:
        store_layout.tag_key(stem)
    except ConfigError:
        return None
    return stem


def _is_store(path: str) -> bool:
    """Tell a directory that is a store from one that Triton fills; raises `NotFound` for what is
    not there.
    """
    if os.path.isfile(path):
        return False
    if not os.path.isdir(path):
        raise NotFound(
            f"there is no bundle, cache directory or store at this place: {path}", path=path
        )
    return any(
        os.path.isdir(os.path.join(path, part, store_layout.MAJOR)) for part in ("data", "refs")
    )
