# SPDX-License-Identifier: Apache-2.0
"""What a Redis server answers: how it is read, whether it is of the kind that the command has, and
what its errors mean.

`ReplyParser` reads answers, and no more of one than the exchange allows.  The parsers that redis-py
has believe what a server says: an array of two thousand million elements is allocated before one of
them has come, and arrays inside arrays go as deep as Python's stack.  `server_connections.py` gives
each connection this one.

A store may be a server that somebody else runs, or no Redis at all: by `check_answer` every answer
is checked where it comes in, so that nothing above ever meets a list where a number belongs.

No other module turns errors of redis-py, and error replies, into `BackendError`: every exchange
with a server runs inside `errors_by_meaning`; `meaning` and `is_wrong_type` read single replies.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError as ServerGone
from redis.exceptions import InvalidResponse, RedisClusterException, RedisError, ResponseError

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendError,
    BackendFull,
    BackendTimeout,
    BackendUnavailable,
)
from bundler.backends.redis.value_parts import (
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


class OverlongReply(BackendUnavailable):
    """A server sent more than what was asked for may have."""


# By name, since releases of redis-py have different classes; whatever is not here means that the
# server is unavailable.
_MEANINGS: dict[str, type[BackendError]] = {
    "OutOfMemoryError": BackendFull,
    "AuthenticationError": BackendDenied,
    "AuthenticationWrongNumberOfArgsError": BackendDenied,
    "AuthorizationError": BackendDenied,
    "ExternalAuthProviderError": BackendDenied,
    "NoPermissionError": BackendDenied,
    "ReadOnlyError": BackendDenied,
    "TimeoutError": BackendTimeout,
}
# Inside a script an error loses its class; these are words of the server, the last two those of
# 6.2.
_WORDS = {
    BackendFull: ("OOM command",),
    BackendDenied: (
        "NOPERM",
        "NOAUTH",
        "WRONGPASS",
        "READONLY",
        "can't run this command",
        "can't access at least one",
    ),
}
_FIXES = {
    BackendFull: "raise maxmemory, set maxmemory-policy allkeys-lru, or prune",
    BackendDenied: "check user, password and the user's rights; a replica takes no writes",
}


def meaning(error: Exception, shown: str) -> BackendError:
    """Return what an error of redis-py, or of the system below it, means."""
    # What is read goes on behind it; redis-py ends its sentences.
    text = str(error).rstrip(".") or type(error).__name__
    names = [cls.__name__ for cls in type(error).__mro__]
    kind = next((_MEANINGS[name] for name in names if name in _MEANINGS), BackendUnavailable)
    kind = next((k for k, words in _WORDS.items() if any(word in text for word in words)), kind)
    fix = _FIXES.get(kind)
    return kind(f"{shown}: {text}{f'; {fix}' if fix else ''}")


def is_wrong_type(answer: object) -> bool:
    """Tell whether a server answered that a key holds a list, a hash or the like, and no string."""
    return isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")


@contextlib.contextmanager
def errors_by_meaning(shown: str) -> Iterator[None]:
    """Raise `BackendError` for errors of redis-py; a host name that cannot be one is a
    `UnicodeError`.
    """
    try:
        yield
    except (RedisError, RedisClusterException, OSError, UnicodeError) as error:
        raise meaning(error, shown) from error


# The answer to CLUSTER SLOTS is the deepest of those that are read here: ranges, nodes, a node,
# what is known of it.
MOST_DEPTH = 4
# An error of the server's may be a long line; each other line is a number.
LINE_BYTES = 64 * 1024
_INTEGER_DIGITS = 20
# What an element of an array takes here besides its bytes, at least.
ELEMENT_BYTES = 64
_END = b"\r\n"
# Read bytes are dropped from the buffer once there are so many: each time the rest is moved.
_DROPPED_BYTES = 1 << 20
# Of a large value so many bytes are asked for at a time.
_LARGE_READ_BYTES = 1 << 20


class ReplyParser(BaseParser):
    """A parser of RESP 2, as redis-py's connections use one; texts come as bytes.

    Guarantees: what a server announces is compared with the allowance of the exchange (see
    `Metered`) before memory is taken for it, and what is no RESP 2 raises `InvalidResponse`.

    Args:
        socket_read_size: how many bytes are asked of the socket at a time.
    """

    def __init__(self, socket_read_size: int) -> None:
        self._read_bytes = socket_read_size
        self._socket: Any = None
        self._received, self._at = bytearray(), 0

    def on_connect(self, connection: Any) -> None:
        """Read from a connection's socket from now on."""
        self._socket = connection._sock  # noqa: SLF001  # as redis-py's parsers do
        self._received, self._at = bytearray(), 0

    def on_disconnect(self) -> None:
        """Forget the socket and what came from it."""
        self._socket = None
        self._received, self._at = bytearray(), 0

    def can_read(self, timeout: float = 0, **_: Any) -> bool:
        """Tell whether anything came that nobody asked for; raises when the server is gone."""
        if self._at < len(self._received):
            return True
        self._socket.settimeout(timeout)
        try:
            self._receive()
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False
        finally:
            self._socket.settimeout(None)
        return True

    def read_response(self, *_: Any, **__: Any) -> Any:
        """Return the next answer; one that is an error of the server's is returned too, or raised
        where the connection is of no more use.
        """
        answer = self._read(0)
        if self._at == len(self._received):
            self._received.clear()
            self._at = 0
        elif self._at > _DROPPED_BYTES:
            del self._received[: self._at]
            self._at = 0
        if isinstance(answer, ServerGone):
            raise answer
        return answer

    def _read(self, depth: int) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            size = _integer(line)
            return None if size == -1 else self._bulk(size, line)
        if kind == b":":
            return _integer(line)
        if kind == b"+":
            return rest
        if kind == b"-":
            return self._error(rest)
        if kind == b"*":
            count = _integer(line)
            return None if count == -1 else self._array(count, depth, line)
        raise InvalidResponse(f"{line[:80]!r} is no answer of Redis")

    def _line(self) -> bytes:
        start = self._at
        while (end := self._received.find(_END, start)) < 0:
            start = max(self._at, len(self._received) - 1)
            if start - self._at > LINE_BYTES:
                raise InvalidResponse(f"a line of an answer is longer than {LINE_BYTES} bytes")
            self._receive()
        line = bytes(self._received[self._at : end])
        self._at = end + len(_END)
        return line

    def _bulk(self, size: int, line: bytes) -> bytes:
        if size < 0:
            raise InvalidResponse(f"{line!r} is no size of a value")
        end = self._at + size
        if (missing := end + len(_END) - len(self._received)) > 0:
            self._socket.expect(missing)
        while (missing := end + len(_END) - len(self._received)) > 0:
            self._receive(missing)
        if self._received[end : end + len(_END)] != _END:
            raise InvalidResponse(f"a value is longer than the {size} bytes that were announced")
        value = bytes(memoryview(self._received)[self._at : end])
        self._at = end + len(_END)
        return value

    def _array(self, count: int, depth: int, line: bytes) -> list[Any]:
        if count < 0 or depth >= MOST_DEPTH:
            raise InvalidResponse(f"{line!r} is no array, or one at depth {depth + 1}")
        self._socket.spend(count * ELEMENT_BYTES)
        return [self._read(depth + 1) for _ in range(count)]

    def _error(self, text: bytes) -> Exception:
        try:
            # redis-py's
            error: Exception = self.parse_error(text.decode("utf-8", "replace"))  # type: ignore[no-untyped-call]
        except (ValueError, TypeError) as wrong:  # a redirection without an address
            raise InvalidResponse(f"{text[:80]!r} is no error of Redis") from wrong
        known = isinstance(error, (ResponseError, ServerGone))
        return error if known else ResponseError(str(error))

    def _receive(self, missing: int = 0) -> None:
        data = self._socket.recv(max(self._read_bytes, min(missing, _LARGE_READ_BYTES)))
        if not data:
            raise ServerGone("the server closed the connection")
        self._received += data


def _integer(line: bytes) -> int:
    """Return the number of a line, which has 64 bits at most."""
    digits = line[1:]
    if len(digits) <= _INTEGER_DIGITS and digits.lstrip(b"+-").isdigit():
        try:
            number = int(digits)
        except ValueError:
            pass
        else:
            if -(1 << 63) <= number < 1 << 63:
                return number
    raise InvalidResponse(f"{line[:80]!r} holds no number of 64 bits")


#: What a command is made of.
Word: TypeAlias = str | bytes | int
#: Gets an answer and how many keys the command had.
_Shape: TypeAlias = Callable[[Any, int], bool]
#: The last second of the year 9999: later ones are no dates of Python's.
LATEST_S = 253_402_300_799
_DIGITS = 20
SLOTS = 16384


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
    return 0 <= first <= last < SLOTS and _of(tuple[bytes | None, int])(node[:2], 0)


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
