# SPDX-License-Identifier: Apache-2.0
"""`remember`: Triton's hash of its own files, which all its keys begin with, from an earlier process.

Triton reads and hashes half a gigabyte for it, in every process that looks a kernel up.

::

    <cache>/triton-bundler/triton/<digest of Triton's directory>
        digest of what the file system says of Triton's files: names, sizes, times, inodes
        sha256 of the hash, and the hash

A file that was written to has another time of change, which nobody can set; so the hash is taken
only where no file was written to since.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import time
from typing import Any

from bundler.compile.source_modules import errors_of, read_trusted, user_directory, write_whole
from bundler.errors import BundlerError
from bundler.package_loggers import logger
from bundler.toolchain.identity import triton_dir

_log = logger("bundler.codegen")
# Files that Triton may hash: of Python, and shared libraries.
_SUFFIXES = (".py", ".so", ".pyd")
# A file that was just written to may be written to again without another time.
_SETTLED_S = 10.0
# Longer than any hash is: some 70 characters for each module.
_MOST_BYTES = 1 << 20


def remember() -> None:
    """Have Triton's hash of its own files known in this process.

    Triton that is not imported yet is imported.  Trouble with the file is a miss: Triton hashes its
    files, as it does by itself.
    """
    cache: Any = importlib.import_module("triton.runtime.cache")
    directory = triton_dir()
    if directory is None or not hasattr(cache.triton_key, "cache_info"):
        return  # this was here, or a Triton that keeps its hash in another way
    if cache.triton_key.cache_info().currsize:
        return
    facts, newest = _facts(directory)
    path = os.path.join(user_directory("triton"), hashlib.sha256(directory.encode()).hexdigest())
    found = _kept(path, facts)
    if found is None:
        found = cache.triton_key()
        again, _ = _facts(directory)
        if again == facts and newest < time.time() - _SETTLED_S:
            _keep(path, facts, found)
    cache.triton_key = lambda: found


def of_files() -> str | None:
    """Return Triton's hash of its own files; None where this Triton has none."""
    key = getattr(sys.modules.get("triton.runtime.cache"), "triton_key", None)
    return None if key is None else str(key())


def _facts(directory: str) -> tuple[str, float]:
    """Return a digest of what the file system says of Triton's files, and when one changed last."""
    found, newest = [], 0.0
    # A backend of somebody else's may be a link.
    for folder, _, names in os.walk(directory, followlinks=True):
        for name in names:
            if name.endswith(_SUFFIXES):
                path = os.path.join(folder, name)
                about = os.stat(path)
                newest = max(newest, about.st_ctime)
                times = about.st_mtime_ns, about.st_ctime_ns
                found.append((path, about.st_size, *times, about.st_dev, about.st_ino))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest(), newest


def _kept(path: str, facts: str) -> str | None:
    try:
        data = read_trusted(path, _MOST_BYTES, "the directory of Triton's hash")
    except BundlerError as error:
        _log.debug("Triton's hash cannot be read: %s", path, exc_info=error)
        return None
    if data is None:
        return None
    known, digest, text = (*data.split(b"\n", 2), b"", b"")[:3]
    right = known == facts.encode() and digest == _digest(text)
    return text.decode() if right else None


def _keep(path: str, facts: str, found: str) -> None:
    text = found.encode()
    try:
        with errors_of("the directory of Triton's hash"):
            write_whole(path, b"\n".join((facts.encode(), _digest(text), text)))
    except BundlerError as error:
        _log.debug("Triton's hash is not kept: %s", path, exc_info=error)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
