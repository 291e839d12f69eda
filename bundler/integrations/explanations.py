# SPDX-License-Identifier: Apache-2.0
"""`explain`: why a kernel was compiled although others were recorded.

`explain` answers users, with one `Explanation` for each kernel; the command `explain` calls
`latest_run` and `explain_run` too.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from bundler.config import registered_bundles, settings
from bundler.errors import ConfigError, NotFound, Untrusted
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel
from bundler.format.summary import Summarized
from bundler.integrations._process import flush_here, registered_here
from bundler.integrations.kernel_lookup import BundleKernels, store_of_settings
from bundler.integrations.key_comparison import (
    Difference,
    KeyedKernel,
    asked_of,
    keyed,
    keyed_all,
    nearest,
)
from bundler.integrations.miss_notes import (
    NotedMiss,
    ProcessNote,
    of_one_run,
    read_misses,
    read_processes,
    read_source,
    source_diff,
)
from bundler.integrations.user_directories import LocalDirectory
from bundler.lifecycle.directory_pack import pack
from bundler.lifecycle.machine_store import Store
from bundler.store.stored_manifests import did_you_mean
from bundler.toolchain import directories
from bundler.toolchain.recording.spool_records import SpooledEvent
from bundler.user_warnings import show

# So long it waits for what this process compiled to be noted.
_PATIENCE_S = 10.0

# Of a store with more kernels the newest are compared.
MOST_COMPARED = 10_000
Source = Bundle | str | os.PathLike[str]
Status = Literal["recorded", "differs", "never recorded", "unknown"]


@dataclass(frozen=True, repr=False)
class Explanation(Summarized):
    """Why one kernel was compiled.

    Attributes:
        key: its key.
        name: its entry point.
        status: `recorded`: it is there, nothing differs; `differs`: the nearest recorded kernel of
            that name differs; `never recorded`: no kernel of that name was recorded; `unknown`:
            what its key was made of is not known.
        nearest: key of the nearest recorded kernel.
        differences: what differs from that one.
        missed_at_s: when it was compiled, in seconds since the epoch; None when it was not, on this
            host.
        there_now: whether the store has it now, so that the next process finds it.
        pid: the process that compiled it; None when that was not on this host.
        source_diff: where the source differs, a unified diff from the recorded one to this one;
            None where one of the two texts was never used on this host.
    """

    key: str
    name: str
    status: Status
    nearest: str | None = None
    differences: tuple[Difference, ...] = ()
    missed_at_s: float | None = None
    there_now: bool = False
    pid: int | None = None
    source_diff: str | None = None

    @property
    def sentence(self) -> str:
        """All of it in a sentence."""
        told = {
            "recorded": "recorded; no part of its key differs",
            "never recorded": "never recorded: no kernel of that name was there before"
            + (", and this one is there now" if self.there_now else ""),
            "unknown": "what its key was made of is not known, so it cannot be compared",
            "differs": (
                f"{'; '.join(map(str, self.differences))} (nearest recorded kernel: {self.nearest})"
            ),
        }
        return f"{self.name}: {told[self.status]}"


def explain(
    key: str | None = None,
    *,
    name: str | None = None,
    last: bool = False,
    store: Store | None = None,
    bundles: Sequence[Bundle | str | os.PathLike[str]] = (),
) -> tuple[Explanation, ...]:
    """Say why kernels were compiled: what differs from the nearest that was recorded before.

    Looks at the notes that cache managers of this user left on this host, and compares with what
    the store and its tag hold, with `bundles`, and with what this process registered; where there
    is none of these, with what else Triton's cache directory has.  Where no cache manager of ours
    was asked, the kernels of Triton's directory that none of these has are those that were
    compiled: all of them with `last`.

    Args:
        key: a kernel key, or the beginning of one.
        name: kernels of this name; `*` and `?` stand for anything.
        last: all kernels that the latest process compiled, with its forks and what it started; none
            when it found everything.
        store: where kernels were recorded; None for what TRITON_BUNDLER_STORE names.
        bundles: more of what was recorded: bundles, their paths, and Triton's cache directories.

    Raises:
        ConfigError: not exactly one of `key`, `name` and `last` was given.
        NotFound: no such kernel was compiled here, and none is recorded; with `last`, no process
            asked our cache manager.
        StoreUnavailable, AccessDenied: the store cannot be read.
    """
    if [key is not None, name is not None, last].count(True) != 1:
        raise ConfigError("expected one of: a kernel's key, name=..., last=True")
    flush_here(_PATIENCE_S)
    if not last:
        return _of_kernels(key, name, store, bundles)
    return explain_run(latest_run(), store, bundles)


def explain_run(
    run: Run | None, store: Store | None, bundles: Sequence[Source] = ()
) -> tuple[Explanation, ...]:
    """Say why a run compiled what it compiled; raises as `explain`."""
    if run is None:
        if bundles:
            return _of_directory(_recorded(store, bundles), lambda _: True)
        raise NotFound(
            "no process here asked this package's cache manager for a kernel; with --bundle, or"
            " bundles=, what Triton's directory has beside these is explained"
        )
    if not run.misses:
        return ()
    return _of_misses(run.misses, list(read_misses(_local())), _recorded(store, bundles))


def _of_kernels(
    key: str | None, name: str | None, store: Store | None, bundles: Sequence[Source]
) -> tuple[Explanation, ...]:
    kernels, misses = _recorded(store, bundles), list(read_misses(_local()))
    wanted = [miss for miss in misses if _is(miss.event, key, name)]
    found = _of_misses(wanted, misses, kernels)
    told = {explanation.key for explanation in found}
    found += tuple(
        Explanation(kernel.key, kernel.name, "recorded", kernel.key, there_now=True)
        for kernel in kernels.values()
        if kernel.key not in told and _is(kernel, key, name)
    )
    if bundles:  # what was compiled without our cache manager left no note
        told = {explanation.key for explanation in found}
        unnoted = _of_directory(kernels, lambda kernel: _is(kernel, key, name))
        found += tuple(one for one in unnoted if one.key not in told)
    if not found:
        there = {miss.event.name for miss in misses} | {kernel.name for kernel in kernels.values()}
        hint = did_you_mean(difflib.get_close_matches(name or "", sorted(there)))
        raise NotFound(
            f"nothing compiled a kernel {key or name!r} here through this package's cache manager,"
            f" and the store has none{'; ' if hint else ''}{hint}"
        )
    return found


def _of_misses(
    wanted: Sequence[NotedMiss], misses: list[NotedMiss], kernels: dict[str, KeyedKernel]
) -> tuple[Explanation, ...]:
    # Misses come with the latest first, and of equal keys a dictionary keeps the last.
    latest = {miss.event.key: miss for miss in reversed(wanted)}
    local = _local()
    return tuple(
        replace(
            _with_diff(_explained(miss, misses, kernels), local),
            there_now=key in kernels,
            missed_at_s=miss.at_s,
            pid=miss.pid,
        )
        for key, miss in latest.items()
    )


@dataclass(frozen=True)
class Run:
    """The processes of one run, by start.

    Attributes:
        processes: each that asked the cache manager for a kernel.
        misses: what they compiled, the latest first.
    """

    processes: tuple[ProcessNote, ...]
    misses: tuple[NotedMiss, ...]

    @property
    def hits(self) -> int | None:
        """How many kernels were found; None unless each process told at its end."""
        counts = [process.hits for process in self.processes]
        return None if None in counts else sum(filter(None, counts))

    @property
    def failed(self) -> int:
        """How many kernels were not found and not compiled either, as far as the processes told."""
        told = [(one.missed or 0) - (one.compiled or 0) for one in self.processes]
        return sum(max(count, 0) for count in told)


def latest_run() -> Run | None:
    """Return the latest run on this host, whether it compiled anything or not; None when there was
    none.
    """
    local = _local()
    misses = list(read_misses(local))
    noted = {(process.began_ns, process.pid): process for process in read_processes(local)}
    for miss in misses:  # the note of its process may have been removed, or never have been written
        noted.setdefault(
            (miss.process_began_ns, miss.pid), ProcessNote(miss.pid, miss.process_began_ns)
        )
    processes = of_one_run(noted.values())
    if not processes:
        return None
    theirs = {(process.began_ns, process.pid) for process in processes}
    return Run(
        processes, tuple(miss for miss in misses if (miss.process_began_ns, miss.pid) in theirs)
    )


def _local() -> LocalDirectory:
    return LocalDirectory(settings().local, show)


def _of_directory(
    kernels: dict[str, KeyedKernel], wanted: Callable[[KeyedKernel], bool]
) -> tuple[Explanation, ...]:
    """Explain the kernels of Triton's directory that are not among those that were recorded."""
    there = list(kernels.values())
    return tuple(
        _compared(kernel, there)
        for kernel in _kernels_in(directories.triton_cache_dir())
        if kernel.key not in kernels and wanted(kernel)
    )


