# SPDX-License-Identifier: Apache-2.0
"""`operand`: an expression's text in parentheses where it needs them to stand beside an operator or
before a dot.

Every module that writes text of kernels puts expressions together with it.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9.]*")
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")


def operand(text: str) -> str:
    """Return the text as it is where it is a name, a number, a call or in parentheses; else in
    parentheses.
    """
    return text if is_atom(text) else f"({text})"


def is_atom(text: str) -> bool:
    """Whether the text binds tighter than any operator: a name, a number, or a chain of calls and
    subscripts.
    """
    if _NUMBER.fullmatch(text):
        return True
    start = _WORD.match(text)
    rest = text[start.end() :] if start else text
    if not start and not text.startswith("("):
        return False
    while rest:
        if rest[0] not in "([":
            return False
        rest = rest[_closing(rest) + 1 :]
        member = re.match(r"\.[A-Za-z_][A-Za-z_0-9.]*", rest)
        rest = rest[member.end() :] if member else rest
    return True


def _closing(text: str) -> int:
    """Return where the bracket that begins the text is closed; strings with brackets do not occur
    inside expressions.
    """
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if depth == 0:
            return place
    raise ValueError(f"an expression with a bracket that is not closed: {text}")
