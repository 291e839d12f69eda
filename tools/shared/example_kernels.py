# SPDX-License-Identifier: Apache-2.0
"""Imports examples/kernels.py, or a copy of it, as programs do that have it beside them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tools.shared.processes import ROOT

PATH = ROOT / "examples" / "kernels.py"


def load(path: Path = PATH, name: str = "kernels") -> ModuleType:
    """Import a file, wherever it lies, under a name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
