# SPDX-License-Identifier: Apache-2.0
"""`DirectoryWatch`: finds kernel directories that appear while a recording or a session goes on.

Recordings (`bundler/lifecycle/recorder.py`) and sessions that push a tag
(`bundler/integrations/lookup_engine.py`) make one at their start; nothing else of this room has to
be imported for it.
"""

from __future__ import annotations

import contextlib
import os

from bundler.errors import ConfigError
from bundler.format import names
from bundler.toolchain import directories


class DirectoryWatch:
    """Kernel directories that appear in the caches of this process while a recording runs.

    torch's static launcher and its workers fill caches without a call to this process's listener.
    Another program that uses the same cache at the same time is seen too: what it compiles is in
    the bundle as well.
    """

    def __init__(self) -> None:
        self._inductor = _inductor_dir()
        self._before = {root: _listing(root) for root in _roots()}

    def appeared(self) -> list[str]:
        """Return directories that are there now and were not at the start."""
        found: list[str] = []
        for root in self.roots():
            known = self._before.get(root)
            if known is None and os.path.dirname(root) == self._inductor:
                known = set()  # the directory of one more device, which did not exist
            if known is not None:
                found += [os.path.join(root, name) for name in sorted(_listing(root) - known)]
        return found

    def roots(self) -> list[str]:
        """Return every cache directory that this process's Triton and Inductor use now or used at
        the start.
        """
        return sorted({*self._before, *_roots()})


def _inductor_dir() -> str:
    return os.path.join(directories.inductor_cache_dir(), "triton")


def _roots() -> set[str]:
    """The caches that this process would use, existing or not."""
    roots: set[str] = set()
    with contextlib.suppress(ConfigError):  # set to nothing: Triton itself refuses to compile then
        roots.add(directories.triton_cache_dir())
    inductor = _inductor_dir()
    if os.path.isdir(inductor):
        roots |= {os.path.join(inductor, name) for name in os.listdir(inductor) if name.isdecimal()}
    else:
        roots.add(directories.inductor_kernel_dir(0))
    return roots


def _listing(root: str) -> set[str]:
    try:
        return {name for name in os.listdir(root) if names.is_kernel_key(name)}
    except OSError:
        return set()
