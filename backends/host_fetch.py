# SPDX-License-Identifier: Apache-2.0
"""`SharedFetches`: of all processes of one host that need the same objects, one fetches them and
the others wait.

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

# Longer than a fetch may take; after that a waiting process fetches for itself, so a process that
# was killed delays nobody longer.
FETCH_S = 4.0
# A lease leaves an empty lock file behind in a directory, so there are few names.  Fetches that
# share a slot wait for each other without need.
SLOTS = 64
_POLL_S = (0.002, 0.05)


class SharedFetches:
    """Fetches that are under way on this host, by leases in a near store.

    For efficiency alone: without a lease, or after `FETCH_S`, each process fetches for itself.
    What the fetching process finds must be put into the near store in the order of `write_order`.

    Args:
        near: a store that all processes of the host share, with leases.
    """

    def __init__(self, near: Backend) -> None:
        self._near = near

    @contextlib.contextmanager
    def joined(self, keys: Collection[str]) -> Iterator[bool]:
        """Fetch in the block; yields True when another process has fetched meanwhile, so that the
        near store is worth a look.

        A process that comes late and already finds some of the keys still waits for the same fetch:
        a fetch is known by its least key, and `write_order` has that key written last.
        """
        least = min(keys)
        slot = f"fetch/{zlib.crc32(least.encode()) % SLOTS:02x}"
        lease = self._take(slot)
        # With the lease in hand, look again: another process may have finished since the caller
        # looked.
        waited = self._wait(slot, least) if lease is None else self._is_near(least)
        try:
            yield waited
        finally:
            if lease is not None:
                _release(lease)

    def _is_near(self, least: str) -> bool:
        with contextlib.suppress(BackendError):
            return bool(self._near.exists([least]))
        return False

    def _take(self, slot: str) -> Lease | None:
        with contextlib.suppress(
            BackendError
        ):  # a full disk, for instance: then every process fetches
            return self._near.lease(slot, FETCH_S)
        return None

    def _wait(self, slot: str, least: str) -> bool:
        """Wait until the objects are near or the fetch has ended; False when that cannot be
        told.
        """
        pause_s, until_s = _POLL_S[0], time.monotonic() + FETCH_S
        with contextlib.suppress(BackendError):
            while not self._near.exists([least]) and time.monotonic() < until_s:
                time.sleep(random.uniform(pause_s / 2, pause_s))  # noqa: S311  # no secret
                pause_s = min(pause_s * 2, _POLL_S[1])
                lease = self._near.lease(slot, FETCH_S)
                if lease is not None:
                    # The fetching process found nothing, or was killed.  The waiting processes now
                    # fetch side by side, not in turn.
                    _release(lease)
                    break
            return True
        return False


def _release(lease: Lease) -> None:
    with contextlib.suppress(BackendError):  # it expires by itself
        lease.release()


def write_order(keys: Collection[str]) -> list[str]:
    """Return keys in the order in which they are to be put into the near store: see
    `SharedFetches.joined`.
    """
    return sorted(keys, reverse=True)
