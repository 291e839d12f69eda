# SPDX-License-Identifier: Apache-2.0
"""`recorded`: the entries of Inductor's caches that torch made or read in this process, and where
it keeps such files.

torch notes every entry that it writes or reads, for its own `save_cache_artifacts`; this module
reads the same list.  The names used are torch's own and may change: `missing` tells which of them
this torch does not have.

`bundler.integrations.inductor` saves them.

`loaded_kernels`: Inductor's kernels that are loaded in this process: their candidates, and the
configuration that tuning chose.  torch stores a graph before it tunes the kernels in it, so the
stored entry holds every candidate and no winner.  The winner is known to the live objects alone,
once each kernel has run.  Recordings and sessions find the directories of such kernels with it, and
`save` of the integration their winners; its `load` calls `keep_winners`, with which torch tunes no
kernel again whose tuning result it has just read.

`rewrite`: torch's graph entries without the kernels that torch embeds, and with every tuned kernel
cut down to its winner.  As torch stores it, an entry holds all files of all candidates, and tuners
that know the cache directory of this machine; elsewhere they find no result there and tune again.
What is unpickled here is only what torch pickled or unpickled in this very process.  `save` of the
integration calls it for each entry.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bundler.package_loggers import logger
from bundler.toolchain import directories, instances
from bundler.toolchain.events import kernel_key

# Where Inductor's parts are, as `module:attribute.attribute`.
ARTIFACTS = "torch.compiler._cache:CacheArtifactManager._seen_artifacts"
GRAPH_DIRECTORY = "torch._inductor.codecache:FxGraphCache._get_tmp_dir_for_key"
AUTOGRAD_DIRECTORY = (
    "torch._functorch._aot_autograd.autograd_cache:AOTAutogradCache._get_tmp_dir_for_key"
)
FILE_NAME = "torch._inductor.codecache:sha256_hash"
PROFILE_PATH = "torch._dynamo.pgo:code_state_path"
BUNDLE_TYPE = "torch._inductor.triton_bundler:TritonBundle"
AUTOTUNER_TYPE = "torch._inductor.runtime.triton_heuristics:CachingAutotuner"
STATIC_RESULT_TYPE = "torch._inductor.runtime.triton_heuristics:StaticTritonCompileResult"
COMPILER = "torch._inductor.config:cpp.cxx"
NEEDED = (
    ARTIFACTS,
    GRAPH_DIRECTORY,
    AUTOGRAD_DIRECTORY,
    FILE_NAME,
    PROFILE_PATH,
    BUNDLE_TYPE,
    AUTOTUNER_TYPE,
    STATIC_RESULT_TYPE,
)

GRAPH, AUTOGRAD, TUNING, PROFILE = "inductor", "aot_autograd", "autotune", "pgo"


@dataclass(frozen=True)
class CacheEntry:
    """One file of Inductor's cache: its kind, torch's key, the path relative to the cache
    directory, and the bytes.
    """

    kind: str
    key: str
    path: str
    content: bytes = field(repr=False)


def find(name: str) -> Any:
    """Return torch's `module:attribute` by name; raises `LookupError` naming what is not there."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise LookupError(name) from error
    return found


def missing(needed: Iterable[str] = NEEDED) -> tuple[str, ...]:
    """Return the names that this torch does not have; with one of `NEEDED` missing nothing here can
    be relied on.
    """
    lacking = []
    for name in needed:
        try:
            find(name)
        except LookupError:
            lacking.append(name)
    return tuple(lacking)


def is_installed() -> bool:
    """Tell whether torch can be imported; imports it."""
    try:
        importlib.import_module("torch")
    except ImportError:
        return False
    return True


def release() -> str | None:
    """Return the release of the torch that this process has imported, else None."""
    return getattr(sys.modules.get("torch"), "__version__", None)


