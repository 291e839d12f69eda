# SPDX-License-Identifier: Apache-2.0
"""`restore`: bundle -> cache directory, where the next process finds its kernels without compiling."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from bundler.errors import BundlerError, DigestMismatch, FormatError, NotFound
from bundler.format import names
from bundler.format.bundle import Bundle, Keep
from bundler.format.digest import digest_raw
from bundler.format.entries import Artifact, HelperLibrary, Kernel
from bundler.lifecycle import rekey as rekeying
from bundler.lifecycle.placing import Companion, Only, Placement, Trust, check_choices, opened
from bundler.lifecycle.publishing import CacheDirectory, Files, Outcome
from bundler.lifecycle.reading import Rejected, check_kernel_files
from bundler.lifecycle.report import RestoreReport
from bundler.lifecycle.tuning import place_tunings
from bundler.toolchain import directories, libraries

# From a store far away one thread fetches a run while this one writes another; what was fetched and not yet written is in
# memory, which this bounds.  Otherwise one thread does all: decoding, hashing and writing are thousands of short calls, and threads lose
# more by handing the interpreter lock over between them than a second core gains.
RUNS_AHEAD = 1


def restore(
    bundle: Bundle | str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    keep: Keep = "all",
    devices: Sequence[int] | None = None,
    only: Only = "usable",
    trust: Trust = "kernels",
    rekey: bool = False,
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
        rekey: restore a kernel that another build of the same Triton release compiled, for another Python or installed elsewhere,
            under the key that this machine's Triton will ask for, with its hash in the metadata; only where each other part of
            the key is equal.  Imports Triton.

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
    check_choices(cache_dir, keep, devices, only, trust)
    with opened(bundle) as source:
        changed = rekeying.derive(source) if rekey else rekeying.Rekeyed(source, {}, {})
        report = Restoration(changed.bundle, cache_dir, keep, devices, only, trust).run()
    return changed.told(report)


_Chosen = tuple[Kernel, list[tuple[Artifact, bytes]]]


@dataclass(frozen=True)
class _Verified:
    """A kernel whose bytes are what they should be: its files by directory, and the names of those that hold a path."""

    key: str
    metadata: bytes
    placed: Mapping[str, Files]
    with_paths: list[str]


@dataclass
class _Tally:
    """What one restore did so far."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    companions: list[str] = field(default_factory=list)
    rewritten: set[str] = field(default_factory=set)
    tuned: int = 0
    files: int = 0
    bytes: int = 0

    def spoiled(self, name: str, error: BundlerError) -> None:
        self.skipped.append((name, error.message))
        self.damaged.append(name)

    def placed(self, kernel: _Verified, root: str, outcome: Outcome) -> None:
        files = kernel.placed[root]
        self.outcomes[kernel.key] = _worst(self.outcomes.get(kernel.key), outcome)
        if outcome != "present":
            self.wrote(len(files) + 1, sum(map(len, files.values())))
            self.rewritten |= {f"{kernel.key}/{name}" for name in kernel.with_paths}

    def wrote(self, files: int, size: int) -> None:
        self.files += files
        self.bytes += size


def _worst(one: Outcome | None, two: Outcome) -> Outcome:
    """A kernel that goes to several directories counts as repaired, else restored, if it was that anywhere."""
    order: tuple[Outcome, ...] = ("present", "restored", "repaired")
    return two if one is None else max(one, two, key=order.index)


