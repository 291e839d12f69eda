# SPDX-License-Identifier: Apache-2.0
"""`restore`: bundle -> cache directory, where the next process finds its kernels without compiling.

`Restoration` is one restore: it follows a `RestorePlan`, and publishes through a `PlacementQueue`,
into a `CacheDirectory` each.  Called by users, by `Store.restore`, by the build service and, for a
tag at the start of a session, by `bundler/integrations/kernel_lookup.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from bundler import observers
from bundler.errors import BundlerError, DigestMismatch, FormatError, NotFound
from bundler.format.bundle import Bundle, Keep, require_content
from bundler.format.bundle_file import cleaned_up
from bundler.format.entries import HelperLibrary, Kernel
from bundler.format.limits import MIB
from bundler.lifecycle.cache_directory import CacheDirectory, Outcome, PlacementQueue, look_for_file
from bundler.lifecycle.compatibility import Questions
from bundler.lifecycle.kernel_placement import StoredKernel, WantedKernel
from bundler.lifecycle.kernel_writer import ReadyKernel
from bundler.lifecycle.lifecycle_reports import RestoreReport, RestoreTally
from bundler.lifecycle.restore_options import Only, RestoreOptions, TreeOptions, Trust
from bundler.lifecycle.restore_plan import (
    KERNELS_PER_RUN,
    NOTHING_TO_RESTORE,
    Companion,
    RestorePlan,
    opened,
)
from bundler.lifecycle.threaded_call import ThreadedCall, processors
from bundler.toolchain import directories
from bundler.trust.admission import admit

if TYPE_CHECKING:
    from bundler.lifecycle.moved_kernels import Moved
    from bundler.lifecycle.rekeyed_kernels import Rekeyed
    from bundler.trust.signature_policy import SignaturePolicy

# A kernel as it is written below each of its directories, or why it cannot be.
Ready = list[ReadyKernel] | BundlerError
# Kernels that are read before it is known whether they are of use here wait in memory.
BYTES_READ_MEANWHILE = 32 * MIB
BUSY_WITHOUT_QUESTIONS = 2
# Who asks waits for the interpreter as long as these are read, and to leave it to them takes a
# third of that.
RUNS_BETWEEN_WAITS = 2


def restore(
    bundle: Bundle | str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    keep: Keep = "all",
    devices: Sequence[int] | None = None,
    only: Only = "usable",
    trust: Trust = "kernels",
    rekey: bool = False,
    allow_empty: bool = False,
    trees: TreeOptions | None = None,
    signatures: SignaturePolicy | None = None,
    moved: bool = False,
) -> RestoreReport:
    """Put the kernels of a bundle where Triton or Inductor will look for them.

    Every byte is verified before it becomes visible; a kernel directory appears whole, by one
    rename, or not at all. May run in any number of processes and threads at once, beside Triton
    itself.

    Args:
        bundle: a bundle, or the path of one.
        cache_dir: the cache directory; None for where this process's Triton looks (for kernels
            recorded under Inductor: Inductor's directory of each device), resolved now.
        keep: `launch` writes only device binary and metadata, which is all that a hit needs.
        devices: device indices to place Inductor's kernels for; None for those they were recorded
            on.
        only: `usable` leaves out what this machine surely cannot use; `all` restores everything.
        trust: `kernels` restores device binaries, metadata, IR and tuning files; `code` also shared
            libraries and what torch executes or unpickles; `signed` that where a trusted key
            vouches for the code in the bundle, else as `kernels`.
        rekey: restore a kernel that another build of the same Triton release compiled, for another
            Python or installed elsewhere, under the key that this machine's Triton will ask for,
            with its hash in the metadata; only where each other part of the key is equal.  Imports
            Triton.
        allow_empty: a bundle with nothing in it is fine, and gives an empty report.
        trees: where trees of servers' caches go, and what they are compared with.  They are files
            that servers execute or unpickle, so they need trust="code", and each goes where its
            fingerprint agrees with what is known here; their kernels are kernels.
        moved: restore a kernel also under the key that this process's Triton will ask for, where
            its function is here already and differs from the recorded one in line numbers alone,
            its own and its helpers'; its metadata then names the recorded key, and its debug
            information shows the old lines.

    Returns:
        What was done, and what was left out and why.

    Raises:
        ConfigError: an argument has a value that is not listed above.
        FormatError, DigestMismatch, NotFound: the bundle cannot be opened.  A kernel whose bytes
            are damaged is skipped with that reason, and the others are restored.
        EmptyBundle: there is nothing in the bundle.
        ToolchainMismatch: not a POSIX system.
        AccessDenied, StoreFull: the directory cannot be written.  Kernels published before stay,
            nothing half-written does; the error's `report` says what was done.

    Warns:
        BundlerWarning: nothing in the bundle can be used here, with the reason.
    """
    return restore_with(
        bundle,
        RestoreOptions(
            cache_dir,
            keep,
            devices,
            only,
            trust,
            rekey,
            allow_empty,
            trees or TreeOptions(),
            signatures,
            moved,
        ),
    )


def restore_with(bundle: Bundle | str | os.PathLike[str], options: RestoreOptions) -> RestoreReport:
    """Restore as `restore` does, with its choices as one value."""
    with Questions() as questions:
        if options.only == "usable":
            questions.ask_for_gpus()  # while the bundle is loaded, and its first kernels are read
        return _restored(bundle, options, questions)


def _restored(
    bundle: Bundle | str | os.PathLike[str], options: RestoreOptions, questions: Questions
) -> RestoreReport:
    with observers.step("restore") as step, opened(bundle) as source:
        if not options.allow_empty:
            require_content(source, NOTHING_TO_RESTORE)
        questions.give_way()
        # Before anything is placed, and of the very digests that all that is placed is compared
        # with.
        admission = admit(source, options.trust, options.signatures)
        options = msgspec.structs.replace(options, trust=admission.trust)
        changed = _rekeyed(source) if options.rekey else None
        placed_of = changed.bundle if changed else source
        moved = _moved(placed_of) if options.moved else None
        questions.give_way()
        report = Restoration(moved.bundle if moved else placed_of, options, questions).run()
        if step.observed:
            placed = len(report.restored) + len(report.repaired)
            step.note(
                digest=source.digest,
                kernels=placed,
                skipped=len(report.skipped),
                bytes=report.bytes,
            )
    report = changed.told(report) if changed else report
    report = moved.told(report) if moved else report
    return replace(report, signatures=admission.line) if admission.line else report


def _rekeyed(bundle: Bundle) -> Rekeyed:
    from bundler.lifecycle.rekeyed_kernels import derive  # few ask for it

    return derive(bundle)


def _moved(bundle: Bundle) -> Moved:
    from bundler.lifecycle.moved_kernels import moved_in  # few ask for it

    return moved_in(bundle)


def _one(data: bytes) -> tuple[bytes]:
    return (data,)


def _size_of(wanted: WantedKernel) -> int:
    return wanted.files.size_bytes


class Restoration(RestorePlan):
    """One restore; `run` does it and returns the report."""

    def __init__(self, bundle: Bundle, options: RestoreOptions, questions: Questions) -> None:
        super().__init__(bundle, options)
        self._questions = questions
        self.tally = RestoreTally()
        self.places: dict[str, CacheDirectory] = {}

    def run(self) -> RestoreReport:
        """Do it; raises as `restore`."""
        started = time.monotonic()
        try:
            self._kernels()
            self._companions()
            self._trees()
            if self.bundle.tuning_records:
                from bundler.lifecycle.tuning_directory import place_tunings  # few bundles have any

                self.tally.tuned = place_tunings(
                    self.bundle, self.base or directories.triton_cache_dir()
                )
        except BundlerError as error:
            # Kernels that were published before the error stay, so the caller is told which.
            error.facts["report"] = self._report(started)
            raise
        report = self._report(started)
        if self.bundle.kernels and not report.usable:
            self._warn_of_nothing(report.skipped, len(report.companions))
        return report

    def _kernels(self) -> None:
        trusted = self._trusted_kernels()
        early = self._read_meanwhile(trusted)
        kernels = self._usable_kernels(trusted)
        # A directory that cannot be made or listed is an error here, before any kernel is fetched.
        for root in {root for kernel in kernels for root in self._roots(kernel)}:
            self._place(root)
        usable = {kernel.key for kernel in kernels} if early else set[str]()
        first = deque(one for one in early if one[0].kernel.key in usable)
        early.clear()  # each kernel is let go as it is written
        left = kernels[len(first) :]
        runs = self._runs((WantedKernel.of(kernel, self.options.keep) for kernel in left), _size_of)
        queue = PlacementQueue(self._placed)

        # From a store far away a thread fetches one run ahead.  Otherwise one thread reads and
        # verifies: those are thousands of short calls, and threads lose more by handing the
        # interpreter lock over between them than a second core gains.
        def place_all() -> None:
            while first:
                self._enqueue(*first.popleft(), queue)
            for run in (
                self._fetched_ahead(runs) if self.bundle.blobs.waits else map(self._fetched, runs)
            ):
                for wanted, ready in self._all_ready(run):
                    self._enqueue(wanted, ready, queue)
            queue.finish()

        cleaned_up(place_all, queue.close)

    def _placed(self, kernels: Sequence[ReadyKernel], outcome: Outcome | BundlerError) -> None:
        for kernel in kernels:
            if isinstance(outcome, DigestMismatch):
                self._show_source(kernel.digests)
            self.tally.placed(kernel, outcome)

    def _show_source(self, digests: Iterable[bytes]) -> None:
        """Let the source, which left the digests to us, compare them too: a store removes what it
        finds damaged.
        """
        with contextlib.suppress(BundlerError):
            self.bundle.blobs.view_blobs([*digests])

    def _fetched(self, run: list[WantedKernel]) -> list[WantedKernel]:
        self.bundle.blobs.prefetch([digest for wanted in run for digest in wanted.digests])
        return run

    def _fetched_ahead(self, runs: Iterable[list[WantedKernel]]) -> Iterator[list[WantedKernel]]:
        """Yield runs of kernels whose blobs were fetched, while a thread fetches those of the next
        one.
        """
        fetching: ThreadedCall[list[WantedKernel]] | None = None
        for run in runs:
            fetched = None if fetching is None else fetching.result()
            # Begun before the previous run is yielded: the fetch goes on while the caller places
            # that run.  Of the first one nobody does anything.
            fetching = ThreadedCall(partial(self._fetched, run))
            fetching.start(apart=fetched is not None)
            if fetched is not None:
                yield fetched
        if fetching is not None:
            yield fetching.result()

    def _read_meanwhile(self, kernels: Sequence[Kernel]) -> list[tuple[WantedKernel, Ready]]:
        """Return the first kernels, read while this machine was asked what it can use: of those
        some may be left out.
        """
        questions, size = self._questions, 0
        found: list[tuple[WantedKernel, Ready]] = []
        # Reader and writers keep two processors busy, and ptxas would only take its turn there.
        if (
            self.options.only == "usable"
            and len(kernels) >= KERNELS_PER_RUN
            and processors() > BUSY_WITHOUT_QUESTIONS
        ):
            questions.ask_for_ptxas(kernels)
        # From a store far away nothing is fetched that may be of no use; what takes long was asked
        # before there.
        runs = self._runs(
            (WantedKernel.of(kernel, self.options.keep) for kernel in kernels), _size_of
        )
        while not (self.bundle.blobs.waits or size > BYTES_READ_MEANWHILE or questions.give_way()):
            some = [*islice(runs, RUNS_BETWEEN_WAITS)]
            if not some:
                break
            for run in some:
                size += sum(map(_size_of, run))
                found += self._all_ready(self._fetched(run))
        questions.close()
        return found

    def _all_ready(self, run: Sequence[WantedKernel]) -> Iterator[tuple[WantedKernel, Ready]]:
        """Read kernels, a few at a time, and check what can be checked before they are written;
        nothing is changed anywhere.
        """
        for start in range(0, len(run), KERNELS_PER_RUN):
            some = run[start : start + KERNELS_PER_RUN]
            try:
                # Most digests are compared where a kernel is written, before anybody sees it.
                stored = StoredKernel.read_unverified(self.bundle.blobs, some)
            except (DigestMismatch, FormatError, NotFound):
                yield from [
                    (wanted, self._ready_alone(wanted)) for wanted in some
                ]  # which says what is wrong with which
            else:
                yield from [(one.wanted, self._ready(one)) for one in stored]

    def _ready_alone(self, wanted: WantedKernel) -> Ready:
        try:
            return self._ready(*StoredKernel.read_unverified(self.bundle.blobs, [wanted]))
        except (DigestMismatch, FormatError, NotFound) as error:
            return error

    def _ready(self, stored: StoredKernel) -> Ready:
        try:
            # For every directory before any is written: a kernel that Triton could not read in one
            # goes to none.
            return [
                stored.ready_for(root, self.triton_dir)
                for root in self._roots(stored.wanted.kernel)
            ]
        except (DigestMismatch, FormatError) as error:
            return error

    def _enqueue(self, wanted: WantedKernel, ready: Ready, queue: PlacementQueue) -> None:
        if isinstance(ready, BundlerError):
            if isinstance(ready, DigestMismatch):
                self._show_source(wanted.digests)
            self.tally.spoiled(wanted.kernel.key, ready)
            return
        for root, one in zip(self._roots(wanted.kernel), ready, strict=True):
            queue.add(self.places[root], one)

    def _companions(self) -> None:
        for entry in self._fetched_companions():
            try:
                stored = self.bundle.read(entry.artifact)
                # As for kernels, for every directory before any is written.
                placed = {
                    root: self._localize(entry.artifact, stored, root)
                    for root in self._companion_roots(entry)
                }
            except (DigestMismatch, FormatError, NotFound) as error:
                self.tally.spoiled(entry.path, error)
                continue
            for root, data in placed.items():
                for path in self._paths(entry):
                    self._publish_file(
                        root,
                        path,
                        partial(_one, data),
                        len(data),
                        rewritten=bool(entry.artifact.spans),
                    )

    def _trees(self) -> None:
        if self.trees is None:
            return
        for placed in self.trees.wanted:
            for path, file in self.trees.files(placed):
                name = f"{placed.tree.family}:{path}"
                chunks = partial(self.trees.chunks, placed.tree, file)
                try:
                    # An image may hold the tree already, where nothing can be written.
                    if look_for_file(placed.root, path, chunks()) is False:
                        self.tally.companions.append(name)
                    else:
                        self._publish_file(placed.root, path, chunks, file.size, name=name)
                except (DigestMismatch, FormatError, NotFound) as error:
                    self.tally.spoiled(name, error)

    def _publish_file(
        self,
        root: str,
        path: str,
        chunks: Callable[[], Iterable[bytes]],
        size_bytes: int,
        *,
        rewritten: bool = False,
        name: str | None = None,
    ) -> None:
        written = self._place(root).publish_file(path, chunks)
        if written is None:
            # A program may be using the file that is there, so a restore never replaces it.
            self.tally.skipped.append((name or path, f"another file is there already, in {root}"))
            return
        self.tally.companions.append(name or path)
        if written:
            self.tally.wrote(1, size_bytes)
            self.tally.rewritten |= {path} if rewritten else set()

    def _paths(self, entry: Companion) -> list[str]:
        """Return where a file belongs: a library also under the keys that this machine's Triton may
        ask for.
        """
        key, _, filename = entry.path.partition("/")
        if not isinstance(entry, HelperLibrary):
            return [entry.path]
        # A bundle does not say which release made a library; the kernels tell, if all are of one
        # release.
        releases = {kernel.toolchain.release for kernel in self.bundle.kernels}
        from bundler.toolchain import helper_libraries

        others = helper_libraries.other_keys(
            key, filename, releases.pop() if len(releases) == 1 else None
        )
        return [entry.path, *(f"{other}/{filename}" for other in sorted(others))]

    def _place(self, root: str) -> CacheDirectory:
        if root not in self.places:
            self.places[root] = CacheDirectory(root)
        return self.places[root]

    def _report(self, started: float) -> RestoreReport:
        tally, trees = self.tally, self.trees
        keys = tally.keys()
        return RestoreReport(
            restored=keys["restored"],
            present=keys["present"],
            repaired=keys["repaired"],
            skipped=tuple(
                sorted({*self.unusable, *tally.skipped, *(trees.unusable if trees else ())})
            ),
            damaged=tuple(sorted({*tally.damaged, *(trees.damaged if trees else ())})),
            unchecked=tuple(sorted({*self.machine.unchecked, *(trees.unchecked if trees else ())})),
            # A file that goes to several directories is named once.
            companions=tuple(sorted(set(tally.companions))),
            rewritten=tally.rewritten_files(),
            directories=tuple(sorted(self.places)),
            tuned=tally.tuned,
            files=tally.files,
            bytes=tally.bytes,
            seconds=time.monotonic() - started,
        )
