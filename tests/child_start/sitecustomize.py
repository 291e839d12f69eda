# SPDX-License-Identifier: Apache-2.0
"""Runs at the start of each Python that a test starts: Triton's digest of itself is computed once a
run, not once a process, and the collector looks less often at what is imported.

`triton_key()` hashes 460 MB of libtriton, which is half of what a test's small program costs.  It
is a constant of the installation, and Triton's own test workers hand it on in the same way
(`triton/_internal_testing.py`).  The first process to ask computes it with Triton's code and leaves
it in a file for the others.  `tests/conftest.py` names the folder of these files and puts this one
on PYTHONPATH.
"""

import functools
import gc
import hashlib
import importlib.abc
import importlib.util
import os
import sys

FOLDER = "BUNDLER_TEST_TRITON_KEYS"
# With Python's own threshold it looks hundreds of times at what an import of torch keeps for good,
# 0.6 s of 4.
_COLLECTED_AFTER = 10_000
_MODULE = "triton.runtime.cache"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Replaces `triton_key` as soon as its module has run, before others import it from there."""

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                module.triton_key = _once(module)

            spec.loader.exec_module = exec_module
        return spec


def _once(module):
    compute = module.triton_key

    @functools.cache
    def triton_key():
        path = os.path.join(os.environ[FOLDER], _place(module))
        try:
            with open(path, encoding="utf-8") as file:
                key = file.read()
        except FileNotFoundError:
            key = compute()
            with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
                file.write(key)
            os.replace(file.name, path)
        return key

    return triton_key


def _place(module):
    """Name an installation by its path and by size and time of its library: a test may make another
    one.
    """
    code = os.path.join(os.path.dirname(os.path.dirname(module.__file__)), "_C")
    parts = [code]
    for name in sorted(os.listdir(code)):
        facts = os.stat(os.path.join(code, name))
        parts.append(f"{name} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


if FOLDER in os.environ:
    gc.set_threshold(_COLLECTED_AFTER)
    sys.meta_path.insert(0, _AfterImport())
