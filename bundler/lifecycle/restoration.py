# SPDX-License-Identifier: Apache-2.0
"""`restore`: bundle -> cache directory, where the next process finds its kernels without compiling.

One restore follows a `RestorePlan`, reads what it says (`kernel_placement.py`), and publishes
through a `PlacementQueue` (`cache_directory.py`).  Called by users, by `Store.restore`, by the
build service and, for a tag at the start of a session, by `bundler/integrations/kernel_lookup.py`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from bundler import observers
from bundler.errors import BundlerError, DigestMismatch, FormatError, NotFound
from bundler.format.bundle import Bundle, Keep, require_content
from bundler.format.bundle_file import cleaned_up
from bundler.format.entries import HelperLibrary, Kernel, replace
from bundler.format.frames import processors
from bundler.format.limits import MIB
from bundler.lifecycle.cache_directory import PlacementQueue, look_for_file
from bundler.lifecycle.compatibility import MOST_THREADS, Questions, ThreadedCall
from bundler.lifecycle.kernel_placement import Placement, Trust, localized, planned, read
from bundler.lifecycle.lifecycle_reports import (
    NO_TREES,
    Only,
    RestoreOptions,
    RestoreReport,
    TreeOptions,
)
from bundler.lifecycle.restore_plan import (
    KERNELS_PER_RUN,
    NOTHING_TO_RESTORE,
    Companion,
    RestorePlan,
    opened,
)
from bundler.toolchain import directories
from bundler.trust.admission import admit

if TYPE_CHECKING:
    from bundler.lifecycle.rekeyed_kernels import Moved, Rekeyed
    from bundler.lifecycle.tree_plan import TreePlan
    from bundler.trust.signature_policy import SignaturePolicy

# A kernel, and what is wanted of it.
_Planned = tuple[Kernel, Placement]
# A kernel that was read, and its placement below each of its directories, or why it cannot be
# placed.
Ready = tuple[Placement, Sequence[tuple[str, Placement]] | BundlerError]
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
            trees or NO_TREES,
            signatures,
            moved,
        ),
    )


def restore_with(bundle: Bundle | str | os.PathLike[str], options: RestoreOptions) -> RestoreReport:
    """Restore as `restore` does, with its choices as one value."""
    if options.only == "all":
        return _restored(bundle, options, None)
    with Questions() as questions:
        questions.ask_for_gpus()  # while the bundle is loaded, and its first kernels are read
        return _restored(bundle, options, questions)


def _restored(
    bundle: Bundle | str | os.PathLike[str], options: RestoreOptions, questions: Questions | None
) -> RestoreReport:
    give_way = questions.give_way if questions is not None else lambda: True
    with observers.step("restore") as step, opened(bundle) as source:
        if not options.allow_empty:
            require_content(source, NOTHING_TO_RESTORE)
        give_way()
        # Before anything is placed, and of the very digests that all that is placed is compared
        # with.
        admission = admit(source, options.trust, options.signatures)
        options = msgspec.structs.replace(options, trust=admission.trust)
        changes = _changes(source, options) if options.rekey or options.moved else []
        give_way()
        plan = RestorePlan(changes[-1].bundle if changes else source, options)
        report = restore_planned(plan, questions)
        if step.observed:
            placed = len(report.restored) + len(report.repaired)
            step.note(
                digest=source.digest,
                kernels=placed,
                skipped=len(report.skipped),
                bytes=report.bytes,
            )
    for change in changes:
        report = change.told(report)
    return replace(report, signatures=admission.line) if admission.line else report


def _changes(bundle: Bundle, options: RestoreOptions) -> list[Rekeyed | Moved]:
    """Return what is restored in place of a bundle, one step after the other."""
    from bundler.lifecycle import rekeyed_kernels  # few ask for it

    changes: list[Rekeyed | Moved] = [rekeyed_kernels.derive(bundle)] if options.rekey else []
    if options.moved:
        changes.append(rekeyed_kernels.moved_in(changes[0].bundle if changes else bundle))
    return changes


def restore_planned(plan: RestorePlan, questions: Questions | None) -> RestoreReport:
    """Do what a plan says; raises as `restore`."""
    started, tuned = time.monotonic(), 0
    queue = PlacementQueue(plan.bundle.blobs)
    try:
        _restore_kernels(plan, queue, questions)
        _restore_companions(plan, queue)
        if plan.trees is not None:
            _restore_trees(plan.trees, queue)
        if plan.bundle.tuning_records:
            from bundler.lifecycle.tuning_directory import (
                place_tunings,  # few bundles have any
            )

            base = plan.base or directories.triton_cache_dir()
            tuned = place_tunings(plan.bundle, base)
    except BundlerError as error:
        # Kernels that were published before the error stay, so the caller is told which.
        error.facts["report"] = _report(plan, queue, started, tuned)
        raise
    report = _report(plan, queue, started, tuned)
    if plan.bundle.kernels and not report.usable:
        plan.warn_of_nothing(report.skipped, len(report.companions))
    return report


# -------------------------------------------------------------------------------------- Kernels


def _restore_kernels(plan: RestorePlan, queue: PlacementQueue, questions: Questions | None) -> None:
    trusted = plan.trusted_kernels()
    early = _read_meanwhile(plan, trusted, questions) if questions is not None else []
    kernels = plan.usable_kernels(trusted)
    # A directory that cannot be made or listed is an error here, before any kernel is fetched.
    for root in {root for kernel in kernels for root in plan.roots(kernel)}:
        queue.directory(root)
    usable = {kernel.key for kernel in kernels} if early else set[str]()
    first = deque(one for one in early if one[0].key in usable)
    early.clear()  # each kernel is let go as it is written
    runs = _runs(plan, kernels[len(first) :])

    # From a store far away a thread fetches one run ahead.  Otherwise one thread reads and
    # verifies: those are thousands of short calls, and threads lose more by handing the
    # interpreter lock over between them than a second core gains.
    def place_all() -> None:
        while first:
            _enqueue(first.popleft(), queue)
        fetched = (
            _fetched_ahead(plan, runs)
            if plan.bundle.blobs.waits
            else (_fetched(plan, run) for run in runs)
        )
        for run in fetched:
            for ready in _all_ready(plan, run):
                _enqueue(ready, queue)
        queue.finish()

    cleaned_up(place_all, queue.close)


def _runs(plan: RestorePlan, kernels: Sequence[Kernel]) -> Iterator[list[_Planned]]:
    """Return kernels with what is wanted of each, in runs."""
    wanted = ((kernel, planned(kernel, plan.options.keep)) for kernel in kernels)
    return plan.runs_of(wanted, _size_of)


def _size_of(wanted: _Planned) -> int:
    return wanted[1].size_bytes


def _fetched(plan: RestorePlan, run: list[_Planned]) -> list[_Planned]:
    plan.bundle.blobs.prefetch([digest for _, one in run for digest in one.digests])
    return run


def _fetched_ahead(plan: RestorePlan, runs: Iterable[list[_Planned]]) -> Iterator[list[_Planned]]:
    """Yield runs of kernels whose blobs were fetched, while a thread fetches those of the next
    one.
    """
    fetching: ThreadedCall[list[_Planned]] | None = None
    for run in runs:
        fetched = None if fetching is None else fetching.result()
        # Begun before the previous run is yielded: the fetch goes on while the caller places that
        # run.  Of the first one nobody does anything.
        fetching = ThreadedCall(partial(_fetched, plan, run))
        fetching.start(apart=fetched is not None)
        if fetched is not None:
            yield fetched
    if fetching is not None:
        yield fetching.result()


def _read_meanwhile(
    plan: RestorePlan, kernels: Sequence[Kernel], questions: Questions
) -> list[Ready]:
    """Return the first kernels, read while this machine was asked what it can use: of those some
    may be left out.
    """
    size = 0
    found: list[Ready] = []
    # Reader and writers keep two processors busy, and ptxas would only take its turn there.
    if len(kernels) >= KERNELS_PER_RUN and processors(MOST_THREADS) > BUSY_WITHOUT_QUESTIONS:
        questions.ask_for_ptxas(kernels)
    # From a store far away nothing is fetched that may be of no use; what takes long was asked
    # before there.
    runs = _runs(plan, kernels)
    while not (plan.bundle.blobs.waits or size > BYTES_READ_MEANWHILE or questions.give_way()):
        some = [*islice(runs, RUNS_BETWEEN_WAITS)]
        if not some:
            break
        for run in some:
            size += sum(map(_size_of, run))
            found += _all_ready(plan, _fetched(plan, run))
    questions.close()
    return found


def _all_ready(plan: RestorePlan, run: Sequence[_Planned]) -> Iterator[Ready]:
    """Read kernels, a few at a time, and check what can be checked before they are written; nothing
    is changed anywhere.
    """
    for start in range(0, len(run), KERNELS_PER_RUN):
        some = run[start : start + KERNELS_PER_RUN]
        try:
            # Most digests are compared where a kernel is written, before anybody sees it.
            read(plan.bundle.blobs, [one for _, one in some])
        except (DigestMismatch, FormatError, NotFound):
            yield from [_ready_alone(plan, *one) for one in some]  # says what is wrong with which
        else:
            yield from [_ready(plan, *one) for one in some]


def _ready_alone(plan: RestorePlan, kernel: Kernel, placement: Placement) -> Ready:
    try:
        read(plan.bundle.blobs, [placement])
    except (DigestMismatch, FormatError, NotFound) as error:
        return placement, error
    return _ready(plan, kernel, placement)


def _ready(plan: RestorePlan, kernel: Kernel, placement: Placement) -> Ready:
    try:
        # For every directory before any is written: a kernel that Triton could not read in one goes
        # to none.
        ready = [(root, localized(placement, root, plan.triton_dir)) for root in plan.roots(kernel)]
    except FormatError as error:
        return placement, error
    return placement, ready


def _enqueue(ready: Ready, queue: PlacementQueue) -> None:
    kernel, placements = ready
    if isinstance(placements, BundlerError):
        queue.refused(kernel, placements)
        return
    for root, placement in placements:
        queue.add(queue.directory(root), placement)


# -------------------------------------------------------------------------------------- Other files


def _restore_companions(plan: RestorePlan, queue: PlacementQueue) -> None:
    for entry in plan.fetched_companions():
        try:
            stored = plan.bundle.read(entry.artifact)
            # As for kernels, for every directory before any is written.
            placed = {
                root: plan.localize(entry.artifact, stored, root)
                for root in plan.companion_roots(entry)
            }
        except (DigestMismatch, FormatError, NotFound) as error:
            queue.spoiled(entry.path, error)
            continue
        for root, data in placed.items():
            for path in _paths(plan.bundle, entry):
                written = _publish_file(queue, root, path, lambda: [data], len(data))  # noqa: B023
                queue.rewritten |= {path} if written and entry.artifact.spans else set()


def _restore_trees(trees: TreePlan, queue: PlacementQueue) -> None:
    for placed in trees.wanted:
        for path, file in trees.files(placed):
            name = f"{placed.tree.family}:{path}"
            chunks = partial(trees.chunks, placed.tree, file)
            try:
                # An image may hold the tree already, where nothing can be written.
                if look_for_file(placed.root, path, chunks()) is False:
                    queue.companions.append(name)
                else:
                    _publish_file(queue, placed.root, path, chunks, file.size, name)
            except (DigestMismatch, FormatError, NotFound) as error:
                queue.spoiled(name, error)


def _publish_file(
    queue: PlacementQueue,
    root: str,
    path: str,
    chunks: Callable[[], Iterable[bytes]],
    size_bytes: int,
    name: str | None = None,
) -> bool:
    """Put a file in place, and tell whether it was written."""
    written = queue.directory(root).publish_file(path, chunks)
    if written is None:
        # A program may be using the file that is there, so a restore never replaces it.
        queue.skipped.append((name or path, f"another file is there already, in {root}"))
        return False
    queue.companions.append(name or path)
    if written:
        queue.wrote(1, size_bytes)
    return written


def _paths(bundle: Bundle, entry: Companion) -> list[str]:
    """Return where a file belongs: a library also under the keys that this machine's Triton may ask
    for.
    """
    key, _, filename = entry.path.partition("/")
    if not isinstance(entry, HelperLibrary):
        return [entry.path]
    # A bundle does not say which release made a library; the kernels tell, if all are of one
    # release.
    releases = {kernel.toolchain.release for kernel in bundle.kernels}
    from bundler.toolchain import helper_libraries

    others = helper_libraries.other_keys(
        key, filename, releases.pop() if len(releases) == 1 else None
    )
    return [entry.path, *(f"{other}/{filename}" for other in sorted(others))]


def _report(plan: RestorePlan, queue: PlacementQueue, started: float, tuned: int) -> RestoreReport:
    trees, keys = plan.trees, queue.keys()
    return RestoreReport(
        restored=keys["restored"],
        present=keys["present"],
        repaired=keys["repaired"],
        skipped=tuple(sorted({*plan.unusable, *queue.skipped, *(trees.unusable if trees else ())})),
        damaged=tuple(sorted({*queue.damaged, *(trees.damaged if trees else ())})),
        unchecked=tuple(sorted({*plan.unchecked, *(trees.unchecked if trees else ())})),
        # A file that goes to several directories is named once.
        companions=tuple(sorted(set(queue.companions))),
        rewritten=partial(_rewritten, queue.written, queue.rewritten),  # type: ignore[arg-type]
        directories=tuple(sorted(queue.directories)),
        tuned=tuned,
        files=queue.files,
        bytes=queue.bytes,
        seconds=time.monotonic() - started,
    )


def _rewritten(
    kernels: Mapping[tuple[str, ...], Sequence[str]], others: set[str]
) -> tuple[str, ...]:
    """Return the files that hold a path of this machine, which the report lists when it is asked
    for it: a text for each kernel would be most of its memory.

    Args:
        kernels: keys of kernels, by the names of their files that do; one that went to several
            directories is there as often.
        others: paths of other files.
    """
    of_kernels = {
        f"{key}/{name}" for names, keys in kernels.items() for key in keys for name in names
    }
    return tuple(sorted(of_kernels | others))