def expected_compiler() -> str | None:
    """Return the C++ compiler that a torch imported now would write into its keys, without
    importing it; None without torch.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def compiler() -> str | None:
    """Return the C++ compiler that torch writes into the keys of its graph entries: $CXX as torch
    was imported.
    """
    try:
        names = find(COMPILER)
    except LookupError:
        return os.environ.get("CXX") or None
    return next((name for name in names if isinstance(name, str)), None)


def recorded() -> tuple[list[CacheEntry], list[tuple[str, str]]]:
    """Return the entries that this process wrote or read, each in its newest state, and (name,
    reason) of those left out.
    """
    entries: dict[str, CacheEntry] = {}
    left_out: list[tuple[str, str]] = []
    for artifact in list(find(ARTIFACTS)):
        kind, key, content = artifact.type(), artifact.key, artifact.content
        path = _path(kind, key, content)
        if path is None:
            left_out.append((f"{kind} {key}", "torch's cache entries of this kind are not carried"))
        else:
            # The list has every state of a tuning result, the newest last, and the newest counts.
            entries[path] = CacheEntry(kind, key, path, content)
    return list(entries.values()), left_out


def _path(kind: str, key: str, content: bytes) -> str | None:
    if kind == GRAPH:
        return graph_path(key, content)
    if kind == AUTOGRAD:
        return _named_by_content(AUTOGRAD_DIRECTORY, key, content)
    if kind == TUNING:
        return key
    if kind == PROFILE:
        path = find(PROFILE_PATH)(key)
        return None if path is None else _relative(path)
    return None


def graph_path(key: str, content: bytes) -> str:
    """Return where a graph entry with this content lies, relative to the cache directory."""
    return _named_by_content(GRAPH_DIRECTORY, key, content)


def _named_by_content(directory: str, key: str, content: bytes) -> str:
    return _relative(os.path.join(find(directory)(key), find(FILE_NAME)(content)))


def _relative(path: str) -> str:
    return os.path.relpath(path, directories.inductor_cache_dir())


def kernel_root(key: str, devices: Iterable[int]) -> str | None:
    """Return the cache directory that holds a kernel compiled for one of these devices; None when
    there is none.
    """
    roots = (root for device in devices for root in _kernel_roots(device))
    return next((root for root in roots if os.path.isdir(os.path.join(root, key))), None)


def _kernel_roots(device: int) -> Iterator[str]:
    yield directories.inductor_kernel_dir(device)
    # torch pins the directory of the first device that it compiles for in the environment, so those
    # of others lie there too.
    folder = os.path.join(directories.inductor_cache_dir(), "triton")
    if os.path.isdir(folder):
        for name in sorted(os.listdir(folder)):
            yield os.path.join(folder, name)


# The setting, as it stands in each kernel, that its configuration is refined by coordinate descent;
# and the mark that it was.
DESCENT, DESCENDED = "coordinate_descent_tuning", "found_by_coordesc"
# Kinds that torch does not refine, by the names of its HeuristicType.
_NOT_DESCENDED = {"TEMPLATE", "USER_AUTOTUNE", "FIXED"}


@dataclass(frozen=True)
class LoadedKernel:
    """One of Inductor's kernels.

    Attributes:
        identity: what tells it from others, here and in graph entries; see `identity_of`.
        device: index of the device it was loaded for.
        candidates: kernel keys of every configuration that was compiled, as far as torch still has
            them.
        winner: kernel key of the configuration that is launched from now on; None while that is not
            decided.
        result: torch's compile result of the winner in a form that can be pickled; None when it
            cannot be had.
    """

    identity: tuple[int, str]
    device: int
    candidates: frozenset[str]
    winner: str | None
    result: Any = field(default=None, repr=False)


def loaded_kernels() -> list[LoadedKernel]:
    """Return Inductor's kernels in this process, as far as `instances` knows them; nothing when
    torch compiled none.
    """
    # torch keeps copies of its tuners for the entries that it writes; those have no launchers.
    return [
        _read(found)
        for found in instances.instances(instances.INDUCTOR_TUNER)
        if found.compile_results and found.launchers
    ]


def loaded_directories() -> Iterator[str]:
    """Yield the directory of each kernel that Inductor loaded in this process, and of its
    candidates.

    torch launches many of them without asking Triton, so Triton's listener does not hear of them.
    Nothing where torch compiled none, or in a torch that we do not know.
    """
    if instances.INDUCTOR_TUNER.module not in sys.modules or missing():
        return
    for kernel in loaded_kernels():
        for key in sorted(kernel.candidates):
            root = kernel_root(key, [kernel.device])
            if root is not None:
                yield os.path.join(root, key)


def identity_of(autotuner: Any) -> tuple[int, str]:
    """Return what tells an autotuner from others: its device, and a digest of its source or,
    without one, its kernel key.

    The digest is the stem of its generated module.  Templates for products of matrices have none:
    torch decides before it generates them, so each has one configuration, and so one kernel key.
    """
    return device_of(autotuner), autotuner.kernel_hash or min(candidate_keys(autotuner))


def candidate_keys(autotuner: Any) -> frozenset[str]:
    """Return the kernel keys of an autotuner's compile results."""
    return frozenset(kernel_key(result.kernel.hash) for result in autotuner.compile_results)


