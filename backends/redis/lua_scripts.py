# SPDX-License-Identifier: Apache-2.0
"""The Lua scripts that run inside the server: each works on the keys in KEYS and on no others.

On a cluster a call carries keys of one slot; elsewhere up to `SCRIPT_KEYS`, which keeps each call
under a millisecond or so.

`RedisBackend` calls them; both kinds of exchange send them by digest, and their text where the
server does not know the digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from bundler.backends.keys import KEY_CHARACTERS
from bundler.backends.redis.value_parts import (
    HEAD_BYTES,
    HEADER_BYTES,
    NONE_OF_OURS,
    REF_BYTES,
    SPLIT,
    WHOLE_BYTES,
)

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
