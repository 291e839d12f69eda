# SPDX-License-Identifier: Apache-2.0
"""`driver_modules`: gives Triton's NVIDIA driver modules of ours where it would run a C compiler,
and Triton's own where we have none.

Triton builds `cuda_utils` when its driver starts, from a file of its package; up to 3.6 also a
launcher for each signature, from text that it writes.  A `Supplier`
(`bundler/runtime/launch/jit/jit_modules.py`) has both ready.  It is asked in place of the build: by two
functions that stand in for those that the driver module calls, and by the cache manager
(`cache_manager.py`) where a session begins in the middle of a build, as it does when the
environment names our manager.  `bundler/integrations/_process.py` says from when to when.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, TypeVar

from bundler.errors import CannotLaunchStatically

T = TypeVar("T")
DRIVER = "triton.backends.nvidia.driver"
_BUILD, _LOADER = "triton.runtime.build", "_load_module_from_path"
_BUILDERS = ("compile_module_from_src", "compile_module_from_file")
_UTILITIES = "cuda_utils"
_MAP = "nvTmaDesc"
# What the functions of `driver.c` take and do is no fact that can be asked: a text that was not
# compared with ours is left to Triton.
_FAMILIES: Mapping[str, str] = {
    "439c1e886fa9eac7346d7523d03ba0a4c52aa4c9b518ea86d8659b5c07eb7dc9": "3.6",
    "835f068cf517d237dc62be91275261e260c2bae985a9242fd28866303c1e5a60": "3.7",
    "c32586d1814fc6770f966087b88fce0611db5e10e96d95579ba51631576d533c": "3.8",
    "8494e9979949da12e48eef65474a821616bf771873ee351e2b42574441e9ec22": "3.9",
}
# What a launcher of 3.6 is called with before the kernel's own arguments.
_LEADING = "iiiKKppOOOOOO"
_DESCRIPTOR = re.compile(r"tensordesc<([^[>]*)\[([^]]*)\]")
# Signatures whose launchers are kept: one serves all kernels that have it.
_MOST_LAUNCHERS = 4096


class Supplier(Protocol):
    """Has what Triton would have built; its methods are called by any thread and raise
    `CannotLaunchStatically` with the reason.
    """

    def utilities(self, family: str) -> ModuleType:
        """Return what stands in for `cuda_utils`, in the form of a release."""

    def launcher(self, signature: tuple[Any, ...]) -> Callable[..., None]:
        """Return what stands in for the function `launch` of one signature: type names,
        `constexpr`, and tuples of these.
        """

    def answered(self, reason: str | None) -> None:
        """Hear of each module: None that ours was given, else why Triton builds its own."""


class _Text(str):  # noqa: SLOT000  # a handful a process
    """In place of the text of a launcher: has the launcher itself."""

    launcher: Callable[..., None]


class DriverModules:
    """The seam of one process; safe from any thread.  Without a supplier everything is Triton's
    own.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._suppliers: list[Supplier] = []
        self._originals: dict[tuple[str, str], tuple[Any, Any]] = {}
        # By the path that the cache manager gave Triton: what is to be taken for loaded from there.
        self._in_progress: dict[str, ModuleType] = {}
        self._launchers: dict[tuple[Any, ...], Callable[..., None]] = {}
        # Of a thread: whether Triton builds `cuda_utils` because the supplier was asked already,
        # and has none.
        self._refused = threading.local()
        # What the driver has, when it has ours.
        self._given: ModuleType | None = None

    def supply(self, supplier: Supplier) -> None:
        """Let a supplier be asked from now on, the last one first; in a process whose driver is not
        loaded yet, once it is.
        """
        with self._lock:
            self._suppliers.append(supplier)
            self._put_in_place()

    def withdraw(self, supplier: Supplier) -> None:
        """Ask it no more; what Triton was given stays in use.  Twice is fine."""
        with self._lock:
            self._suppliers = [other for other in self._suppliers if other is not supplier]
            if self._suppliers:
                return
            for (module, name), (original, ours) in self._originals.items():
                # What somebody put in front of ours since then stays: it ends in ours, which passes
                # everything on.
                if getattr(sys.modules.get(module), name, None) is ours:
                    setattr(sys.modules[module], name, original)
            self._originals.clear()
            self._launchers.clear()

    def path_for(self, filename: str) -> str | None:
        """Return the file of our extension when Triton asks a cache manager for `cuda_utils`; else
        None.

        Triton then loads that file by a function of ours, which returns the module.
        """
        asked = filename.startswith(f"{_UTILITIES}.") and _BUILD in sys.modules
        if not self._suppliers or not asked or getattr(self._refused, "now", False):
            return None
        with self._lock:
            self._put_in_place()
            made = self._utilities()
            path = getattr(made, "__file__", None)
            if made is None or path is None or (_BUILD, _LOADER) not in self._originals:
                return None
            self._in_progress[path] = made
            return str(path)

    # --------------------------------------------------- What stands in place of Triton's functions

    def _put_in_place(self) -> None:
        """Put our functions in front of Triton's, in modules that are loaded and as far as they
        have them.
        """
        wanted: Iterable[tuple[str, str, Callable[[Any], Any]]] = (
            *((DRIVER, name, self._building) for name in _BUILDERS),
            (DRIVER, "make_launcher", self._writing),
            (_BUILD, _LOADER, self._loading),
        )
        for module, name, wrap in wanted:
            theirs = getattr(sys.modules.get(module), name, None)
            if callable(theirs) and (module, name) not in self._originals:
                ours = functools.wraps(theirs)(wrap(theirs))
                self._originals[module, name] = theirs, ours
                setattr(sys.modules[module], name, ours)

    def _building(self, build: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            text = kwargs.get("src")
            if isinstance(text, _Text):
                return SimpleNamespace(launch=text.launcher)
            if not self._suppliers or kwargs.get("name") != _UTILITIES:
                return build(*args, **kwargs)
            made = self._utilities()
            if made is not None:
                return made
            self._refused.now = True
            try:
                return build(*args, **kwargs)
            finally:
                self._refused.now = False

        return instead

    def _writing(self, write: Callable[..., str]) -> Callable[..., str]:
        def instead(*args: Any, **kwargs: Any) -> str:
            launcher = self._launcher(args) if self._suppliers else None
            if launcher is None:
                return write(*args, **kwargs)
            text = _Text()
            text.launcher = launcher
            return text

        return instead

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def instead(name: str, path: str) -> Any:
            made = self._in_progress.pop(path, None) if name == _UTILITIES else None
            return load(name, path) if made is None else made

        return instead

    # -------------------------------------------------------------------------- Asking the supplier

    def _utilities(self) -> ModuleType | None:
        made = self._ask(lambda supplier: supplier.utilities(_family()))
        self._given = made or self._given
        return made

    def _launcher(self, args: tuple[Any, ...]) -> Callable[..., None] | None:
        def make(supplier: Supplier) -> Callable[..., None]:
            signature = _expanded(args[1].values(), args[2])
            maps = getattr(sys.modules[DRIVER], "PyCUtensorMap", None)
            if _MAP in signature and maps is not getattr(self._given, "PyCUtensorMap", None):
                raise CannotLaunchStatically(
                    "tensor maps are made by a library that Triton loaded before"
                )
            made = self._launchers.get(signature)
            if made is None:
                made = supplier.launcher(signature)
                if len(self._launchers) >= _MOST_LAUNCHERS:
                    self._launchers.clear()
                self._launchers[signature] = made
            return made

        return self._ask(make)

    def _ask(self, what: Callable[[Supplier], T]) -> T | None:
        supplier = self._suppliers[-1]
        try:
            made = what(supplier)
        except CannotLaunchStatically as error:
            supplier.answered(error.message)
            return None
        except Exception as error:  # noqa: BLE001  # the seam: a Triton of another shape goes on with its own build
            supplier.answered(f"{type(error).__name__}: {error}")
            return None
        supplier.answered(None)
        return made


driver_modules = DriverModules()


def known_family() -> str | None:
    """Return the release as whose form the installed Triton's driver is known; None for another
    one, or without Triton.
    """
    try:
        return _family()
    except CannotLaunchStatically:
        return None


def _family() -> str:
    from bundler.toolchain.identity import triton_dir  # a hit needs none of what it imports

    directory = triton_dir()
    if directory is None:
        raise CannotLaunchStatically("Triton is not installed")
    return _family_in(directory)


@functools.cache
def _family_in(directory: str) -> str:
    try:
        text = Path(directory, "backends", "nvidia", "driver.c").read_bytes()
    except OSError as error:
        raise CannotLaunchStatically(
            f"this Triton's driver.c cannot be read: {error.strerror}"
        ) from None
    family = _FAMILIES.get(hashlib.sha256(text).hexdigest())
    if family is None:
        raise CannotLaunchStatically("this Triton's driver.c is none that was compared with ours")
    return family


def _expanded(types: Iterable[Any], maps: list[Any] | None) -> tuple[Any, ...]:
    """Return a signature with tensor descriptors taken apart, as Triton 3.6 does; `maps` are facts
    of the descriptors, or none.
    """
    if _family() != "3.6" or getattr(sys.modules[DRIVER], "_BASE_ARGS_FORMAT", None) != _LEADING:
        raise CannotLaunchStatically("this Triton calls launchers otherwise than 3.6")
    found: list[Any] = []
    number = 0
    for kind in types:
        if not isinstance(kind, str) or not kind.startswith("tensordesc"):
            found.append(kind)
            continue
        match = _DESCRIPTOR.match(kind)
        if match is None:
            raise CannotLaunchStatically(f"{kind} is no tensor descriptor that is known")
        rank = match[2].count(",") + 1
        # Without facts a descriptor is a pointer with sizes and strides, which are passed again
        # behind it.
        decomposed = [f"*{match[1]}", *["i64"] * (2 * rank), "i1"]
        found += [_MAP] if maps and maps[number] is not None else decomposed
        found += [*["i32"] * rank, *["i64"] * rank]
        number += 1
    return tuple(found)
