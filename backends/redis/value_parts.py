# SPDX-License-Identifier: Apache-2.0
"""What is stored under which key, how a large value is cut into parts, and the Lua scripts that
work on it inside the server: each on the keys in KEYS and on no others.

::

    <ns>:o:<key>                      an object: a header, then the value, or, for a large one, a head that names its parts
    <ns>:p:<key>:<16 hex>:<number>    a part: a header, then up to `PART_BYTES` of the value
    <ns>:r:<key>                      a ref: its value alone
    <ns>:l:<key>                      a lease: its holder's token

    header  TB, a letter (w whole, s split, p part), 13 digits: how many ms it lives after its last use
    head    header, then 16 digits: bytes of the value, 16 hex: the beginning of their sha256

The lifetime in the header is the writer's choice: a touch sets the expiry to that much from now, so
the time of the last use is the expiry less the lifetime.  Parts carry a digest of the whole in
their names: two writers of different bytes under one key do not mix theirs, two of the same bytes
share them.

On a cluster a call of a script carries keys of one slot; elsewhere up to `SCRIPT_KEYS`, which keeps
each call under a millisecond or so.

`RedisBackend` writes and reads values through `whole`, `split`, `read_head` and `payload`, and
calls the scripts; exchanges send these by digest, and their text where the server does not know the
digest.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from bundler.backends.keys import KEY_CHARACTERS

KIB, MIB = 1024, 1024 * 1024
# A value up to here is stored whole, and comes in one round trip.
WHOLE_BYTES = 256 * KIB
PART_BYTES = 8 * MIB
BATCH_BYTES = 16 * MIB
BATCH_KEYS = 512
# More than any unit or manifest may have; a head that says more is damaged.
MAX_BYTES = 1024 * MIB
HEAD_BYTES = 48
HEADER_BYTES = 16
# Tags and notes of failures have a few KB.  Of a larger value only one byte more than this is read,
# and compared.
REF_BYTES = 256 * KIB
# What scripts give in place of the first bytes of a value that cannot be an object here: too large,
# empty, a list, a hash.
NONE_OF_OURS = b"?"
#: What the head of a large value begins with.
SPLIT = b"TBs"
_HEADER = re.compile(rb"TB[wp]\d{13}")
_SPLIT = re.compile(rb"TBs(\d{13})(\d{16})([0-9a-f]{16})")
# A record names other objects, and should be gone before them: they live a day longer, and a
# quarter of its life.
RECORD = re.compile(r"v\d+/[km]/")
# Which bundle has a kernel, and under which key it was recorded, has some hundred bytes, and is
# asked for only by who knows no tag: it outlives long times of use by tag.
ENTRY, ENTRY_LIVES = re.compile(r"v\d+/[bl]/"), 12
MARGIN, MARGIN_S = 1.25, 24 * 3600.0


@dataclass(frozen=True)
class Head:
    """A large value: its key without namespace, its size, its digest and how long it lives."""

    key: str
    size_bytes: int
    digest: str
    ttl_ms: int

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Name, without namespace, and size of each part, without its header."""
        starts = range(0, self.size_bytes, PART_BYTES)
        sizes = (min(PART_BYTES, self.size_bytes - start) for start in starts)
        return [(f"{self.key}:{self.digest}:{number}", size) for number, size in enumerate(sizes)]

    def encode(self) -> bytes:
        """Return what is stored under the object's own key."""
        return b"TBs%013d%016d%s" % (self.ttl_ms, self.size_bytes, self.digest.encode())


def object_ttl_ms(key: str, ttl_s: float) -> int:
    """Return how long an object lives: records `ttl_s`, what they name longer."""
    if ENTRY.match(key):
        return int(1000 * ttl_s * ENTRY_LIVES)
    return int(1000 * (ttl_s if RECORD.match(key) else ttl_s * MARGIN + MARGIN_S))


def whole(value: bytes, ttl_ms: int) -> bytes:
    """Return what is stored for a value that is not split."""
    return b"TBw%013d%s" % (ttl_ms, value)


def split(key: str, value: bytes, ttl_ms: int) -> tuple[Head, dict[str, bytes]]:
    """Return the head of a large value, and what is stored for each part."""
    head = Head(key, len(value), hashlib.sha256(value).hexdigest()[:16], ttl_ms)
    view, parts, start = memoryview(value), {}, 0
    for name, size in head.parts:
        parts[name] = b"TBp%013d%s" % (ttl_ms, view[start : start + size])
        start += size
    return head, parts


def read_head(key: str, stored: bytes) -> Head | None:
    """Return the head that a stored value is; None when it is whole or damaged."""
    found = _SPLIT.fullmatch(stored)
    if found is None or not WHOLE_BYTES < int(found[2]) <= MAX_BYTES:
        return None
    return Head(key, int(found[2]), found[3].decode(), int(found[1]))


def payload(stored: bytes) -> bytes:
    """Return the value without its header; a damaged one as it is, since readers compare
    digests.
    """
    return stored[HEADER_BYTES:] if _HEADER.match(stored) else stored


def size_of(key: str, head: bytes, stored_bytes: int) -> int:
    """Return the size of an object, by its first bytes and how many are stored."""
    found = read_head(key, head)
    if found is not None:
        return found.size_bytes
    return stored_bytes - (HEADER_BYTES if _HEADER.match(head) else 0)


SCRIPT_KEYS = 256
# Longer than any name that this package makes, with the longest namespace.
NAME_BYTES = 2 * KEY_CHARACTERS


@dataclass(frozen=True)
class Script:
    """A script and the name by which the server remembers it; one that only reads says so, for
    users who may only read.
    """

    source: str
    reads: bool = False
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "sha", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        )


