# SPDX-License-Identifier: Apache-2.0
"""`find`: the kernels in a client's files: the JIT functions that something launches, not the
helpers that only kernels call.

`check.py` calls it once for each target, since a module may decide by the target what it defines.
"""

from __future__ import annotations

import ast
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bundler.compile.build_plan import Plan, source_of
from bundler.compile.compile_job import SourceRef
from bundler.compile.module_import import ModulePlace
from bundler.format.entries import Target
from bundler.toolchain import jit_specialization

_MARKS = ("triton.jit", "gluon.jit", "triton_jit")
# Tests of clients, and copies of Triton's own sources.
_NOT_THEIRS = ("/test", "/third_party/triton_kernels/", "/benchmark")


@dataclass(frozen=True)
class FoundKernel:
    """A kernel of a client.

    Attributes:
        name: `module:function`.
        source: for jobs.
        kernel: the JIT function, perhaps autotuned or with heuristics.
    """

    name: str
    source: SourceRef
    kernel: Any

    @property
    def function(self) -> Any:
        """The JIT function inside."""
        return jit_specialization.jit_function(self.kernel)


@dataclass
class Found:
    """What a client's files hold.

    Attributes:
        kernels: by name.
        helpers: JIT functions that only kernels call.
        files: with kernels, as far as their text tells.
        refused: file -> why it cannot be imported.
    """

    kernels: dict[str, FoundKernel] = field(default_factory=dict)
    helpers: int = 0
    files: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def find(root: Path, folders: Iterable[Path], target: Target) -> Found:
    """Import each file that has kernels in some folders below `root`, as on a machine with such a
    GPU.
    """
    found, functions = Found(), dict[str, FoundKernel]()
    called, launched = set[int](), set[str]()
    for path in itertools.chain.from_iterable(_files(root, folder) for folder in folders):
        text = path.read_text()
        launched.update(_launched(text))
        if any(mark in text for mark in _MARKS):
            found.files += 1
            plan = Plan()
            place = _place(root, path)
            module = plan.load(place, target)
            if module is None:
                found.refused[str(path.relative_to(root))] = plan.failures[0].reason
                continue
            for name, value in list(vars(module).items()):
                function = (
                    jit_specialization.jit_function(value)
                    if jit_specialization.is_kernel(value)
                    else None
                )
                if function is not None and function.module == place.name:
                    kernel = FoundKernel(f"{place.name}:{name}", source_of(place, name), value)
                    functions.setdefault(f"{place.name}:{function.__name__}", kernel)
    for one in functions.values():
        called.update(id(other) for other in jit_specialization.functions_of(one.function)[1:])
    for one in functions.values():
        if (
            id(one.function) in called or _returns(one.function)
        ) and one.function.__name__ not in launched:
            found.helpers += 1
        else:
            found.kernels[one.name] = one
    return found


def _files(root: Path, folder: Path) -> Iterator[Path]:
    for path in sorted((root / folder).rglob("*.py")):
        if not any(part in f"/{path.relative_to(root)}" for part in _NOT_THEIRS):
            yield path


def _place(root: Path, path: Path) -> ModulePlace:
    name = (
        str(path.relative_to(root))
        .removesuffix(".py")
        .removesuffix("/__init__")
        .replace(os.sep, ".")
    )
    return ModulePlace(str(path), name, str(root))


def _launched(text: str) -> Iterator[str]:
    """Yield the names that a text launches: `name[grid](…)`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            callee = node.func.value
            if isinstance(callee, (ast.Name, ast.Attribute)):
                yield callee.id if isinstance(callee, ast.Name) else callee.attr


def _returns(function: Any) -> bool:
    tree = ast.parse(function.src)
    return any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(tree))
