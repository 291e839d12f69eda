# SPDX-License-Identifier: Apache-2.0
"""Processes that hand on what they have: a server of objects and tags over HTTP, and the byte store
that asks one.

::

    PeerServer ── ServedObjects ── a byte store        GET, HEAD /v1/…   an object or a tag      POST /objects   many at once
        ▲ HTTP                                         GET /keys         which there are         POST /exists    which are there
    PeerBackend ── Guarded ── Tiers                    GET /health, /metrics

`bundler/store/store_urls.py` opens `PeerBackend`, `bundler/store/store_server.py` makes a
`PeerServer`; importing this package costs nothing.
"""

from __future__ import annotations

from bundler.backends.peers.peer_urls import SCHEMES, PeerSettings, parse_peer, parse_served

__all__ = ["SCHEMES", "PeerSettings", "parse_peer", "parse_served"]
