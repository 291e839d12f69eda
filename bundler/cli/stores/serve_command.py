# SPDX-License-Identifier: Apache-2.0
"""The command `serve`: bundles, cache directories and stores for other machines, over HTTP and for
reading.

`app.py` lists it.
"""

from __future__ import annotations

from dataclasses import replace

import click

from bundler.backends.peers.served_objects import ServingBounds
from bundler.cli import wording
from bundler.cli.command import FINE, PROBLEM, command, option, to_bytes, to_seconds
from bundler.cli.interruption import asked_to_end
from bundler.cli.stores.store_options import as_url, with_environment
from bundler.cli.terminal import Screen
from bundler.integrations.metrics_export import metrics_text
from bundler.lifecycle.served_sources import served_source
from bundler.store.store_server import DRAIN_S, StoreServer, listen_address

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
