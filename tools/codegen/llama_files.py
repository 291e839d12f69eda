# SPDX-License-Identifier: Apache-2.0
"""What the processes of `without-torch` have in common: files of its folder, how long prompt and
answer are, and the modules of examples/.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from tools.shared.processes import ROOT

BUNDLE, WEIGHTS, TOKENS = "llama.tbundle", "llama.safetensors", "tokens.json"
PROMPT, ANSWER = 12, 64


def example(name: str) -> Any:
    """Return a program of examples/ as a module."""
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
