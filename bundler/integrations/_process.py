# SPDX-License-Identifier: Apache-2.0
"""The one process-wide session: Triton makes a cache manager for each key, and what must outlive
them is here.

::

    environment ── first manager ──▶ a session of its own, until the process ends
    install, session ─────────────▶ in force until closed; of several the one that began last
    register ─────────────────────▶ bundles that every session asks last

`activity_of` and `inherited_activity` say what of it children get, by the manager environment.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from bundler import config
from bundler.config import PREFIX, Mode, Strict, settings
from bundler.errors import BundlerError, ConfigError
from bundler.fork_safety import after_fork
from bundler.integrations.kernel_lookup import (
    RegisteredBundles,
    SessionOptions,
    store_of_settings,
)
from bundler.toolchain.recording.cache_delegate import DelegateSource
from bundler.toolchain.recording.manager_environment import Active, manager_environment
from bundler.user_warnings import warn

# What opens stores, and what a session is made of, is imported when the first one begins: Triton
# imports this module for a name alone.
if TYPE_CHECKING:
    from collections.abc import Callable

    from bundler.config import Launcher
    from bundler.integrations.failure_policy import Tally
    from bundler.integrations.lookup_engine import Engine
    from bundler.integrations.sessions import Session
    from bundler.lifecycle.machine_store import Store
    from bundler.store.bundle_store import PushMode


# Triton asks this class only behind its own remote manager, which ours is in place of.
_OTHER_REMOTE = "TRITON_REMOTE_CACHE_BACKEND"


class _Process:
    """Which session is in force.  Safe from any thread; a forked child goes on with copies."""

    def __init__(self) -> None:
        self.registered = RegisteredBundles()
        # Paths of bundles that were to be registered, and that the user was told are missing.
        self.not_there: set[str] = set()
        self._lock = threading.RLock()
        self._sessions: list[tuple[Session, Engine]] = []
        self._from_environment: tuple[Session, Engine] | None = None
        self._exit_registered = False
        # Managers ask it for each key: the one in force is an attribute, and found anew after a
        # change.
        self.source = DelegateSource(self.engine)

    def engine(self) -> Engine:
        """Return what looks after Triton's managers now; raises what strict mode asks for."""
        with self._lock:
            if self._sessions:
                engine = self._sessions[-1][1]
            else:
                if self._from_environment is None:
                    self._from_environment = _session_from_environment(self.registered)
                    self._at_exit()
                engine = self._from_environment[1]
            self.source.delegate = engine
            return engine

    def enter(self, session: Session, engine: Engine, activity: Active) -> None:
        """Put a session in force, here and for children that start from now on."""
        with self._lock:
            manager_environment.add(activity)
            self._sessions.append((session, engine))
            self.source.delegate, self.source.manager = engine, None
            self._at_exit()

    def leave(self, session: Session, activity: Active) -> None:
        """Put in force again whichever session began last of those that go on."""
        with self._lock:
            self._sessions = [pair for pair in self._sessions if pair[0] is not session]
            self.source.delegate = self.source.manager = None
            manager_environment.remove(activity)

    def close(self) -> None:
        """Close every session, at the end of the process; raises what the last of them raised."""
        with contextlib.ExitStack() as stack:
            for session, _ in self._all():
                stack.callback(session.close)

    def flush(self, timeout_s: float) -> None:
        """Wait until every session has sent what it was handed, each for at most so long."""
        for session, _ in self._all():
            session.flush(timeout_s)

    def _all(self) -> list[tuple[Session, Engine]]:
        with self._lock:
            return [*filter(None, [self._from_environment]), *self._sessions]

    def reset_after_fork(self) -> None:
        """Leave to the parent what is its own; for the child only."""
        self._lock = threading.RLock()
        self.registered.reset_after_fork()
        for _, engine in self._all():
            engine.reset_after_fork()

    def _at_exit(self) -> None:
        if not self._exit_registered:
            self._exit_registered = True
            atexit.register(self.close)