# An object begins with how long it lives after its last use (value_parts.py); a damaged one gets
# the default lifetime. Times come from the expiry.  Before 7.0 the server gives only what is left
# of it: the clock is read on both sides, until no tick lies between, for else one object's time
# would differ by a millisecond from call to call.
_TIMES = """
local absolute = true
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function expires_ms(key)
  if absolute then
    local at = redis.pcall('PEXPIRETIME', key)
    if type(at) == 'number' then return at end
    absolute = false
  end
  local before = now_ms()
  while true do
    local left = redis.call('PTTL', key)
    local after = now_ms()
    if left < 0 then return left end
    if before == after then return before + left end
    before = after
  end
end
local function lives_ms(head, default)
  local said = tonumber(string.match(head, '^TB%l(%d%d%d%d%d%d%d%d%d%d%d%d%d)')) or 0
  return said > 0 and said or tonumber(default)
end
local function modified_ms(key, head, default)
  local at = expires_ms(key)
  return at < 0 and 0 or at - lives_ms(head, default)
end
"""
# Whatever stands under an object's key: a value of a wrong type must not fail the call for the
# other keys.  One byte more than a head is read, so that a longer value which begins like a head is
# not taken for one.
_HEADS = f"""
local function size_of(key)
  local size = redis.pcall('STRLEN', key)
  return type(size) == 'number' and size or -1
end
local function head_of(key)
  local size = size_of(key)
  if size > 0 and size <= {HEADER_BYTES + WHOLE_BYTES} then return redis.call('GETRANGE', key, 0, {HEAD_BYTES}) end
  if size == 0 and redis.call('EXISTS', key) == 0 then return '' end
  return '{NONE_OF_OURS.decode()}'
end
"""
# For each key: nothing, or its first bytes, which say whether it is whole or a head of parts.
HEADS = Script(
    f"""{_HEADS}
local found = {{}}
for i, key in ipairs(KEYS) do found[i] = head_of(key) end
return found
""",
    reads=True,
)
# For each key: its first bytes, its size, when it was modified.
DESCRIBE = Script(
    f"""{_HEADS}{_TIMES}
local found = {{}}
for i, key in ipairs(KEYS) do
  local head = head_of(key)
  found[i] = {{head, math.max(0, size_of(key)), modified_ms(key, head, ARGV[1])}}
end
return found
""",
    reads=True,
)
# Start the life of each key anew; returns as HEADS does.
CLAIM = Script(f"""{_HEADS}{_TIMES}
local found = {{}}
for i, key in ipairs(KEYS) do
  local head = head_of(key)
  if head ~= '' and head ~= '{NONE_OF_OURS.decode()}' then redis.call('PEXPIRE', key, lives_ms(head, ARGV[1])) end
  found[i] = head
end
return found
""")
# The same for who does not ask what is there, with as few calls as can be; returns names and heads
# of those that have parts, which are to live on too.  Objects that one writer stored begin alike,
# so what is worked out of a beginning is kept for the next one.
TOUCH = Script(f"""{_TIMES}
local found, header, lives, split = {{}}, '', 0, false
for i, key in ipairs(KEYS) do
  local begins = redis.pcall('GETRANGE', key, 0, {HEADER_BYTES - 1})
  if type(begins) == 'string' and begins ~= '' then
    if begins ~= header then
      header, lives, split = begins, lives_ms(begins, ARGV[1]), string.sub(begins, 1, {len(SPLIT)}) == '{SPLIT.decode()}'
    end
    redis.call('PEXPIRE', key, lives)
    if split then
      found[#found + 1] = key
      found[#found + 1] = redis.call('GETRANGE', key, 0, {HEAD_BYTES})
    end
  end
end
return found
""")
# Remove what was not modified after ARGV[2] (empty: everything); returns the first bytes of what
# was removed.
DELETE = Script(f"""{_HEADS}{_TIMES}
local found = {{}}
for i, key in ipairs(KEYS) do
  local head = head_of(key)
  if head ~= '' and ARGV[2] ~= '' and modified_ms(key, head, ARGV[1]) > tonumber(ARGV[2]) then head = '' end
  if head ~= '' then redis.call('UNLINK', key) end
  found[i] = head
end
return found
""")
# Remove keys whose value cannot be an object of this package; returns as HEADS does.
CLEAR = Script(f"""{_HEADS}
local found = {{}}
for i, key in ipairs(KEYS) do
  found[i] = head_of(key)
  if found[i] == '{NONE_OF_OURS.decode()}' then redis.call('UNLINK', key) end
end
return found
""")
# The value of a ref or lease, as `RedisBackend.read_ref` gives it: of a larger one the beginning,
# of a list or hash nothing.
_VALUE = f"""
local function value_of(key)
  if redis.call('EXISTS', key) == 0 then return false end
  local value = redis.pcall('GETRANGE', key, 0, {REF_BYTES})
  return type(value) == 'string' and value or ''
end
"""
# Change a value if it is ARGV[2] (ARGV[1] is 0: if there is none) to ARGV[4] (ARGV[3] is 0: remove
# it) for ARGV[5] ms.
SWAP = Script(f"""{_VALUE}
local current = value_of(KEYS[1])
if (ARGV[1] == '0' and current) or (ARGV[1] == '1' and current ~= ARGV[2]) then return 0 end
if ARGV[3] == '1' then
  redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5])
elseif current then
  redis.call('UNLINK', KEYS[1])
end
return 1
""")
# Prolong a key that holds our token.
RENEW = Script(f"""{_VALUE}
if value_of(KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
""")
# One page of SCAN without names that are too long to be ours; not a `Script`, since it has no keys.
SCAN_SHORT = """
local page = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local names = {}
for _, name in ipairs(page[2]) do
  if #name <= tonumber(ARGV[4]) then names[#names + 1] = name end
end
return {page[1], names}
"""
