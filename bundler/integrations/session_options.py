# SPDX-License-Identifier: Apache-2.0
"""`SessionOptions`: what a session was told, as one value; `_process.py` makes it of arguments or
settings, the lookup engine reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from bundler.config import Launcher, Mode, Strict
    from bundler.format.bundle import Keep
    from bundler.lifecycle.kernel_placement import Trust
    from bundler.lifecycle.machine_store import Store
    from bundler.store.bundle_store import PushMode
    from bundler.user_settings import Settings


class SessionOptions(NamedTuple):
    """What a session was told.

    Attributes:
        tag: fetched at the start, and given what was used at the end; None for none.
        mode: look up (`read`), publish (`write`), or both.
        push: how the tag is given what was used; None for not at all.
        strict, trust, keep: as the settings of these names.
        serving: what a compile is once the tag was replayed; None for what `strict` says.
        local: our own directory; None for the usual place.
        launcher: who gives Triton the launchers that it would have a C compiler build.
        replay: whether the tag's kernels are put into Triton's in-memory caches at the start.
        moved: whether a kernel is taken that differs from the one asked for in line numbers alone.
    """

    tag: str | None = None
    mode: Mode = "readwrite"
    push: PushMode | None = "merge"
    strict: Strict = "off"
    trust: Trust = "kernels"
    keep: Keep = "all"
    local: str | None = None
    replay: bool = False
    launcher: Launcher = "bundler"
    serving: Strict | None = None
    moved: bool = False

    @property
    def reads(self) -> bool:
        """Whether kernels are looked up."""
        return self.mode != "write"

    @property
    def writes(self) -> bool:
        """Whether kernels are published."""
        return self.mode != "read"


def store_of_settings(chosen: Settings, **how: Any) -> Store:
    """Open the store that the settings name; what one of its URLs says itself, such as a password,
    holds for that one.

    Args:
        chosen: the settings, which name at least one.
        how: as for `machine_store.open_store`.
    """
    from bundler.lifecycle.machine_store import open_store
    from bundler.store.store_urls import with_settings

    return open_store(*(with_settings(url, chosen.server) for url in chosen.store), **how)
