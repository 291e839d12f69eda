# SPDX-License-Identifier: Apache-2.0
"""`check_answer`: whether what a server answered is of the kind that the command has.

A store may be a server that somebody else runs, or no Redis at all.  `run` in `server_exchange.py`
checks every answer where it comes in, so that nothing above ever meets a list where a number
belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from bundler.backends.backend_errors import BackendUnavailable
from bundler.backends.redis.lua_scripts import (
    CLAIM,
    CLEAR,
    DELETE,
    DESCRIBE,
    HEADS,
    RENEW,
    SCAN_SHORT,
    SWAP,
    TOUCH,
)
from bundler.backends.redis.server_connections import Word

#: Gets an answer and how many keys the command had.
_Shape: TypeAlias = Callable[[Any, int], bool]
#: The last second of the year 9999: later ones are no dates of Python's.
LATEST_S = 253_402_300_799
_DIGITS = 20
_SLOTS = 16384


class WrongAnswer(BackendUnavailable):
    """A server answered with something of another kind than the command has."""


def check_answer(words: Sequence[Word], answer: Any) -> None:
    """Raise `WrongAnswer` unless an answer is an error of the server's, or of the kind that its
    command has.
    """
    if isinstance(answer, Exception):
        return
    name = str(words[0])
    expected, shape = _OF_SCRIPTS[str(words[1])] if name.startswith("EVAL") else _OF_COMMANDS[name]
    keys = int(words[2]) if name.startswith("EVAL") else 1
    if not shape(answer, keys):
        raise WrongAnswer(
            f"answered {name} with {_kind(answer)}; expected {expected}; is it a Redis server?"
        )


def _kind(answer: Any) -> str:
    if isinstance(answer, list):
        return f"a list of {len(answer)}"
    return repr(answer) if answer is None or isinstance(answer, int) else "a text"


def _of(kind: Any) -> _Shape:
    """Return what tells whether an answer is of a type."""

    def fits(answer: Any, _keys: int) -> bool:
        try:
            msgspec.convert(answer, kind, builtin_types=(bytes,))
        except msgspec.ValidationError:
            return False
        return True

    return fits


def _rows_of(kind: Any) -> _Shape:
    """Return what tells whether an answer is a list of as many members of a type as keys."""
    fits = _of(list[kind])
    return lambda answer, keys: fits(answer, keys) and len(answer) == keys


def _is_text(answer: Any, _keys: int) -> bool:
    return isinstance(answer, bytes)


def _is_int(answer: Any, _keys: int) -> bool:
    return isinstance(answer, int)


def _is_number(text: bytes) -> bool:
    return len(text) <= _DIGITS and text.isdigit()


def _is_time(answer: Any, keys: int) -> bool:
    return (
        _of(tuple[bytes, bytes])(answer, keys)
        and all(map(_is_number, answer))
        and int(answer[0]) <= LATEST_S
    )


def _is_page(answer: Any, keys: int) -> bool:
    return _of(tuple[bytes, list[bytes]])(answer, keys) and _is_number(answer[0])


def _is_slots(answer: Any, keys: int) -> bool:
    return _of(list[list[Any]])(answer, keys) and all(map(_is_range, answer))


def _is_range(told: list[Any]) -> bool:
    if not _of(tuple[int, int, list[Any]])(told[:3], 0):
        return False
    first, last, node = told[:3]
    return 0 <= first <= last < _SLOTS and _of(tuple[bytes | None, int])(node[:2], 0)


def _are_touched(answer: Any, keys: int) -> bool:
    return (
        _of(list[bytes])(answer, keys)
        and len(answer) <= 2 * keys
        and len(answer) % 2 == 0
        and all(name.isascii() for name in answer[::2])
    )


_NUMBER, _TEXT = ("a number", _is_int), ("a text", _is_text)
_HEADS = ("the first bytes of each key", _rows_of(bytes))
_PAGE = ("a cursor and names", _is_page)
_OF_COMMANDS: dict[str, tuple[str, _Shape]] = {
    "ASKING": _TEXT,
    "CLUSTER": ("ranges of slots", _is_slots),
    "EXISTS": _NUMBER,
    "GET": ("a text or nothing", _of(bytes | None)),
    "GETRANGE": _TEXT,
    "PEXPIRE": _NUMBER,
    "PTTL": _NUMBER,
    "SCAN": _PAGE,
    "SET": ("a text or nothing", _of(bytes | None)),
    "STRLEN": ("a size", lambda answer, keys: _is_int(answer, keys) and answer >= 0),
    "TIME": ("seconds and microseconds", _is_time),
    "UNLINK": _NUMBER,
}
_OF_SCRIPTS: dict[str, tuple[str, _Shape]] = {SCAN_SHORT: _PAGE} | {
    text: shape
    for script, shape in {
        HEADS: _HEADS,
        CLAIM: _HEADS,
        DELETE: _HEADS,
        CLEAR: _HEADS,
        DESCRIBE: ("first bytes, size and time of each key", _rows_of(tuple[bytes, int, int])),
        TOUCH: ("names and first bytes", _are_touched),
        SWAP: _NUMBER,
        RENEW: _NUMBER,
    }.items()
    for text in (script.sha, script.source)
}
