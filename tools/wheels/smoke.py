# SPDX-License-Identifier: Apache-2.0
"""What `trial.py` runs in an environment that has one built file: use the installed package, and
print as JSON what came out, also of four threads at once and of subinterpreters.

It imports nothing of this repository but the installed `bundler`: load a golden bundle, restore it,
pack what was restored. `extensions` are those that were called, or, where only a GPU has them
called, those that were found where the package looks for them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bundler
from bundler.runtime.launch.drivers import launchers
from bundler.runtime.launch.jit import jit_modules

# What Python calls of the two that work without a GPU.
_CALLED = {"_kernel_writer": "begin_writing", "_kernel_reader": "begin_reading"}


def counted() -> dict[str, int]:
    """Count calls of the extensions from now on; one that was not built is not in what is
    returned.
    """
    counts: dict[str, int] = {}
    for name, function in _CALLED.items():
        try:
            extension = importlib.import_module(f"bundler.lifecycle.{name}")
        except ImportError:
            continue
        counts[name] = 0
        setattr(
            extension,
            function,
            functools.partial(_call, counts, name, getattr(extension, function)),
        )
    return counts


def _call(counts: dict[str, int], name: str, real: Callable[..., Any], *words: Any) -> Any:
    counts[name] += 1
    return real(*words)


def launch_extensions() -> set[str]:
    """Return the extensions for launches that the package would use."""
    found = {
        "_launch": launchers.compiled_type(),
        "_jit_driver": jit_modules.compiled_driver(),
    }
    return {name for name, it in found.items() if it is not None}


def restored_by_threads(golden: str, folder: Path) -> set[str]:
    """Restore a bundle by four threads at once, each to a place of its own, and return the
    different digests of what is there.
    """

    def restored(number: int) -> str:
        root = folder / f"thread-{number}"
        bundler.restore(golden, root, keep="all")
        return tree_digest(root)

    with ThreadPoolExecutor(4) as threads:
        return set(threads.map(restored, range(4)))


def in_subinterpreters(golden: str) -> dict[str, str]:
    """Return what loading a bundle ends with in a subinterpreter, by its kind: `legacy` shares the
    lock of the main one, `isolated` has its own; empty where this Python makes only one kind.
    """
    try:
        interpreters = importlib.import_module("_interpreters")
    except ImportError:
        return {}
    code = f"import sys; sys.path[:] = {sys.path}; import bundler; bundler.Bundle.load({golden!r})"
    ends = {}
    for kind in ("legacy", "isolated"):
        made = interpreters.create(kind)
        error = interpreters.exec(made, code)
        interpreters.destroy(made)
        ends[kind] = error.type.__name__ if error else "loaded"
    return ends


def lock() -> str:
    """Say whether this process has the lock of the interpreter, after all was loaded."""
    is_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return "with the GIL" if is_enabled() else "without the GIL"


def tree_digest(root: Path) -> str:
    """Return a digest of names and bytes of all files; paths of the folder itself, which Triton's
    metadata has, are left out.
    """
    lines = [
        f"{path.relative_to(root)}"
        f" {hashlib.sha256(path.read_bytes().replace(str(root).encode(), b'')).hexdigest()}"
        for path in sorted(root.rglob("*"))
        if path.is_file()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def main() -> None:
    """Try the installed package on the golden bundle in the command line."""
    golden = sys.argv[1]
    counts = counted()
    with bundler.Bundle.load(golden) as bundle:
        digest, kernels = bundle.digest, len(bundle.kernels)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "cache"
        report = bundler.restore(golden, root, keep="all")
        restored, tree = report.restored, tree_digest(root)
        trees = restored_by_threads(golden, Path(folder).resolve())
        if trees != {tree}:
            raise SystemExit(f"threads restored {sorted(trees)}, expected {tree}")
        packed = bundler.pack(root).digest
    extensions = {name for name, calls in counts.items() if calls} | launch_extensions()
    idle = {name for name, calls in counts.items() if not calls}
    if idle:
        raise SystemExit(f"built, but not called: {sorted(idle)}")
    print(
        json.dumps(
            {
                "extensions": sorted(extensions),
                "where": str(Path(bundler.__file__).parent),
                "versions": [bundler.__version__, importlib.metadata.version("triton-bundler")],
                "lock": lock(),
                "interpreters": in_subinterpreters(golden),
                "results": [digest, kernels, restored, tree, packed],
            }
        )
    )


if __name__ == "__main__":
    main()
