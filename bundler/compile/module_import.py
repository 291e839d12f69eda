# SPDX-License-Identifier: Apache-2.0
"""`load` imports a user's module of kernels under a declared target, once for each target; `find`
says where a module is.

A module may decide by the target at import: which configurations an autotuner gets, the value of a
global.  So each target has its own copies of the user's modules, which take their places in
`sys.modules` in turn; libraries without kernels are shared.

Build plans, workers (`compile_job.py`), retargeted kernels and the tuner load modules through it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from bundler.errors import CompileFailed, NotFound
from bundler.format.entries import Target
from bundler.toolchain import jit_specialization
from bundler.toolchain.declared_target import declared, declaring

_SHARED = ("bundler", "torch", "triton")
_OWN_PREFIX = "bundler_built_"


@dataclass(frozen=True)
class ModulePlace:
    """A module file, the name that it is imported by, and the directory that must be on `sys.path`
    for it.
    """

    path: str
    name: str
    root: str


@dataclass
class _Imported:
    """What is in `sys.modules` for one target, and what each module asked the driver for without an
    answer.
    """

    modules: dict[str, ModuleType] = field(default_factory=dict)
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)


_copies: dict[str, _Imported] = {}
_current: list[str] = []


def find(module: str) -> ModulePlace:
    """Return where a module is, given its file or its dotted name; imports nothing.

    Raises:
        NotFound: there is none, or it is not a Python file.
    """
    if module.endswith(".py") or os.sep in module:
        path = os.path.abspath(module)
        if not os.path.isfile(path):
            raise NotFound(f"no such file: {module}", path=module)
        return _place_of(path)
    spec = _spec_of(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise NotFound(
            f"no module {module!r} with a Python file; give its file, or install it here",
            name=module,
        )
    path = os.path.abspath(spec.origin)
    levels = module.count(".") + (1 if os.path.basename(path) == "__init__.py" else 0)
    root = os.path.dirname(path)
    for _ in range(levels):
        root = os.path.dirname(root)
    return ModulePlace(path, module, root)


def _spec_of(module: str) -> ModuleSpec | None:
    # `importlib.util.find_spec` would import the packages around it, and with no target declared.
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError) as error:
        raise NotFound(f"no module {module!r}: {error}", name=module) from error
    name = top
    for part in inner:
        name = f"{name}.{part}"
        folders = None if spec is None else spec.submodule_search_locations
        spec = None if folders is None else PathFinder.find_spec(name, list(folders))
    return spec


def _place_of(path: str) -> ModulePlace:
    root, name = os.path.split(path.removesuffix(".py"))
    while os.path.isfile(os.path.join(root, "__init__.py")):
        root, package = os.path.split(root)
        name = f"{package}.{name}"
    name = name.removesuffix(".__init__")
    if "." in name:
        return ModulePlace(path, name, root)
    # A file named like a module that exists already must not take that module's place, so it gets
    # another name.
    taken = name in sys.stdlib_module_names or (
        name in sys.modules and getattr(sys.modules[name], "__file__", 0) != path
    )
    return ModulePlace(
        path, f"{_OWN_PREFIX}{name}" if taken or not name.isidentifier() else name, root
    )


def load(place: ModulePlace, target: Target) -> ModuleType:
    """Return the module as it is imported on a machine with such a GPU.

    Raises:
        CompileFailed: importing it raised, with what and where.
    """
    with declaring, declared(target) as driver:
        _switch(str(target))
        module = sys.modules.get(place.name)
        if module is not None and getattr(module, "__file__", None) == place.path:
            return module
        before = set(sys.modules)
        try:
            return _import(place)
        except (Exception, SystemExit) as error:  # a module may raise anything, `SystemExit` too
            line = line_in(error, place.path)
            at = f"{place.path}:{line}" if line else place.path
            raise CompileFailed(
                f"{at} cannot be imported for {target}: {type(error).__name__}: {error}",
                name=place.name,
                reason=f"{type(error).__name__}: {error}",
                line=line,
                file=place.path,
            ) from error
        finally:
            _remember(str(target), before, place)
            _copies[str(target)].refused[place.path] = tuple(driver.refused)


def refused(place: ModulePlace, target: Target) -> tuple[str, ...]:
    """Return what a module, when it was imported, asked Triton's driver for and no declared target
    knows.
    """
    copies = _copies.get(str(target))
    return () if copies is None else copies.refused.get(place.path, ())


def _import(place: ModulePlace) -> ModuleType:
    if place.root not in sys.path:
        sys.path.insert(0, place.root)
    if not place.name.startswith(_OWN_PREFIX):
        importlib.invalidate_caches()
        module = importlib.import_module(place.name)
        if getattr(module, "__file__", None) == place.path:
            return module
    spec = importlib.util.spec_from_file_location(place.name, place.path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[place.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[place.name]
        raise
    return module


def _switch(target: str) -> None:
    """Put the copies for a target where imports find them, in place of those for the target
    before.
    """
    if _current == [target]:
        return
    for before in _current:
        for name, module in _copies[before].modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
    _current[:] = [target]
    sys.modules.update(_copies.setdefault(target, _Imported()).modules)


def _remember(target: str, before: set[str], place: ModulePlace) -> None:
    own = _copies[target].modules
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if name.partition(".")[0] not in _SHARED and (
            _is_beside(module, place) or _has_kernels(module)
        ):
            own[name] = module


def _is_beside(module: Any, place: ModulePlace) -> bool:
    file = getattr(module, "__file__", None) or ""
    package = (
        os.path.join(place.root, place.name.partition(".")[0])
        if "." in place.name
        else os.path.dirname(place.path)
    )
    return file == place.path or (file.endswith(".py") and file.startswith(package + os.sep))


def _has_kernels(module: Any) -> bool:
    return any(
        jit_specialization.is_kernel(value)
        for value in list(getattr(module, "__dict__", {}).values())
    )


def forget() -> None:
    """Take every copy out of `sys.modules`; the next `load` of a module imports it anew."""
    with declaring:
        _switch("")
        _copies.clear()
        _current.clear()


def function_in(module: Any, path: str) -> Any:
    """Return a kernel by its qualified name in a module; raises `NotFound`."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None or jit_specialization.jit_function(found) is None:
        raise NotFound(f"{module.__name__} has no kernel {path!r}", name=path)
    return found


def line_in(error: BaseException, path: str) -> int | None:
    """Return the last line of the file that an error came through."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found
