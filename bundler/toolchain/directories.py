# SPDX-License-Identifier: Apache-2.0
"""`triton_cache_dir`, `inductor_cache_dir`: where Triton and Inductor look for compiled kernels at
this moment.

The rules are Triton's and Inductor's, applied without importing them, making a directory or writing
the environment.  Everything is read at each call, as both do, since users change these settings
while a process runs.

Restores, recordings, sessions, the tuner and the compile service ask it where kernels are or go.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from bundler.errors import ConfigError

_UNSAFE_IN_USER_NAME = r'[\\/:*?"<>|]'  # compiled when used


def triton_cache_dir() -> str:
    """Return Triton's cache directory as an absolute path; symbolic links are kept as they are
    spelled.

    A value set in Python (`triton.knobs.cache.dir`) counts when Triton is imported, else the
    environment.

    Raises:
        ConfigError: the directory is set to an empty text, with which Triton refuses to compile.
    """
    cache: Any = getattr(sys.modules.get("triton.knobs"), "cache", None)
    directory = cache.dir if cache is not None else _directory_from_environment()
    if not directory:
        raise ConfigError(
            "TRITON_CACHE_DIR is set to an empty text; unset it, or set it to a directory",
            got=directory,
        )
    return os.path.abspath(directory)


def _directory_from_environment() -> str:
    directory = os.environ.get("TRITON_CACHE_DIR")
    if directory is not None:
        return directory
    return os.path.join(os.environ.get("TRITON_HOME", os.path.expanduser("~/")), ".triton", "cache")


def inductor_cache_dir() -> str:
    """Return Inductor's cache directory as an absolute path."""
    directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return os.path.abspath(_default_inductor_dir() if directory is None else directory)


def inductor_kernel_dir(device: int) -> str:
    """Return the directory of Triton kernels that Inductor compiles for `device` (its index on this
    machine).
    """
    directory = os.environ.get("TRITON_CACHE_DIR")
    if directory is not None:
        return os.path.abspath(directory)
    return os.path.join(inductor_cache_dir(), "triton", str(device))


def inductor_layout(directory: str) -> tuple[str, int] | None:
    """Return (Inductor's root, device) for a directory of kernels spelled `<root>/triton/<device>`,
    else None.

    Looks at the text only: the directory need not exist.
    """
    parent, device = os.path.split(os.path.normpath(directory))
    root, name = os.path.split(parent)
    if name == "triton" and root and device.isascii() and device.isdecimal():
        return root, int(device)
    return None


def _default_inductor_dir() -> str:
    # Few ask for the usual place, and these import much of what asks the system.
    import getpass
    import tempfile

    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return os.path.join(
        tempfile.gettempdir(), "torchinductor_" + re.sub(_UNSAFE_IN_USER_NAME, "_", user)
    )