def device_of(autotuner: Any) -> int:
    """Return the index of the device that an autotuner compiles for."""
    return int(autotuner.triton_meta.get("device") or 0)


def _read(autotuner: Any) -> LoadedKernel:
    launchers = autotuner.launchers
    launched = frozenset(launcher.cache_hash for launcher in launchers)
    settled = len(launchers) == 1 and _settled(autotuner, launchers[0].config)
    return LoadedKernel(
        identity=identity_of(autotuner),
        device=device_of(autotuner),
        candidates=candidate_keys(autotuner) | launched,
        winner=launchers[0].cache_hash if settled else None,
        result=_portable(autotuner, launchers[0]) if settled else None,
    )


def _settled(autotuner: Any, config: Any) -> bool:
    """Tell whether torch would tune no further at the next launch."""
    if not autotuner.inductor_meta.get(DESCENT, False) or getattr(config, DESCENDED, False):
        return True
    return getattr(autotuner.heuristic_type, "name", "") in _NOT_DESCENDED


def _portable(autotuner: Any, launcher: Any) -> Any:
    """Return the compile result behind a launcher, as it was before its binary was loaded; None for
    one with no static form.
    """
    static: Any = find(STATIC_RESULT_TYPE)
    kernel = getattr(launcher.__globals__.get("runner"), "__self__", None)
    results = [result for result in autotuner.compile_results if result.kernel is kernel]
    every_static = all(type(result) is static for result in autotuner.compile_results)
    if not every_static or not hasattr(kernel, "cubin_path"):
        return None
    # What coordinate descent found is kept by its launcher alone.
    meta = results[0].compile_meta if results else autotuner._create_compile_meta(launcher.config)  # noqa: SLF001
    return static(_unloaded(kernel), launcher.config, meta, autotuner.inductor_meta)


def _unloaded(kernel: Any) -> Any:
    """Copy a static kernel without what belongs to this process: module, function and path."""
    copy = object.__new__(type(kernel))
    copy.__dict__.update(kernel.__getstate__())
    copy.__dict__.pop("C_impl", None)
    copy.cubin_raw = None
    return copy


# The last step of building a kernel, in the process that launches it, also where a worker compiled
# it.
METHOD = AUTOTUNER_TYPE + "._dynamic_scale_rblock"
RESULTS = "torch._inductor.runtime.autotune_cache:AutotuneCache.create"
READ = "torch._inductor.runtime.autotune_cache:AutotuneCache._read"
NEEDED_TO_KEEP = (METHOD, RESULTS, READ)
_OURS = "_bundler_keeps_winner"
_LOG = logger("bundler.toolchain")


def keep_winners() -> tuple[str, ...]:
    """Make torch launch what a tuning result names, and try nothing beside it; calling it again
    changes nothing.

    torch 2.11 halves the block of a reduction that uses many registers also when its configuration
    came from a tuning result: it compiles and tunes again.  And the mark that coordinate descent
    found a configuration is lost where it comes from a compile worker, since Triton drops it when
    it unpickles one: torch descends again.

    Returns:
        The names of what this torch does not have; with any of them nothing was changed.
    """
    lacking = missing(NEEDED_TO_KEEP)
    if not lacking:
        kind = find(AUTOTUNER_TYPE)
        original = find(METHOD)
        if not hasattr(original, _OURS):
            setattr(kind, original.__name__, _unless_found(original))
        instances.note_from_now_on()  # for `save`, later
    return lacking


def _unless_found(original: Any) -> Any:
    @functools.wraps(original)
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (getattr(self, "autotune_cache_info", None) or {}).get("autotune_cache_state") != "hit":
            return original(self, *args, **kwargs)
        if self.inductor_meta.get(DESCENT, False):
            _mark(self)
        return None

    setattr(scale, _OURS, True)
    return scale


def _mark(autotuner: Any) -> None:
    """Mark the one configuration that was found as what its record says."""
    try:
        cache = find(RESULTS)(autotuner.inductor_meta, autotuner.filename, "")
        # torch has no other way
        record = cache._read() if cache is not None else None  # noqa: SLF001
        found = record is not None and bool(record.get(DESCENDED))
    except (OSError, AttributeError, TypeError, ValueError) as error:
        # The seam: the kernel is good without the mark, torch only tunes it again.
        _LOG.warning(
            "the tuning result of %s cannot be read again: %r", autotuner.kernel_hash, error
        )
        return
    for result in autotuner.compile_results if found else ():
        setattr(result.config, DESCENDED, True)


