# SPDX-License-Identifier: Apache-2.0
"""`is_program_path`: which opaque files of a bundle are plans of generated programs: data that a replay validates, never code.

`program_build` names them, `program_replay` looks for them, a restore leaves them out, and signatures of kernels cover them.
"""

from __future__ import annotations

import re

from bundler.errors import UnsafeName
from bundler.format.tree_index import is_tree_path

_PREFIX, _SUFFIX = "programs/", ".program.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")


def program_path(name: str) -> str:
    """Return where the plan of a program stands in a bundle.

    Raises:
        UnsafeName: the name is no plain one.
    """
    if not _NAME.fullmatch(name):
        raise UnsafeName(
            f"program {name!r:.80}: expected a name of up to 128 letters, digits and any of _ . + -", name=name
        )
    return f"{_PREFIX}{name}{_SUFFIX}"


def program_name(path: str) -> str | None:
    """Return the name of the program whose plan stands at a path; None for any other file."""
    if not (path.startswith(_PREFIX) and path.endswith(_SUFFIX)):
        return None
    name = path[len(_PREFIX) : -len(_SUFFIX)]
    return name if _NAME.fullmatch(name) else None


def is_program_path(path: str) -> bool:
    """Whether an opaque file of a bundle is the plan of a program."""
    return program_name(path) is not None


def is_cache_path(path: str) -> bool:
    """Whether an opaque file of a bundle belongs to Inductor's cache, where torch executes or unpickles it."""
    return not is_tree_path(path) and not is_program_path(path)
