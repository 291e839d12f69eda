# SPDX-License-Identifier: Apache-2.0
"""`restore`: bundle -> cache directory, where the next process finds its kernels without compiling."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from bundler.errors import (
    BundlerError,
    BundlerWarning,
    ConfigError,
    DigestMismatch,
    FormatError,
    NotFound,
    ToolchainMismatch,
)
from bundler.format import names, sentinel
from bundler.format.bundle import Bundle, Keep
from bundler.format.digest import digest_raw
from bundler.format.entries import Artifact, HelperLibrary, Kernel, Opaque, TuningFile
from bundler.format.manifest import Observation
from bundler.lifecycle.fitting import Machine
from bundler.lifecycle.publishing import CacheDirectory, Outcome
from bundler.lifecycle.reading import Rejected, check_kernel_files
from bundler.lifecycle.report import RestoreReport
from bundler.toolchain import directories, identity

Only = Literal["usable", "all"]
Trust = Literal["kernels", "code"]
Companion = TuningFile | HelperLibrary | Opaque

WRITER_THREADS = 2
KERNELS_PER_TASK = 16
NEEDS_TRUST = "it would be executed or unpickled; pass trust='code' if you trust who made the bundle"
_CHOICES = {"keep": ("all", "launch"), "only": ("usable", "all"), "trust": ("kernels", "code")}


def restore(
    bundle: Bundle | str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    keep: Keep = "all",
    devices: Sequence[int] | None = None,
    only: Only = "usable",
    trust: Trust = "kernels",
) -> RestoreReport:
    """Put the kernels of a bundle where Triton or Inductor will look for them.

    Every byte is verified before it becomes visible; a kernel directory appears whole, by one rename, or not at all.
    May run in any number of processes and threads at once, beside Triton itself.

    Args:
        bundle: a bundle, or the path of one.
        cache_dir: the cache directory; None for where this process's Triton looks (for kernels recorded under
            Inductor: Inductor's directory of each device), resolved now.
        keep: `launch` writes only device binary and metadata, which is all that a hit needs.
        devices: device indices to place Inductor's kernels for; None for those they were recorded on.
        only: `usable` leaves out what this machine surely cannot use; `all` restores everything.
        trust: `kernels` restores device binaries, metadata, IR and tuning files; `code` also shared libraries and what
            torch executes or unpickles.

    Returns:
        What was done, and what was left out and why.

    Raises:
        ConfigError: an argument has a value that is not listed above.
        FormatError, DigestMismatch, NotFound: the bundle cannot be opened.  A kernel whose bytes are damaged is
            skipped with that reason, and the others are restored.
        ToolchainMismatch: not a POSIX system.
        AccessDenied, StoreFull: the directory cannot be written.  Kernels published before stay, nothing half-written
            does; the error's `report` says what was done.

    Warns:
        BundlerWarning: nothing in the bundle can be used here, with the reason.
    """
    for name, value in (("keep", keep), ("only", only), ("trust", trust)):
        if value not in _CHOICES[name]:
            raise ConfigError(f"{name}={value!r}: expected {' or '.join(map(repr, _CHOICES[name]))}", got=value)
    _check_devices(devices)
    if cache_dir is not None and not os.fspath(cache_dir):
        raise ConfigError("cache_dir is an empty text; give a directory, or None for Triton's own", got=cache_dir)
    if os.name != "posix":
        raise ToolchainMismatch(
            f"restore needs a POSIX system (directories renamed over each other, no-follow opens); this is {os.name}",
            platform=os.name,
        )
    opened = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    try:
        return _Restore(opened, cache_dir, keep, devices, only, trust).run()
    finally:
        if opened is not bundle:
            opened.close()


def _check_devices(devices: Sequence[int] | None) -> None:
    if devices is None:
        return
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable):
        raise ConfigError(f"devices={devices!r}: expected device indices, such as [0, 1]", got=devices)
    if not devices or any(type(device) is not int or device < 0 for device in devices):
        raise ConfigError(f"devices={devices!r}: expected one or more device indices, such as [0, 1]", got=devices)


@dataclass
class _Tally:
    """What the tasks of one restore did so far."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    companions: list[str] = field(default_factory=list)
    rewritten: set[str] = field(default_factory=set)
    files: int = 0
    bytes: int = 0

    def spoiled(self, name: str, error: BundlerError) -> None:
        self.skipped.append((name, error.message))
        self.damaged.append(name)

    def wrote(self, files: int, size: int) -> None:
        self.files += files
        self.bytes += size

    def add(self, other: _Tally) -> None:
        for key, outcome in other.outcomes.items():
            self.outcomes[key] = _worst(self.outcomes.get(key), outcome)
        self.skipped += other.skipped
        self.damaged += other.damaged
        self.companions += other.companions
        self.rewritten |= other.rewritten
        self.wrote(other.files, other.bytes)


