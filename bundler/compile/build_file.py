# SPDX-License-Identifier: Apache-2.0
"""Reads a build file: TOML that lists kernels by module and function.

::

    targets = ["cuda:90", "hip:gfx942"]

    [[kernel]]
    module = "kernels.py"               # a file beside the build file, or a module's dotted name
    function = "matmul_kernel"
    signature = { a = "*fp16:16", n = ["i32:16", "i32"] }
    constants = { BLOCK = [64, 128], ACC = { dtype = "fp32" }, ACT = { function = "relu" } }
    options = { num_warps = [4, 8] }
    configs = [{ STAGES = 2, num_stages = 3 }]
    targets = ["cuda:90"]

`read` returns each `[[kernel]]` as `ListedKernel`.  The `build` command reads the file, and `Plan`
resolves its constants.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bundler.compile.declarations import Declaration
from bundler.errors import ConfigError
from bundler.format.bundle_file import os_errors, read_regular
from bundler.format.entries import Target
from bundler.format.limits import MIB
from bundler.settings_files import toml_of

# Far more than any build file has; a kernel takes a few hundred bytes.
MAX_BYTES = 16 * MIB
_TOP = frozenset({"targets", "kernel"})


@dataclass(frozen=True)
class DtypeConstant:
    """A constant that is a type of Triton's language."""

    name: str


@dataclass(frozen=True)
class FunctionConstant:
    """A constant that is a JIT function of the kernel's module."""

    name: str


@dataclass(frozen=True)
class ListedKernel:
    """One `[[kernel]]` of a build file."""

    module: str
    function: str
    declaration: Declaration


def read(path: str | os.PathLike[str]) -> tuple[tuple[ListedKernel, ...], tuple[Target, ...]]:
    """Return the kernels of a build file, and the targets that it names for all of them.

    Raises:
        ConfigError: not TOML, an unknown or missing name, or a value of another shape; with the
            place.
        LimitExceeded: it is larger than 16 MiB.
        NotFound, AccessDenied, BundlerError: the file cannot be read, or is none.
    """
    with os_errors(path, "read"):
        data = read_regular(path, MAX_BYTES)
    try:
        parsed = toml_of(data)
    except ValueError as error:
        raise ConfigError(f"{path}: not a TOML file: {error}", path=str(path)) from error
    unknown = sorted(parsed.keys() - _TOP)
    if unknown:
        raise ConfigError(
            f"{path}: unknown {', '.join(unknown)}; expected targets and [[kernel]]", got=unknown
        )
    kernels = parsed.get("kernel", [])
    if not isinstance(kernels, list) or not kernels:
        raise ConfigError(f"{path}: no [[kernel]] in it", path=str(path))
    folder = os.path.dirname(os.path.abspath(path))
    listed = tuple(
        _kernel(f"{path}: kernel {number}", kernel, folder)
        for number, kernel in enumerate(kernels, 1)
    )
    return listed, Declaration.of(str(path), targets=parsed.get("targets")).targets


def _kernel(what: str, kernel: Any, folder: str) -> ListedKernel:
    if not isinstance(kernel, dict):
        raise ConfigError(f"{what}: expected a table, got {kernel!r:.80}")
    rest = dict(kernel)
    module, function = rest.pop("module", None), rest.pop("function", None)
    if not isinstance(module, str) or not isinstance(function, str):
        raise ConfigError(f"{what}: expected module and function, got {module!r} and {function!r}")
    declaration = Declaration.of_mapping(f"{what} ({function})", rest)
    configs = tuple(_constants(what, config) for config in declaration.configs)
    declaration = replace(
        declaration, constants=_constants(what, declaration.constants), configs=configs
    )
    if module.endswith(".py"):
        module = os.path.join(folder, module)
    return ListedKernel(module, function, declaration)


def _constants(what: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _variants(f"{what}: {name}", value) for name, value in named.items()}


def _variants(what: str, value: Any) -> Any:
    return (
        [_constant(what, item) for item in value]
        if isinstance(value, list)
        else _constant(what, value)
    )


def _constant(what: str, value: Any) -> Any:
    if isinstance(value, list):  # a list inside the list of variants is one variant
        return tuple(_constant(what, item) for item in value)
    if not isinstance(value, dict):
        return value
    kinds = {"dtype": DtypeConstant, "function": FunctionConstant}
    (kind, name) = next(iter(value.items()), ("", None))
    if len(value) != 1 or kind not in kinds or not isinstance(name, str):
        raise ConfigError(
            f'{what}: expected {{dtype = "fp32"}} or {{function = "name"}}, got {value!r:.80}'
        )
    return kinds[kind](name)
