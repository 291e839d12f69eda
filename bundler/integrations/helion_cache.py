# SPDX-License-Identifier: Apache-2.0
"""`HelionCache`: Helion's remote cache of tuned configs in a store of this package.

    TRITON_BUNDLER_STORE=redis://cache-host
    HELION_REMOTE_CACHE_BACKEND=bundler.integrations.helion_cache.HelionCache
    HELION_AUTOTUNE_CACHE=RemoteAutotuneCache

Helion imports it by that name, makes one without arguments, and asks it to `get`, `put` and `list`
texts of JSON.  Helion itself is not imported: the class is registered as one of its backends where
Helion is there already.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from bundler.config import settings
from bundler.errors import ConfigError
from bundler.format.digest import sha256
from bundler.integrations.kernel_lookup import store_of_settings
from bundler.lifecycle.machine_store import Store

_PREFIX = "helion/"
_HELION, _BASE = "helion.autotuner.remote_cache", "RemoteCacheBackend"
# A config with its settings has a few KB; Helion's limit is none.
MOST_BYTES = 1 << 20
# Without a number Helion takes all that there are, to begin a search with.
MOST_LISTED = 1000
_FILE_DIGITS = 32


class HelionCache:
    """Keeps what Helion's tuner found, as single files of a store, under Helion's own keys.

    Guarantees: what is returned is the text that was put, compared with its digest.  The first text
    of a key is everybody's, as with all records of a store: a later one changes nothing until the
    first is pruned.  Threads, processes and forks as the store. Does not guarantee that a text
    stays: a server may evict it.

    Args:
        store: where to keep it; None for the store of TRITON_BUNDLER_STORE.

    Raises:
        ConfigError: no store is given and none is set.
        StoreUnavailable, AccessDenied: as `bundler.open_store`.
    """

    def __init__(self, store: Store | None = None) -> None:
        if store is None:
            chosen = settings()
            if not chosen.store:
                raise ConfigError(
                    "no store for Helion's configs: set TRITON_BUNDLER_STORE, or pass store="
                )
            store = store_of_settings(chosen, when_down="degrade")
        self._files = store.file_records()

    def get(self, key: str) -> str | None:
        """Return the text of a key; None when there is none, or what is there is no JSON object.

        Raises:
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        data = self._files.look_up(_PREFIX + key)
        return None if data is None else _text(data)

    def put(self, key: str, data: str) -> None:
        """Keep a text under a key, unless there is one.

        Raises:
            ConfigError: it is no JSON object, or a large one.
            StoreFull, AccessDenied, StoreUnavailable: it could not be stored.
        """
        encoded = data.encode("utf-8", "replace")
        if _text(encoded) is None:
            raise ConfigError(
                f"Helion's key {key!r:.80}: expected a JSON object of at most {MOST_BYTES} bytes",
                key=key,
            )
        self._files.publish(
            _PREFIX + key, f"{sha256(key.encode()).hex()[:_FILE_DIGITS]}.json", encoded
        )

    def list(self, max_results: int | None = None) -> Iterable[str]:
        """Yield the texts of all keys, the newest first; raises as `get`."""
        most = MOST_LISTED if max_results is None else max_results
        texts = (_text(data) for _, data in self._files.listed(_PREFIX, most))
        return [text for text in texts if text is not None]


def _text(data: bytes) -> str | None:
    try:
        text = data.decode() if len(data) <= MOST_BYTES else ""
        return text if isinstance(json.loads(text), dict) else None
    except (ValueError, RecursionError):
        return None


# Helion takes the class for one of its backends; the class of that name is an abstract one.
_base: Any = getattr(sys.modules.get(_HELION), _BASE, None)
if _base is not None:
    _base.register(HelionCache)
