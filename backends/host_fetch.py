# SPDX-License-Identifier: Apache-2.0
"""`Flights`: of all processes of one host that need the same objects, one fetches them and the others wait.

`Tiers` uses it where its nearest tier is a directory that they share.
"""

from __future__ import annotations

import contextlib
import random
import time
import zlib
from collections.abc import Collection, Iterator

from bundler.backends.backend_errors import BackendError
from bundler.backends.port import Backend, Lease

# Longer than a fetch may take; after that whoever waits fetches for itself, and a killed fetcher is forgotten.
FLIGHT_S = 4.0
# A lease leaves an empty lock file behind in a directory.  Flights that share a slot wait for each other without need.
SLOTS = 64
_POLL_S = (0.002, 0.05)


class Flights:
    """Fetches that are under way on this host, by leases in a near store.

    For efficiency alone: without a lease, or after `FLIGHT_S`, each fetches for itself.  What the fetcher finds must be put
    into the near store in the order of `landing_order`.

    Args:
        near: a store that all processes of the host share, with leases.
    """

    def __init__(self, near: Backend) -> None:
        self._near = near

    @contextlib.contextmanager
    def joined(self, keys: Collection[str]) -> Iterator[bool]:
        """Fetch in the block; yields True when another process has fetched meanwhile, so that the near store is worth a look.

        A process that comes late and already finds some of the keys still waits for the same flight: it is known by the
        least key, and that one lands last.
        """
        least = min(keys)
        slot = f"flight/{zlib.crc32(least.encode()) % SLOTS:02x}"
        lease = self._take(slot)
        # With the lease in hand: another may have landed between the caller's look and now.
        waited = self._wait(slot, least) if lease is None else self._landed(least)
        try:
            yield waited
        finally:
            if lease is not None:
                _release(lease)

    def _landed(self, least: str) -> bool:
        with contextlib.suppress(BackendError):
            return bool(self._near.exists([least]))
        return False

    def _take(self, slot: str) -> Lease | None:
        with contextlib.suppress(BackendError):  # a full disk, for instance: then everybody fetches
            return self._near.lease(slot, FLIGHT_S)
        return None

    def _wait(self, slot: str, least: str) -> bool:
        """Wait until the flight has landed or ended; False when that cannot be told."""
        pause_s, until_s = _POLL_S[0], time.monotonic() + FLIGHT_S
        with contextlib.suppress(BackendError):
            while not self._near.exists([least]) and time.monotonic() < until_s:
                time.sleep(random.uniform(pause_s / 2, pause_s))  # noqa: S311  # no secret
                pause_s = min(pause_s * 2, _POLL_S[1])
                lease = self._near.lease(slot, FLIGHT_S)
                if lease is not None:
                    # It found nothing, or was killed.  Those who waited fetch side by side, not one after the other.
                    _release(lease)
                    break
            return True
        return False


def _release(lease: Lease) -> None:
    with contextlib.suppress(BackendError):  # it expires by itself
        lease.release()


def landing_order(keys: Collection[str]) -> list[str]:
    """Return keys in the order in which they are to be put into the near store: see `Flights.joined`."""
    return sorted(keys, reverse=True)
