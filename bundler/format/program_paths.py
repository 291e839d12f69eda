# SPDX-License-Identifier: Apache-2.0
"""`is_program_path`: which files of a bundle are plans of programs; `is_code_path`: which are code.

::

    programs/NAME.program.json        data, validated by a replay: it calls listed operators alone
    programs/NAME.code-program.json   calls operators of users or other libraries: needs trust in code

`emit` names them, `run` looks for them, and a restore leaves both out.
"""

from __future__ import annotations

import re

from bundler.errors import UnsafeName
from bundler.format.tree_index import is_tree_path

_PREFIX, _SUFFIX, _CODE_SUFFIX = "programs/", ".program.json", ".code-program.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")


def program_path(name: str, *, code: bool = False) -> str:
    """Return where the plan of a program stands in a bundle.

    Args:
        name: of the program.
        code: whether it calls operators that need trust in code.

    Raises:
        UnsafeName: the name is no plain one.
    """
    if not _NAME.fullmatch(name):
        raise UnsafeName(
            f"program {name!r:.80}: expected a name of up to 128 letters, digits and any of _"
            " . + -",
            name=name,
        )
    return f"{_PREFIX}{name}{_CODE_SUFFIX if code else _SUFFIX}"


def program_name(path: str) -> str | None:
    """Return the name of the program whose plan stands at a path; None for any other file."""
    suffix = _CODE_SUFFIX if path.endswith(_CODE_SUFFIX) else _SUFFIX
    if not (path.startswith(_PREFIX) and path.endswith(suffix)):
        return None
    name = path[len(_PREFIX) : -len(suffix)]
    return name if _NAME.fullmatch(name) else None


def is_program_path(path: str) -> bool:
    """Whether an opaque file of a bundle is the plan of a program."""
    return program_name(path) is not None


def is_code_path(path: str) -> bool:
    """Whether an opaque file of a bundle is the plan of a program that calls code of others."""
    return is_program_path(path) and path.endswith(_CODE_SUFFIX)


def is_cache_path(path: str) -> bool:
    """Whether an opaque file of a bundle belongs to Inductor's cache, where torch executes or
    unpickles it.
    """
    return not is_tree_path(path) and not is_program_path(path)
