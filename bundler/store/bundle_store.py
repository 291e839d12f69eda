# SPDX-License-Identifier: Apache-2.0
"""`BundleStore`: push and pull bundles, and give them tags.

`bundler/lifecycle/machine_store.py` derives `Store` from it, which users open; listing, checking
and pruning come from `Maintenance`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from bundler import observers
from bundler.backends.batches import batches
from bundler.backends.port import Backend
from bundler.errors import (
    AccessDenied,
    ConfigError,
    DigestMismatch,
    MergeConflict,
    NotFound,
    StoreUnavailable,
    UnsupportedVersion,
)
from bundler.format.bundle import Bundle, require_content
from bundler.format.bundle_union import merge
from bundler.format.frames import processors
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.manifest import Content, Observed
from bundler.package_loggers import logger
from bundler.store import store_layout
from bundler.store.blob_source import BundleUnits, StoreBlobs, UsageMarks, unit_batches
from bundler.store.dictionaries import UnitCompression
from bundler.store.kernel_index import BundlePlace, names_in, sample
from bundler.store.maintenance import Maintenance
from bundler.store.store_failures import DAMAGED, checked
from bundler.store.store_layout import BATCH_BYTES, Hint, Unit
from bundler.store.store_reports import (
    PushProgress,
    PushReport,
)
from bundler.store.store_signatures import SignedTag, StoreSignatures, admit_tag
from bundler.store.stored_manifests import (
    References,
    current_manifest,
    read_manifest,
    seen_too,
    without,
)

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from bundler.trust.signature_policy import SignaturePolicy
    from bundler.trust.signing_keys import SigningKey

PushMode = Literal["merge", "replace", "create"]
MODES = ("merge", "replace", "create")
# Each lost race means that another push succeeded; so many in a row for one tag mean that something
# is wrong with the store.
SWAP_ATTEMPTS = 100
# Of fewer units the first is done before a thread has begun.
_LEAST_UNITS = 8
# One thread reads and stores what they compress, which takes it a third of the time of one of them.
_MOST_THREADS = 8
# So many wait to be compressed or taken; enough that no thread waits for the caller, who stores
# hundreds at a time.
_MOST_AHEAD = 256
_Seen = Callable[[Content], None]
_log = logger("bundler.store")


class BundleStore(Maintenance):
    """Bundles in a byte store, shared by any number of processes.

    Guarantees: a manifest is written after every unit that it names was acknowledged, and a tag
    after its manifest; what is read is verified; every operation may be repeated, and stopped
    anywhere.  Of pushes to one tag at once with `mode="merge"`, the tag holds all.  Thread-safe;
    may be used on both sides of a fork. Does not guarantee: that a push survives a power failure
    before it returned; that what no tag reaches stays longer than `prune` says.

    Args:
        backend: the byte store; closed with the store.
        name: what to call it in messages; holds no secret.
        limits: bounds on what is read.

    Attributes:
        signatures: which signatures a pull by tag asks for; None for what the environment says.
    """

    signatures: SignaturePolicy | None = None

    def __init__(self, backend: Backend, name: str, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(backend, name, limits)
        self._references = References(self._backend)

    @observers.observing("push", "digest", "bytes_sent", "blobs_sent")
    def push(
        self,
        bundle: Bundle,
        tag: str | None = None,
        mode: PushMode = "merge",
        allow_empty: bool = False,
        *,
        key: SigningKey | str | os.PathLike[str] | None = None,
    ) -> PushReport:
        """Store a bundle, sending only what is missing.

        Args:
            bundle: what to store.
            tag: a name for it, such as `llama3/h200`; None stores it under its digest alone.
            mode: `merge` makes the tag name the union of what it named and this; `replace` makes it
                name this; `create` refuses when it names something else.
            allow_empty: also store a bundle with nothing in it.
            key: a private key, or the file of one, that signs the bundle and what the tag names;
                None for `TRITON_BUNDLER_SIGNING_KEY`.

        Raises:
            Untrusted: with `merge`, the tag is signed and there is no key, or nobody vouches for
                what it names and the key would.
            ConfigError: not a tag, or another mode.
            EmptyBundle: there is nothing in the bundle; nothing is sent, and the tag names what it
                named.
            FormatError: what the tag says is damaged or of a newer version; not with `replace`.
            UnsupportedVersion: the bundle has features that we can read but not write.
            MergeConflict: with `create`, the tag is set; with `merge`, one key stands for two
                kernels.
            StoreFull, AccessDenied, StoreUnavailable: it could not be stored; push again.  The tag
                names what it named before, or, when it was only the last answer that got lost, what
                it should.
        """
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r}: expected {', '.join(map(repr, MODES))}", got=mode)
        if not allow_empty:
            require_content(
                bundle,
                f"nothing was pushed to {self.name}; --allow-empty, or allow_empty=True, pushes it",
            )
        # Who only pulls imports this module too.
        from bundler.store.push_signatures import PushSignatures, signing_key

        started = time.monotonic()
        ref = None if tag is None else store_layout.tag_key(tag)
        sent = PushProgress()
        signatures = PushSignatures(self._backend, signing_key(key), bundle, tag)
        # Each round merges with what the tag says now; units that an earlier round sent are present
        # in the next.
        for _ in range(SWAP_ATTEMPTS):
            before = None if ref is None else self._backend.read_ref(ref)
            current = current_manifest(before, tag, damaged_ok=mode == "replace")
            hints = store_layout.hints_of(before)
            final, held = self._combined(
                bundle, tag, current, mode, hints, partial(signatures.check_merge, before)
            )
            if not final.writable:
                raise UnsupportedVersion(
                    "this bundle was written by a newer version, with features that this one would"
                    " lose; upgrade triton-bundler"
                )
            manifest, hints = self._send(final, sent, hints, held)
            value = signatures.tag_value(final, before, manifest, hints)
            # Before the tag: a push that ends here has done no harm, and one that ends later lacks
            # nothing.
            place = BundlePlace(manifest, tag or "")
            fresh, over = not sent.present, signatures.signed
            if sent.known and not over and not held:  # under another tag, whose push added them
                held = names_in(final.content)
            held = held if sent.indexed else frozenset()
            sent.bytes += self._index.add(final.content, place, held, fresh=fresh, over=over)
            if ref is None or before == value or self._backend.swap_ref(ref, before, value):
                return PushReport(
                    final.digest,
                    sent.units,
                    sent.present,
                    sent.bytes,
                    sent.repaired,
                    final.variants_dropped,
                    current and store_layout.digest_of_manifest(current),
                    None if ref is None else final.digest,
                    time.monotonic() - started,
                )
        raise StoreUnavailable(
            f"{self.name}: tag {tag} changed {SWAP_ATTEMPTS} times while we pushed; try again",
            tag=tag,
        )

    @observers.observing("pull", "digest")
    def pull(self, tag_or_digest: str, *, read_only: bool = False) -> Bundle:
        """Return a bundle by tag, digest or the beginning of one (8 digits and more, with `sha256:`
        or without); its content is fetched when it is read.

        Args:
            tag_or_digest: which bundle.
            read_only: leave the store as it is; else what is pulled is marked as in use, so that
                `prune` spares it, and what is found damaged is removed, so that the next push sends
                it again.

        Raises:
            NotFound: no such tag or bundle, or its manifest is missing; `near` are tags that are
                called almost so.
            ConfigError: neither a tag nor a digest, or the beginning of several, which are its
                `candidates`.
            DigestMismatch: the manifest is damaged; push again.
            FormatError: the tag or the manifest is none that this version reads.
            Untrusted: signatures are required, and no trusted key vouches for what the tag names,
                or it did for something newer.
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        found = self._references.find(tag_or_digest)
        return self._open(found, admit_tag(self.signatures, self.name, found), read_only=read_only)

    @property
    def writable(self) -> bool:
        """Whether anything can be stored; False where every tier was opened for reading alone."""
        return self._backend.writable

    def near_tags(self, tag: str) -> tuple[str, ...]:
        """Return up to three tags that are called so or almost so, the nearest first; raises as
        `tags`.
        """
        return self._references.near_tags(tag)

    def delete_tag(self, tag: str) -> bool:
        """Remove a tag; True when it was set.  What it named stays until `prune`."""
        key = store_layout.tag_key(tag)
        for _ in range(SWAP_ATTEMPTS):
            value = self._backend.read_ref(key)
            if value is None:
                return False
            if self._backend.swap_ref(key, value, None):
                return True
        raise StoreUnavailable(f"{self.name}: tag {tag} keeps changing; try again", tag=tag)

    def close(self) -> None:
        """Release the byte store; closing twice is fine."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _combined(
        self,
        bundle: Bundle,
        tag: str | None,
        current: str | None,
        mode: PushMode,
        hints: Sequence[Hint],
        check_merge: Callable[[Bundle], None],
    ) -> tuple[Bundle, frozenset[str]]:
        """Return what the tag is to name, and the names of what is in it already."""
        nothing: frozenset[str] = frozenset()
        if current is None:
            return bundle, nothing
        same = store_layout.digest_of_manifest(current) == bundle.digest
        there = names_in(bundle.content) if same else nothing
        if mode == "replace":
            return bundle, there
        if mode == "create":
            if same:
                return bundle, there
            raise MergeConflict(
                f"{self.name}: tag {tag} is set already; use mode='merge' or 'replace'", tag=tag
            )
        try:
            if same:
                # Merged with itself a bundle stays what it is: nothing is decoded.
                stored = read_manifest(self._backend, current, self._limits)
                return seen_too(bundle, stored, self._limits), there
            held = self._open(SignedTag(tag, current, hints))
            check_merge(held)
        except (NotFound, DigestMismatch) as error:
            if self._backend.exists([current]):
                # the manifest is there: it may have been damaged on its way here, and arrive
                # whole the next time
                raise
            # A tag without its manifest names nothing that could be merged; the push repairs it.
            _log.warning("%s: tag %s is dangling and is set anew: %s", self.name, tag, error)
            return bundle, nothing
        try:
            return merge([bundle, held]), names_in(held.content)
        except (NotFound, *DAMAGED) as error:
            _log.warning(
                "%s: tag %s: what is damaged gives way to what is pushed: %s", self.name, tag, error
            )
            return merge([bundle, without(held, bundle)]), nothing

    def _send(
        self, bundle: Bundle, sent: PushProgress, hints: Sequence[Hint], held: Collection[str]
    ) -> tuple[str, tuple[Hint, ...]]:
        """Store dictionaries, units, then the manifest, each only when missing; returns its key,
        and what to hint at.
        """
        units = {unit.key: unit for unit in store_layout.units_of(bundle.content)}
        observed = bundle.observed.encode()
        manifest = store_layout.manifest_key(bundle.digest, observed)
        # With what is asked anyway: whether what was pushed before, all if the bundle is known, is
        # found by its keys.
        entries = sample(held or names_in(bundle.content))
        asked = [manifest, *map(_key_of, hints)]
        try:
            present = self._look(units, [*asked, *entries], sent)
            sent.indexed = present.issuperset(entries)
        except AccessDenied:  # of the index, maybe: a user of one prefix has its tags alone
            present = self._look(units, asked, sent)
        lost = [hint for hint in hints if _key_of(hint) not in present]
        if lost:
            there = [unit for key, unit in units.items() if key in present]
            present -= self._without_dictionary(there, {digest for _, digest in lost})
        missing = [unit for key, unit in units.items() if key not in present]
        sent.present += len(units) - len(missing)
        compression = UnitCompression(self._backend, [hint for hint in hints if hint not in lost])
        if missing and not self._backend.reads_are_cheap:
            new = compression.choose(missing, partial(_payload, bundle))
            if new:
                self._put(new, units)
                sent.bytes += _size(new)
        with ParallelCompression(compression.encode, len(missing)) as compressing:
            sealed = compressing.values(self._payloads(bundle, missing))
            for batch in batches(
                sealed, store_layout.BATCH_KEYS, store_layout.BATCH_BYTES, lambda item: len(item[1])
            ):
                values = dict(batch)
                self._put(values, units)
                sent.bytes += _size(values)
                sent.units += len(values)
        # before the manifest: after a power failure it must not name what was lost
        self._backend.flush()
        sent.known = manifest in present
        if not sent.known:
            values = {manifest: store_layout.encode_manifest(bundle.content.encode(), observed)}
            self._put(values, units)
            self._backend.flush()
            sent.bytes += _size(values)
        return manifest, compression.hints({unit.family for unit in units.values()})

    def _look(
        self, units: Mapping[str, store_layout.Unit], others: list[str], sent: PushProgress
    ) -> set[str]:
        """Return which of these objects are there, marked as in use; asked in batches."""
        if self._backend.reads_are_cheap:
            # Then `_present` reads the objects, so batches are bounded by bytes.
            of_units = ([unit.key for unit in batch] for batch in unit_batches(units.values()))
            asked = [others, *of_units]
        else:
            asked = list(batches([*others, *units], store_layout.BATCH_KEYS))
        return set().union(*(self._present(keys, units, sent) for keys in asked))

    def _without_dictionary(
        self, units: Sequence[store_layout.Unit], lost: Collection[bytes]
    ) -> set[str]:
        """Remove the units that need a dictionary which is gone, so that they can be sent again;
        returns them.
        """
        gone: set[str] = set()
        for batch in unit_batches(units):
            found = self._backend.get_within(
                store_layout.bounds_of_heads(unit.key for unit in batch)
            )
            useless = [
                key for key, value in found.items() if store_layout.dictionary_of(value) in lost
            ]
            gone.update(useless)
            self._backend.delete(useless)
        return gone

    def _payloads(
        self, bundle: Bundle, units: Iterable[store_layout.Unit]
    ) -> Iterator[tuple[store_layout.Unit, bytes]]:
        for unit in units:
            try:
                yield unit, _payload(bundle, unit)
            except NotFound as error:
                # The tag that was merged names a unit that is gone.  Readers skip its kernel until
                # a process that has it pushes again.
                _log.warning("%s: %s is dangling: %s", self.name, unit.key, error)

    def _put(self, values: dict[str, bytes], units: Mapping[str, store_layout.Unit]) -> None:
        """Store objects, and read them back where that is cheap, so that no tag names an object
        that did not arrive whole.
        """
        self._backend.put(values)
        if self._backend.reads_are_cheap:
            lost = values.keys() - self._present(list(values), units, PushProgress())
            if lost:
                raise StoreUnavailable(
                    f"{self.name}: {min(lost)} did not arrive whole; push again", key=min(lost)
                )

    def _present(
        self, keys: list[str], units: Mapping[str, store_layout.Unit], sent: PushProgress
    ) -> frozenset[str]:
        """Return which objects are there, marked as in use; damaged ones are removed where reading
        them back is cheap.
        """
        if not self._backend.reads_are_cheap:
            return self._backend.claim(keys)
        # Touched before they are read: a prune that runs meanwhile then removes none of them.
        self._backend.touch(keys)
        others = store_layout.bounds_of_keys(
            [key for key in keys if key not in units], self._limits
        )
        found = self._backend.get_within(
            others | store_layout.bounds_of_units([units[key] for key in keys if key in units])
        )
        sound = {key for key, value in found.items() if store_layout.is_sound_object(value)}
        for key in found.keys() - sound:
            check = partial(
                store_layout.checked_frame, key=key, size=units[key].size if key in units else None
            )
            try:
                checked(key, found[key], self._backend, check)
                sound.add(key)
            except DigestMismatch:
                sent.repaired += 1
        stuck = self._backend.exists(found.keys() - sound)
        if stuck:
            raise StoreUnavailable(
                f"{self.name}: {min(stuck)} is damaged and cannot be removed, so it cannot be sent"
                " again; remove it by hand",
                key=min(stuck),
            )
        return frozenset(sound)

    def _pull_to_place(
        self, tag_or_digest: str, named: Callable[[SignedTag], None], seen: _Seen
    ) -> Bundle:
        """Return a bundle as `pull` does, to who reads it at once and closes it: it is marked as in
        use meanwhile.

        `named` gets what the tag says, before anything else is read, and `seen` the content.
        """
        found = self._references.find(tag_or_digest)
        named(found)
        return self._open(found, admit_tag(self.signatures, self.name, found), seen=seen)

    def _open(
        self,
        found: SignedTag,
        doubt: str = "",
        *,
        read_only: bool = False,
        seen: _Seen | None = None,
    ) -> Bundle:
        backend, manifest, hints = self._backend, found.manifest, found.hints
        backend = backend.untouched if read_only else backend
        content_bytes, observed_bytes = read_manifest(backend, manifest, self._limits)
        content = Content.decode(content_bytes, self._limits)
        if seen is not None:
            seen(content)
        observed = Observed.decode(observed_bytes, self._limits)
        units = BundleUnits(content)
        marks = (
            None if read_only else UsageMarks(backend, [manifest, *map(_key_of, hints)], units.all)
        )
        blobs = StoreBlobs(backend, units, self._limits, hints=hints, marks=marks)
        if marks is not None and seen is None:
            marks.finish()
        signed = StoreSignatures(backend, manifest, found.envelopes, doubt)
        return Bundle(content, observed, blobs, content_bytes=content_bytes, signed=signed)


def _size(values: dict[str, bytes]) -> int:
    return sum(map(len, values.values()))


def _key_of(hint: Hint) -> str:
    return store_layout.dictionary_key(hint[1])


def _payload(bundle: Bundle, unit: store_layout.Unit) -> bytes:
    return b"".join(bundle.blobs.read_blob(digest) for digest, _ in unit.blobs)


class ParallelCompression:
    """Threads that compress units; used as a context, at whose end what was not begun is left
    undone.

    Args:
        encode: returns what is to be stored for a unit and its payload; safe under threads.
        units: how many there are going to be.
    """

    def __init__(self, encode: Callable[[Unit, bytes], bytes], units: int) -> None:
        self._encode = encode
        self._pool: ThreadPoolExecutor | None = None
        threads = processors(_MOST_THREADS)
        if units >= _LEAST_UNITS and threads > 1:
            # Who only pulls imports this module too.
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(threads)

    def values(self, payloads: Iterable[tuple[Unit, bytes]]) -> Iterator[tuple[str, bytes]]:
        """Yield what is to be stored by key, in the order of the units."""
        if self._pool is None:
            for unit, payload in payloads:
                yield unit.key, self._encode(unit, payload)
            return
        ahead: deque[tuple[Unit, Future[bytes]]] = deque()
        waiting_bytes = 0
        for unit, payload in payloads:
            while ahead and (len(ahead) == _MOST_AHEAD or waiting_bytes + unit.size > BATCH_BYTES):
                waiting_bytes -= ahead[0][0].size
                yield _taken(ahead)
            ahead.append((unit, self._pool.submit(self._encode, unit, payload)))
            waiting_bytes += unit.size
        while ahead:
            yield _taken(ahead)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            # After an error, or Ctrl-C, nobody waits for what no thread has begun.
            self._pool.shutdown(wait=kind is None, cancel_futures=True)


def _taken(ahead: deque[tuple[Unit, Future[bytes]]]) -> tuple[str, bytes]:
    unit, encoded = ahead.popleft()
    return unit.key, encoded.result()