def _worst(one: Outcome | None, two: Outcome) -> Outcome:
    """A kernel that goes to several directories counts as repaired, else restored, if it was that anywhere."""
    order: tuple[Outcome, ...] = ("present", "restored", "repaired")
    return two if one is None else max(one, two, key=order.index)


class _Restore:
    def __init__(
        self,
        bundle: Bundle,
        cache_dir: str | os.PathLike[str] | None,
        keep: Keep,
        devices: Sequence[int] | None,
        only: Only,
        trust: Trust,
    ) -> None:
        self.bundle = bundle
        self.keep, self.only, self.trust = keep, only, trust
        self.base = None if cache_dir is None else os.path.abspath(os.fspath(cache_dir))
        self.devices = tuple(devices) if devices is not None else None
        self.machine = Machine()
        self.triton_dir = identity.triton_dir()
        self.inductor = is_inductor(bundle)
        self.tally = _Tally()
        self.places: dict[str, CacheDirectory] = {}

    def run(self) -> RestoreReport:
        started = time.monotonic()
        try:
            self._kernels()
            self._companions()
        except BundlerError as error:
            error.facts["report"] = self._report(started)
            raise
        report = self._report(started)
        if self.bundle.kernels and not report.usable:
            keys = {kernel.key for kernel in self.bundle.kernels}
            reason = min(reason for name, reason in report.skipped if name in keys)
            warnings.warn(f"nothing in this bundle can be used here: {reason}", BundlerWarning, stacklevel=3)
        return report

    def _kernels(self) -> None:
        wanted = []
        for kernel in self.bundle.kernels:
            reason = self.machine.why_not(kernel) if self.only == "usable" else None
            if reason is None:
                wanted.append(kernel)
            else:
                self.tally.skipped.append((kernel.key, reason))
        for root in {root for kernel in wanted for root in self._roots(kernel)}:
            self._place(root)
        # Neighbours share compressed frames, so tasks take runs of neighbours.
        tasks = [wanted[i : i + KERNELS_PER_TASK] for i in range(0, len(wanted), KERNELS_PER_TASK)]
        with ThreadPoolExecutor(WRITER_THREADS) as pool:
            futures = [pool.submit(self._publish_all, task) for task in tasks]
            failure: BundlerError | None = None
            for future in futures:
                if future.cancelled():
                    continue
                tally, error = future.result()
                self.tally.add(tally)
                if error is not None and failure is None:
                    failure = error
                    for other in futures:
                        other.cancel()  # one that runs already goes on, and counts
        if failure is not None:
            raise failure

    def _publish_all(self, kernels: list[Kernel]) -> tuple[_Tally, BundlerError | None]:
        tally = _Tally()
        try:
            artifacts = [artifact for kernel in kernels for artifact in self._artifacts(kernel)]
            self.bundle.blobs.prefetch([digest_raw(artifact.digest) for artifact in artifacts])
        except BundlerError as error:
            return tally, error
        for kernel in kernels:
            try:
                stored = {a: self.bundle.read(a) for a in self._artifacts(kernel)}
                placed = {root: self._files(kernel, stored, root) for root in self._roots(kernel)}
            except (DigestMismatch, FormatError, NotFound) as error:
                tally.spoiled(kernel.key, error)
                continue
            try:
                for root, files in placed.items():
                    self._publish(kernel, stored, files, root, tally)
            except BundlerError as error:
                return tally, error
        return tally, None

    def _files(self, kernel: Kernel, stored: dict[Artifact, bytes], root: str) -> dict[str, bytes]:
        """Return a kernel's files for one directory; raises `FormatError` when Triton could not read them there."""
        files = {artifact.filename: self._localize(artifact, data, root) for artifact, data in stored.items()}
        checked = check_kernel_files(kernel.key, files)
        if isinstance(checked, Rejected):
            raise FormatError(checked.reason, key=kernel.key)
        return files

    def _publish(
        self, kernel: Kernel, stored: dict[Artifact, bytes], files: dict[str, bytes], root: str, tally: _Tally
    ) -> None:
        place = self.places[root]
        outcome = place.publish(kernel.key, files, stored[kernel.metadata])
        tally.outcomes[kernel.key] = _worst(tally.outcomes.get(kernel.key), outcome)
        if outcome != "present":
            tally.wrote(len(files) + 1, sum(map(len, files.values())))
            tally.rewritten |= {f"{kernel.key}/{artifact.filename}" for artifact in stored if artifact.spans}

    def _companions(self) -> None:
        companions: list[Companion] = [*self.bundle.tuning_files, *self.bundle.helpers, *self.bundle.opaque]
        for entry in companions:
            reason = self._why_not(entry)
            if reason is not None:
                self.tally.skipped.append((entry.path, reason))
                continue
            try:
                stored = self.bundle.read(entry.artifact)
                placed = {root: self._localize(entry.artifact, stored, root) for root in self._companion_roots(entry)}
            except (DigestMismatch, FormatError, NotFound) as error:
                self.tally.spoiled(entry.path, error)
                continue
            for root, data in placed.items():
                written = self._place(root).publish_file(entry.path, data)
                if written is None:
                    self.tally.skipped.append((entry.path, f"another file is there already, in {root}"))
                    continue
                self.tally.companions.append(entry.path)
                if written:
                    self.tally.wrote(1, len(data))
                    self.tally.rewritten |= {entry.path} if entry.artifact.spans else set()

    def _why_not(self, entry: Companion) -> str | None:
        if isinstance(entry, TuningFile):
            return None
        if self.trust != "code":
            return NEEDS_TRUST
        if self.keep == "launch" and isinstance(entry, Opaque):
            return "not needed to launch (keep='launch')"
        if self.only == "usable" and isinstance(entry, HelperLibrary):
            return self.machine.why_not_helper(entry)
        return None

    def _artifacts(self, kernel: Kernel) -> Iterable[Artifact]:
        chosen = kernel.launch_set if self.keep == "launch" else kernel.artifacts
        return sorted(chosen, key=lambda artifact: names.artifact_order(artifact.filename))

    def _localize(self, artifact: Artifact, data: bytes, root: str) -> bytes:
        if not artifact.spans:
            return data
        paths = {sentinel.CACHE_DIR: root}
        if self.triton_dir is not None:
            paths[sentinel.TRITON_DIR] = self.triton_dir
        return sentinel.from_sentinels(data, artifact.spans, paths)

    def _place(self, root: str) -> CacheDirectory:
        if root not in self.places:
            self.places[root] = CacheDirectory(root)
        return self.places[root]

    def _roots(self, kernel: Kernel) -> list[str]:
        """Cache directories that this kernel goes to."""
        seen = self.bundle.observed.kernels.get(kernel.key, Observation())
        if self.base is not None:
            return self._device_roots(seen.devices) if self.inductor else [self.base]
        roots = self._device_roots(seen.devices) if "inductor" in seen.layouts else []
        return roots + ([directories.triton_cache_dir()] if "inductor" not in seen.layouts or "triton" in seen.layouts
                        else [])  # fmt: skip

    def _device_roots(self, seen: Sequence[int] = ()) -> list[str]:
        chosen = self.devices if self.devices is not None else (seen or self.bundle.observed.devices or (0,))
        if self.base is None:
            return list(dict.fromkeys(directories.inductor_kernel_dir(device) for device in chosen))
        return [os.path.join(self.base, "triton", str(device)) for device in dict.fromkeys(chosen)]

    def _companion_roots(self, entry: Companion) -> list[str]:
        in_triton = not isinstance(entry, Opaque) and names.is_kernel_key(entry.path.partition("/")[0])
        if not in_triton:
            return [self.base or directories.inductor_cache_dir()]
        if self.inductor:
            return self._device_roots()
        return [self.base or directories.triton_cache_dir()]

    def _report(self, started: float) -> RestoreReport:
        tally = self.tally

        def keys(outcome: Outcome) -> tuple[str, ...]:
            return tuple(sorted(key for key, got in tally.outcomes.items() if got == outcome))

        return RestoreReport(
            restored=keys("restored"),
            present=keys("present"),
            repaired=keys("repaired"),
            skipped=tuple(sorted(set(tally.skipped))),
            damaged=tuple(sorted(set(tally.damaged))),
            unchecked=tuple(sorted(self.machine.unchecked)),
            companions=tuple(sorted(set(tally.companions))),
            rewritten=tuple(sorted(tally.rewritten)),
            directories=tuple(sorted(self.places)),
            files=tally.files,
            bytes=tally.bytes,
            seconds=time.monotonic() - started,
        )


def is_inductor(bundle: Bundle) -> bool:
    """Tell whether a bundle came from Inductor's cache, which has a kernel directory for each device."""
    return (
        bool(bundle.opaque)
        or any("inductor" in seen.layouts for seen in bundle.observed.kernels.values())
        or any(not entry.in_triton_cache for entry in bundle.tuning_files)
    )
