# SPDX-License-Identifier: Apache-2.0
"""`KernelIndex`: which bundle of a store has a kernel or a single file, by the kernel's key or what
the file is known by; so what was pushed is found without a tag.

::

    v1/b/<kernel key>   an object: magic, digest and zstd as of a manifest, and in it [1, manifest,
                        tag] of a bundle with that kernel
    v1/b/f/<64 hex>     the same of a tuning file, helper library or tuning record; the hex is the
                        sha256 of what it is known by (file_records.py)

An entry is a hint: who follows it reads what the tag names now, else the manifest, and takes the
kernel where one of them has it.  So one that names what was pruned, replaced or never arrived costs
a miss and nothing else.  All entries of one push have the same value.

`MovedIndex` says under which key a kernel was recorded, by the parts of its key without lines; so
the kernel of a function that only moved is found::

    v1/l/<moved key>   an object: magic, digest and zstd as of a manifest, and in it [1, kernel key]

Such an entry is a hint too: who follows it looks the kernel up by its key, and proves that it is
the one.  One that leads nowhere is removed by who finds that out.

`BundleStore.push` and `Mirror` add entries once the manifest is there, `KernelRecords` and
`FileRecords` follow them, and sessions that take moved kernels; `Maintenance` mends and prunes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from bundler.backends.batches import batches
from bundler.errors import AccessDenied, FormatError, NotFound, UnsafeName, Untrusted
from bundler.format import names, wire
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.candidate_timings import id_of, time_of, to_file
from bundler.format.digest import digest_raw, sha256
from bundler.format.entries import HelperLibrary, Kernel, TuningFile
from bundler.format.keyparts import FUNCTIONS_PART, moved_key_of
from bundler.format.lazy_kernel import any_parts_may_hold, parts_may_hold
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.manifest import Content, Observation, Observed
from bundler.package_loggers import logger
from bundler.store import store_layout
from bundler.store.blob_source import StoreBlobs, StoredKernel
from bundler.store.store_failures import DAMAGED, NamedStore, checked, read_sound
from bundler.store.store_signatures import StoreSignatures, envelopes_in
from bundler.store.stored_manifests import read_manifest

INDEX = store_layout.INDEX
FILES_INDEX = f"{INDEX}/f"
# Of a bundle that has entries already so many are looked at, spread evenly: where one is missing,
# each is looked at.
SAMPLE = 8
# Bundles that were read for a kernel: the next kernel is often of the same one.
_REMEMBERED = 8
_log = logger("bundler.store")


class BundlePlace(NamedTuple):
    """The bundle that an entry names: its manifest, and the tag under which it was pushed, empty
    for none.
    """

    manifest: str
    tag: str


class _ReadBundle(NamedTuple):
    """A bundle that was read, its kernels by key, and what its signatures allow."""

    manifest: str
    kernels: Mapping[str, Kernel]
    content: Content
    observed: Observed
    usable: bool
    code: bool

    def find(self, key: str) -> StoredKernel | None:
        kernel = self.kernels.get(key) if self.usable else None
        if kernel is None:
            return None
        seen = self.observed.kernels.get(key, Observation())
        return StoredKernel(kernel, seen, (index_key(key), self.manifest), code=self.code)


#: Judges a bundle by its signatures: whether its kernels may be used, and whether the code in it
#: may; raises `Untrusted` for the former.
Judge = Callable[[Bundle], bool]


def _allow(_bundle: Bundle) -> bool:
    return True


class KernelIndex:
    """Which bundles of a store have which kernels.

    Guarantees: what it returns is in a manifest whose bytes are what its key says, and is allowed
        by `judge`.  Safe under threads.
    Does not guarantee that the units of a kernel are there: who reads them finds out.

    Args:
        store: the store.
        limits: bounds on what is read.
        judge: says of a bundle whether its code may be used; raises `Untrusted` where nothing of
            it may.

    Attributes:
        held: bundles that were read before, the last one first.
        moved: by which kernels are found that only moved.
    """

    def __init__(
        self, store: NamedStore, limits: Limits = DEFAULT_LIMITS, judge: Judge = _allow
    ) -> None:
        self._backend, self._limits, self._judge = store, limits, judge
        # Replaced as a whole: threads read it without a
        # lock, which a fork could leave locked.
        self.held: tuple[_ReadBundle, ...] = ()
        self.moved = MovedIndex(store, limits)

    def remembered(self, keys: Iterable[str]) -> dict[str, StoredKernel]:
        """Return the kernels that bundles which were read before have; asks the store nothing."""
        held = self.held
        found = ((key, _first(held, key)) for key in keys) if held else ()
        return {key: kernel for key, kernel in found if kernel is not None}

    def forget(self) -> None:
        """Forget the bundles that were read: one of them lacks what it had."""
        self.held = ()

    def find(self, keys: Collection[str]) -> dict[str, StoredKernel]:
        """Return the kernels that a bundle has, by key: two round trips more for each bundle that
        was not read before.

        Raises:
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        places = self.places(keys)
        bundles = {place: tuple(self._followed(place)) for place in set(places.values())}
        found = ((key, _first(bundles[place], key)) for key, place in places.items())
        return {key: kernel for key, kernel in found if kernel is not None}

    def read_file(self, name: str, place: BundlePlace, *, code: bool = False) -> bytes | None:
        """Return the bytes of a single file that an entry led to, None where it is gone or damaged.

        Args:
            name: of the entry, as `file_name` gives it.
            place: what the entry names.
            code: whether a helper library is wanted too.

        Raises:
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        files = (self._file(held, name, code=code) for held in self._followed(place))
        return next((data for data in files if data is not None), None)

    def _file(self, held: _ReadBundle, name: str, *, code: bool) -> bytes | None:
        if not held.usable:
            return None
        entry = _files(held.content).get(name)
        if entry is None:
            return _record(held, name)
        artifact = entry.artifact
        # By the name too, which decides how Triton uses a file, whatever the bundle calls it.
        is_code = isinstance(entry, HelperLibrary) or artifact.filename.endswith(
            names.LIBRARY_SUFFIXES
        )
        if is_code and not (code and held.code):
            return None
        digest = digest_raw(artifact.digest)
        unit = store_layout.Unit(((digest, artifact.size),))
        blobs = StoreBlobs(self._backend.untouched, [unit], self._limits)
        try:
            return blobs.read_blob(digest)
        except (NotFound, *DAMAGED) as error:
            _log.info("%s: %s is not found where it was: %s", self._backend.name, entry.path, error)
            return None

    def places(self, keys: Collection[str]) -> dict[str, BundlePlace]:
        """Return what the entries of these names name; a damaged entry is removed and counts as
        none.

        Raises:
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        wanted = {index_key(key): key for key in keys}
        found: dict[str, BundlePlace] = {}
        for batch in batches(wanted, store_layout.BATCH_KEYS):
            values = self._backend.get_within(store_layout.bounds_of_keys(batch, self._limits))
            places = self.decode_places(values)
            found |= {wanted[stored]: place for stored, place in places.items()}
        return found

    def decode_places(self, entries: Mapping[str, bytes]) -> dict[str, BundlePlace]:
        """Return what entries name, by their keys; a damaged one is removed and left out."""
        found: dict[str, BundlePlace] = {}
        decoded: dict[bytes, BundlePlace] = {}  # all entries of one push are alike
        for stored, value in entries.items():
            if (place := decoded.get(value)) is None:
                try:
                    decode = partial(decode_place, stored)
                    place = checked(stored, value, self._backend, decode)
                except DAMAGED:
                    continue
                decoded[value] = place
            found[stored] = place
        return found

    def add(
        self,
        content: Content,
        place: BundlePlace,
        held: Collection[str] = (),
        *,
        fresh: bool = False,
        over: bool = False,
    ) -> int:
        """Let what is in a bundle whose manifest is there be found; returns how many bytes were
        sent.

        An entry that leads to another bundle stays, unless that bundle is gone, or `over` says
        that this one counts more.  A store that may not
        be written there keeps the bundle without entries, which is then found by its tag.

        Args:
            content: of the bundle.
            place: where it is.
            held: names in it that were in a bundle of the store before, and have entries since.
            fresh: nothing of the bundle was there before: as a rule it has no entries, and nobody
                asks for them first.
            over: put these entries in the place of others.

        Raises:
            StoreUnavailable, StoreFull: they could not be stored.
        """
        try:
            wanted = sorted(names_in(content).difference(held))
            there = {} if fresh else self.places(wanted)
            sent = self._put([key for key in wanted if key not in there], place)
            others = [key for key in wanted if key not in sent]
            there = self.places(others) if fresh else there
            sent |= self._put_over(others, there, place, over=over)
        except AccessDenied as error:
            _log.warning("%s: kernels are found by tag alone: %s", self._backend.name, error)
            return 0
        if self._backend.reads_are_cheap and sent:
            self.places(sent)  # which removes one that did not arrive whole
        new = (kernel for kernel in content.kernels if kernel.key in sent)
        moved = self.moved.add(new) if sent else 0
        return len(sent) * len(encode_place(place)) + moved

    def mend(self, tagged: Iterable[tuple[BundlePlace, frozenset[str]]]) -> int:
        """Add the entries that kernels of tagged bundles lack, or that name what no tag names;
        returns how many.

        Args:
            tagged: what each tag names, and the names of what is in it.

        Raises:
            StoreUnavailable, StoreFull, AccessDenied: the store cannot be read or written.
        """
        bundles = dict(tagged)
        tags = {place.tag: keys for place, keys in bundles.items()}
        manifests = {place.manifest: keys for place, keys in bundles.items()}
        none: frozenset[str] = frozenset()
        written: set[str] = set()
        for place, keys in bundles.items():
            there = self.places(keys - written)
            bad = [
                key
                for key in keys - written
                if (held := there.get(key)) is None
                or not (
                    key in tags.get(held.tag, none) or key in manifests.get(held.manifest, none)
                )
            ]
            try:
                self._backend.delete([index_key(key) for key in bad if key in there])
            except AccessDenied as error:  # as damage in a store that we may only read
                _log.warning("%s: entries cannot be removed: %s", self._backend.name, error)
                continue
            written |= self._put(sorted(bad), place)
        return len(written)

    def _put(self, keys: Sequence[str], place: BundlePlace) -> set[str]:
        """Add entries; returns the kernels that had none."""
        value, created = encode_place(place), set[str]()
        for batch in batches(keys, store_layout.BATCH_KEYS):
            created |= self._backend.put({index_key(key): value for key in batch})
        return {key for key in keys if index_key(key) in created}

    def _put_over(
        self,
        keys: Collection[str],
        there: Mapping[str, BundlePlace],
        place: BundlePlace,
        *,
        over: bool,
    ) -> set[str]:
        """Put entries in the place of those that lead nowhere, or of all others; returns the
        kernels.
        """
        elsewhere = {there[key] for key in keys if key in there}
        elsewhere -= {
            one for one in elsewhere if one == place or (one.tag and one.tag == place.tag)
        }
        wrong = elsewhere if over else {one for one in elsewhere if not self._leads(one)}
        again = [key for key in keys if there.get(key) in wrong]
        if again:
            self._backend.delete(list(map(index_key, again)))
        return self._put(again, place)

    def _leads(self, place: BundlePlace) -> bool:
        """Tell whether something is where an entry points to."""
        return bool(
            (place.tag and self._backend.read_ref(store_layout.tag_key(place.tag)) is not None)
            or self._backend.exists([place.manifest])
        )

    def _followed(self, place: BundlePlace) -> Iterator[_ReadBundle]:
        """Yield the bundles that an entry leads to: what the tag names now has, as a rule, all
        that was ever pushed to it.
        """
        if place.tag:
            value = self._backend.read_ref(store_layout.tag_key(place.tag))
            try:
                manifest = store_layout.decode_tag(value or b"", place.tag)
            except FormatError:  # the tag is gone or damaged
                manifest = ""
            if manifest and (held := self._bundle(manifest, value)) is not None:
                yield held
            if manifest == place.manifest:
                return
        if (held := self._bundle(place.manifest)) is not None:
            yield held

    def _bundle(self, manifest: str, tag_value: bytes | None = None) -> _ReadBundle | None:
        for held in self.held:
            if held.manifest == manifest:
                return held
        read = self._read(manifest, tag_value)
        if read is not None:
            self.held = (read, *self.held[: _REMEMBERED - 1])
        return read

    def _read(self, manifest: str, tag_value: bytes | None) -> _ReadBundle | None:
        """Read and judge a bundle; None where it is gone or damaged."""
        backend, limits = self._backend, self._limits
        try:
            content_bytes, observed_bytes = read_manifest(backend.untouched, manifest, limits)
            content = Content.decode(content_bytes, limits)
            observed = Observed.decode(observed_bytes, limits)
        except (NotFound, *DAMAGED) as error:
            _log.info("%s: a kernel is not found where it was: %s", backend.name, error)
            return None
        signed = StoreSignatures(backend, manifest, envelopes_in(tag_value))
        kernels = {kernel.key: kernel for kernel in content.kernels}
        bundle = Bundle(
            content, observed, MemoryBlobs({}), content_bytes=content_bytes, signed=signed
        )
        try:
            code = self._judge(bundle)
            return _ReadBundle(manifest, kernels, content, observed, usable=True, code=code)
        except Untrusted as error:
            _log.info("%s: kernels of a bundle are not used: %s", backend.name, error)
            return _ReadBundle(manifest, {}, Content(), observed, usable=False, code=False)