_process = _Process()
after_fork(_process.reset_after_fork)
# Says who looks after the managers of this process.
delegate_source = _process.source


def install(
    store: Store | str | os.PathLike[str],
    tag: str | None = None,
    mode: Mode = "readwrite",
    strict: Strict = "off",
) -> Session:
    """Let Triton's compiles of this process, and of processes it starts, go through a store, until
    the session is closed.

    A kernel that Triton does not find in its own directory is looked up and placed there; one that
    it compiles is published. Any thread, and forked children, are included; child processes that
    start later are when the store was opened by URLs alone, by way of environment variables.
    Closing gives all of that back.  A cache manager that was configured before is kept, behind
    ours.

    Args:
        store: an open store, which stays open, or the URL or path of one, which is closed with the
            session.
        tag: fetched now, and given what was used when the session is closed; None for none.
        mode: `read` looks kernels up, `write` publishes them, `readwrite` does both.
        strict: see `Session.arm_strict`; with `error` the store's failures are raised too.

    Raises:
        ConfigError: an argument that cannot be used.
        StoreUnavailable, AccessDenied: the URL's store cannot be opened.

    Warns:
        BundlerWarning: once for each cause, when something fails and the program goes on without
        it.
    """
    _check(mode, get_args(Mode), "mode")
    return _install(store, SessionOptions(tag=tag, mode=mode, strict=strict))


def session(
    store: Store | str | os.PathLike[str],
    tag: str | None = None,
    *,
    push: PushMode | None = "merge",
    strict: Strict | None = None,
    replay: bool | None = None,
    metrics_port: int | str | None = None,
    moved: bool | None = None,
) -> Session:
    """Return a session for a whole job, to use in a `with` statement: fetch the tag, look up,
    record, publish, give it to the tag.

    Args:
        store: as for `install`.
        tag: as for `install`; a first run, without such a tag, is fine.
        push: how the tag is given what was used, as for `Store.push`; None only reads.
        strict: as for `install`; None is `off` and, once the tag was replayed, `warn`.
        replay: hand what the tag names to the JIT functions of this process at the start, as
            `bundler.replay`, so that no first call asks the compiler; None does what
            TRITON_BUNDLER_REPLAY says.
        moved: take a kernel that differs from the one asked for in line numbers alone, its own and
            its helpers'; its debug information shows the old lines; None does what
            TRITON_BUNDLER_MOVED says.
        metrics_port: show this process's metrics to Prometheus while the session lasts: a port of
            the loopback address, 0 for one that is free, or `HOST:PORT`, which whoever reaches it
            may read; `Session.metrics_url` says where.  Needs the extra `metrics`.

    Raises:
        ConfigError: `metrics_port` cannot be listened on, or its library is not installed.
        As `install`.
    """
    from bundler.store.bundle_store import MODES as PUSH_MODES

    if push is not None:
        _check(push, PUSH_MODES, "push")
    mode: Mode = "read" if push is None else "readwrite"
    serving: Strict | None = "warn" if strict is None else None
    options = SessionOptions(tag=tag, mode=mode, push=push, strict=strict or "off", serving=serving)
    return _install(store, options, replay=replay, metrics_port=metrics_port, moved=moved)


def install_from_environment() -> None:
    """Let Triton's compiles go through the session that environment variables ask for, here and in
    processes that start from now on.

    The session begins with the first kernel, or with `begin_from_environment`.  Plug-ins of servers
    call it, who may be loaded in each of a server's processes, and before those fork: no store is
    opened and no device touched.
    """
    manager_environment.add(inherited_activity(delegate_source, session={}))


def begin_from_environment() -> None:
    """Begin the session that is in force, unless it has: its tag is fetched, and replayed where it
    says so.
    """
    _process.engine()


