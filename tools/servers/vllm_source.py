# SPDX-License-Identifier: Apache-2.0
"""`Vllm`: vLLM's own modules from the files of its wheel, with stubs only for what is absent: its
compiled parts, its heavy dependencies.

`trees.py` and its child process lay caches out with them.  A module that is not among `OWN` is a
stub, whose attributes answer any call.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

# Run as they are: they name the directories, and hash what the names are made of.
OWN = (
    "vllm.envs",
    "vllm.config.utils",
    "vllm.utils.hashing",
    "vllm.compilation.counter",
    "vllm.compilation.wrapper",
    "vllm.compilation.compiler_interface",
    "vllm.compilation.caching",
    "vllm.compilation.backends",
    "vllm.compilation.decorators",
)
_PACKAGES = ("vllm", "vllm.compilation", "vllm.config", "vllm.utils")
_ABSENT = ("cbor2", "pydantic", "transformers", "depyf", "regex", "psutil", "cloudpickle")


class Stub(ModuleType):
    """A module that has every attribute: a mock that takes any call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Of a package, with nothing in it.
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Source(MetaPathFinder, Loader):
    """Finds vLLM's own modules in the files of its wheel, and makes stubs of the rest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an own module, of a stub, or None for what is neither."""
        if fullname in OWN:
            file = self._folder.joinpath(*fullname.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(fullname, file)
        if fullname.startswith("vllm.") or fullname.partition(".")[0] in _ABSENT:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a stub."""
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stub has what it is asked for."""


def load_vllm(folder: Path, release: str) -> ModuleType:
    """Make `vllm` importable in this process; returns the package.

    Args:
        folder: holds `vllm/`, the Python files of the wheel.
        release: its version.
    """
    if not os.path.isfile(folder / "vllm" / "envs.py"):
        raise SystemExit(f"{folder} has no vllm/envs.py: run python -m tools.servers wheels first")
    sys.meta_path.insert(0, _Source(folder))
    for name in _PACKAGES:
        sys.modules[name] = Stub(name)
    package = sys.modules["vllm"]
    package.__version__ = release  # type: ignore[attr-defined]
    # `import vllm.envs as envs` reads the attribute of the package.
    for name in OWN:
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, importlib.import_module(name))
    # A figure of a module that is a stub.
    monitor: Any = importlib.import_module("vllm.compilation.monitor")
    monitor.torch_compile_start_time = 0.0
    return package
