# SPDX-License-Identifier: Apache-2.0
"""How the contract of byte stores looks into a bucket, for the tests of object stores."""

import contextlib
import gc
import os
import time

import pytest

from bundler.backends.cloud import CloudBackend
from bundler.backends.cloud.cloud_backend import CATALOG
from bundler.backends.cloud.object_exchange import Absent, Bucket
from bundler.backends.cloud.pack_catalog import CATALOG_BYTES, decode_catalog, pack_name
from bundler.backends.testing import BackendContract


def opened(store, **settings):
    """Return a store that marks each use at once."""
    return CloudBackend(Bucket(store, "memory"), **({"touch_every_s": 0} | settings))


def stored(backend, key):
    """Return an object by the catalog and pack that lie in the bucket."""
    try:
        catalog = decode_catalog(backend._bucket.read(CATALOG, CATALOG_BYTES)[0], "test")
    except Absent:
        return None
    place = catalog.objects.get(key)
    if place is None:
        return None
    whole, _ = backend._bucket.read(pack_name(place.pack), 2**30)
    return whole[place.offset : place.offset + place.size]


def packs_of(backend):
    """Return the names of the packs that lie in the bucket."""
    return {name.rpartition("packs/")[2] for name, _ in backend._bucket.names("packs")}


class CloudContract(BackendContract):
    """How the contract looks into a bucket: by another handle."""

    def reopen(self, backend):
        """Return a handle that knows nothing yet."""
        return CloudBackend(backend._bucket, touch_every_s=0)

    def peek(self, backend, key):
        """Look into catalog and pack."""
        return stored(backend, key)

    def poke(self, backend, key, data):
        """Write as another host would."""
        other = self.reopen(backend)
        other.delete([key])
        other.put({key: data})


def sockets():
    """Return how many sockets this process has."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


@pytest.fixture(autouse=True)
def connections_end():
    """Wait for the connections of stores that nobody holds any more: threads of obstore
    close them.
    """
    before = sockets()
    yield
    gc.collect()
    until = time.monotonic() + 5
    while sockets() > before and time.monotonic() < until:
        time.sleep(0.01)
