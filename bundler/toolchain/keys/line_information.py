# SPDX-License-Identifier: Apache-2.0
"""`path_counts`, `place_parts`: whether this Triton's keys hold where a kernel's source file lies,
and the parts that then tell it.

A kernel's binary holds the path of its source as line information.  Up to Triton 3.9 the key holds
the number of its first line alone; a coming release hashes path and column too, unless
TRITON_DISABLE_LINE_INFO is set (triton-lang/triton pull request 11832).  Such keys differ between
two checkouts, and between two Pythons of one machine.

`keytext` adds the parts to a key's others, `explain` compares them, and `doctor` says what to set.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

PATH_PART, COLUMN_PART = "source.path", "source.column"
VARIABLE = "TRITON_DISABLE_LINE_INFO"
#: The fix, for every message about it.
ADVICE = f"set {VARIABLE}=1 where kernels are recorded and where they are used"
_DIGITS = 16
#: No file lies there: for a function with this path Python asks the loader of the function's
#: module, so it finds this module's text.
_OTHER_PLACE = os.path.join(os.path.dirname(__file__), "another place", os.path.basename(__file__))


def path_counts() -> bool:
    """Tell whether the keys that Triton makes now hold the path of the source; False where Triton
    is not imported.
    """
    jit: Any = getattr(sys.modules.get("triton.runtime.jit"), "JITCallable", None)
    compilation = getattr(sys.modules.get("triton.knobs"), "compilation", None)
    return jit is not None and _probed(jit, bool(getattr(compilation, "disable_line_info", False)))


@functools.lru_cache(maxsize=4)
def _probed(jit: Any, _disabled: bool) -> bool:
    """Compare the hashes of one function at two paths; Triton's own code is the only one that
    knows.
    """
    moved = types.FunctionType(
        _probe.__code__.replace(co_filename=_OTHER_PLACE), globals(), _probe.__name__
    )
    try:
        return bool(jit(_probe).cache_key != jit(moved).cache_key)
    except Exception:  # noqa: BLE001  # Triton's own code, of any release: what cannot be asked is taken for the Triton we know
        return False


def _probe(number: int) -> int:
    """Return the number: Triton hashes this function, nobody calls it."""
    return number


def place_parts(fn: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of a JIT function's key that tell where it stands, where those count; nothing
    elsewhere.

    The path itself would travel, so a digest stands for it.
    """
    path = getattr(fn, "file_name", None) or getattr(
        getattr(getattr(fn, "fn", None), "__code__", None), "co_filename", None
    )
    if not isinstance(path, str) or not path_counts():
        return
    yield PATH_PART, hashlib.sha256(path.encode("utf-8", "replace")).hexdigest()[:_DIGITS]
    column = getattr(fn, "def_file_col_number", None)
    if column is not None:
        yield COLUMN_PART, str(column)
