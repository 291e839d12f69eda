# SPDX-License-Identifier: Apache-2.0
"""`UnitCompression`, `Dictionaries`: dictionaries are bytes that many units have in common, stored
once.

A unit that is compressed alone is ten times as large as its share of a bundle file: within one
kernel little repeats, but two kernels have much in common.  So a push to a store that is far away
looks at the units that it sends of one family (the launch sets of one target, or its IR), joins
those that have least in common with the others into a dictionary, and compresses every unit of the
family with it.  The head of each unit names the dictionary by its digest.  The key of a unit still
depends on its own content alone, and everybody can read it.

`UnitCompression` chooses dictionaries for one push, `Dictionaries` holds those that a reader has
needed so far; `BundleStore` and `StoreBlobs` call them.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import zstandard

from bundler.errors import BundlerError, FormatError, NotFound
from bundler.format.digest import check_digest, sha256
from bundler.format.limits import KIB, MIB
from bundler.store import store_layout
from bundler.store.store_failures import DAMAGED, NamedStore, checked
from bundler.store.store_layout import DICTIONARY_BYTES

_KEY = re.compile(store_layout.DICTIONARIES + r"/[0-9a-f]{64}")
# So many units of a family are sampled, evenly spaced; a family of fewer than the least gets no
# dictionary.
SAMPLES, LEAST_SAMPLES = 64, 4
SAMPLED_BYTES = 16 * MIB
# A sample that the dictionary so far makes no smaller than this part of its own compressed size has
# content that is new: it is added.
NEW = 0.5
# A dictionary is worth while when all samples together shrink to this part, and by so many bytes;
# measured in docs/cluster.md.
WORTH = 0.8
LEAST_SAVED_BYTES = 16 * KIB
# The level for comparing sizes, faster than `store_layout.ZSTD_LEVEL`; sizes at the two levels rise
# and fall together.
_TRIAL_LEVEL = 3
KEPT = 16


class Dictionary:
    """Bytes that units of one family have in common; see the module.

    Safe under threads.

    Args:
        content: the bytes.
        digest: theirs, where that was compared; else it is computed.
    """

    def __init__(self, content: bytes, digest: bytes | None = None) -> None:
        self.content, self.digest = content, digest or sha256(content)
        self.data = zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)

    @property
    def key(self) -> str:
        """Its key in a store."""
        return store_layout.dictionary_key(self.digest)

    def compressor(self, level: int = store_layout.ZSTD_LEVEL) -> zstandard.ZstdCompressor:
        """Return what compresses with it, for one thread."""
        return zstandard.ZstdCompressor(
            level=level, dict_data=self.data, write_checksum=True, write_dict_id=False
        )

    def serves(self, samples: Sequence[bytes]) -> bool:
        """Tell whether these payloads get enough smaller with it."""
        alone, shared = zstandard.ZstdCompressor(level=_TRIAL_LEVEL), self.compressor(_TRIAL_LEVEL)
        # The dictionary is stored already, so it costs nothing, and no least saving in bytes is
        # asked for.
        return sum(len(shared.compress(s)) for s in samples) <= WORTH * sum(
            len(alone.compress(s)) for s in samples
        )

    @staticmethod
    def of(samples: Sequence[bytes]) -> Dictionary | None:
        """Return the dictionary of some payloads, the same whenever they are the same; None when it
        is not worth while.
        """
        if len(samples) < LEAST_SAMPLES:
            return None
        alone = shared = zstandard.ZstdCompressor(level=_TRIAL_LEVEL)
        content, alone_bytes, shared_bytes = b"", 0, 0
        # In the given order, each against the dictionary so far: a sample that resembles an earlier
        # one adds nothing.
        for sample in samples:
            before = len(alone.compress(sample))
            after = len(shared.compress(sample)) if content else before
            alone_bytes, shared_bytes = alone_bytes + before, shared_bytes + min(before, after)
            if after > NEW * before and len(content) + len(sample) <= DICTIONARY_BYTES:
                content += sample
                shared = Dictionary(content).compressor(_TRIAL_LEVEL)
        # A sample that became part of the dictionary is counted with its size alone: about what it
        # adds to the stored dictionary.
        worth = (
            shared_bytes <= WORTH * alone_bytes and alone_bytes - shared_bytes >= LEAST_SAVED_BYTES
        )
        return Dictionary(content) if worth else None


class Dictionaries:
    """The dictionaries of a store that were needed so far; the last `KEPT` of them stay in memory.

    Safe under threads, without locks: single operations on dictionaries are atomic.

    Args:
        store: the store.
    """

    def __init__(self, store: NamedStore) -> None:
        self._backend, self.name = store, store.name
        self._known: dict[bytes, Dictionary] = {}

    def get(self, digest: bytes) -> Dictionary | None:
        """Return one; None when the store does not have it."""
        if digest not in self._known:
            self.fetch([digest])
        return self._known.get(digest)

    def known(self, digest: bytes) -> Dictionary | None:
        """Return one that is in memory; None when it would have to be fetched."""
        return self._known.get(digest)

    def unknown(self, digests: Iterable[bytes | None]) -> list[bytes]:
        """Return those of which nothing is in memory."""
        return [
            digest
            for digest in dict.fromkeys(digests)
            if digest is not None and digest not in self._known
        ]

    def fetch(self, digests: Collection[bytes]) -> None:
        """Fetch some, in one round trip; those that are absent or damaged stay unknown."""
        wanted = self.unknown(digests)
        if wanted:
            asked = store_layout.bounds_of_keys(map(store_layout.dictionary_key, wanted))
            self.take(self._backend.get_within(asked))

    def take(self, values: Mapping[str, bytes]) -> None:
        """Keep dictionaries that the store gave; a damaged one counts as missing."""
        for key, value in values.items():
            try:
                found = checked(key, value, self._backend, partial(opened, key))
            except DAMAGED:
                continue
            # In order of arrival: a pull needs the dictionaries of one tag, which are few, so the
            # oldest are of other tags.
            for oldest in list(self._known)[: max(0, len(self._known) + 1 - KEPT)]:
                self._known.pop(oldest, None)
            self._known[found.digest] = found

    def learn(self, digests: Collection[bytes]) -> list[bytes]:
        """Fetch dictionaries that nobody told us of, and mark them as in use; returns those that
        are not to be had.
        """
        new = self.unknown(digests)
        if not new:
            return []
        self.fetch(new)
        if not self._backend.read_only:
            with contextlib.suppress(BundlerError):
                self._backend.touch([store_layout.dictionary_key(digest) for digest in new])
        return self.unknown(new)


def opened(key: str, value: bytes) -> Dictionary:
    """Return the dictionary that a stored value is; raises `DigestMismatch` or `FormatError`."""
    if not _KEY.fullmatch(key):
        raise FormatError(f"{key}: no key of a dictionary; verify --repair removes it", key=key)
    # The digest in the key is that of the content, so a dictionary cannot be exchanged for another
    # one.
    content = store_layout.decode_object(value, key, None, most_bytes=DICTIONARY_BYTES)
    digest = bytes.fromhex(key.rpartition("/")[2])
    check_digest(content, digest, key)
    return Dictionary(content, digest)


class UnitCompression:
    """How one push compresses its units, family by family.

    Args:
        store: the store.
        hints: dictionaries that the tag names, the latest first.
    """

    def __init__(self, store: NamedStore, hints: Sequence[store_layout.Hint]) -> None:
        self._dictionaries, self._hints = Dictionaries(store), list(hints)
        self._chosen: dict[str, Dictionary] = {}
        self._of_thread = threading.local()

    def choose(
        self, units: Sequence[store_layout.Unit], read: Callable[[store_layout.Unit], bytes]
    ) -> dict[str, bytes]:
        """Choose a dictionary for each family where one is worth while; returns the new ones, as
        they are to be stored.

        Args:
            units: what is going to be sent.
            read: returns the payload of one; raises `NotFound`.
        """
        families: dict[str, list[store_layout.Unit]] = {}
        for unit in units:
            if unit.family and unit.size <= DICTIONARY_BYTES:
                families.setdefault(unit.family, []).append(unit)
        self._dictionaries.fetch([digest for family, digest in self._hints if family in families])
        new: dict[str, bytes] = {}
        for family, members in families.items():
            samples = list(_sampled(members, read))
            # A dictionary that is in the store already costs nothing, so a new one is made only
            # where none serves.
            found = self._hinted(family, samples)
            if found is None:
                found = Dictionary.of(samples)
                if found is not None:
                    self._hints.insert(0, (family, found.digest))
                    new[found.key] = store_layout.encode_object(found.content)
            if found is not None:
                self._chosen[family] = found
        return new

    def _hinted(self, family: str, samples: Sequence[bytes]) -> Dictionary | None:
        """Return the latest dictionary of a family that serves these payloads too."""
        for hinted, digest in self._hints:
            known = self._dictionaries.get(digest) if hinted == family else None
            if known is not None and samples and known.serves(samples):
                return known
        return None

    def encode(self, unit: store_layout.Unit, payload: bytes) -> bytes:
        """Return what is stored for a unit; threads may do this at the same time."""
        chosen = self._chosen.get(unit.family)
        if chosen is None or len(payload) > DICTIONARY_BYTES:
            return store_layout.encode_object(payload)
        compressors: dict[str, zstandard.ZstdCompressor] = self._of_thread.__dict__
        if unit.family not in compressors:
            compressors[unit.family] = chosen.compressor()
        return store_layout.encode_object_with(
            chosen.digest, compressors[unit.family].compress(payload)
        )

    def hints(self, families: Collection[str]) -> tuple[store_layout.Hint, ...]:
        """Return the dictionaries of these families for the tag to name, the latest first."""
        return tuple(hint for hint in self._hints if hint[0] in families)[: store_layout.HINTS]


def _sampled(
    units: Sequence[store_layout.Unit], read: Callable[[store_layout.Unit], bytes]
) -> Iterator[bytes]:
    """Yield some of the payloads, evenly spaced, as far as memory allows."""
    count = min(SAMPLES, len(units))
    left = SAMPLED_BYTES
    for unit in (units[number * len(units) // count] for number in range(count)):
        if unit.size <= left:
            with contextlib.suppress(NotFound):
                yield read(unit)
                left -= unit.size
