# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: what torch.compile made in this process, as a bundle, in place of torch's
save_ and load_cache_artifacts.

::

    bundler.integrations.inductor.save("model.tbundle")                   after the first iterations
    bundler.integrations.inductor.load("model.tbundle", trust="code")     in another process, before the first

Users call both.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Sequence

from bundler.errors import ConfigError, NotFound, RecordingError
from bundler.format import names
from bundler.format.bundle import Bundle, Keep, check_keep, require_content
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Artifact, Entry, HelperLibrary, Opaque, Toolchain, TuningFile
from bundler.format.manifest import Observation
from bundler.format.opaque_files import is_cache_path
from bundler.format.summary import plural
from bundler.integrations.inductor_generated import compile_generated, load_generated
from bundler.lifecycle.bundle_builder import Builder, KnownFacts, join
from bundler.lifecycle.directory_pack import pack, single_files
from bundler.lifecycle.kernel_placement import Trust
from bundler.lifecycle.lifecycle_reports import Only, RestoreReport
from bundler.lifecycle.restoration import restore
from bundler.lifecycle.restore_plan import opened
from bundler.project import install
from bundler.toolchain import directories, identity, inductor_caches
from bundler.toolchain.inductor_caches import RewrittenEntries, rewrite
from bundler.user_warnings import warn

__all__ = ["compile_generated", "load", "load_generated", "save"]

_NO_TORCH = f"torch cannot be imported; install it in this environment: {install('torch')}"
# What rewriting an entry of an unknown shape can raise.
_UNKNOWN_SHAPE = (pickle.PickleError, AttributeError, TypeError, ValueError, KeyError, ImportError)


def save(
    path: str | os.PathLike[str] | None = None, *, keep: Keep = "launch", winners_only: bool = False
) -> Bundle:
    """Collect what torch.compile made, or took from its caches, in this process.

    Call it after the first iterations, when every kernel has run: torch's graph entries are then
    cut down to the configurations that tuning chose, and the next process launches these without
    looking further.  torch's own cache is left as it is. A process that found everything in its
    caches, and never asked Triton for a kernel, gives the same.

    Args:
        path: where to write the bundle too; None to only return it.
        keep: `launch` takes each kernel's device binary and metadata; `all` its IR too.
        winners_only: leave out the candidates that tuning did not choose.  They are of use where a
            graph entry is not: to another device index, another $CXX or a changed model, which tune
            among them instead of compiling them.

    Returns:
        The bundle; its `left_out` names every kernel that torch will build again from its source,
        with the reason, and everything else that was seen and not taken.

    Raises:
        RecordingError: torch is not installed.
        NotFound: torch.compile has compiled nothing in this process.
        EmptyBundle: nothing of it could be taken, so no file was written.
        ConfigError: another value for `keep`.
        StoreFull, AccessDenied, NotFound: the file cannot be written.

    Warns:
        BundlerWarning: this torch keeps its caches in a way that we do not know.  What it lacks is
        named, and its whole cache
            directory is packed as it is.
    """
    check_keep(keep)
    if not inductor_caches.is_installed():
        raise RecordingError(_NO_TORCH)
    missing = inductor_caches.missing()
    bundle = _packed(missing) if missing else _collected(keep, winners_only=winners_only)
    if path is not None:
        require_content(bundle, f"{path} was not written")
        bundle.save(path)
    return bundle


def load(
    bundle: Bundle | str | os.PathLike[str],
    *,
    devices: Sequence[int] | None = None,
    only: Only = "usable",
    trust: Trust = "kernels",
) -> RestoreReport:
    """Put a bundle of `save` where torch.compile looks, before it compiles.

    Any number of processes may do so at once, such as the ranks on one host.

    Args:
        bundle: a bundle, or the path of one.
        devices: device indices to place kernels for; None for those they were recorded on.  torch
            writes the index into the keys of its graph entries, so on another device only kernels
            are found.
        only: as for `bundler.restore`.
        trust: `code` also restores what torch unpickles and executes, its graph entries: only from
            those you trust.  Without them torch generates its code again, and finds the kernels.

    Returns:
        What was done, and what was left out and why.

    Raises:
        ConfigError: torch is not installed, or an argument has a value that is not listed.
        FormatError, DigestMismatch, NotFound, EmptyBundle, ToolchainMismatch, AccessDenied,
            StoreFull: as `bundler.restore`.

    Warns:
        BundlerWarning: the graph entries cannot be found by this process, and why: not trusted,
        another torch, another $CXX;
            or this torch cannot be kept from tuning again, naming what it lacks.
    """
    if not inductor_caches.is_installed():
        raise ConfigError(_NO_TORCH)
    with opened(bundle) as source:
        report = restore(source, devices=devices, only=only, trust=trust)
        reasons = list(_why_not_found(source, trust))
    lacking = inductor_caches.keep_winners()
    if lacking:
        reasons.append(
            f"torch {inductor_caches.release()} is not one that we know, it has no"
            f" {', '.join(lacking)}: it may tune kernels again whose results it has read"
        )
    for reason in reasons:
        warn(reason)
    return report


def _packed(missing: Iterable[str]) -> Bundle:
    warn(
        f"torch {inductor_caches.release()} is not one that we know: it has no"
        f" {', '.join(missing)}.  Its whole cache directory is packed as it is, and where it is"
        " restored torch may tune again"
    )
    return pack(directories.inductor_cache_dir())