def _recorded(store: Store | None, bundles: Sequence[Source] = ()) -> dict[str, KeyedKernel]:
    """Return what a store and its tag, bundles and registered bundles hold, by key; None for the
    store that TRITON_BUNDLER_STORE names.

    Without any of these, what Triton's directory holds.
    """
    chosen = settings()
    sources = [*bundles, *registered_here(), *registered_bundles()]
    with ExitStack() as opened:
        if store is None and chosen.store:
            store = opened.enter_context(store_of_settings(chosen, read_only=True))
        if store is None and not sources:
            sources = [directories.triton_cache_dir()]
        kernels = () if store is None else map(_bare, _kernels_of(store, chosen.tag))
        found = {kernel.key: kernel for kernel in kernels}
    for source in sources:
        found |= {kernel.key: kernel for kernel in _kernels_in(source) if kernel.key not in found}
    return found


def _kernels_in(source: Source) -> list[KeyedKernel]:
    """Return the kernels of a bundle, of the file of one, or of a cache directory, which may not be
    there.
    """
    if isinstance(source, Bundle):
        return list(keyed_all(source))
    if os.path.isdir(source):
        with pack(source, keep="launch") as packed:
            return list(keyed_all(packed))
    if source == directories.triton_cache_dir():
        return []
    with Bundle.load(source) as bundle:
        return list(keyed_all(bundle))


