# SPDX-License-Identifier: Apache-2.0
"""`MovedIndex`: under which key a kernel of a store was recorded, by the parts of its key without
lines; so the kernel of a function that only moved is found.

::

    v1/l/<moved key>   an object: magic, digest and zstd as of a manifest, and in it [1, kernel key]

An entry is a hint, as those of `kernel_index.py` are: who follows it looks the kernel up by its
key, and proves that it is the one.  One that leads nowhere is removed by who finds that out.

`KernelIndex` and `KernelRecords` add entries, sessions that take moved kernels follow them,
`Maintenance` mends and prunes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from bundler.backends.batches import batches
from bundler.backends.port import Backend
from bundler.errors import AccessDenied, FormatError, UnsafeName
from bundler.format import names, wire
from bundler.format.entries import Kernel
from bundler.format.keyparts import FUNCTIONS_PART, moved_key_of
from bundler.format.lazy_kernel import any_parts_may_hold, parts_may_hold
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.package_loggers import logger
from bundler.store import store_layout
from bundler.store.store_failures import DAMAGED, checked, store_errors

_PREFIX = store_layout.MOVED
_VERSION = 1
_RECORDED_LINES = FUNCTIONS_PART.encode()
_log = logger("bundler.store")


class MovedIndex:
    """The kernels of a store by the parts of their keys without lines.  Safe under threads.

    Args:
        backend, name: the store.
        limits: bounds on what is read.
    """

    def __init__(self, backend: Backend, name: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self._backend, self._name, self._limits = backend, name, limits

    def find(self, moved: Collection[str]) -> dict[str, str]:
        """Return the keys of recorded kernels, by moved key: one round trip.

        Raises:
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        wanted = {moved_entry(key): key for key in moved}
        found: dict[str, str] = {}
        for batch in batches(wanted, store_layout.BATCH_KEYS):
            with store_errors(self._name):
                values = self._backend.get_within(store_layout.bounds_of_keys(batch, self._limits))
            for stored, value in values.items():
                try:
                    decode = partial(decode_kernel, stored)
                    found[wanted[stored]] = checked(
                        self._backend, self._name, stored, value, decode
                    )
                except DAMAGED:
                    continue
        return found

    def add(self, kernels: Iterable[Kernel]) -> int:
        """Let kernels be found by others that only moved; returns how many bytes were sent.

        What the entry of another kernel leads to is as good, so it stays.

        Raises:
            StoreUnavailable, StoreFull: they could not be stored.
        """
        return self._put(moved_keys(kernels))

    def mend(self, kernels: Mapping[str, str]) -> None:
        """Add the entries that are missing; raises as `add`.

        Args:
            kernels: keys of kernels, by moved key.
        """
        there = self.find(kernels)
        self._put({moved: key for moved, key in kernels.items() if moved not in there})

    def remove(self, moved: str) -> None:
        """Remove an entry that leads nowhere, where it may be removed."""
        try:
            with store_errors(self._name):
                self._backend.delete([moved_entry(moved)])
        except AccessDenied as error:
            _log.info("%s: an entry stays that leads nowhere: %s", self._name, error)

    def _put(self, kernels: Mapping[str, str]) -> int:
        sent = 0
        try:
            for batch in batches(kernels, store_layout.BATCH_KEYS):
                values = {moved_entry(moved): encode_kernel(kernels[moved]) for moved in batch}
                with store_errors(self._name):
                    created = self._backend.put(values)
                sent += sum(len(values[key]) for key in created)
        except AccessDenied as error:
            _log.warning("%s: kernels are not found once they moved: %s", self._name, error)
        return sent


def moved_keys(kernels: Iterable[Kernel]) -> dict[str, str]:
    """Return the keys of those kernels that can be found once they moved, by moved key."""
    kernels = list(kernels)
    if not any_parts_may_hold(kernels, _RECORDED_LINES):
        return {}
    found = {}
    for kernel in kernels:
        if parts_may_hold(kernel, _RECORDED_LINES) and kernel.parts_bytes is not None:
            moved = moved_key_of(kernel.parts_bytes)
            if moved is not None:
                found[moved] = kernel.key
    return found


def moved_entry(moved: str) -> str:
    """Return the key of an entry; raises `UnsafeName`."""
    return f"{_PREFIX}/{names.check_kernel_key(moved)}"


def encode_kernel(key: str) -> bytes:
    """Return the stored value of an entry."""
    return store_layout.encode_small_object(wire.pack([_VERSION, key]))


def decode_kernel(stored: str, value: bytes) -> str:
    """Return the kernel that an entry names; raises `FormatError`, `DigestMismatch`."""
    payload = wire.unpack(
        store_layout.decode_object(value, stored, None, most_bytes=store_layout.PLACE_BYTES), stored
    )
    version, key = wire.fields(payload, stored, int, str, open_ended=True)
    if version != _VERSION:
        raise FormatError(f"{stored}: version {version}, expected {_VERSION}", key=stored)
    try:
        return names.check_kernel_key(key)
    except UnsafeName as error:
        raise FormatError(f"{stored}: {error.message}", key=stored) from error
