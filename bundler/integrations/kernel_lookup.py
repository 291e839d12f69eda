# SPDX-License-Identifier: Apache-2.0
"""`KernelSources`: where a session looks for a kernel: the tag it fetched at the start, the store,
bundles that libraries registered.

The lookup engine asks it for each kernel that Triton does not have, and places what it finds.
`SessionOptions` is what a session was told; `_process.py` makes it of arguments or settings.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from bundler.config import registration_is_off
from bundler.errors import BundlerError, NotFound, StoreUnavailable
from bundler.package_loggers import logger

if TYPE_CHECKING:
    from bundler.config import Launcher, Mode, Strict
    from bundler.format.bundle import BlobSource, Bundle, Keep
    from bundler.format.entries import Kernel
    from bundler.format.manifest import Observation
    from bundler.lifecycle.compiled_once import CompileLease
    from bundler.lifecycle.kernel_placement import Trust
    from bundler.lifecycle.lifecycle_reports import RestoreReport
    from bundler.lifecycle.machine_store import Store
    from bundler.store.blob_source import StoredKernel
    from bundler.store.bundle_store import PushMode
    from bundler.store.kernel_records import KernelRecords
    from bundler.toolchain.compile_frames import CompileFrame
    from bundler.user_settings import Settings

_LOG = logger("bundler.integrations")

# A compile whose time nobody recorded is taken for as long as this: others wait for three times
# that.
TYPICAL_COMPILE_S = 5.0
# How long a compile that nobody recorded waits for the store to say what was, to name the nearest.
LISTED_S = 2.0


class SessionOptions(NamedTuple):
    """What a session was told.

    Attributes:
        tag: fetched at the start, and given what was used at the end; None for none.
        mode: look up (`read`), publish (`write`), or both.
        push: how the tag is given what was used; None for not at all.
        strict, trust, keep: as the settings of these names.
        serving: what a compile is once the tag was replayed; None for what `strict` says.
        local: our own directory; None for the usual place.
        launcher: who gives Triton the launchers that it would have a C compiler build.
        replay: whether the tag's kernels are put into Triton's in-memory caches at the start.
        moved: whether a kernel is taken that differs from the one asked for in line numbers alone.
    """

    tag: str | None = None
    mode: Mode = "readwrite"
    push: PushMode | None = "merge"
    strict: Strict = "off"
    trust: Trust = "kernels"
    keep: Keep = "all"
    local: str | None = None
    replay: bool = False
    launcher: Launcher = "bundler"
    serving: Strict | None = None
    moved: bool = False

    @property
    def reads(self) -> bool:
        """Whether kernels are looked up."""
        return self.mode != "write"

    @property
    def writes(self) -> bool:
        """Whether kernels are published."""
        return self.mode != "read"


def store_of_settings(chosen: Settings, **how: Any) -> Store:
    """Open the store that the settings name; what one of its URLs says itself, such as a password,
    holds for that one.

    Args:
        chosen: the settings, which name at least one.
        how: as for `machine_store.open_store`.
    """
    from bundler.lifecycle.machine_store import open_store
    from bundler.store.store_urls import with_settings

    return open_store(*(with_settings(url, chosen.server) for url in chosen.store), **how)


class FoundKernel(NamedTuple):
    """A kernel that need not be compiled.

    Attributes:
        kernel: the kernel.
        source: where its bytes are read when it is placed.
        place: where it was: `tag`, `store` or `registered`.
        seen: what was observed when it was recorded, None where nothing was.
        seconds: how long its compile took, 0 when that is not known.
        code: of a kernel of the store: whether signatures let the code of the bundle that it came
            with be used.
        moved_from: of a kernel that only moved, the key under which it was recorded.
    """

    kernel: Kernel
    source: BlobSource
    place: str
    seen: Observation | None
    seconds: float = 0.0
    code: bool = False
    moved_from: str | None = None


class BundleKernels:
    """The kernels of one bundle, by key."""

    def __init__(self, bundle: Bundle, place: str) -> None:
        self.bundle, self._place = bundle, place
        self._kernels = {kernel.key: kernel for kernel in bundle.kernels}
        # Made now: a loaded bundle makes them when the first one is read, which would be in the
        # midst of a lookup.
        self._source, self._seen = bundle.blobs, dict(bundle.observed.kernels)
        self._moved: dict[str, str] | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._kernels

    def find(self, key: str) -> FoundKernel | None:
        """Return a kernel."""
        kernel = self._kernels.get(key)
        if kernel is None:
            return None
        seen = self._seen.get(key)
        seconds = sum([us for _, us in seen.times_us]) / 1e6 if seen is not None else 0.0
        return FoundKernel(kernel, self._source, self._place, seen, seconds)

    def find_moved(self, moved: str) -> FoundKernel | None:
        """Return a kernel that has this moved key, which says which parts of its key count but
        lines.
        """
        if self._moved is None:
            from bundler.store.kernel_index import moved_keys

            self._moved = moved_keys(self.bundle.kernels)
        key = self._moved.get(moved)
        return None if key is None else self.find(key)


class RegisteredBundles:
    """Bundles that libraries bring along: opened when a kernel is looked for, read only, each path
    once.

    Safe from any thread.

    Attributes:
        added: whether there is any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bundles: dict[str, BundleKernels | None] = {}
        self.added = False

    def add(self, path: str) -> None:
        """Add a bundle by its path; it is not opened yet."""
        with self._lock:
            self._bundles.setdefault(os.path.abspath(path), None)
            self.added = True

    def paths(self) -> list[str]:
        """Return what was added and can be used as far as is known."""
        with self._lock:
            return list(self._bundles)

    def find(self, key: str, failed: Callable[[BundlerError, str], None]) -> FoundKernel | None:
        """Return a kernel from the first bundle that has it.

        Args:
            key: the kernel's key.
            failed: is told of a bundle that cannot be opened, which is left out from then on.
        """
        found = (opened.find(key) for opened in self._opened(failed))
        return next(filter(None, found), None)

    def find_moved(
        self, moved: str, failed: Callable[[BundlerError, str], None]
    ) -> FoundKernel | None:
        """Return a kernel with this moved key from the first bundle that has one; `failed` as for
        `find`.
        """
        found = (opened.find_moved(moved) for opened in self._opened(failed))
        return next(filter(None, found), None)

    def kernels(self, failed: Callable[[BundlerError, str], None]) -> Iterator[Kernel]:
        """Yield every kernel."""
        for opened in self._opened(failed):
            yield from opened.bundle.kernels

    def reset_after_fork(self) -> None:
        """Give the child a lock that no thread of the parent holds."""
        self._lock = threading.Lock()

    def _opened(self, failed: Callable[[BundlerError, str], None]) -> list[BundleKernels]:
        if not self._bundles or registration_is_off():
            return []
        from bundler.format.bundle import Bundle
        from bundler.trust.admission import admit

        with self._lock:
            for path in [path for path, opened in self._bundles.items() if opened is None]:
                try:
                    bundle = Bundle.load(path)
                    admit(bundle, "code")  # with all that is in it: sessions of any trust level ask
                    self._bundles[path] = BundleKernels(bundle, "registered")
                except BundlerError as error:
                    del self._bundles[path]
                    failed(error, f"the registered bundle {path} cannot be used")
            return [opened for opened in self._bundles.values() if opened is not None]


