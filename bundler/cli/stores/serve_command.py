# SPDX-License-Identifier: Apache-2.0
"""The command `serve`: bundles, cache directories and stores for other machines, over HTTP and for
reading.

`app.py` lists it.  `served_source` makes one byte store of all.  What is no store is held in memory
as a store would have it, so that its units have the keys that every other store gives them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click

from bundler.backends.breaker import ReadOnly
from bundler.backends.memory import MemoryBackend
from bundler.backends.peers.served_objects import ServingBounds
from bundler.backends.port import Backend
from bundler.backends.tiers import Tier, Tiers
from bundler.cli import wording
from bundler.cli.command import FINE, PROBLEM, command, option, to_bytes, to_seconds
from bundler.cli.interruption import asked_to_end
from bundler.cli.stores.store_options import as_url, with_environment
from bundler.cli.terminal import Screen
from bundler.errors import ConfigError, NotFound
from bundler.format.bundle import Bundle
from bundler.integrations.metrics_export import metrics_text
from bundler.lifecycle.directory_pack import pack
from bundler.store import store_layout
from bundler.store.bundle_store import BundleStore
from bundler.store.store_server import DRAIN_S, StoreServer, listen_address
from bundler.store.store_urls import STORE_RULES, Opening, local_directory, open_backend

_BOUNDS = ServingBounds()


@command(
    "Hand kernels on to other machines.",
    "serve --listen 0.0.0.0:8321 file:///var/cache/kernels",
    "serve --listen 0.0.0.0:8321 model.tbundle ~/.triton/cache",
)
@click.argument("sources", metavar="SOURCE…", nargs=-1, required=True)
@option("--listen HOST:PORT", "Where to listen; port 0 for one that is free.", required=True)
@option(
    "--connections N",
    "Connections at once; more are refused, and come again.",
    type=click.IntRange(1, 10_000),
    default=_BOUNDS.connections,
)
@option(
    "--memory SIZE",
    "How much is kept in memory of what was read last.",
    callback=to_bytes,
    default="128MiB",
)
@option(
    "--drain DURATION",
    "After SIGTERM, wait so long for answers that are under way.",
    callback=to_seconds,
    default=f"{DRAIN_S:.0f}s",
)
def serve(
    screen: Screen, sources: tuple[str, ...], listen: str, connections: int, memory: int, drain: int
) -> int:
    """Hand on what is in SOURCE: a bundle, a cache directory of Triton, or a store; several are
    one, the nearest first.

    Others name this server in TRITON_BUNDLER_PEERS, http://HOST:PORT, or read it as a store,
    tb+http://HOST:PORT. It serves objects by digest and tags by name, and nothing else; GET /health
    and GET /metrics say how it does. Whoever reaches the address may read. It ends at SIGTERM, with
    status 0: it listens no more at once, and finishes what is under way within --drain; then status
    1 when that was too short.
    """
    listen_address(listen)  # raises for what is none, before anything is read
    urls = [with_environment(as_url(source)) for source in sources]
    metrics_text()  # counts from here on, where the library is installed
    with screen.progress("reading what is to be served"):
        source = served_source(urls)
    bounds = replace(_BOUNDS, connections=connections, memory_bytes=memory)
    with source.backend, StoreServer(source.backend, listen, bounds, metrics_text) as server:
        with asked_to_end() as ending:
            for path, name in source.bundles:
                screen.line(f"{path} as {name}")
            for name in source.stores:
                screen.line(name)
            screen.done(f"serving at {server.url}")
            screen.out.file.flush()
            ending.wait()
        finished = server.close(drain)
        requests, sent = server.total("requests_total"), server.total("sent_bytes_total")
    if not finished:
        screen.complain(
            f"some requests were not answered within {wording.span(drain)}; allow more by --drain"
        )
    screen.done(f"served {wording.count(requests, 'request')}, {wording.size(sent)}")
    screen.finish({"url": server.url, "requests": requests, "sent_bytes": sent, "ok": finished})
    return FINE if finished else PROBLEM


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
