# SPDX-License-Identifier: Apache-2.0
"""Turns what was seen during a recording into a bundle and a report.

Called at the end of a recording, by `triton-bundler run`, and by sessions for what their tag gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from bundler.errors import BundlerError, ConfigError
from bundler.format import names
from bundler.format.bundle import Bundle, Keep
from bundler.format.entries import Kernel
from bundler.lifecycle.bundle_builder import Builder, KnownFacts, join
from bundler.lifecycle.directory_pack import single_files, tuning_results
from bundler.lifecycle.kernel_directory import KernelFiles, Rejected, read_kernels
from bundler.lifecycle.lifecycle_reports import Reasons, RecordReport
from bundler.lifecycle.recorded_kernels import RecordedKernel, RecordedKernels
from bundler.lifecycle.tuning.tuning_directory import winners_in, with_tunings
from bundler.package_loggers import logger
from bundler.toolchain import identity, keytext

if TYPE_CHECKING:
    from bundler.toolchain.events import CompileEvent
    from bundler.toolchain.recording.child_recording import ChildSpool

_log = logger("bundler.lifecycle")


def collect_recorded(
    kernels: RecordedKernels,
    roots: Iterable[str],
    keep: Keep,
    environment: tuple[tuple[str, str], ...] | None = None,
) -> tuple[Bundle, RecordReport]:
    """Read every directory that was seen.

    Args:
        kernels: what was seen, and by whom.
        roots: cache directories to search for results of Triton's tuner for the kernels found.
        keep: `all`, or `launch` for device binaries, metadata and tuning files only.
        environment: names and versions of the host that compiled; None for this process.

    Returns:
        The bundle, and a report that names whatever is not in it.
    """
    if keep not in ("all", "launch"):
        raise ConfigError(f"keep={keep!r}: expected 'all' or 'launch'", got=keep)
    builders: dict[str, Builder] = {}
    seen = list(kernels)
    for recorded, found in zip(
        seen, read_kernels([recorded.directory for recorded in seen]), strict=True
    ):
        _take(recorded, found, builders.setdefault(recorded.root, Builder(recorded.root, keep)))
    roots = list(roots)
    _add_tuning_files(builders, roots, keep)
    bundle = join(builders.values(), environment or identity.environment())
    bundle = with_tunings(bundle, winners_in({*roots, *builders}, bundle))
    return bundle, _reported(kernels, bundle)


def collect_spool(spool: ChildSpool, keep: Keep = "all") -> tuple[Bundle, RecordReport]:
    """Return what the processes that wrote to a spool compiled."""
    kernels = RecordedKernels()
    add_spool(kernels, spool)
    roots = {recorded.root for recorded in kernels}
    # The children may run another Python than this process; what their records say of Triton is
    # what is known.
    releases = {
        ("triton", event.toolchain.release) for event in spool.events() if event.toolchain.release
    }
    host = tuple(
        pair for pair in identity.environment() if pair[0] in {"platform", "gpu", "driver"}
    )
    bundle, report = collect_recorded(kernels, roots, keep, (*host, *sorted(releases)))
    return bundle, replace(report, left_out=merge_reasons(report.left_out, spool.problems))


def add_spool(kernels: RecordedKernels, spool: ChildSpool) -> None:
    """Add everything that child processes wrote down."""
    for event in spool.events():
        kernels.add_spooled(event)
    for file in spool.files():
        if file.directory not in kernels:
            kernels.add_directory(file.directory)


def merge_reasons(*reasons: Iterable[tuple[str, str]]) -> Reasons:
    """Return all reasons once, in order."""
    return tuple(sorted({pair for group in reasons for pair in group}))


def _take(recorded: RecordedKernel, found: KernelFiles | Rejected, builder: Builder) -> None:
    # What is a kernel holds other files, too.
    singles = single_files(recorded.directory) if isinstance(found, Rejected) else []
    for name in singles:
        builder.add_single(recorded.key, name)
    if singles:
        return
    facts = recorded.facts
    if facts is None and recorded.event is not None:
        facts = known_facts(recorded.event, builder.left_out)
    builder.add_found(recorded.key, found, recorded.observation, facts)


def _add_tuning_files(builders: dict[str, Builder], roots: Iterable[str], keep: Keep) -> None:
    """Take results of Triton's tuner for the kernels we have, also those that were there before."""
    wanted = {kernel.name for builder in builders.values() for kernel in builder.kernels}
    for root in roots:
        for key, name in tuning_results(root):
            if name.removesuffix(names.AUTOTUNE_SUFFIX) in wanted:
                builders.setdefault(root, Builder(root, keep)).add_single(key, name)


def _reported(kernels: RecordedKernels, bundle: Bundle) -> RecordReport:
    taken = {kernel.key for kernel in bundle.kernels}
    sources = Counter({s.key: s.source for s in kernels if s.key in taken}.values())
    return RecordReport(
        sources=dict(sorted(sources.items())),
        hits=sum(recorded.hits for recorded in kernels),
        compiles=sum(recorded.compiles for recorded in kernels),
        compile_seconds=sum(us for recorded in kernels for _, us in recorded.times_us) / 1e6,
        left_out=bundle.left_out,
        not_portable=tuple((k.key, name) for k in bundle.kernels for name in _unportable(k)),
        without_facts=tuple(k.key for k in bundle.kernels if k.facts_bytes is None),
    )


def known_facts(event: CompileEvent, problems: list[tuple[str, str]]) -> KnownFacts:
    """Return what a compile in this process tells about its kernel; what cannot be had goes to
    `problems`.
    """
    toolchain = keytext.toolchain_of(event.target.backend, event.target.arch)
    if event.options is None or event.env_vars is None:
        problems.append((event.key, "launch facts: the compile's options could not be seen"))
        return KnownFacts(toolchain)
    try:
        launch = keytext.launch_facts(event.src, event.options).to_bytes()
        parts = keytext.key_parts(
            event.src, event.backend, event.options, event.env_vars, event.hash, event.stages_key
        ).to_bytes()
    except (AttributeError, KeyError, TypeError, ValueError, OSError, BundlerError) as error:
        # A source kind that a later Triton brings; the kernel itself is still good for a hit.
        _log.warning("no launch facts for %s (%s): %r", event.name, event.key, error)
        problems.append((event.key, f"launch facts: {type(error).__name__}: {error}"))
        return KnownFacts(toolchain)
    return KnownFacts(toolchain, launch, parts)


def _unportable(kernel: Kernel) -> tuple[str, ...]:
    facts = kernel.launch.facts
    return () if facts is None else facts.unportable