# The name of torch's class as it stands in the pickle of an entry that holds kernels.
_MARK = b"TritonBundle"
# What torch reads from each kernel: whether one that uses many registers is tried with smaller
# blocks when it is loaded, and whether its configuration is refined when it is launched.  The mark
# that it was refined is lost whenever Triton pickles a configuration.
_TUNES_ON = ("dynamic_scale_rblock", DESCENT)


@dataclass
class RewrittenEntries:
    """What became of the entries.

    Attributes:
        kernels: (device, kernel key) of every kernel that the entries name.
        settled: identities of the kernels that were cut down to their winner.
        needed: kernel keys of the candidates of the others.
        rebuilt: (name, why) of kernels that torch builds again from their source, through Triton's
            cache.
    """

    kernels: set[tuple[int, str]] = field(default_factory=set)
    settled: set[tuple[int, str]] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)
    rebuilt: list[tuple[str, str]] = field(default_factory=list)


def rewrite(
    content: bytes, loaded: Mapping[tuple[int, str], LoadedKernel], done: RewrittenEntries
) -> bytes:
    """Return an entry as it should travel.

    Args:
        content: the entry as torch noted it in this process.
        loaded: the live kernels by identity.
        done: what is learned on the way is added to it.

    Raises:
        pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError, ValueError: it has
            a shape that we do not know.
    """
    if _MARK not in content:
        return content
    out = io.BytesIO()
    rewriter = _Rewriter(out, loaded, done)
    # torch made or read these bytes in this process
    rewriter.dump(pickle.loads(content))  # noqa: S301
    # Pickled again it would have other bytes, and so another name: every process would add one more
    # to a tag.
    return out.getvalue() if rewriter.changed else content


class _Rewriter(pickle.Pickler):
    """Pickles an entry and changes each bundle of kernels on the way, wherever torch put it."""

    def __init__(
        self,
        out: io.BytesIO,
        loaded: Mapping[tuple[int, str], LoadedKernel],
        done: RewrittenEntries,
    ) -> None:
        super().__init__(out)
        self._bundle: Any = find(BUNDLE_TYPE)
        self._loaded, self._done = loaded, done
        self.changed = False

    def reducer_override(self, obj: Any) -> Any:
        """Change a bundle before it is pickled as usual."""
        if type(obj) is self._bundle:
            self._change(obj)
        return NotImplemented

    def _change(self, bundle: Any) -> None:
        embedded, tuners = bundle.kernel_artifacts, bundle.static_autotuners
        self._done.kernels |= {(kernel.device, kernel.kernel_hash) for kernel in embedded}
        for entry in tuners:
            device = device_of(entry.kernel)
            self._done.kernels |= {(device, key) for key in candidate_keys(entry.kernel)}
        if embedded or not all(_is_cut_down(entry.kernel) for entry in tuners):
            self.changed = True
            embedded.clear()
            tuners[:] = [entry for entry in tuners if self._cut_down(entry)]
        else:
            self._done.needed |= {key for entry in tuners for key in candidate_keys(entry.kernel)}

    def _cut_down(self, entry: Any) -> bool:
        """Leave a tuner its winner and nothing of this machine; False when the winner is
        not known.
        """
        autotuner = entry.kernel
        identity = identity_of(autotuner)
        live = self._loaded.get(identity)
        if live is None or live.result is None:
            self._done.rebuilt.append((entry.kernel_name, _why(live)))
            self._done.needed |= candidate_keys(autotuner)
            return False
        live.result.inductor_meta = autotuner.inductor_meta
        autotuner.inductor_meta.update(dict.fromkeys(_TUNES_ON, False))
        autotuner.compile_results = [live.result]
        # Only for reading and writing tuning results, in the directory where this was compiled.
        autotuner.filename = autotuner.save_cache_hook = None
        # From Triton 3.8 a function knows its file, which lies in the cache directory of this
        # machine; only a compile would use it.
        if hasattr(autotuner.fn, "file_name"):
            autotuner.fn.file_name = os.path.basename(autotuner.fn.file_name)
        self._done.settled.add(identity)
        return True


def _is_cut_down(autotuner: Any) -> bool:
    """Tell whether an earlier process did so, and this one loaded what it saved."""
    return autotuner.filename is None and all(
        autotuner.inductor_meta.get(name) is False for name in _TUNES_ON
    )


def _why(live: LoadedKernel | None) -> str:
    if live is None:
        return (
            "it is not loaded in this process, so its winner is not known; it is built again from"
            " its candidates"
        )
    if live.winner is None:
        return "it has not run, or is still being tuned; save after the first iterations"
    return (
        "torch does not launch it statically; it is built again from its source, and reads its"
        " tuning result"
    )