class KernelSources:
    """Where one session looks.

    Args:
        store: the store; None for none.
        registered: bundles of libraries, asked last.
        keep: what is fetched of a kernel.
        on_failure: is told of a failure that only means compiling, and what it was that failed.
    """

    def __init__(
        self,
        store: Store | None,
        registered: RegisteredBundles,
        keep: Keep,
        on_failure: Callable[[BundlerError, str], None],
    ) -> None:
        self._store, self._registered, self._keep = store, registered, keep
        self._on_failure = on_failure
        self.tag: BundleKernels | None = None
        self.records: KernelRecords | None = None
        # Why the kernels of the store cannot be listed.
        self._unlisted = ""
        if store is not None:
            self.records = store.kernel_records().reporting_to(
                lambda error: on_failure(error, "the store cannot be used")
            )

    def fetch_tag(
        self, tag: str, cache_dir: str | None, trust: Trust, *, moved: bool = False
    ) -> RestoreReport | None:
        """Fetch what a tag names and put it where Triton looks; None when there is no such tag yet.

        Args:
            tag: which.
            cache_dir, trust, moved: as for `bundler.restore`.

        Raises:
            BundlerError: the store, or the directory, cannot be used.
        """
        if self._store is None:
            return None
        if self.records is not None:
            self.records.quiet = True  # what is said of the tag is enough
        try:
            bundle = self._store.pull(tag)
        except NotFound:
            return None
        from bundler.lifecycle.restoration import restore
        from bundler.trust.admission import admit

        # Before lookups find it too: what a restore cannot place, as for want of space, they still
        # take from it.
        admit(bundle, trust, self._store.signatures)
        self.tag = BundleKernels(bundle, "tag")
        return restore(
            bundle,
            cache_dir,
            self._keep,
            trust=trust,
            allow_empty=True,
            signatures=self._store.signatures,
            moved=moved,
        )

    def find_in_tag(self, key: str) -> FoundKernel | None:
        """Return a kernel of the tag."""
        return self.tag.find(key) if self.tag is not None else None

    def tag_seconds(self, key: str) -> float | None:
        """Return how long the compile of a kernel of the tag took, 0 when that is not known; None
        for another kernel.
        """
        found = self.find_in_tag(key)
        return None if found is None else found.seconds

    def find(
        self, key: str, *, turn: bool, moved: Callable[[], FoundKernel | None] | None = None
    ) -> FoundKernel | CompileLease | None:
        """Return a kernel that is not in the tag, or the turn to compile it for everyone, or None.

        Args:
            key: its key.
            turn: ask for the turn, which may mean to wait for another's compile.
            moved: asked where nobody has the kernel, before anybody waits for it; returns one that
                only moved.

        Raises:
            BundlerError: the store cannot be read.
        """
        registered = self._registered if self._registered.added else None
        prebuilt = registered.find(key, self._on_failure) if registered is not None else None
        if self.records is not None and prebuilt is None and turn:
            from bundler.lifecycle.compiled_once import AlreadyThere, CompileLeases

            answer = CompileLeases(self.records).begin(key, TYPICAL_COMPILE_S, instead=moved)
            if not isinstance(answer, AlreadyThere):
                return answer
            return _of_store(answer.there.found[key])
        if self.records is not None:
            found = self.records.find(key, self._keep)
            if found is not None:
                return _of_store(found)
        return prebuilt or (moved() if moved is not None else None)

    def find_moved(self, moved: str) -> Iterator[FoundKernel]:
        """Yield kernels with this moved key: of the tag, of the store, which is asked once, of
        registered bundles.
        """
        if self.tag is not None and (found := self.tag.find_moved(moved)) is not None:
            yield found
        if self.records is not None:
            key = self.records.moved.find([moved]).get(moved)
            if key is not None:
                there = self.records.find(key, self._keep)
                if there is not None:
                    yield _of_store(there)
                else:
                    self.records.moved.remove(moved)
        if found := self._registered.find_moved(moved, self._on_failure):
            yield found

    def trust_in(self, found: FoundKernel, trust: Trust) -> Trust:
        """Return how far a kernel is trusted: nobody signed one that was published by itself, which
        code may need.
        """
        # Looked up for each kernel, settings would cost as much as to read it.
        if trust == "kernels" or found.place != "store" or found.code or self._store is None:
            return trust
        return "kernels" if self._store.requires_signatures("code") else trust

    def reject(self, found: FoundKernel) -> None:
        """Forget a kernel that Triton could not read; who builds it next publishes it anew."""
        # One with a library may only need more trust than it has here, and be good for others.
        if (
            found.place == "store"
            and self.records is not None
            and not found.kernel.layout.has_library
        ):
            self.records.remove([found.kernel.key])

    def recorded(self, most: int) -> Iterator[Kernel]:
        """Yield kernels that were recorded: of the tag, of registered bundles, of the store.

        A store that cannot be listed in time is not asked again: whoever compiles waits for this.
        """
        if self.tag is not None:
            yield from self.tag.bundle.kernels
        yield from self._registered.kernels(self._on_failure)
        if self.records is None:
            return
        if self._unlisted:
            raise StoreUnavailable(self._unlisted)
        try:
            yield from self.records.recorded(most, LISTED_S)
        except StoreUnavailable as error:
            self._unlisted = error.message
            raise