def publish_from_environment() -> None:
    """Publish what the session in force has made so far, and give it to its tag; it goes on."""
    engine = _process.engine()
    from bundler.integrations.sessions import LAST_FLUSH_S

    engine.publisher.flush(LAST_FLUSH_S)
    with engine.failures.tolerating(f"tag {engine.options.tag} was not pushed"):
        engine.push_tag()


def register(path: str | os.PathLike[str]) -> None:
    """Add a library's own prebuilt kernels: read-only, opened when Triton first misses, asked after
    every store.

    Works with a session and without one, for this process and those that it starts later; several
    add up, and once added a bundle stays.

    Args:
        path: a bundle file.  While `triton-bundler build` or `generate` runs nothing is registered:
            it may be what they are about to write.

    Warns:
        BundlerWarning: there is no such file, once for each path; its kernels are compiled then.
        Later, when the file cannot be used.
    """
    bundle = os.path.abspath(os.fspath(path))
    if config.registration_is_off():
        return
    if not os.path.isfile(bundle):
        if bundle not in _process.not_there:
            _process.not_there.add(bundle)
            warn(
                f"no bundle {bundle} to register, so its kernels are compiled; `triton-bundler"
                " build` makes it, or give the path of a .tbundle file"
            )
        return
    _process.registered.add(bundle)
    if bundle not in config.registered_bundles():
        manager_environment.add(inherited_activity(delegate_source, bundle=bundle))


def flush_here(timeout_s: float) -> None:
    """Wait until what this process compiled so far is noted and sent, as long as the time is
    enough.
    """
    _process.flush(timeout_s)


def registered_here() -> list[str]:
    """Return the paths of the bundles that were registered in this process."""
    return _process.registered.paths()


def _check(value: object, choices: tuple[str, ...], name: str) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: expected {', '.join(map(repr, choices))}", got=value)


def _install(
    store: Store | str | os.PathLike[str],
    options: SessionOptions,
    *,
    replay: bool | None = None,
    metrics_port: int | str | None = None,
    moved: bool | None = None,
) -> Session:
    from bundler.integrations.lookup_engine import Engine
    from bundler.integrations.metrics_export import begin_metrics, serve_metrics
    from bundler.integrations.sessions import Session
    from bundler.lifecycle.machine_store import Store, open_store
    from bundler.store.store_urls import given_url, with_settings

    _check(options.strict, get_args(Strict), "strict")
    _check_tag(options.tag)
    chosen = settings()
    begin_metrics()
    with contextlib.ExitStack() as undone:
        owned = not isinstance(store, Store)
        if not isinstance(store, Store):
            url = with_settings(given_url(store), chosen.server)
            store = open_store(url, trust=chosen.trust, when_down="degrade")
            undone.callback(store.close)
        options = options._replace(
            trust=store.trust,
            keep=chosen.keep,
            local=chosen.local,
            launcher=chosen.launcher,
            replay=chosen.replay if replay is None else replay,
            moved=chosen.moved if moved is None else moved,
        )
        engine = Engine(store, options, _process.registered)
        endpoint = serve_metrics(metrics_port) if metrics_port is not None else None
        if endpoint is not None:
            undone.callback(endpoint.close)
        _name_unknown(engine)
        engine.start()
        activity = activity_of(store, options, delegate_source)

        def leave(session: Session) -> None:
            end_supply()
            _process.leave(session, activity)

        made = Session(engine, chosen.report, leave, owned=owned, endpoint=endpoint)
        _process.enter(made, engine, activity)
        end_supply = _supply_launchers(options.launcher, engine.tally)
        undone.pop_all()  # the session closes them
    return made


def _check_tag(tag: str | None) -> None:
    if tag is not None:
        from bundler.store.store_layout import tag_key

        tag_key(tag)  # raises for what is no tag


