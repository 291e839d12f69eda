# SPDX-License-Identifier: Apache-2.0
"""Single files of a store, found by what names them: tuning results and helper libraries, which belong to no kernel.

::

    v1/s/<64 hex>   an object: a sealed [1, name, file name, bytes]; the hex is the sha256 of the name

Created and never changed: the first is everybody's.
"""

from __future__ import annotations

from functools import partial

from bundler.backends.port import Backend
from bundler.errors import FormatError
from bundler.format import names, wire
from bundler.format.digest import sha256
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.store import bounds, store_layout
from bundler.store.damage import DAMAGED, checked
from bundler.store.error_translation import store_errors

FILES = f"{store_layout.MAJOR}/s"
_VERSION = 1


class FileRecords:
    """The single files of a store.

    Guarantees: what is read is verified, and has the name that was asked for.  Threads, processes and forks as the byte store.
    Does not guarantee that a file stays: a server may evict it.

    Args:
        backend: the byte store.
        name: what to call it in messages; holds no secret.
        limits: bounds on what is read.
    """

    def __init__(self, backend: Backend, name: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self._backend, self.name, self._limits = backend, name, limits

    def look_up(self, name: str) -> bytes | None:
        """Return the bytes of a file, None when there is none or it is damaged.

        Args:
            name: what it is known by, any text.

        Raises:
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        key = _key(name)
        with store_errors(self.name):
            value = self._backend.get_within(bounds.of_keys([key], self._limits)).get(key)
        if value is None:
            return None
        try:
            return checked(self._backend, self.name, key, value, partial(self._decode, name))
        except DAMAGED:
            return None

    def publish(self, name: str, filename: str, data: bytes) -> bool:
        """Store a file unless there is one of that name; True when it is ours.

        Raises:
            UnsafeName: not a file name.
            StoreFull, AccessDenied, StoreUnavailable: it could not be stored.
        """
        value = store_layout.seal(wire.pack([_VERSION, name, names.check_file_name(filename), data]))
        with store_errors(self.name):
            return bool(self._backend.put({_key(name): value}))

    def _decode(self, name: str, value: bytes) -> bytes:
        what = _key(name)
        payload = wire.unpack(store_layout.unseal(value, what, None, self._limits), what, self._limits)
        version, known_by, filename, data = wire.fields(payload, what, int, str, str, bytes, open_ended=True)
        if version != _VERSION or known_by != name:
            raise FormatError(f"{what}: version {version} of another file, {filename!r:.80}", key=what)
        return bytes(data)


def _key(name: str) -> str:
    return f"{FILES}/{sha256(name.encode()).hex()}"
