# SPDX-License-Identifier: Apache-2.0
"""Lets a server that speaks Redis answer with whatever it likes; exit status 1 when a promise did
not hold.

    python -m tools.fuzz replies [--count N] [--seed S] [--only NUMBER]

Each case picks commands whose answers are replaced: by another type, a number of more than 64 bits,
an array that is announced to be endless or lies in arrays, a cursor that never ends, bytes of
another protocol.  Then it does what users do with a store, in any order.  Promised: errors are ours
and can be printed, no call takes a gigabyte or ten seconds.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bundler
from bundler.backends.redis import server_exchange
from tools.fuzz import workers
from tools.fuzz.judge import first_error, typed
from tools.fuzz.redis import sound, uses
from tools.shared.fake_redis import FakeRedis

# A listing may take a minute, which is too long for a case.
LISTING_S = 1.0
COMMANDS = (
    b"EXISTS STRLEN PEXPIRE UNLINK TIME SCAN GETRANGE PTTL GET SET"
    b" EVALSHA EVALSHA_RO EVAL EVAL_RO CLUSTER ASKING"
).split()
_ERRORS = (
    *(b"ERR x", b"MOVED", b"MOVED 1 h:p", b"MOVED 1 127.0.0.1:99999", b"ASK 5 :1", b"LOADING"),
    *(b"NOSCRIPT no", b"NOPERM no", b"", b"\xff\xfe", b"WRONGTYPE x", b"OOM command", b"TRYAGAIN"),
    *(b"CLUSTERDOWN", b"ERR unknown command", b"ERR max number of clients reached"),
)
ERRORS = [b"-%s\r\n" % text for text in _ERRORS]
_LINES = (
    *(b"", b"HTTP/1.1 400 Bad Request\r\n", b"$5\r\nabc", b"$3\r\nabcdef", b":", b":x", b"$-2"),
    *(b"*-7", b"$99999999999", b"*2000000000", b"*9223372036854775807", b"%1\r\n+a\r\n+b", b"_"),
    *(b":" + b"9" * 5000, b"$" + b"9" * 30, b":1_0", b">1\r\n+a", b",inf"),
)
BROKEN = [b"", b"\0" * 64, b"x" * 100_000, *(b"%s\r\n" % line for line in _LINES)]
INTEGERS = [0, 1, -1, 2, -2, 255, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 10**25]


def _text(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def _value(chance: random.Random, depth: int = 0) -> bytes:
    """Return the bytes of one answer."""
    match chance.randrange(8 if depth < 6 else 5):
        case 0:
            return b":%d\r\n" % chance.choice(INTEGERS)
        case 1:
            texts = [b"", b"0", b"7", b"-1", b"9" * 25, b"\xff", b"TBw" + b"9" * 13, b"OK"]
            return _text(chance.choice(texts))
        case 2:
            return b"$-1\r\n" if chance.random() < 0.5 else b"*-1\r\n"
        case 3:
            return chance.choice(ERRORS)
        case 4:
            return b"+" + chance.choice([b"OK", b"", b"\xff", b"0"]) + b"\r\n"
        case 5:
            count = chance.choice([0, 1, 2, 2, 3, 300])
            return b"*%d\r\n" % count + b"".join(_value(chance, depth + 2) for _ in range(count))
        case 6:
            return b"*1\r\n" * chance.choice([1, 5, 2000]) + b":1\r\n"
    return chance.choice(BROKEN)


def _large(chance: random.Random) -> bytes:
    arrays = [b"*5000000\r\n" + b":1\r\n" * 5_000_000, b"*4000000\r\n" + b"*0\r\n" * 4_000_000]
    return chance.choice([*arrays, _text(b"x" * 20_000_000)])


def _page(chance: random.Random, cursors: Any) -> bytes:
    cursor = chance.choice([b"7", b"%d" % next(cursors), b"%d" % next(cursors)])
    odd = [b"tb:r:v1/t/t", b"tb:o:v1/u/aa", b"\xff", b"tb:l:v1/c/x", b"x" * 500]
    count = chance.choice([0, 0, 3, 2000])
    names = [chance.choice([*odd, b"tb:r:%d" % number]) for number in range(count)]
    return b"*2\r\n%s*%d\r\n%s" % (_text(cursor), len(names), b"".join(map(_text, names)))


class Case:
    """One server that lies, and what is done with it."""

    def __init__(self, seed: int, number: int, done: list[str]) -> None:
        self._chance = random.Random(f"{seed}/{number}")
        self._victims = set(self._chance.sample(COMMANDS, self._chance.choice([1, 1, 2, 5, 16])))
        self._share, self._cursors = self._chance.choice([0.3, 1.0]), itertools.count(8)
        self._once = self._chance.random() < 0.05
        self.done = done
        done.append(f"{sorted(self._victims)}, {self._share}")

    def answer(self, words: list[bytes]) -> bytes | None:
        """Return what the server says to a command."""
        chance = self._chance
        if words[0] not in self._victims or chance.random() > self._share:
            return None
        if self._once:
            self._once = False
            return _large(chance)
        if words[0] == b"SCAN" and chance.random() < 0.7:
            return _page(chance, self._cursors)
        return _value(chance)

    def judge(self, bundle: Any) -> str:
        """Return the class of the first error, or `accepted`; raises `Finding`."""
        outcomes = []
        with FakeRedis(self.answer) as server:
            scheme = self._chance.choice(["redis", "redis", "redis+cluster"])
            with bundler.open_store(server.url(scheme), timeout_s=1, connect_timeout_s=1) as store:
                acts = _acts(store, bundle)
                for name in self._chance.sample(sorted(acts), 4):
                    self.done.append(name)
                    outcomes.append(typed(acts[name]))
        return first_error(outcomes)


def _acts(store: Any, bundle: Any) -> dict[str, Callable[[], object]]:
    return uses(store, bundle) | {
        "pull": lambda: store.pull("t"),
        "pull by digest": lambda: store.pull(bundle.digest),
        "restore": lambda: store.restore("t", only="all"),
    }


class Replies(workers.Fuzzer):
    """Answers that no server gives."""

    name = "replies"
    memory_bytes = 2 << 30
    accepts = ""

    def ready(self, place: Path, job: int, made: Connection) -> None:
        """Limit how long a listing may take."""
        server_exchange.LISTING_S = LISTING_S
        self.bundle = bundler.Bundle.from_bytes(sound("1", "2", extra_bytes=300_000))

    def judge(self, number: int, begin: Callable[[], None], done: list[str]) -> Counter[str]:
        """Use a store whose server lies."""
        begin()
        return Counter({Case(self.seed, number, done).judge(self.bundle): 1})


def main() -> int:
    """Fuzz and print what came out."""
    options = workers.parser(__doc__, 2000).parse_args()
    return workers.run(Replies(options.seed), options)
