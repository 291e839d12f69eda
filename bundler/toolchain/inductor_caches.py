# SPDX-License-Identifier: Apache-2.0
"""`recorded`: the entries of Inductor's caches that torch made or read in this process, and where
it keeps such files.

torch notes every entry that it writes or reads, for its own `save_cache_artifacts`; this module
reads the same list.  The names used are torch's own and may change: `missing` tells which of them
this torch does not have.

`bundler.integrations.inductor` saves them; the other `inductor_*` modules find torch's objects
through `find`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bundler.toolchain import directories

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
