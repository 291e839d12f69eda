# SPDX-License-Identifier: Apache-2.0
"""`check_answer`: whether what a server answered is of the kind that the command has.

A store may be a server that somebody else runs, or no Redis at all.  `run` in `server_exchange.py`
checks every answer where it comes in, so that nothing above ever meets a list where a number
belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from bundler.backends.backend_errors import BackendUnavailable
from bundler.backends.redis.command_packing import Word
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


def _is_int(answer: Any, _keys: int) -> bool:
    return isinstance(answer, int)


def _is_size(answer: Any, _keys: int) -> bool:
    return isinstance(answer, int) and answer >= 0


def _is_text(answer: Any, _keys: int) -> bool:
    return isinstance(answer, bytes)


def _is_text_or_none(answer: Any, _keys: int) -> bool:
    return answer is None or isinstance(answer, bytes)


def _is_number(answer: Any) -> bool:
    return isinstance(answer, bytes) and len(answer) <= _DIGITS and answer.isdigit()


def _is_row(answer: Any, *kinds: type) -> bool:
    return (
        isinstance(answer, list)
        and len(answer) == len(kinds)
        and all(map(isinstance, answer, kinds))
    )


def _is_time(answer: Any, _keys: int) -> bool:
    return (
        _is_row(answer, bytes, bytes)
        and all(map(_is_number, answer))
        and int(answer[0]) <= LATEST_S
    )


def _is_page(answer: Any, _keys: int) -> bool:
    return (
        _is_row(answer, bytes, list)
        and _is_number(answer[0])
        and all(isinstance(name, bytes) for name in answer[1])
    )


def _is_slots(answer: Any, _keys: int) -> bool:
    return isinstance(answer, list) and all(map(_is_range, answer))


def _is_range(told: Any) -> bool:
    return (
        isinstance(told, list)
        and _is_row(told[:3], int, int, list)
        and 0 <= told[0] <= told[1] < _SLOTS
        and (_is_row(told[2][:2], bytes, int) or _is_row(told[2][:2], type(None), int))
    )


def _are_heads(answer: Any, keys: int) -> bool:
    return (
        isinstance(answer, list)
        and len(answer) == keys
        and all(isinstance(head, bytes) for head in answer)
    )


def _are_touched(answer: Any, keys: int) -> bool:
    return (
        isinstance(answer, list)
        and len(answer) <= 2 * keys
        and len(answer) % 2 == 0
        and all(isinstance(told, bytes) for told in answer)
        and all(name.isascii() for name in answer[::2])
    )


def _are_described(answer: Any, keys: int) -> bool:
    return (
        isinstance(answer, list)
        and len(answer) == keys
        and all(_is_row(told, bytes, int, int) for told in answer)
    )


_NUMBER, _TEXT = ("a number", _is_int), ("a text", _is_text)
_HEADS = ("the first bytes of each key", _are_heads)
_PAGE = ("a cursor and names", _is_page)
_OF_COMMANDS: dict[str, tuple[str, _Shape]] = {
    "ASKING": _TEXT,
    "CLUSTER": ("ranges of slots", _is_slots),
    "EXISTS": _NUMBER,
    "GET": ("a text or nothing", _is_text_or_none),
    "GETRANGE": _TEXT,
    "PEXPIRE": _NUMBER,
    "PTTL": _NUMBER,
    "SCAN": _PAGE,
    "SET": ("a text or nothing", _is_text_or_none),
    "STRLEN": ("a size", _is_size),
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
        DESCRIBE: ("first bytes, size and time of each key", _are_described),
        TOUCH: ("names and first bytes", _are_touched),
        SWAP: _NUMBER,
        RENEW: _NUMBER,
    }.items()
    for text in (script.sha, script.source)
}
