# SPDX-License-Identifier: Apache-2.0
"""`lay_out_monitor`: vLLM's own JIT monitor in a package of its name, without the rest of vLLM.

Tests arm it.  Its file is taken from the wheel as it is; beside it are
the few names that it imports.
"""

from __future__ import annotations

import shutil
from pathlib import Path

# What vllm/utils/jit_monitor.py imports of vLLM.
_BESIDE = {
    "__init__.py": "",
    "utils/__init__.py": "",
    "triton_utils/__init__.py": "",
    "triton_utils/importing.py": "HAS_TRITON = True\n",
    "platforms.py": "class current_platform:\n    is_rocm = staticmethod(lambda: False)\n",
    "logger.py": """import logging


def init_logger(name):
    logger = logging.getLogger(name)
    logger.warning_once = logger.warning
    return logger
""",
}
_PLACE = "utils/jit_monitor.py"


def monitor_in(sources: Path) -> Path:
    """Return the monitor's file in what `python -m tools.servers wheels` unpacked."""
    return sources / "vllm" / "vllm" / _PLACE


def lay_out_monitor(folder: Path, monitor: Path) -> Path:
    """Write a package `vllm` into a folder, to put on the path; returns the folder.

    Args:
        folder: gets `vllm/`.
        monitor: the file `jit_monitor.py` of the wheel.
    """
    for name, text in _BESIDE.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copyfile(monitor, folder / "vllm" / _PLACE)
    return folder
