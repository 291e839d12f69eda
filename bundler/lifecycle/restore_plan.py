# SPDX-License-Identifier: Apache-2.0
"""`RestorePlan`: what of a bundle this machine can use, and which directories it belongs to, as
`RestoreOptions` ask.

`restore` writes there and `check` only looks, so that they cannot disagree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from bundler.format import names
from bundler.format.bundle import Bundle
from bundler.format.digest import digest_raw
from bundler.format.entries import (
    Artifact,
    HelperLibrary,
    Kernel,
    Opaque,
    TuningFile,
)
from bundler.format.limits import MIB
from bundler.format.manifest import Observation
from bundler.lifecycle.compatibility import Machine, why_not_helper
from bundler.lifecycle.kernel_placement import (
    NEEDS_TRUST,
    localize,
    places_no_code,
    why_not_trusted,
)
from bundler.lifecycle.lifecycle_reports import RestoreOptions
from bundler.toolchain import directories, identity

if TYPE_CHECKING:
    from bundler.lifecycle.tree_plan import TreePlan

T = TypeVar("T")
Companion = TuningFile | HelperLibrary | Opaque

# Neighbours share compressed frames and are fetched together, so they are worked on together, as
# far as memory allows.
KERNELS_PER_RUN = 16
BYTES_PER_RUN = 8 * MIB
# From a store far away a run is one round trip, with one batch of units
# (bundler/store/store_layout.py): the launch set of a kernel is one, the rest of it another.
UNITS_PER_TRIP = 512
BYTES_PER_TRIP = 16 * MIB
NOTHING_TO_RESTORE = (
    "nothing can be restored from it; with --allow-empty, or allow_empty=True, that is fine"
)
# More than any host has.
DEVICES = 128
# Anything else that calls itself a tuning file could be a program.
_TUNED = (names.AUTOTUNE_SUFFIX, names.BEST_CONFIG_SUFFIX)
_NOTHING_SEEN = Observation()
_OURS_ALONE = (names.GROUP_PREFIX, "tmp.")


def runs(
    items: Iterable[T], size_of: Callable[[T], int], most: int, most_bytes: int
) -> Iterator[list[T]]:
    """Split items into runs of neighbours, bounded in number and in bytes; a larger one is
    alone.
    """
    run: list[T] = []
    size = 0
    for item in items:
        more = size_of(item)
        if run and (len(run) == most or size + more > most_bytes):
            yield run
            run, size = [], 0
        run.append(item)
        size += more
    if run:
        yield run


def _stored_bytes(entry: Companion) -> int:
    return entry.artifact.size


class RestorePlan:
    """What of one bundle goes where.

    Looks at this machine, and neither reads nor writes a cache directory.
    """

    def __init__(self, bundle: Bundle, options: RestoreOptions) -> None:
        self.bundle, self.options = bundle, options
        self.base = (
            None if options.cache_dir is None else os.path.abspath(os.fspath(options.cache_dir))
        )
        chosen = options.trees.facts.get("target")
        # Who wants everything asks nothing of the machine.
        self._machine = None if options.only == "all" and chosen is None else Machine(chosen)
        self.triton_dir = identity.triton_dir()
        self.inductor = is_inductor(bundle)
        self.unusable: list[tuple[str, str]] = []
        self.trees = self._plan_of_trees()
        # What is restored into one directory needs no look at what was seen of each kernel.
        self._only_root = None if self.base is None or self.inductor else [self.base]
        self._known_roots: dict[tuple[tuple[int, ...], tuple[str, ...]], list[str]] = {}

    def _plan_of_trees(self) -> TreePlan | None:
        chosen = self.options.trees.roots or self.options.trees.facts
        if not self.bundle.opaque and not chosen:
            return None
        from bundler.format.opaque_files import (
            has_trees,  # few bundles have opaque files, and fewer trees
        )

        if not has_trees(entry.path for entry in self.bundle.opaque) and not chosen:
            return None
        from bundler.lifecycle.tree_plan import TreePlan

        return TreePlan(self.bundle, self.options)

    def wanted_kernels(self) -> Sequence[Kernel]:
        """Return the kernels to place; the others are in `unusable` then, with the reason."""
        return self.usable_kernels(self.trusted_kernels())

    def usable_kernels(self, kernels: Sequence[Kernel]) -> Sequence[Kernel]:
        """Return those of the trusted kernels that this machine can use, or all if it was so asked;
        the others are in `unusable` then.
        """
        return (
            kernels
            if self.options.only == "all" or self._machine is None
            else self._without(kernels, self._machine.judging(kernels))
        )

    def trusted_kernels(self) -> Sequence[Kernel]:
        """Return the kernels that may be placed, whatever this machine is; the others are in
        `unusable` then, with the reason.
        """
        keep, trust = self.options.keep, self.options.trust
        if places_no_code(keep, trust):
            return self.bundle.kernels
        return self._without(
            self.bundle.kernels, lambda kernel: why_not_trusted(kernel, keep, trust)
        )

    def _without(
        self, kernels: Sequence[Kernel], why_not: Callable[[Kernel], str | None]
    ) -> Sequence[Kernel]:
        left: list[Kernel] | None = None
        for number, kernel in enumerate(kernels):
            reason = why_not(kernel)
            if reason is not None:
                # Until one is left out they are the bundle's own tuple, and nothing is copied.
                left = list(kernels[:number]) if left is None else left
                self.unusable.append((kernel.key, reason))
            elif left is not None:
                left.append(kernel)
        return kernels if left is None else left

    def fetched_companions(self) -> Iterator[Companion]:
        """Yield the other files to place; from a store far away they come in few round trips."""
        wanted = self._wanted_companions()
        for run in runs(wanted, _stored_bytes, UNITS_PER_TRIP, BYTES_PER_TRIP):
            self.bundle.blobs.prefetch([digest_raw(entry.artifact.digest) for entry in run])
            yield from run

    def _wanted_companions(self) -> Iterator[Companion]:
        """Yield the other files to place; the rest are in `unusable` then, with the reason."""
        companions: list[Companion] = [
            *self.bundle.tuning_files,
            *self.bundle.helpers,
            *_in_caches(self.bundle),
        ]
        for entry in companions:
            reason = self._why_not(entry)
            if reason is None:
                yield entry
            else:
                self.unusable.append((entry.path, reason))

    def runs_of(self, items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
        """Split items into runs, each of which is fetched at once."""
        if not self.bundle.blobs.waits:
            return runs(items, size_of, KERNELS_PER_RUN, BYTES_PER_RUN)
        return runs(
            items,
            size_of,
            UNITS_PER_TRIP // (2 if self.options.keep == "all" else 1),
            BYTES_PER_TRIP,
        )

    def warn_of_nothing(self, skipped: Iterable[tuple[str, str]], others: int = 0) -> None:
        """Warn that no kernel can be used here, with the reason; `others` is how many other files
        are in place.
        """
        keys = {kernel.key for kernel in self.bundle.kernels}
        # One reason stands for all: the least, which is the same one in each run.
        reason = min(reason for name, reason in skipped if name in keys)
        from bundler.user_warnings import warn  # hardly a restore warns

        if others:
            from bundler.format.summary import count

            none = f"none of the {count(len(keys), 'kernel')} in this bundle can be used here"
            warn(f"{none}: {reason}; in place beside them: {count(others, 'other file')}")
            return
        warn(f"nothing in this bundle can be used here: {reason}")

    def _why_not(self, entry: Companion) -> str | None:
        if any(part.startswith(_OURS_ALONE) for part in entry.path.split("/")):
            return "group files and temporary files are made here, and never taken from a bundle"
        if isinstance(entry, TuningFile) and entry.path.endswith(_TUNED):
            return None
        if self.options.trust != "code":
            return NEEDS_TRUST
        if self.options.keep == "launch" and isinstance(entry, Opaque):
            return "not needed to launch (keep='launch')"
        if self.options.only == "usable" and isinstance(entry, HelperLibrary):
            return why_not_helper(entry)
        return None

    @property
    def unchecked(self) -> set[str]:
        """Facts that are unknown on this machine and therefore excluded nothing."""
        return set() if self._machine is None else self._machine.unchecked

    def localize(self, artifact: Artifact, data: bytes, root: str) -> bytes:
        """Put paths of this machine in place of a file's placeholders."""
        return localize(artifact.spans, data, root, self.triton_dir)

    def roots(self, kernel: Kernel) -> list[str]:
        """Cache directories that this kernel goes to."""
        if self.trees is not None and kernel.key in self.trees.kernel_roots:
            return [*self.trees.kernel_roots[kernel.key]]
        if self._only_root is not None:
            return self._only_root
        seen = self.bundle.observed.kernels.get(kernel.key, _NOTHING_SEEN)
        # Thousands of kernels were seen in few places: the directories are worked out once for each
        # of these.
        places = (seen.devices, seen.layouts)
        if places not in self._known_roots:
            self._known_roots[places] = self._roots_of(seen)
        return self._known_roots[places]

    def _roots_of(self, seen: Observation) -> list[str]:
        if self.base is not None:
            return self._device_roots(seen.devices) if self.inductor else [self.base]
        roots = self._device_roots(seen.devices) if "inductor" in seen.layouts else []
        return roots + (
            [directories.triton_cache_dir()]
            if "inductor" not in seen.layouts or "triton" in seen.layouts
            else []
        )

    def _device_roots(self, seen: Sequence[int] = ()) -> list[str]:
        # A kernel of which no device is known goes where the bundle's others go, and without these
        # to the first device.
        seen = _existing(seen) or _existing(self.bundle.observed.devices) or (0,)
        chosen = self.options.devices if self.options.devices is not None else seen
        if self.base is None:
            return list(dict.fromkeys(directories.inductor_kernel_dir(device) for device in chosen))
        return [os.path.join(self.base, "triton", str(device)) for device in dict.fromkeys(chosen)]

    def companion_roots(self, entry: Companion) -> list[str]:
        """Return the directories that a file goes to."""
        folder = entry.path.partition("/")[0]
        in_triton = not isinstance(entry, Opaque) and names.is_kernel_key(folder)
        if in_triton and self.trees is not None and folder in self.trees.kernel_roots:
            return [*self.trees.kernel_roots[folder]]
        if not in_triton:
            return [self.base or directories.inductor_cache_dir()]
        if self.inductor:
            return self._device_roots()
        return [self.base or directories.triton_cache_dir()]


def _existing(devices: Sequence[int]) -> Sequence[int]:
    """Leave out indices that no host has: there is a directory for each, whatever somebody wrote
    into a bundle.
    """
    return [device for device in devices if 0 <= device < DEVICES]


@contextmanager
def opened(bundle: Bundle | str | os.PathLike[str]) -> Iterator[Bundle]:
    """Open a bundle given by its path; one that is open already stays open."""
    if isinstance(bundle, Bundle):
        yield bundle
        return
    with Bundle.load(bundle) as loaded:
        yield loaded


def _in_caches(bundle: Bundle) -> list[Opaque]:
    """Return the opaque files of a bundle that belong to Inductor's cache."""
    if not bundle.opaque:
        return []
    from bundler.format.opaque_files import is_cache_path  # few bundles have opaque files

    return [entry for entry in bundle.opaque if is_cache_path(entry.path)]


def is_inductor(bundle: Bundle) -> bool:
    """Tell whether a bundle came from Inductor's cache, which has a kernel directory for each
    device.
    """
    return (
        bool(_in_caches(bundle))
        or "inductor" in bundle.observed.layouts
        or any(not entry.in_triton_cache for entry in bundle.tuning_files)
    )