def _of_store(found: StoredKernel) -> FoundKernel:
    return FoundKernel(found.kernel, found, "store", found.seen, found.seconds, found.code)


def find_moved(key: str, frame: CompileFrame, sources: KernelSources) -> FoundKernel | None:
    """Return a recorded kernel of a function that only moved, under the key that Triton asks for;
    None where there is none.

    `lifecycle/rekeyed_kernels.py` proves that it differs in lines alone.

    Args:
        key: what Triton asks for.
        frame: the call of Triton's `compile` that asks.
        sources: where kernels are looked for.

    Raises:
        StoreUnavailable, AccessDenied: the store cannot be read.
    """
    # Few sessions ask for such kernels.
    from bundler.lifecycle.rekeyed_kernels import moved_kernel
    from bundler.toolchain.keytext import key_parts

    function: Any = getattr(frame.src, "fn", None)
    if function is None:
        return None
    parts = key_parts(
        frame.src, frame.backend, frame.options, frame.env_vars, frame.hash, frame.stages_key
    )
    if parts.moved_key is None:
        return None
    for found in sources.find_moved(parts.moved_key):
        try:
            made = moved_kernel(found.source, found.kernel, function, asked=key)
        except BundlerError as error:
            _LOG.info("%s is not taken for %s: %s", found.kernel.key, key, error)
            continue
        return found._replace(
            kernel=made.kernel, source=made.source(found.source), moved_from=made.origin
        )
    return None
