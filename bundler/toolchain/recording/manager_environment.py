# SPDX-License-Identifier: Apache-2.0
"""What makes Triton use our cache managers, here and in child processes: computed from what is
active at each change.

::

    recordings ──┐                         ┌─▶ os.environ: this process and the children that start from now on
    sessions ────┼─▶ the set of what is ───┤
    bundles ─────┘   active now            └─▶ triton.knobs.cache.manager_class: this process, where that needs it

The managers stand in front of each other: a recording's, a session's, then the one that the program
had. Never imports Triton.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.config import INNER, REGISTERED, SPOOL_DIRECTORY, SPOOL_INNER

MANAGER_VARIABLE = "TRITON_CACHE_MANAGER"
PATH_VARIABLE = "PYTHONPATH"
SPOOL_MANAGER = "bundler.toolchain.recording.spool_manager:SpoolCacheManager"
SESSION_MANAGER = "bundler.integrations.triton:BundlerCacheManager"
# Which variable names the manager behind each of ours, from the front to the back.
_BEHIND = {SPOOL_MANAGER: SPOOL_INNER, SESSION_MANAGER: INNER}

# On the path of every child, behind its own entries: what stands in for this package where a child
# does not have it.
STAND_IN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stand_in")

Values = Mapping[str, str | None]


@dataclass(eq=False, frozen=True, slots=True)
class Active:
    """A recording, a session or a registered bundle, while it is active; each one differs from all
    others.

    Attributes:
        spool: the directory of a recording, where children leave records.
        session: what makes children use a session's store; None when they cannot.
        bundle: the path of a registered bundle.
        path: what children need on PYTHONPATH before the program's own entries.
        in_code: returns the class to set in this process instead of one that the program set in
            Python, or that the environment names (None); returns None for none.  A recording needs
            none: it listens.
        here_only: whether `in_code` is needed also where the program set nothing in Python.
    """

    spool: str | None = None
    session: Mapping[str, str] | None = None
    bundle: str | None = None
    path: tuple[str, ...] = ()
    in_code: Callable[[type | None], type | None] | None = None
    here_only: bool = False


def variables(before: Values, active: Sequence[Active]) -> dict[str, str | None]:
    """Return the variables for what is active, in the order it began; None for one that is not to
    be there.

    Args:
        before: the environment without us.
        active: at least one.
    """
    spools = [item.spool for item in reversed(active) if item.spool is not None]
    sessions = [item.session for item in active if item.session is not None]
    bundles = [item.bundle for item in active if item.bundle is not None]
    wanted: dict[str, str | None] = dict(sessions[-1]) if sessions else {}
    managers = {SPOOL_MANAGER: bool(spools), SESSION_MANAGER: bool(sessions or bundles)}
    wanted |= _chain(before, {name for name, needed in managers.items() if needed})
    if spools:
        # A recording inside another, or in a process that is recorded itself: children write to
        # both.
        wanted[SPOOL_DIRECTORY] = _join([*spools, *_split(before.get(SPOOL_DIRECTORY))])
    if bundles:
        wanted[REGISTERED] = _join([*_split(before.get(REGISTERED)), *bundles])
    if any(managers.values()):
        path = before.get(PATH_VARIABLE)
        # The program's own text stays as it is: an empty entry means the working directory.
        first, last = (
            [entry for entry in entries if entry not in _split(path)]
            for entries in ([entry for item in active for entry in item.path], [STAND_IN])
        )
        wanted[PATH_VARIABLE] = _join([*first, *([path] if path else []), *last])
    return wanted


def _chain(before: Values, ours: set[str]) -> dict[str, str | None]:
    """Return the variables that name the managers, each in front of the next; nothing when none of
    ours is needed.
    """
    if not ours:
        return {}
    theirs, found = before.get(MANAGER_VARIABLE), set[str]()
    while theirs in _BEHIND and theirs not in found:
        # This process is the child of one that records or has a session.
        found.add(theirs)
        theirs = before.get(_BEHIND[theirs])
    names = [name for name in _BEHIND if name in ours | found]
    behind = [*names[1:], theirs if theirs not in _BEHIND else None]
    return {
        MANAGER_VARIABLE: names[0],
        **{_BEHIND[name]: next_ for name, next_ in zip(names, behind, strict=True)},
    }


class ManagerEnvironment:
    """Owns those variables, and `triton.knobs.cache.manager_class`, for all that is active in this
    process.

    Guarantees: what is active may begin and end in any order and in any thread; after the last end
    each variable has the value that it had before the first beginning.  A variable that the program
    changed meanwhile is the program's: it is left alone until something else begins, which builds
    on it, and keeps its value at the end; of PYTHONPATH only our entries go.  A forked child goes
    on with a copy of the set. Does not guarantee: that a thread that reads several variables while
    another begins or ends something sees them of one time, but for `current`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._active: list[Active] = []
        # By name: the program's value, and ours in place of it.
        self._before: dict[str, str | None] = {}
        self._ours: dict[str, str | None] = {}
        self._class_before: type | None = None
        self._our_class: type | None = None

    def add(self, item: Active) -> None:
        """Begin; nothing has changed when this raises."""
        with self._lock:
            self._active.append(item)
            try:
                self._update(begins=True)
            except BaseException:
                self.remove(item)
                raise

    def remove(self, item: Active) -> None:
        """End; does nothing for what is not active."""
        with self._lock:
            if item in self._active:
                self._active.remove(item)
                self._update(begins=False)

    def current(self, more: Active | None = None) -> dict[str, str]:
        """Return a copy of the whole environment, as if `more` were active too."""
        with self._lock:
            whole: dict[str, str | None] = dict(os.environ)
            if more is not None:
                whole |= variables(self._without_us(), [*self._active, more])
        return {name: value for name, value in whole.items() if value is not None}

    def before(self, name: str) -> str | None:
        """Return a variable as the program has it, without what we set."""
        with self._lock:
            return self._without_us().get(name)

    def _update(self, *, begins: bool) -> None:
        before = self._without_us()
        wanted = variables(before, self._active) if self._active else {}
        for name in self._ours.keys() - wanted.keys():
            _put(name, self._before.pop(name))
            del self._ours[name]
        for name, value in wanted.items():
            if begins or name in self._ours:
                self._before.setdefault(name, before.get(name))
                self._ours[name] = value
                _put(name, value)
        self._update_class(begins=begins)

    def _without_us(self) -> dict[str, str | None]:
        """Return the environment as the program has it; forgets what we set where the program
        changed it since.
        """
        for name, ours in list(self._ours.items()):
            now = os.environ.get(name)
            if now == ours:
                continue
            if name == PATH_VARIABLE:
                # Programs add to what they find there, which has our entries.
                self._ours[name], self._before[name] = now, self._cut(now)
            else:
                del self._ours[name], self._before[name]
        return {**os.environ, **self._before}

    def _cut(self, path: str | None) -> str | None:
        added = set(_split(self._ours[PATH_VARIABLE])) - set(_split(self._before[PATH_VARIABLE]))
        kept = [entry for entry in (path or "").split(os.pathsep) if entry not in added]
        return os.pathsep.join(kept) or None

    def _update_class(self, *, begins: bool) -> None:
        knobs: Any = getattr(sys.modules.get("triton.knobs"), "cache", None)
        if knobs is None:
            return
        now = vars(knobs).get("manager_class")
        if now is not self._our_class:
            self._our_class = None  # the program set another one
        theirs = now if self._our_class is None else self._class_before
        in_code = next((item.in_code for item in self._active if item.in_code is not None), None)
        needed = theirs is not None or any(item.here_only for item in self._active)
        wanted = in_code(theirs) if in_code is not None and needed else None
        if wanted is not None and (begins or self._our_class is not None):
            knobs.manager_class = wanted
            self._class_before, self._our_class = theirs, wanted
        elif wanted is None and self._our_class is not None:
            if theirs is None:
                vars(knobs).pop("manager_class", None)
            else:
                knobs.manager_class = theirs
            self._class_before = self._our_class = None

    def before_fork(self) -> None:
        """Wait for a change that another thread makes: the child must not get half of it."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Let other threads change things again."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Give the child a lock of its own."""
        self._lock = threading.RLock()


def names_our_manager() -> bool:
    """Whether the environment asks for a session's manager, with or without a recording's
    in front.
    """
    first = os.environ.get(MANAGER_VARIABLE)
    return SESSION_MANAGER in {
        first,
        os.environ.get(SPOOL_INNER) if first == SPOOL_MANAGER else None,
    }


def named_manager(name: str) -> type:
    """Return the cache manager that a variable names as `module:class`.

    Raises:
        What Triton raises for a manager that cannot be imported.
    """
    module, _, attribute = name.partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found


def _split(value: str | None) -> list[str]:
    return [part for part in (value or "").split(os.pathsep) if part]


def _join(parts: Sequence[str]) -> str | None:
    return os.pathsep.join(dict.fromkeys(parts)) or None


def _put(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


manager_environment = ManagerEnvironment()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=manager_environment.before_fork,
        after_in_parent=manager_environment.after_fork_in_parent,
        after_in_child=manager_environment.after_fork_in_child,
    )
