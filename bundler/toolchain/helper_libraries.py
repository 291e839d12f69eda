# SPDX-License-Identifier: Apache-2.0
"""`origin_here`, `other_keys`: what a helper library is built of, and under which keys this
machine's Triton may ask for it.

Triton builds `cuda_utils` and launchers with the C compiler.  Their keys differ by release, and
since 3.9 they hold absolute include and library directories: the same source has another key where
Triton is installed elsewhere.

The cache managers note the origin when a library is built; restores and sessions place a recorded
library under its other keys too.
"""

from __future__ import annotations

import hashlib
import importlib
import platform
import sys
from pathlib import Path
from types import FrameType

from bundler.toolchain.events import kernel_key
from bundler.toolchain.identity import extension_suffix, installed_triton, triton_dir

_BUILD_MODULE = "triton.runtime.build"
_BUILDERS = frozenset({"compile_module_from_src", "_compile_so"})
_MAX_FRAMES = 8
# What `platform.architecture()` says of linkage on Linux: where the program `file` is installed,
# and where it is not.
_LINKAGES = ("ELF", "")


def origin_here() -> str | None:
    """Return the sha256 (hex) of source, name, libraries, flags, Python and platform of the library
    that Triton asks for now.

    None when Triton's build is not among the callers, or keeps its arguments otherwise than we
    know.
    """
    # the only way to an own caller's frame without a trace
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name in _BUILDERS and frame.f_globals.get("__name__") == _BUILD_MODULE:
            return _origin(frame)
        frame = frame.f_back
    return None


def _origin(frame: FrameType) -> str | None:
    local = frame.f_locals
    source, name = local.get("src"), local.get("name")
    if not isinstance(source, (str, bytes)) or not isinstance(name, str):
        return None
    digest = hashlib.sha256(source.encode() if isinstance(source, str) else source)
    built_with = [repr(local.get(argument)) for argument in ("language", "libraries", "ccflags")]
    for text in (name, *built_with, *_built_for(), extension_suffix()):
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()


def _built_for() -> list[str]:
    # Only the first value of `platform.architecture()`: the second depends on whether the program
    # `file` is installed.
    return [platform.machine(), platform.system(), platform.architecture()[0]]


def other_keys(key: str, filename: str, release: str | None) -> frozenset[str]:
    """Return the other keys by which this machine's Triton may ask for a library that was recorded
    under a key.

    Known for `cuda_utils`, whose source is in Triton's package.  Its key holds what
    `platform.architecture()` says, and that is something else where the program `file` is missing,
    as in most images without a compiler; since 3.9 also directories of this machine.

    Args:
        key, filename: of the recorded library.
        release: of the Triton that recorded it; without directories in keys the key itself proves
            that the source is ours.
    """
    directory = triton_dir()
    if directory is None or filename != f"cuda_utils{extension_suffix()}":
        return frozenset()
    try:
        source = Path(directory, "backends", "nvidia", "driver.c").read_bytes()
        hashes_directories, more = _directories_in_keys()
    except (ImportError, OSError, AttributeError, AssertionError):
        return frozenset()
    keys = {_key(source, linkage, more) for linkage in _LINKAGES}
    installed = installed_triton()
    same_release = installed is not None and release is not None and installed.release == release
    is_ours = key in keys or (hashes_directories and same_release)
    return frozenset(keys - {key}) if is_ours else frozenset()


def _directories_in_keys() -> tuple[bool, bytes]:
    """Return whether this Triton's keys of libraries hold directories, and those of `cuda_utils` as
    they are hashed.
    """
    build = importlib.import_module("triton.runtime.build")
    if not hasattr(build, "_get_cache_manager"):
        return False, b""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    config = {
        "language": ["c"],
        "library_dirs": driver.library_dirs(),
        "include_dirs": driver.include_dirs,
        "libraries": driver.libraries,
    }
    return True, b"".join(
        name.encode() + b"".join(f"{value}:".encode() for value in config[name]) for name in config
    )


def _key(source: bytes, linkage: str, more: bytes) -> str:
    built_for = ",".join([*_built_for(), linkage])
    return kernel_key(hashlib.sha256(source + built_for.encode() + more).hexdigest())
