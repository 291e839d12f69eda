# SPDX-License-Identifier: Apache-2.0
"""`explain`: why a kernel was compiled although others were recorded."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from bundler.config import settings
from bundler.errors import ConfigError, NotFound
from bundler.format.entries import Kernel
from bundler.integrations.comparing import Difference, keyed, nearest
from bundler.integrations.misses import Miss, read_misses
from bundler.integrations.shelves import Shelf
from bundler.integrations.strictness import asked_of
from bundler.lifecycle.storing import Store, open_store
from bundler.store.opening import is_server

# Of a store with more kernels the newest are compared.
MOST_COMPARED = 10_000
Status = Literal["recorded", "differs", "never recorded", "unknown"]


@dataclass(frozen=True)
class Explanation:
    """Why one kernel was compiled.

    Attributes:
        key: its key.
        name: its entry point.
        status: `recorded`: it is there, nothing differs; `differs`: the nearest recorded kernel of that name differs;
            `never recorded`: no kernel of that name was recorded; `unknown`: what its key was made of is not known.
        nearest: key of the nearest recorded kernel.
        differences: what differs from that one.
        missed_at_s: when it was compiled, in seconds since the epoch; None when it was not, on this host.
        there_now: whether the store has it now, so that the next process finds it.
    """

    key: str
    name: str
    status: Status
    nearest: str | None = None
    differences: tuple[Difference, ...] = ()
    missed_at_s: float | None = None
    there_now: bool = False

    @property
    def sentence(self) -> str:
        """All of it in a sentence."""
        if self.status == "recorded":
            return f"{self.name}: recorded; no part of its key differs"
        if self.status == "never recorded":
            return f"{self.name}: never recorded: no kernel of that name was there before"
        if self.status == "unknown":
            return f"{self.name}: what its key was made of is not known, so it cannot be compared"
        return f"{self.name}: {'; '.join(map(str, self.differences))} (nearest recorded kernel: {self.nearest})"


def explain(
    key: str | None = None,
    *,
    name: str | None = None,
    last: bool = False,
    store: Store | None = None,
) -> tuple[Explanation, ...]:
    """Say why kernels were compiled: what differs from the nearest that was recorded before.

    Looks at the notes that cache managers of this user left on this host, and at what the store, and its tag, hold.

    Args:
        key: a kernel key, or the beginning of one.
        name: kernels of this name; `*` and `?` stand for anything.
        last: all kernels that the latest process compiled that compiled any.
        store: where kernels were recorded; None for what TRITON_BUNDLER_STORE names.

    Raises:
        ConfigError: not exactly one of `key`, `name` and `last` was given; or no store.
        NotFound: no such kernel was compiled here, and none is recorded.
        StoreUnavailable, AccessDenied: the store cannot be read.
    """
    if [key is not None, name is not None, last].count(True) != 1:
        raise ConfigError("expected one of: a kernel's key, name=..., last=True")
    chosen = settings()
    with ExitStack() as opened:
        if store is None:
            if not chosen.store:
                raise ConfigError("no store to compare with; pass store=..., or set TRITON_BUNDLER_STORE")
            server = chosen.server if any(map(is_server, chosen.store)) else {}
            store = opened.enter_context(open_store(*chosen.store, read_only=True, **server))
        kernels = {kernel.key: kernel for kernel in _recorded(store, chosen.tag)}
    misses = list(read_misses(chosen.local))
    wanted = {miss.event.key: miss for miss in reversed(_wanted(misses, key, name))}
    found = [replace(_explained(miss, misses, kernels), there_now=there in kernels) for there, miss in wanted.items()]
    if not last:
        others = [kernel for kernel in kernels.values() if kernel.key not in wanted and _is(kernel, key, name)]
        found += [Explanation(kernel.key, kernel.name, "recorded", kernel.key, there_now=True) for kernel in others]
    if not found:
        what = "anything" if last else f"a kernel {key or name!r}"
        raise NotFound(f"nothing compiled {what} here through this package's cache manager, and the store has none")
    return tuple(found)


def _recorded(store: Store, tag: str | None) -> Iterator[Kernel]:
    yield from store.kernel_records().recorded(MOST_COMPARED)
    if tag is not None:
        try:
            with store.pull(tag, read_only=True) as bundle:
                yield from Shelf(bundle, "tag").bundle.kernels
        except NotFound:
            return


def _wanted(misses: list[Miss], key: str | None, name: str | None) -> list[Miss]:
    if key is not None:
        return [miss for miss in misses if miss.event.key.startswith(key)]
    if name is not None:
        return [miss for miss in misses if fnmatch.fnmatchcase(miss.event.name, name)]
    latest = max((miss.process_began_ns for miss in misses), default=0)
    return [miss for miss in misses if miss.process_began_ns == latest]


def _is(kernel: Kernel, key: str | None, name: str | None) -> bool:
    if key is not None:
        return kernel.key.startswith(key)
    return fnmatch.fnmatchcase(kernel.name, name or "")


def _explained(miss: Miss, misses: list[Miss], kernels: dict[str, Kernel]) -> Explanation:
    """Compare with what was recorded when the process of a miss began, as far as this host's notes tell."""
    asked, event = asked_of(miss.event), miss.event
    if asked is None:
        return Explanation(event.key, event.name, "unknown", missed_at_s=miss.at_s)
    later = {other.event.key for other in misses if other.at_ns >= miss.process_began_ns}
    earlier = {other.event.key for other in misses if other.at_ns < miss.process_began_ns}
    before = [kernel for kernel in kernels.values() if kernel.key not in later - earlier]
    found = nearest(asked, keyed(kernel for kernel in before if kernel.key != event.key))
    if event.key in earlier and event.key in kernels:
        return Explanation(event.key, event.name, "recorded", event.key, missed_at_s=miss.at_s)
    if found is None:
        return Explanation(event.key, event.name, "never recorded", missed_at_s=miss.at_s)
    return Explanation(event.key, event.name, "differs", found[0].key, found[1], miss.at_s)
