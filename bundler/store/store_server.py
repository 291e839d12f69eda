# SPDX-License-Identifier: Apache-2.0
"""`StoreServer`: hands on what a store has to other machines, over HTTP, for reading.

`Store.serve` makes one of an open store, and the command `serve` of what it was given
(`bundler/cli/stores/serve_command.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Self

from bundler.backends.peers.peer_server import PeerServer
from bundler.backends.peers.served_objects import (
    ServedKeys,
    ServedObjects,
    ServingBounds,
    ServingTally,
)
from bundler.backends.port import Backend
from bundler.errors import ConfigError
from bundler.fork_safety import after_fork
from bundler.store import store_layout
from bundler.store.store_failures import store_errors
from bundler.store.store_layout import (
    DICTIONARIES,
    ENVELOPES,
    INDEX,
    MANIFESTS,
    MOVED,
    RECORDS,
    TAGS,
    UNITS,
)
from bundler.store.store_urls import is_sound

#: How long who leaves waits for answers that are under way.
DRAIN_S = 5.0
_LISTEN = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,253})):(\d{1,5})", re.ASCII)
_OBJECT = re.compile(
    rf"(?:{UNITS}|{DICTIONARIES})/[0-9a-f]{{64}}|(?:{MANIFESTS}|{ENVELOPES})/[0-9a-f]{{64}}/[0-9a-f]{{16}}"
    rf"|(?:{RECORDS}|{INDEX}|{MOVED})/(?:[A-Z2-7]{{52}}|[0-9a-f]{{64}})|{INDEX}/f/[0-9a-f]{{64}}",
    re.ASCII,
)
_MOST_PORT = 65535


class StoreServer:
    """A server of what a store has, which runs in threads of this process until it is closed; a
    context manager.

    Objects are read by digest, kernels by key and tags by name; there is nothing else that could be
    asked for, and nothing is written.  Whoever reaches the address may read: listen where that is
    fine.  In a forked child there is no server.

    Args:
        source: the byte store, which stays open.
        listen: `HOST:PORT`; port 0 for one that is free.
        bounds: how much is done at once.
        more_metrics: gives what `GET /metrics` shows beside what the server did.

    Raises:
        ConfigError: not an address, or it cannot be listened on.
    """

    def __init__(
        self,
        source: Backend,
        listen: str,
        bounds: ServingBounds | None = None,
        more_metrics: Callable[[], str] = str,
    ) -> None:
        host, port = listen_address(listen)
        self._tally = ServingTally(more_metrics)
        objects = ServedObjects(source, _KEYS, self._tally, bounds or ServingBounds())
        with store_errors("serve"):
            self._server = PeerServer(objects, host, port)
        after_fork(self._server.abandon)

    @property
    def url(self) -> str:
        """Where it listens, as a peer: `http://host:port`."""
        host, port = self._server.host, self._server.port
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def metrics(self) -> str:
        """Return what it did so far, as `GET /metrics` does: the text format of Prometheus."""
        return self._tally.text()

    def total(self, name: str) -> int:
        """Return one of the numbers of `metrics`, by its name without the prefix, of all labels
        together.
        """
        return self._tally.total(name)

    def close(self, drain_s: float = DRAIN_S) -> bool:
        """Listen no more, and end; closing twice is fine.

        Args:
            drain_s: how long to wait for requests that are under way.

        Returns:
            Whether all of these got their answer.
        """
        return self._server.close(drain_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"


def listen_address(listen: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; raises `ConfigError`."""
    match = _LISTEN.fullmatch(listen)
    if match is None or int(match[3]) > _MOST_PORT:
        raise ConfigError(
            f"listen={listen!r:.100}: expected HOST:PORT, such as 127.0.0.1:8321 or 0.0.0.0:8321",
            got=listen,
        )
    return match[1] or match[2], int(match[3])


def _is_tag(key: str) -> bool:
    try:
        return (
            key.startswith(f"{TAGS}/") and store_layout.tag_key(key.removeprefix(f"{TAGS}/")) == key
        )
    except ConfigError:
        return False


def _is_object(key: str) -> bool:
    return _OBJECT.fullmatch(key) is not None


_KEYS = ServedKeys(
    _is_object,
    _is_tag,
    (UNITS, DICTIONARIES, MANIFESTS, ENVELOPES, RECORDS, INDEX, MOVED, TAGS),
    TAGS,
    is_sound,
)
