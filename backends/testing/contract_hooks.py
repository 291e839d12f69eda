# SPDX-License-Identifier: Apache-2.0
"""`ContractHooks`: what a subclass of the contract defines; and the keys and threads that the tests
of the contract share.

`ObjectContract`, `RefContract` and `LeaseContract` inherit from it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from bundler.backends.backend_errors import InvalidKey
from bundler.backends.port import Backend, Lease

THREADS = 8

_VALID = "a A _ 0 a. a..b Ab.c_d-e a/b/c/d/e/f/g/h a/a tmp data/refs CON"
VALID_KEYS = (
    *_VALID.split(),
    "x" * 128,
    "v1/u/" + "0" * 64,
    "/".join(["k" * 128, "k" * 128, "k" * 128, "k" * 13]),
)
_INVALID = "/ /a a/ a//b . .. ../a a/../b a/.b .a -a a/-b a\\b a:b a+b a* é a/b/c/d/e/f/g/h/i"
INVALID_KEYS = (
    *_INVALID.split(),
    *("", "a b", " a", "a\n", "\n", "a\0", "\u0660"),
    "x" * 129,
    "/".join(["k" * 128, "k" * 128, "k" * 128, "k" * 14]),
)
# Every way to hand a key to a store.
CALLS: dict[str, Callable[[Backend, str], Any]] = {
    "get": lambda backend, key: backend.get([key]),
    "get within": lambda backend, key: backend.get_within({key: 1}),
    "put": lambda backend, key: backend.put({key: b"x"}),
    "exists": lambda backend, key: backend.exists([key]),
    "delete": lambda backend, key: backend.delete([key]),
    "delete unmodified": lambda backend, key: backend.delete([key], unmodified_since_s=0.0),
    "touch": lambda backend, key: backend.touch([key]),
    "claim": lambda backend, key: backend.claim([key]),
    "read_ref": lambda backend, key: backend.read_ref(key),
    "swap_ref": lambda backend, key: backend.swap_ref(key, None, b"x"),
    "remove ref": lambda backend, key: backend.swap_ref(key, None, None),
}
LISTINGS: dict[str, Callable[[Backend, str], Any]] = {
    "list": lambda backend, prefix: list(backend.list(prefix)),
    "list_refs": lambda backend, prefix: list(backend.list_refs(prefix)),
}


class ContractHooks:
    """How the contract opens a store, and looks into it without using it.

    Attributes:
        clock_step_s: modification times closer together than this may be equal.
        lease_s: a lease that tests wait for; long enough that no pause of the machine lets it
            expire too early.
    """

    clock_step_s: ClassVar[float] = 0.02
    lease_s: ClassVar[float] = 1.0

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """Yield an empty store."""
        raise NotImplementedError

    def reopen(self, backend: Backend) -> Backend:
        """Return another handle on the same store, or, where there can be only one, the same."""
        raise NotImplementedError

    def peek(self, backend: Backend, key: str) -> bytes | None:
        """Return what is really stored as an object, None for nothing, without using the code under
        test.
        """
        raise NotImplementedError

    def poke(self, backend: Backend, key: str, data: bytes) -> None:
        """Store an object, over whatever is there, without using the code under test."""
        raise NotImplementedError

    @pytest.fixture
    def leasing(self, backend: Backend) -> Backend:
        """The store, if it has leases."""
        if type(backend).lease is Backend.lease:
            pytest.skip(f"{type(backend).__name__} has no leases")
        return backend

    def later(self) -> None:
        """Wait until the store's clock has moved on."""
        time.sleep(2 * self.clock_step_s)


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all at once, each in a thread of its own; returns their results in order, or raises what
    one raised.
    """
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def is_refused(call: Callable[[], Any]) -> bool:
    """Tell whether a call raises `InvalidKey`."""
    try:
        call()
    except InvalidKey:
        return True
    return False


def count(backend: Backend, key: str, times: int) -> None:
    """Add one to the number in a ref, `times` times, whoever else does the same."""
    done = 0
    while done < times:
        before = backend.read_ref(key)
        done += backend.swap_ref(key, before, b"%d" % (int(before or b"0") + 1))


def granted(lease: Lease | None) -> Lease:
    """Return a lease that must have been granted."""
    assert lease is not None
    return lease


def eventually(ask: Callable[[], Lease | None]) -> Lease | None:
    """Ask again and again until there is an answer; None after half a minute."""
    until = time.monotonic() + 30
    while (answer := ask()) is None and time.monotonic() < until:
        time.sleep(0.01)
    return answer
