# SPDX-License-Identifier: Apache-2.0
"""Processes that hand on what they have: a server of objects and tags over HTTP, and the byte store
that asks one.

::

    PeerServer ── ServedObjects ── a byte store        GET, HEAD /v1/…   an object or a tag      POST /objects   many at once
        ▲ HTTP                                         GET /keys         which there are         POST /exists    which are there
    PeerBackend ── Guarded ── Tiers                    GET /health, /metrics

`bundler/store/store_urls.py` opens `PeerBackend`, `bundler/store/store_server.py` makes a
`PeerServer`; importing this package costs nothing.  `parse_peer` reads URLs of peers that are asked
before a store, `parse_served` that of one that is a store itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlsplit

from bundler.backends.backend_errors import BadSettings
from bundler.backends.url_parts import seconds, without_secrets

_PREFIX = "tb+"
SCHEMES = frozenset({"tb+http", "tb+https"})
#: A peer is on the same network; one that needs longer than this costs more than it saves.
TIMEOUT_S = 2.0
#: Connecting takes a round trip: who does not accept by then is switched off.
CONNECT_S = 0.5
#: A header of every answer, so that another web server's 404 is not taken for an object that is
#: absent.
MARK = "Triton-Bundler-Serve"
_EXPECTED = "expected http://host:port or https://host:port, with ?timeout_s=SECONDS"


@dataclass(frozen=True)
class PeerSettings:
    """How to reach a peer.

    Attributes:
        shown: its URL, as messages name it.
        secure: whether it speaks TLS.
        host, port: where it listens.
        timeout_s: how long one call may take, without its bytes.
    """

    shown: str
    secure: bool
    host: str
    port: int
    timeout_s: float = TIMEOUT_S

    @property
    def connect_s(self) -> float:
        """How long connecting may take."""
        return min(CONNECT_S, self.timeout_s) if self.timeout_s <= TIMEOUT_S else self.timeout_s


def parse_peer(url: str) -> PeerSettings:
    """Return how to reach a peer.

    Raises:
        BadSettings: not such a URL, credentials in it, or an unknown setting; the message holds no
            secret.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadSettings(f"not a peer: {error}; {_EXPECTED}") from error
    shown = without_secrets(parts)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not url.isprintable():
        raise BadSettings(f"{shown!r:.200} is no peer; {_EXPECTED}")
    if "@" in parts.netloc:
        raise BadSettings(
            f"{shown}: holds user or password, which a peer is never given; {_EXPECTED}"
        )
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    timeout_s = seconds(shown, "timeout_s", settings.pop("timeout_s", str(TIMEOUT_S)))
    if settings or parts.fragment or parts.path not in {"", "/"}:
        raise BadSettings(f"{shown}: {_EXPECTED}, and nothing else")
    secure = parts.scheme == "https"
    return PeerSettings(
        shown.rstrip("/"), secure, parts.hostname, port or (443 if secure else 80), timeout_s
    )


def parse_served(url: str) -> PeerSettings:
    """Return how to reach a server whose URL is that of a store, `tb+http://host:port`; raises as
    `parse_peer`.
    """
    found = parse_peer(url.removeprefix(_PREFIX))
    return replace(found, shown=_PREFIX + found.shown)