def _first(bundles: Iterable[_ReadBundle], key: str) -> StoredKernel | None:
    return next(filter(None, (held.find(key) for held in bundles)), None)


def names_in(content: Content) -> frozenset[str]:
    """Return what a bundle is found by: keys of kernels, and the names of single files."""
    records = (file_name(f"tuning {id_of(record)}") for record in content.tuning_records)
    return frozenset((*(kernel.key for kernel in content.kernels), *_files(content), *records))


def file_name(known_by: str) -> str:
    """Return the name of the entry of a single file."""
    return f"f/{sha256(known_by.encode()).hex()}"


def _files(content: Content) -> dict[str, TuningFile | HelperLibrary]:
    """Return the files that a bundle's entries lead to, by name."""
    files: tuple[TuningFile | HelperLibrary, ...] = (*content.tuning_files, *content.helpers)
    return {file_name(f"file {one.path}"): one for one in files}


def _record(held: _ReadBundle, name: str) -> bytes | None:
    """Return a tuning record as a file; of several of that name the one with the fastest winner."""
    records = [
        record
        for record in held.content.tuning_records
        if file_name(f"tuning {id_of(record)}") == name
    ]
    known = {tuning.record: tuning for tuning in held.observed.tunings}
    pairs = [(record, known.get(id_of(record))) for record in records]
    timed = [(time, pair) for pair in pairs if (time := time_of(*pair)) is not None]
    best = min(timed, key=lambda one: one[0])[1] if timed else pairs[0] if pairs else None
    return None if best is None else to_file(*best)