def _supply_launchers(launcher: Launcher, tally: Tally) -> Callable[[], None]:
    """Give Triton what it would have a C compiler build, from now on; returns what ends that.

    Args:
        launcher: `bundler`, or `triton` to leave everything as it is.
        tally: counts what was given, and why something was not.
    """
    if launcher == "triton":
        return lambda: None
    from bundler.runtime.launch.jit.jit_modules import JitModules
    from bundler.toolchain.driver_modules import driver_modules

    supplier = JitModules(tally.launcher)
    driver_modules.supply(supplier)
    return lambda: driver_modules.withdraw(supplier)


def _session_from_environment(registered: RegisteredBundles) -> tuple[Session, Engine]:
    """Return the session that environment variables ask for; a wrong setting is a warning, and in
    strict mode an error.
    """
    from bundler.integrations.lookup_engine import Engine
    from bundler.integrations.metrics_export import begin_metrics
    from bundler.integrations.sessions import Session
    from bundler.toolchain.recording.cache_manager import asked_for
    from bundler.user_settings import Settings

    problem: BundlerError | None = None
    chosen, store = Settings(strict=config.strict_setting()), None
    try:
        chosen = settings()
        _check_tag(chosen.tag)
        if chosen.store:
            store = store_of_settings(chosen, trust=chosen.trust, when_down="degrade")
    except BundlerError as error:
        problem = error
    options = SessionOptions(
        tag=chosen.tag,
        mode=chosen.mode,
        strict=chosen.strict,
        trust=chosen.trust,
        keep=chosen.keep,
        local=chosen.local,
        replay=chosen.replay,
        moved=chosen.moved,
        serving=None if config.says_strict() else "warn",
        launcher=chosen.launcher,
    )
    for path in config.registered_bundles():
        registered.add(path)
    engine = Engine(store, options, registered)
    with engine.failures.tolerating("metrics are not written"):
        begin_metrics()
    if problem is not None:
        engine.failures.report(problem, "no store is used")
    elif store is None and not registered.added and asked_for(delegate_source):
        engine.failures.warn_once(
            "no-store",
            "TRITON_CACHE_MANAGER names triton-bundler, but TRITON_BUNDLER_STORE is not set",
        )
    _name_unknown(engine)
    if os.environ.get(_OTHER_REMOTE):
        engine.failures.warn_once(
            "two-managers", f"{_OTHER_REMOTE} is set, which only Triton's own remote manager asks"
        )
    engine.start()
    end_supply = _supply_launchers(options.launcher, engine.tally)
    owned = store is not None
    made = Session(engine, chosen.report, lambda _session: end_supply(), owned=owned)
    return made, engine


def _name_unknown(engine: Engine) -> None:
    unknown = config.unknown_words()
    if unknown is not None:
        engine.failures.warn_once("unknown-setting", unknown)


def activity_of(store: Store, options: SessionOptions, source: DelegateSource) -> Active:
    """Return what makes Triton use a session's store: here, and in children where they can open it
    by its URLs.

    Args:
        store, options: of the session.
        source: says who looks after the managers of this process.
    """
    if store.urls:
        # What makes a child process look where we look.  Tags are the parent's: it fetches and
        # pushes for all.
        names = ("mode", "trust", "strict", "keep")
        told = {name.upper(): str(getattr(options, name)) for name in names}
        told |= {"STORE": " ".join(store.urls), "MOVED": str(int(options.moved))}
        session = {PREFIX + name: value for name, value in told.items()}
        return inherited_activity(source, session=session)
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
    from bundler.toolchain.recording.child_recording import hidden_package_parent

    return Active(path=hidden_package_parent(), in_code=partial(_in_front_of, source), **what)


def _in_front_of(source: DelegateSource, theirs: type | None) -> type | None:
    """Return our manager in front of the one that the program set in Python, or of what the
    environment names; None for what is ours.
    """
    from bundler.toolchain.recording import cache_manager

    behind = theirs if theirs is not None else cache_manager.named_by_environment()
    if cache_manager.has_delegate(behind, source):
        return None
    return cache_manager.manager_before(source, behind)