def _bare(kernel: Kernel) -> KeyedKernel:
    """Return a kernel of a store; one without key parts is known by its key alone."""
    return next(keyed([kernel]), KeyedKernel.partly(kernel, {}))


def _kernels_of(store: Store, tag: str | None) -> Iterator[Kernel]:
    yield from store.kernel_records().recorded(MOST_COMPARED)
    if tag is not None:
        try:
            with store.pull(tag, read_only=True) as bundle:
                yield from BundleKernels(bundle, "tag").bundle.kernels
        except (NotFound, Untrusted):
            # The first run of a tag, which is set at its end; or one that is not used here either.
            return


def _is(kernel: KeyedKernel | SpooledEvent, key: str | None, name: str | None) -> bool:
    if key is not None:
        return kernel.key.startswith(key)
    # Not `fnmatch`, which takes capitals as the operating system takes them in file names.
    return fnmatch.fnmatchcase(kernel.name, name or "")


def _explained(
    miss: NotedMiss, misses: list[NotedMiss], kernels: dict[str, KeyedKernel]
) -> Explanation:
    """Compare with what was recorded when the process of a miss began, as far as this host's notes
    tell.
    """
    asked, event = asked_of(miss.event), miss.event
    if asked is None:
        return Explanation(event.key, event.name, "unknown")
    # What was compiled since this process began may be in the store by now, but was not there for
    # it to find.
    later = {other.event.key for other in misses if other.at_ns >= miss.process_began_ns}
    earlier = {other.event.key for other in misses if other.at_ns < miss.process_began_ns}
    before = [kernel for kernel in kernels.values() if kernel.key not in later - earlier]
    if event.key in earlier and event.key in kernels:
        return Explanation(event.key, event.name, "recorded", event.key)
    others = [kernel for kernel in before if kernel.key != event.key]
    return replace(_compared(asked, others), name=event.name)


def _compared(asked: KeyedKernel, recorded: Iterable[KeyedKernel]) -> Explanation:
    found = nearest(asked, recorded)
    if found is None:
        return Explanation(asked.key, asked.name, "never recorded")
    return Explanation(asked.key, asked.name, "differs", found[0].key, found[1])


def _with_diff(explanation: Explanation, local: LocalDirectory) -> Explanation:
    """Add what changed in the source, where both texts were used on this host."""
    changed = next((one for one in explanation.differences if one.what == "source"), None)
    if changed is None:
        return explanation
    recorded, asked = (read_source(local, side or "") for side in (changed.recorded, changed.asked))
    if recorded is None or asked is None:
        return explanation
    return replace(explanation, source_diff=source_diff(explanation.name, recorded, asked))
