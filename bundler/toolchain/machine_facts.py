# SPDX-License-Identifier: Apache-2.0
"""`machine_facts`: what this machine has of the things that a tree of a server's cache depends on,
by name, as texts.

Packing a family notes them as the fingerprint of its trees, restoring and explaining compare.
Imports no package that it names, and opens no device.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable

from bundler.toolchain import identity, targets

_CUDA = re.compile(r"""^(?:cuda|hip)\b[^=\n]*=\s*["']([^"']+)["']""", re.MULTILINE)
_TORCH_BYTES = 1 << 16
# So alike are `pyton` and `python`, and not the names of two packages.
_ALIKE = 0.8


def machine_facts(names: Iterable[str]) -> dict[str, str]:
    """Return name -> value of each fact that is known here; a name that is none of ours is a
    package, which stands for its version.
    """
    found = {
        name: _FACTS[name]() if name in _FACTS else identity.version_of(name)
        for name in dict.fromkeys(names)
    }
    return {name: value for name, value in found.items() if value}


def misspelled(name: str) -> str | None:
    """Return the fact that a name which is neither a fact nor a package here was meant to be; None
    for what may be a package elsewhere.
    """
    if name in _FACTS or identity.version_of(name):
        return None
    return next(iter(difflib.get_close_matches(name, _FACTS, n=1, cutoff=_ALIKE)), None)


def _environment(name: str) -> Callable[[], str | None]:
    return lambda: dict(identity.environment()).get(name)


def _cuda() -> str | None:
    """Return the CUDA, or ROCm, that torch was built for: its `version.py` says so, in a
    line each.
    """
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.origin:
            return None
        path = os.path.join(os.path.dirname(spec.origin), "version.py")
        with open(path, encoding="utf-8") as file:
            found = _CUDA.search(file.read(_TORCH_BYTES))
    except (ImportError, OSError, ValueError):
        return None
    return found[1] if found is not None else None


def _triton() -> str | None:
    installed = identity.installed_triton()
    return installed.release if installed is not None else None


_FACTS: dict[str, Callable[[], str | None]] = {
    "python": lambda: (
        f"{platform.python_implementation()} {'.'.join(map(str, sys.version_info[:2]))}"
    ),
    "platform": _environment("platform"),
    "gpu": _environment("gpu"),
    "driver": _environment("driver"),
    "target": lambda: ", ".join(map(str, targets.visible_targets() or ())) or None,
    "cuda": _cuda,
    "triton": _triton,
    # Nothing on a machine says how many ranks a server will have there: users do.
    "ranks": lambda: None,
}
