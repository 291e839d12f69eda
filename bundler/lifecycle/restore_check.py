# SPDX-License-Identifier: Apache-2.0
"""`check`: what `restore` would find missing, without writing anything.  Called by users and by
`triton-bundler restore --check`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from bundler.errors import DigestMismatch, FormatError, NotFound
from bundler.format.bundle import Bundle, Keep, require_content
from bundler.format.digest import digest_raw
from bundler.format.entries import Kernel
from bundler.format.summary import Reported
from bundler.lifecycle.cache_directory import look, look_for_file, same_launch
from bundler.lifecycle.compatibility import Questions
from bundler.lifecycle.kernel_directory import KernelFiles, Rejected
from bundler.lifecycle.kernel_placement import Trust
from bundler.lifecycle.lifecycle_reports import (
    NO_TREES,
    Only,
    Reasons,
    RestoreOptions,
    TreeOptions,
)
from bundler.lifecycle.restore_plan import (
    NOTHING_TO_RESTORE,
    Companion,
    RestorePlan,
    opened,
)
from bundler.trust.admission import admit

if TYPE_CHECKING:
    from bundler.lifecycle.tree_plan import TreePlan
    from bundler.trust.signature_policy import SignaturePolicy

_UNREADABLE = (DigestMismatch, FormatError, NotFound)


@dataclass(frozen=True, repr=False)
class CheckReport(Reported):
    """What a check found.  Kernels count once, however many devices they are placed for.

    Attributes:
        missing: (kernel key or file, reason) of what a restore would write: it is not there, or
            broken.
        present: keys of kernels and paths of files that are in place, in each directory where they
            belong.
        skipped: (kernel key or file, reason) of what a restore would leave out.
        unchecked: facts that are unknown on this machine and therefore excluded nothing.
        directories: where we looked.
        signatures: as of a `RestoreReport`.
    """

    missing: Reasons = ()
    present: tuple[str, ...] = ()
    skipped: Reasons = ()
    unchecked: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    signatures: str = ""

    @property
    def complete(self) -> bool:
        """Whether nothing that this machine can use is missing."""
        return not self.missing


def check(
    bundle: Bundle | str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    keep: Keep = "all",
    devices: Sequence[int] | None = None,
    only: Only = "usable",
    trust: Trust = "kernels",
    allow_empty: bool = False,
    trees: TreeOptions | None = None,
    signatures: SignaturePolicy | None = None,
) -> CheckReport:
    """Say what of a bundle is missing where Triton or Inductor will look, and write nothing.

    What counts as there is what `restore` would leave alone: a complete build of the kernel, ours
    or another.

    Args:
        bundle, cache_dir, keep, devices, only, trust, allow_empty, trees, signatures: as for
            `restore`.

    Raises:
        ConfigError, FormatError, DigestMismatch, NotFound, EmptyBundle, ToolchainMismatch: as
            `restore`.  Of a bundle whose kernels are damaged only what is compared is read;
            `Bundle.verify` reads everything.

    Warns:
        BundlerWarning: nothing in the bundle can be used here, with the reason.
    """
    options = RestoreOptions(
        cache_dir, keep, devices, only, trust, trees=trees or NO_TREES, signatures=signatures
    )
    with Questions(), opened(bundle) as source:
        if not allow_empty:
            require_content(source, NOTHING_TO_RESTORE)
        admission = admit(source, trust, signatures)
        plan = RestorePlan(source, msgspec.structs.replace(options, trust=admission.trust))
        report = _checked(plan)
    return replace(report, signatures=admission.line)


def _checked(plan: RestorePlan) -> CheckReport:
    wanted = plan.wanted_kernels()
    missing: list[tuple[str, str]] = []
    names: set[str] = {kernel.key for kernel in wanted}
    directories: set[str] = {root for kernel in wanted for root in plan.roots(kernel)}
    for kernels in plan.runs_of(wanted, lambda kernel: kernel.metadata.size):
        missing += _missing_kernels(plan, kernels)
    for entry in plan.fetched_companions():
        names.add(entry.path)
        directories |= {*plan.companion_roots(entry)}
        missing += _missing_companion(plan, entry)
    unchecked = set(plan.unchecked)
    if plan.trees is not None:
        for name, root, reason in _tree_files(plan, plan.trees):
            names.add(name)
            directories.add(root)
            missing += [(name, reason)] if reason else []
        plan.unusable += plan.trees.unusable
        unchecked |= plan.trees.unchecked
    if plan.bundle.kernels and not wanted:
        plan.warn_of_nothing(plan.unusable)
    return CheckReport(
        missing=tuple(sorted(set(missing))),
        present=tuple(sorted(names - {name for name, _ in (*missing, *plan.unusable)})),
        skipped=tuple(sorted(set(plan.unusable))),
        unchecked=tuple(sorted(unchecked)),
        directories=tuple(sorted(directories)),
    )


def _missing_kernels(plan: RestorePlan, kernels: list[Kernel]) -> list[tuple[str, str]]:
    found = [
        (kernel, root, look(root, kernel.key)) for kernel in kernels for root in plan.roots(kernel)
    ]
    there = {
        kernel.metadata.digest for kernel, _, files in found if not isinstance(files, Rejected)
    }
    plan.bundle.blobs.prefetch([digest_raw(digest) for digest in there])
    reasons = [
        (kernel.key, _why_missing(plan, kernel, root, files)) for kernel, root, files in found
    ]
    return [(key, reason) for key, reason in reasons if reason is not None]


def _why_missing(
    plan: RestorePlan, kernel: Kernel, root: str, found: KernelFiles | Rejected
) -> str | None:
    if isinstance(found, Rejected):
        return f"not in {root}" if found.missing else f"broken in {root}: {found.reason}"
    try:
        stored = plan.bundle.read(kernel.metadata)
        ours = plan.localize(kernel.metadata, stored, root)
    except _UNREADABLE as error:
        return f"another build is in {root}, which cannot be compared: {error.message}"
    # Equal metadata is the quick answer: whoever wrote the other files compiled the same
    # kernel.
    if found.files[found.metadata_name] == ours or same_launch(root, found, stored):
        return None
    return f"broken in {root}: its metadata differs from this kernel's"


def _tree_files(plan: RestorePlan, trees: TreePlan) -> Iterator[tuple[str, str, str]]:
    """Yield name, root, and why it is missing, of each file of the trees; an empty reason for
    one that is there.
    """
    for placed in trees.wanted:
        for path, file in trees.files(placed):
            name = f"{placed.tree.family}:{path}"
            try:
                absent = look_for_file(placed.root, path, trees.chunks(placed.tree, file))
            except _UNREADABLE as error:
                yield name, placed.root, f"cannot be compared: {error.message}"
                continue
            if absent is None:
                plan.unusable.append((name, f"another file is there already, in {placed.root}"))
            yield name, placed.root, f"not in {placed.root}" if absent else ""


def _missing_companion(plan: RestorePlan, entry: Companion) -> list[tuple[str, str]]:
    missing = []
    for root in plan.companion_roots(entry):
        try:
            data = plan.localize(entry.artifact, plan.bundle.read(entry.artifact), root)
        except _UNREADABLE as error:
            missing.append((entry.path, f"cannot be compared: {error.message}"))
            continue
        absent = look_for_file(root, entry.path, [data])
        if absent is None:
            plan.unusable.append((entry.path, f"another file is there already, in {root}"))
        elif absent:
            missing.append((entry.path, f"not in {root}"))
    return missing