def _collected(keep: Keep, *, winners_only: bool) -> Bundle:
    entries, left_out = inductor_caches.recorded()
    loaded = inductor_caches.loaded_kernels()
    if not entries and not loaded:
        raise NotFound(
            "torch.compile has compiled nothing in this process; call save() after the first"
            " iterations"
        )
    # The last one that is settled: a kernel may be in several graphs, and each tunes for itself.
    live = {
        kernel.identity: kernel
        for kernel in sorted(loaded, key=lambda kernel: kernel.winner is not None)
    }
    done = RewrittenEntries()
    files = Builder(directories.inductor_cache_dir())
    files.left_out += left_out
    for entry in entries:
        content, path = entry.content, entry.path
        if entry.kind in (inductor_caches.GRAPH, inductor_caches.AUTOGRAD):
            content = _rewritten(entry, live, done, files.left_out)
        if entry.kind == inductor_caches.GRAPH:  # torch names these by their content
            path = inductor_caches.graph_path(entry.key, content)
        _add(files, path, content, TuningFile if entry.kind == inductor_caches.TUNING else Opaque)
    files.left_out += done.rebuilt
    kernels = _wanted(loaded, done, winners_only=winners_only)
    environment, cxx = identity.environment(), inductor_caches.compiler()
    if cxx:
        environment = (*environment, ("CXX", cxx))
    return join([files, *_kernel_builders(kernels, keep, files.left_out)], environment)


def _rewritten(
    entry: inductor_caches.CacheEntry,
    loaded: dict[tuple[int, str], inductor_caches.LoadedKernel],
    done: RewrittenEntries,
    left_out: list[tuple[str, str]],
) -> bytes:
    try:
        return rewrite(entry.content, loaded, done)
    except _UNKNOWN_SHAPE as error:
        reason = f"{type(error).__name__}: {error}"
        left_out.append(
            (entry.path, f"not cut down, so torch may tune its kernels again: {reason}")
        )
        return entry.content


def _add(files: Builder, path: str, content: bytes, kind: type[TuningFile | Opaque]) -> None:
    try:
        names.check_relative_path(path)
    except ValueError as error:
        files.left_out.append((path, str(error)))
        return
    raw = sha256(content)
    files.blobs[raw] = content
    entry: Entry = kind(path, Artifact(path.rpartition("/")[2], digest_text(raw), len(content)))
    files.entries[path] = entry


def _wanted(
    loaded: Iterable[inductor_caches.LoadedKernel], done: RewrittenEntries, *, winners_only: bool
) -> dict[str, set[int]]:
    """Return the kernels to take, and the devices that each was loaded for."""
    devices: dict[str, set[int]] = {}
    needed = set(done.needed)
    for kernel in loaded:
        for key in kernel.candidates:
            devices.setdefault(key, set()).add(kernel.device)
        if kernel.identity not in done.settled:
            needed |= kernel.candidates
        elif kernel.winner is not None:
            needed.add(kernel.winner)
    for device, key in done.kernels:
        devices.setdefault(key, set()).add(device)
    return {key: found for key, found in devices.items() if key in needed or not winners_only}


def _kernel_builders(
    kernels: dict[str, set[int]], keep: Keep, left_out: list[tuple[str, str]]
) -> Iterable[Builder]:
    """Yield a builder for each directory that holds kernels of this process."""
    # torch pins the directory of one device for all that a process compiles, so each may look where
    # another does.
    every = tuple(sorted(set().union(*kernels.values())))
    observation = Observation(every, ("inductor",))
    # torch's own keys, which found them, hold the digest of this Triton.
    facts = KnownFacts(identity.installed_triton() or Toolchain())
    builders: dict[str, Builder] = {}
    for key in sorted(kernels):
        root = inductor_caches.kernel_root(key, sorted(kernels[key]))
        if root is None:
            left_out.append((key, "its directory is gone"))
            continue
        builders.setdefault(root, Builder(root, keep)).add_directory(key, observation, facts)
    # With the libraries that Triton built with the C compiler: without them the next process builds
    # them again.
    for root, builder in builders.items():
        for folder in sorted(filter(names.is_kernel_key, os.listdir(root))):
            for name in single_files(os.path.join(root, folder)):
                if name.endswith(".so"):
                    builder.add_file(f"{folder}/{name}", HelperLibrary)
    return builders.values()


def _why_not_found(bundle: Bundle, trust: Trust) -> Iterable[str]:
    graphs = [entry for entry in bundle.opaque if is_cache_path(entry.path)]
    if not graphs:
        return
    if trust != "code":
        yield (
            f"{len(graphs)} of torch's graph entries {plural(len(graphs), 'was')} not restored,"
            " since torch unpickles and executes what it finds there; pass trust='code' if you"
            " trust who made the bundle"
        )
        return
    hosts = [dict(pairs) for pairs in bundle.observed.environments]
    here = {"torch": dict(identity.environment()).get("torch"), "CXX": inductor_caches.compiler()}
    for name, found in here.items():
        recorded = {host[name] for host in hosts if name in host}
        if recorded and found not in recorded:
            yield (
                f"recorded with {name} {' and '.join(sorted(recorded))}, here it is {found}: torch"
                " writes it into the keys of its graph entries, so they are not found, only"
                " kernels are"
            )
