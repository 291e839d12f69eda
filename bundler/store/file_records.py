# SPDX-License-Identifier: Apache-2.0
"""Single files of a store, found by what names them: tuning results and helper libraries, which
belong to no kernel.

::

    v1/s/<64 hex>   an object: a sealed [1, name, file name, bytes]; the hex is the sha256 of the name

Created and never changed: the first is everybody's.  What was pushed in a bundle is found by the
same look-up (kernel_index.py): a file by its path, a tuning record by its id.

`FileRecords` looks files up and publishes them: `Store.file_records` makes it for sessions
(`bundler/integrations/lookup_engine.py`) and for Helion's cache (`helion_cache.py`);
`maintenance.py` prunes what it wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial

from bundler.backends.batches import batches
from bundler.backends.port import Backend
from bundler.errors import FormatError
from bundler.format import names, wire
from bundler.format.digest import sha256
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.store import store_layout
from bundler.store.kernel_index import KernelIndex, file_name, index_key
from bundler.store.store_failures import DAMAGED, checked, named, read_sound

FILES = f"{store_layout.MAJOR}/s"
_VERSION = 1


class FileRecords:
    """The single files of a store.

    Guarantees: what is read is verified, and has the name that was asked for.  Threads, processes
    and forks as the byte store. Does not guarantee that a file stays: a server may evict it.

    Args:
        backend: the byte store.
        name: what to call it in messages; holds no secret.
        limits: bounds on what is read.
        readable: whether files that were published by themselves are taken; nobody signs them, so
            that a policy may forbid it.
        index: where files of bundles are found; None for all bundles of the store, whoever signed
            them.
        code: whether helper libraries of bundles are taken.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        limits: Limits = DEFAULT_LIMITS,
        *,
        readable: bool = True,
        index: KernelIndex | None = None,
        code: bool = False,
    ) -> None:
        self._backend, self.name = named(backend, name), name
        self._limits, self._readable = limits, readable
        self._index, self._code = index or KernelIndex(self._backend, limits), code

    def look_up(self, name: str) -> bytes | None:
        """Return the bytes of a file, None when there is none or it is damaged; as
        `look_up_all`.
        """
        return self.look_up_all([name]).get(name)

    def look_up_all(self, known_by: Collection[str]) -> dict[str, bytes]:
        """Return the bytes of the files that are there and whole, by name: one round trip, and
        for what was pushed two more for each bundle, with one for the bytes of each file.

        Args:
            known_by: what they are known by, any texts.

        Raises:
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        found: dict[str, bytes] = {}
        # Each name is asked for by two keys.
        for batch in batches(dict.fromkeys(known_by), store_layout.BATCH_KEYS // 2):
            published = {_key(name): name for name in batch} if self._readable else {}
            pushed = {index_key(file_name(name)): name for name in batch}
            asked = store_layout.bounds_of_keys([*published, *pushed], self._limits)
            values = self._backend.get_within(asked)
            for key in published.keys() & values.keys():
                name = published[key]
                decode = partial(self._decode, name)
                with contextlib.suppress(*DAMAGED):
                    found[name] = checked(key, values[key], self._backend, decode)
            left = [key for key in pushed.keys() & values.keys() if pushed[key] not in found]
            places = self._index.decode_places({key: values[key] for key in left})
            for key, place in places.items():
                name = pushed[key]
                data = self._index.read_file(file_name(name), place, code=self._code)
                if data is not None:
                    found[name] = data
        return found

    def publish(self, name: str, filename: str, data: bytes) -> bool:
        """Store a file unless there is one of that name; True when it is ours.

        Raises:
            UnsafeName: not a file name.
            StoreFull, AccessDenied, StoreUnavailable: it could not be stored.
        """
        value = store_layout.encode_object(
            wire.pack([_VERSION, name, names.check_file_name(filename), data])
        )
        return bool(self._backend.put({_key(name): value}))

    def listed(self, prefix: str, most: int) -> Iterator[tuple[str, bytes]]:
        """Yield (name, bytes) of the files whose name begins so, the newest first; damaged ones are
        left out.

        Every file of the store is looked at, since objects are called by digests of names.

        Args:
            prefix: the beginning of a name.
            most: how many to yield.

        Raises:
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        stats = sorted(
            self._backend.list(FILES) if self._readable else (),
            key=lambda stat: -stat.modified_s,
        )
        left = most
        keys = [stat.key for stat in stats]
        for key, found in read_sound(self._backend, keys, self._limits, self._opened):
            # One of another name stands under a key that is not its own.
            if left and _key(found[0]) == key and found[0].startswith(prefix):
                left -= 1
                yield found
            if not left:
                return

    def _decode(self, name: str, value: bytes) -> bytes:
        known_by, data = self._opened(_key(name), value)
        if known_by != name:
            raise FormatError(f"{_key(name)}: it is another file, {known_by!r:.80}", key=_key(name))
        return data

    def _opened(self, what: str, value: bytes) -> tuple[str, bytes]:
        payload = wire.unpack(
            store_layout.decode_object(value, what, None, self._limits), what, self._limits
        )
        version, known_by, filename, data = wire.fields(
            payload, what, int, str, str, bytes, open_ended=True
        )
        if version != _VERSION:
            raise FormatError(
                f"{what}: version {version} of the file {filename!r:.80}, expected {_VERSION}",
                key=what,
            )
        return known_by, bytes(data)


def _key(name: str) -> str:
    return f"{FILES}/{sha256(name.encode()).hex()}"
