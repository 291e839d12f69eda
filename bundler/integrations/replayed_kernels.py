# SPDX-License-Identifier: Apache-2.0
"""`replay`, `ReplayReport`: recorded kernels are put into Triton's in-memory caches before traffic
comes, so that nothing is compiled while serving.

::

    bundle or tag ──restore──▶ Triton's directory ──▶ device_caches: functions     ──▶ first calls ask no compiler, fire no hook of it
                                                └───▶ tuner_caches:  result files, tuning records  ──▶ first calls benchmark nothing

Users call `replay`; a session that was told `replay=True`, or that TRITON_BUNDLER_REPLAY is 1,
calls `replay_restored` for its tag.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bundler import observers
from bundler.config import settings, takes_moved
from bundler.errors import ConfigError, NotFound
from bundler.format.bundle import Bundle
from bundler.format.summary import Reported, count
from bundler.integrations.kernel_lookup import store_of_settings
from bundler.user_warnings import show

if TYPE_CHECKING:
    from bundler.integrations.replayed_tunings import RecordedWinner
    from bundler.lifecycle.lifecycle_reports import Reasons
    from bundler.toolchain.device_caches import Outcome, ReplayOutcome

# Threads wait for files more than they compute; more of them only wait for the interpreter.
_THREADS = 8
_SUFFIX = ".tbundle"
#: What can become of a kernel, as the fields of `ReplayReport` are called.
OUTCOMES = ("replayed", "later", "not_found", "changed", "skipped")


@dataclass(frozen=True, repr=False)
class ReplayReport(Reported):
    """What a replay did.  Kernels are told by their keys, and in each reason by their name.

    Attributes:
        replayed: keys of kernels that are in the in-memory cache of a function now.
        later: (key, reason) of kernels that are handed over at the first call that needs them,
            without the compiler too.
        not_found: (key, reason) of kernels whose function is not here; they are handed over when it
            is made.
        changed: (key, reason) of kernels whose function is here with another source, and which part
            of it differs.
        skipped: (key, reason) of kernels that are for another target, or whose files or facts
            cannot be used.
        moved: (key, key in the bundle) of kernels among these whose functions differ from the
            recorded ones in line numbers alone.
        tuned: paths of result files, and names of tuning records, whose winner is in the cache of a
            tuner now.
        not_tuned: (path or name, reason) of the others; those of a tuner that is made later may
            still be used.
        milliseconds: wall time, with that of the restore.
    """

    replayed: tuple[str, ...] = ()
    later: Reasons = ()
    not_found: Reasons = ()
    changed: Reasons = ()
    skipped: Reasons = ()
    moved: Reasons = ()
    tuned: tuple[str, ...] = ()
    not_tuned: Reasons = ()
    milliseconds: float = 0.0


def replay(
    bundle_or_tag: Bundle | str | os.PathLike[str],
    modules: Sequence[str] | None = None,
    *,
    moved: bool | None = None,
) -> ReplayReport:
    """Restore a bundle, and hand its kernels to the JIT functions of this process, for the device
    in use.

    After it a first call of what was replayed makes no call of the compiler and fires no
    `jit_post_compile_hook`, which Triton fires for kernels on disk too; a tuned function benchmarks
    nothing where its result file was recorded (TRITON_CACHE_AUTOTUNING=1).  A kernel goes to a
    function only where this process's Triton makes the kernel's own key for it.  Functions that are
    made later get theirs when their import ends, or at their first call. Imports Triton; safe
    beside launches of other threads.

    Args:
        bundle_or_tag: a bundle, the path of one, or a tag of the store that TRITON_BUNDLER_STORE
            names.
        modules: only functions of these modules, and of those below them; None for all.  Nothing is
            imported.
        moved: also hand kernels to functions that differ from the recorded ones in line numbers
            alone, as `bundler.restore` restores them; None does what TRITON_BUNDLER_MOVED says.

    Returns:
        What was replayed, and what was not and why.

    Raises:
        ConfigError: a tag, and no store; or `modules` is no list of names.
        NotFound: no such file or tag.
        DriverUnavailable: Triton finds no GPU.
        RecordingError: Triton is not installed.
        ToolchainMismatch: its JIT is not as in the releases that are known.
        As `bundler.restore`: the bundle cannot be opened, or the directory not written.

    Warns:
        BundlerWarning: once, when kernels of this machine's target were left out.
    """
    from bundler.lifecycle.restoration import restore
    from bundler.toolchain import directories

    if isinstance(modules, str):
        raise ConfigError(f"modules={modules!r}: expected a list of module names", got=modules)
    began = time.monotonic()
    with _opened(bundle_or_tag) as bundle:
        taken = takes_moved() if moved is None else moved
        restore(bundle, allow_empty=True, moved=taken)
        roots = [directories.triton_cache_dir()]
        report, complaint = replay_restored(bundle, roots, modules, moved=taken)
    if complaint:
        show(complaint)
    return replace(report, milliseconds=(time.monotonic() - began) * 1e3)


def replay_restored(
    bundle: Bundle,
    roots: Iterable[str],
    modules: Sequence[str] | None = None,
    *,
    moved: bool = False,
) -> tuple[ReplayReport, str]:
    """Replay what was restored; raises as `replay`.

    Args:
        bundle: what was restored.
        roots: Triton's cache directories where it was.
        modules: as for `replay`.
        moved: whether kernels were restored for functions that only moved.

    Returns:
        The report, and a sentence about kernels that were left out, empty where there is nothing to
        say.
    """
    with observers.step("replay") as step:
        report, complaint = _replayed(bundle, roots, modules, moved=moved)
        if step.observed:
            counts = {outcome: len(getattr(report, outcome)) for outcome in OUTCOMES}
            step.note(digest=bundle.digest, tuned=len(report.tuned), **counts)
    return report, complaint


def _replayed(
    bundle: Bundle, roots: Iterable[str], modules: Sequence[str] | None, *, moved: bool
) -> tuple[ReplayReport, str]:
    from concurrent.futures import ThreadPoolExecutor

    from bundler.toolchain.device_caches import OfferedKernel, device_caches
    from bundler.toolchain.tuner_caches import ResultFile, tuner_caches

    began = time.monotonic()
    moved_from: dict[str, str] = {}
    if moved:
        from bundler.lifecycle.rekeyed_kernels import moved_in  # few ask for it

        bundle, moved_from = moved_in(bundle)
    places, allowed = tuple(dict.fromkeys(roots)), None if modules is None else tuple(modules)
    names = {kernel.key: kernel.name for kernel in bundle.kernels}
    with ThreadPoolExecutor(_THREADS) as threads:
        offered = (OfferedKernel(kernel, places, allowed) for kernel in bundle.kernels)
        told = _without_origins(device_caches.offer(offered, threads), moved_from)
    files = [
        ResultFile(entry.path, places, allowed)
        for entry in bundle.tuning_files
        if entry.in_triton_cache
    ]
    # After the kernels, whose functions then have the hash that result files were named by.
    tuned = tuner_caches.offer([*files, *_records(bundle, allowed)])
    report = ReplayReport(
        replayed=tuple(sorted(key for key, one in told.items() if one.outcome == "replayed")),
        later=_reasons(told, names, "later"),
        not_found=_reasons(told, names, "not found"),
        changed=_reasons(told, names, "changed"),
        skipped=_reasons(told, names, "skipped", "elsewhere"),
        moved=tuple(sorted((k, origin) for k, origin in moved_from.items() if k in told)),
        tuned=tuple(sorted(path for path, reason in tuned.items() if not reason)),
        not_tuned=tuple(sorted((path, reason) for path, reason in tuned.items() if reason)),
        milliseconds=(time.monotonic() - began) * 1e3,
    )
    return report, _complaint(report, _reasons(told, names, "changed", "skipped"))


def _without_origins(
    told: Mapping[str, ReplayOutcome], moved_from: Mapping[str, str]
) -> dict[str, ReplayOutcome]:
    """Leave out what is said of kernels that were replayed under another key, since their functions
    moved.
    """
    replayed = {origin for key, origin in moved_from.items() if told[key].outcome == "replayed"}
    return {
        key: one for key, one in told.items() if key not in replayed or one.outcome != "changed"
    }


def _records(bundle: Bundle, modules: tuple[str, ...] | None) -> list[RecordedWinner]:
    if not bundle.tuning_records:  # what records are compared by takes a while to import
        return []
    from bundler.integrations.replayed_tunings import RecordedWinner

    return [RecordedWinner(record, modules) for record in bundle.tuning_records]


def _reasons(
    told: Mapping[str, ReplayOutcome], names: Mapping[str, str], *outcomes: Outcome
) -> Reasons:
    found = ((key, one) for key, one in told.items() if one.outcome in outcomes)
    return tuple(sorted((key, f"{names[key]}: {one.reason}") for key, one in found))


def _complaint(report: ReplayReport, left_out: Reasons) -> str:
    if not left_out:
        return ""
    whole = len(left_out) + len(report.replayed) + len(report.later)
    return (
        f"{len(left_out)} of {count(whole, 'kernel')} were not replayed, the report says why;"
        f" {left_out[0][1]}"
    )


@contextmanager
def _opened(bundle_or_tag: Bundle | str | os.PathLike[str]) -> Iterator[Bundle]:
    if isinstance(bundle_or_tag, Bundle):
        yield bundle_or_tag
        return
    name = os.fspath(bundle_or_tag)
    a_path = not isinstance(bundle_or_tag, str) or os.sep in name or name.endswith(_SUFFIX)
    if a_path or os.path.isfile(name):
        with Bundle.load(name) as bundle:
            yield bundle
        return
    chosen = settings()
    if not chosen.store:
        raise NotFound(
            f"no bundle {name}, and TRITON_BUNDLER_STORE names no store with a tag {name}",
            name=name,
        )
    with (
        store_of_settings(chosen, trust=chosen.trust, read_only=True) as store,
        store.pull(name) as bundle,
    ):
        yield bundle