def sample(kernels: Iterable[str]) -> list[str]:
    """Return the keys of some entries, spread in the order in which a push adds them, the last
    included: where these are there, a push that ended added all.
    """
    ordered = sorted(kernels)
    step = max(1, len(ordered) // SAMPLE)
    return [index_key(key) for key in dict.fromkeys((*ordered[::step], *ordered[-1:]))]


def index_key(name: str) -> str:
    """Return the key of an entry, by a kernel's key or a file's name; raises `UnsafeName`."""
    names.check_kernel_key(name.removeprefix("f/"))
    return f"{INDEX}/{name}"


def encode_place(place: BundlePlace) -> bytes:
    """Return the stored value of an entry."""
    return store_layout.encode_object(wire.pack([store_layout.ROW_VERSION, *place]))


def decode_place(key: str, value: bytes) -> BundlePlace:
    """Return what an entry names; raises `FormatError`, `DigestMismatch`."""
    manifest, tag = store_layout.decode_row(value, key, str, str)
    store_layout.digest_of_manifest(manifest)
    if tag and not store_layout.is_tag(tag):
        raise FormatError(f"{key}: names the tag {tag!r:.80}, which is none", key=key)
    return BundlePlace(manifest, tag)


MOVED = store_layout.MOVED
_RECORDED_LINES = FUNCTIONS_PART.encode()


class MovedIndex:
    """The kernels of a store by the parts of their keys without lines.  Safe under threads.

    Args:
        store: the store.
        limits: bounds on what is read.
    """

    def __init__(self, store: NamedStore, limits: Limits = DEFAULT_LIMITS) -> None:
        self._backend, self._limits = store, limits

    def find(self, moved: Collection[str]) -> dict[str, str]:
        """Return the keys of recorded kernels, by moved key: one round trip.

        Raises:
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        wanted = {moved_entry(key): key for key in moved}
        found = read_sound(self._backend, wanted, self._limits, decode_kernel)
        return {wanted[stored]: key for stored, key in found}

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
            self._backend.delete([moved_entry(moved)])
        except AccessDenied as error:
            _log.info("%s: an entry stays that leads nowhere: %s", self._backend.name, error)

    def _put(self, kernels: Mapping[str, str]) -> int:
        sent = 0
        try:
            for batch in batches(kernels, store_layout.BATCH_KEYS):
                values = {moved_entry(moved): encode_kernel(kernels[moved]) for moved in batch}
                created = self._backend.put(values)
                sent += sum(len(values[key]) for key in created)
        except AccessDenied as error:
            _log.warning("%s: kernels are not found once they moved: %s", self._backend.name, error)
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
    return f"{MOVED}/{names.check_kernel_key(moved)}"


def encode_kernel(key: str) -> bytes:
    """Return the stored value of an entry."""
    return store_layout.encode_small_object(wire.pack([store_layout.ROW_VERSION, key]))


def decode_kernel(stored: str, value: bytes) -> str:
    """Return the kernel that an entry names; raises `FormatError`, `DigestMismatch`."""
    (key,) = store_layout.decode_row(value, stored, str)
    try:
        return names.check_kernel_key(key)
    except UnsafeName as error:
        raise FormatError(f"{stored}: {error.message}", key=stored) from error
