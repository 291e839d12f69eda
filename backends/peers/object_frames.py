# SPDX-License-Identifier: Apache-2.0
"""How many objects travel in one exchange between peers: the lines that ask, and the frames that
answer.

::

    POST /objects    a line for each object: its key, a blank, the most bytes that it may have
    the answer       for each of these, in order: its size in 8 bytes, then its bytes; or one of `ABSENT`, `LATER`, `LARGER` and nothing

`peer_backend.py` asks, `peer_server.py` answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bundler.backends.keys import is_key

#: It is not there; the answer is full, ask again; it has more bytes than it may have.
ABSENT, LATER, LARGER = -1, -2, -3
MOST_KEYS = 512
# Keys have 400 characters at most, and those of objects about 70.
QUESTION_BYTES = 256 * 1024
# An answer is as large, or one object.
ANSWER_BYTES = 4 * 1024 * 1024
SIZE_BYTES = 8


def encode_question(max_bytes: Mapping[str, int]) -> bytes:
    """Return the lines that ask for objects, each up to a size."""
    return "".join([f"{key} {int(most)}\n" for key, most in max_bytes.items()]).encode("ascii")


def decode_question(body: bytes) -> dict[str, int] | None:
    """Return what is asked for; None for what is no question."""
    found: dict[str, int] = {}
    lines = body.decode("ascii", "replace").split("\n")
    if lines.pop() or len(lines) > MOST_KEYS:
        return None
    for line in lines:
        key, _, most = line.partition(" ")
        if not is_key(key) or not most.isdecimal() or len(most) > len(str(1 << 63)):
            return None
        found[key] = int(most)
    return found


def encode_size(size: int) -> bytes:
    """Return what stands before the bytes of an object, or in place of them."""
    return size.to_bytes(SIZE_BYTES, "big", signed=True)


def decode_answer(keys: Sequence[str], body: memoryview) -> Iterator[tuple[str, bytes | int]]:
    """Yield for each key its bytes, or why there are none; raises `ValueError` for what is no
    answer.
    """
    offset = 0
    for key in keys:
        head = body[offset : offset + SIZE_BYTES]
        size = int.from_bytes(head, "big", signed=True)
        offset += SIZE_BYTES
        if len(head) < SIZE_BYTES or size < LARGER or size > len(body) - offset:
            raise ValueError("cut off, or no answer to what was asked")
        if size < 0:
            yield key, size
        else:
            yield key, bytes(body[offset : offset + size])
            offset += size
    if offset != len(body):
        raise ValueError("more bytes than were asked for")