class Restoration(Placement):
    """One restore; `run` does it and returns the report."""

    def __init__(
        self,
        bundle: Bundle,
        cache_dir: str | os.PathLike[str] | None,
        keep: Keep,
        devices: Sequence[int] | None,
        only: Only,
        trust: Trust,
    ) -> None:
        super().__init__(bundle, cache_dir, keep, devices, only, trust)
        self.tally = _Tally()
        self.places: dict[str, CacheDirectory] = {}

    def run(self) -> RestoreReport:
        """Do it; raises as `restore`."""
        started = time.monotonic()
        try:
            self._kernels()
            self._companions()
            if self.bundle.tuning_records:
                self.tally.tuned = place_tunings(self.bundle, self.base or directories.triton_cache_dir())
        except BundlerError as error:
            error.facts["report"] = self._report(started)
            raise
        report = self._report(started)
        if self.bundle.kernels and not report.usable:
            self._warn_of_nothing(report.skipped, stacklevel=3)
        return report

    def _kernels(self) -> None:
        wanted = self._wanted_kernels()
        for root in {root for kernel in wanted for root in self._roots(kernel)}:
            self._place(root)
        chosen = ([(kernel, self._artifacts(kernel)) for kernel in run] for run in self._runs(wanted))
        for run in self._fetched_ahead(chosen) if self.bundle.blobs.waits else map(self._fetched, chosen):
            self._publish_all(run)

    def _fetched(self, run: list[_Chosen]) -> list[_Chosen]:
        self.bundle.blobs.prefetch([digest for _, artifacts in run for _, digest in artifacts])
        return run

    def _fetched_ahead(self, chosen: Iterable[list[_Chosen]]) -> Iterator[list[_Chosen]]:
        """Yield runs of kernels whose blobs were fetched, while a thread fetches those of the next ones."""
        ready: deque[Future[list[_Chosen]]] = deque()
        with ThreadPoolExecutor(1) as reader:
            try:
                for run in chosen:
                    ready.append(reader.submit(self._fetched, run))
                    if len(ready) > RUNS_AHEAD:
                        yield ready.popleft().result()
                while ready:
                    yield ready.popleft().result()
            finally:
                reader.shutdown(wait=False, cancel_futures=True)

    def _publish_all(self, run: list[_Chosen]) -> None:
        for kernel, artifacts in run:
            try:
                verified = self._verified(kernel, artifacts)
            except (DigestMismatch, FormatError, NotFound) as error:
                self.tally.spoiled(kernel.key, error)
                continue
            for root, files in verified.placed.items():
                outcome = self.places[root].publish(kernel.key, files, verified.metadata)
                self.tally.placed(verified, root, outcome)

    def _verified(self, kernel: Kernel, artifacts: list[tuple[Artifact, bytes]]) -> _Verified:
        """Read a kernel and check everything about it; raises what is wrong with it."""
        stored: dict[str, bytes | memoryview] = {}
        with_paths: list[Artifact] = []
        for artifact, digest in artifacts:
            data = self.bundle.view_blob(digest, artifact.filename)
            # What is looked into is small; IR, which is only written, is not copied.
            stored[artifact.filename] = bytes(data) if artifact.kind in names.LAUNCH_KINDS else data
            if artifact.spans:
                with_paths.append(artifact)
        placed = {root: self._files(kernel, stored, with_paths, root) for root in self._roots(kernel)}
        metadata = bytes(stored[kernel.metadata.filename])
        return _Verified(kernel.key, metadata, placed, [artifact.filename for artifact in with_paths])

    def _files(
        self, kernel: Kernel, stored: dict[str, bytes | memoryview], with_paths: list[Artifact], root: str
    ) -> Files:
        """Return a kernel's files for one directory; raises `FormatError` when Triton could not read them there."""
        files = {**stored, **{a.filename: self._localize(a, bytes(stored[a.filename]), root) for a in with_paths}}
        launch = {a.filename: bytes(files[a.filename]) for a in kernel.launch_set}
        checked = check_kernel_files(kernel.key, launch)
        if isinstance(checked, Rejected):
            raise FormatError(checked.reason, key=kernel.key)
        return files

    def _companions(self) -> None:
        for entry in self._fetched_companions():
            try:
                stored = self.bundle.read(entry.artifact)
                placed = {root: self._localize(entry.artifact, stored, root) for root in self._companion_roots(entry)}
            except (DigestMismatch, FormatError, NotFound) as error:
                self.tally.spoiled(entry.path, error)
                continue
            for root, data in placed.items():
                for path in self._paths(entry):
                    self._publish_file(root, path, data, rewritten=bool(entry.artifact.spans))

    def _publish_file(self, root: str, path: str, data: bytes, *, rewritten: bool) -> None:
        written = self._place(root).publish_file(path, data)
        if written is None:
            self.tally.skipped.append((path, f"another file is there already, in {root}"))
            return
        self.tally.companions.append(path)
        if written:
            self.tally.wrote(1, len(data))
            self.tally.rewritten |= {path} if rewritten else set()

    def _paths(self, entry: Companion) -> list[str]:
        """Return where a file belongs: a library also under the keys that this machine's Triton may ask for."""
        key, _, filename = entry.path.partition("/")
        if not isinstance(entry, HelperLibrary):
            return [entry.path]
        releases = {kernel.toolchain.release for kernel in self.bundle.kernels}
        others = libraries.other_keys(key, filename, releases.pop() if len(releases) == 1 else None)
        return [entry.path, *(f"{other}/{filename}" for other in sorted(others))]

    def _artifacts(self, kernel: Kernel) -> list[tuple[Artifact, bytes]]:
        """Return the files to write and their raw digests, in Triton's order."""
        chosen = kernel.launch_set if self.keep == "launch" else kernel.artifacts
        ordered = sorted(chosen, key=lambda artifact: names.artifact_order(artifact.filename))
        return [(artifact, digest_raw(artifact.digest)) for artifact in ordered]

    def _place(self, root: str) -> CacheDirectory:
        if root not in self.places:
            self.places[root] = CacheDirectory(root)
        return self.places[root]

    def _report(self, started: float) -> RestoreReport:
        tally = self.tally

        def keys(outcome: Outcome) -> tuple[str, ...]:
            return tuple(sorted(key for key, got in tally.outcomes.items() if got == outcome))

        return RestoreReport(
            restored=keys("restored"),
            present=keys("present"),
            repaired=keys("repaired"),
            skipped=tuple(sorted({*self.unusable, *tally.skipped})),
            damaged=tuple(sorted(set(tally.damaged))),
            unchecked=tuple(sorted(self.machine.unchecked)),
            companions=tuple(sorted(set(tally.companions))),
            rewritten=tuple(sorted(tally.rewritten)),
            directories=tuple(sorted(self.places)),
            tuned=tally.tuned,
            files=tally.files,
            bytes=tally.bytes,
            seconds=time.monotonic() - started,
        )
