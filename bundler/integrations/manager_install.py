# SPDX-License-Identifier: Apache-2.0
"""What a session, or a registered bundle, adds to the manager environment: our cache manager, here
and in child processes.

`bundler/integrations/_process.py` adds it when one begins, and removes it when a session ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from bundler.config import PREFIX
from bundler.toolchain.recording.cache_delegate import DelegateSource
from bundler.toolchain.recording.child_recording import hidden_package_parent
from bundler.toolchain.recording.manager_environment import Active

if TYPE_CHECKING:
    from bundler.integrations.session_options import SessionOptions
    from bundler.lifecycle.machine_store import Store


def activity_of(store: Store, options: SessionOptions, source: DelegateSource) -> Active:
    """Return what makes Triton use a session's store: here, and in children where they can open it
    by its URLs.

    Args:
        store, options: of the session.
        source: says who looks after the managers of this process.
    """
    if store.urls:
        return inherited_activity(source, session=_for_children(store.urls, options))
    # imports Triton, whose settings in Python are changed
    from bundler.toolchain.recording import cache_manager  # noqa: F401

    return Active(in_code=partial(_in_front_of, source), here_only=True)


def inherited_activity(source: DelegateSource, **what: Any) -> Active:
    """Return what makes Triton use something here and in children.

    Args:
        source: as for `activity_of`.
        what: `bundle`, the path of a registered one; or `session`, the variables of one for
            children, none where the user's own variables ask for it.
    """
    return Active(path=hidden_package_parent(), in_code=partial(_in_front_of, source), **what)


def _for_children(urls: tuple[str, ...], options: SessionOptions) -> Mapping[str, str]:
    """Return what makes a child process look where we look.  Tags are the parent's: it fetches and
    pushes for all.
    """
    names = ("mode", "trust", "strict", "keep")
    chosen = {name.upper(): str(getattr(options, name)) for name in names}
    chosen |= {"STORE": " ".join(urls), "MOVED": str(int(options.moved))}
    return {PREFIX + name: value for name, value in chosen.items()}


def _in_front_of(source: DelegateSource, theirs: type | None) -> type | None:
    """Return our manager in front of the one that the program set in Python, or of what the
    environment names; None for what is ours.
    """
    from bundler.toolchain.recording import cache_manager

    behind = theirs if theirs is not None else cache_manager.named_by_environment()
    if cache_manager.has_delegate(behind, source):
        return None
    return cache_manager.manager_before(source, behind)
