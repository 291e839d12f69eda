# SPDX-License-Identifier: Apache-2.0
"""`listening`: the listener that Triton calls at each compile and each hit of this process; another
program's listener is called too.

::

    knobs.compilation.listener ──▶ our link ──▶ the listener that was there before
                                      └─▶ callbacks (guarded)

Recordings attach callbacks; compile jobs and the tuner run one compile with `heard`.

`loaded_kernels`: kernels that this process compiled or loaded before a recording began, found in
the JIT's own in-memory caches.  Recordings and sessions add them to what they heard.
"""

from __future__ import annotations

import collections
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from bundler.errors import RecordingError
from bundler.fork_safety import after_fork
from bundler.package_loggers import logger
from bundler.project import install
from bundler.toolchain import compile_frames, instances
from bundler.toolchain.encoding import as_tuples
from bundler.toolchain.events import CompileEvent, kernel_key, target_of
from bundler.toolchain.targets import current_device

_LOG = logger("bundler.toolchain")

Callback = Callable[[CompileEvent], None]


class _Link:
    """The object that stands in `knobs.compilation.listener`.

    Another program may keep a link that was cut (`owner` is None); such a link only passes on what
    it hears.
    """

    __slots__ = ("owner", "previous")

    def __init__(self, owner: CompileListener, previous: Callable[..., None] | None) -> None:
        self.owner: CompileListener | None = owner
        self.previous = previous

    def __call__(self, *args: Any, **facts: Any) -> None:
        owner = self.owner
        if owner is not None:
            owner.hear(facts)
        if self.previous is not None:
            self.previous(*args, **facts)


class CompileListener:
    """Calls callbacks for each compile and hit of this process.

    Guarantees: safe from any thread; a callback hears every compile that ends after `attach`
    returns, in the thread that compiled; an exception of a callback goes to the log once per cause
    and into `errors`, never to the user; another listener, before or after ours, hears what it
    would hear without us, and its exceptions go where they would go. Does not guarantee: to hear a
    compile after somebody replaced the listener without calling the previous one; that a callback
    is not called by a compile that was already ending while `detach` ran. A forked child starts
    with nothing attached.

    Attributes:
        errors: number of failures of callbacks, or of ours, by cause.
    """

    def __init__(self) -> None:
        self.errors: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._callbacks: tuple[Callback, ...] = ()
        self._link: _Link | None = None

    def attach(self, callback: Callback) -> None:
        """Begin to call `callback`.  Imports Triton.

        Raises:
            RecordingError: Triton is not installed, or has no compilation listener.
        """
        compilation = _compilation_knobs()
        with self._lock:
            self._callbacks = (*self._callbacks, callback)
            if self._link is None:
                self._link = _Link(self, compilation.listener)
                compilation.listener = self._link

    def detach(self, callback: Callback) -> None:
        """Undo `attach`; does nothing for a callback that is not attached."""
        with self._lock:
            self._callbacks = tuple(one for one in self._callbacks if one != callback)
            if not self._callbacks:
                self._cut()

    def heard(self, compile_now: Callable[[], object]) -> CompileEvent:
        """Run something that compiles or finds a kernel, in this thread, and return the last event
        of it.

        Raises:
            RecordingError: nothing was heard: another program replaced the listener and does not
                call ours.
        """
        thread, events = threading.get_ident(), list[CompileEvent]()

        def hear(event: CompileEvent) -> None:
            if event.thread_id == thread:
                events.append(event)

        self.attach(hear)
        try:
            compile_now()
        finally:
            self.detach(hear)
        if not events:
            raise RecordingError(
                "Triton compiled, and its listener was not called: another program put its own in"
                " knobs.compilation.listener; have that one call the listener that was there before"
            )
        return events[-1]

    def reset_after_fork(self) -> None:
        """Drop everything that was attached in the parent; for the child only, where no other
        thread runs.
        """
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._callbacks = ()
        self._cut()

    def _cut(self) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        link.owner = None
        compilation = _compilation_knobs()
        if compilation.listener is link:
            compilation.listener = link.previous

    def hear(self, facts: dict[str, Any]) -> None:
        """Tell every callback about one compile; never raises (called by the link, inside the
        user's compile).
        """
        callbacks = self._callbacks
        if not callbacks:
            return
        try:
            event = _event(facts)
        except Exception as error:  # noqa: BLE001  # the seam: whatever Triton changed must not end the user's compile
            self._failed("reading the compile", error)
            return
        for callback in callbacks:
            try:
                callback(event)
            except Exception as error:  # noqa: BLE001  # the seam, as above
                self._failed(getattr(callback, "__qualname__", type(callback).__name__), error)

    def _failed(self, where: str, error: Exception) -> None:
        cause = f"{where}: {type(error).__name__}"
        with self._lock:
            self.errors[cause] += 1
            first = self.errors[cause] == 1
        if first:
            _LOG.warning(
                "a compile was not recorded (%s: %s); the program goes on",
                cause,
                error,
                exc_info=error,
            )


def _compilation_knobs() -> Any:
    try:
        from triton import knobs
    except ImportError as error:
        raise RecordingError(
            f"Triton cannot be imported ({error}), so there is nothing to record; "
            f"install it in this environment: {install('triton')}"
        ) from error
    compilation = getattr(knobs, "compilation", None)
    if not hasattr(compilation, "listener"):
        raise RecordingError("this Triton has no compilation listener; install Triton 3.6 or newer")
    return compilation


def _event(facts: dict[str, Any]) -> CompileEvent:
    metadata, times = facts["metadata"], facts["times"]
    frame = compile_frames.find_compile()
    seen: dict[str, Any] = {} if frame is None else frame._asdict()
    kernel_hash, device = seen["hash"] if seen else metadata["hash"], seen.get("device")
    path = next(path for name, path in facts["metadata_group"].items() if name.endswith(".json"))
    return CompileEvent(
        key=kernel_key(kernel_hash),
        hash=kernel_hash,
        directory=os.path.dirname(path),
        name=metadata["name"],
        target=target_of(metadata["target"]),
        src=facts["src"],
        **{name: seen.get(name) for name in ("options", "backend", "env_vars", "stages_key")},
        stage_times_us=(
            ("ir_initialization", times.ir_initialization),
            *((name, duration) for name, duration in times.lowering_stages),
            ("store_results", times.store_results),
        ),
        cache_hit=facts["cache_hit"],
        device=device if device is not None else current_device(),
        thread_id=threading.get_ident(),
    )


listening = CompileListener()
after_fork(listening.reset_after_fork)


# Triton writes the environment that is part of the key into metadata, beside options, which are all
# lower case.
_ENVIRONMENT_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


def loaded_kernels() -> Iterator[CompileEvent]:
    """Yield each finished kernel in the JIT caches of this process, with the device it was loaded
    for.

    The options are rebuilt from the kernel's metadata, which compiler passes may have changed
    since: whether they are those of the key is for `keytext.key_parts` to prove.  A kernel whose
    compile is still running is left out; one that cannot be read is left out with a log line.
    Nothing when Triton is not imported.  Which functions are known, says `instances`; looking for
    them takes 0.1 s where torch is imported.
    """
    for function in instances.instances(instances.JIT_FUNCTION):
        # Copied in one step: during a loop over the items another thread could change the
        # dictionary.
        for device, cache in list(dict(getattr(function, "device_caches", {})).items()):
            for kernel in list(cache[0].values()):
                event = _event_of(kernel, device)
                if event is not None:
                    yield event


def _event_of(kernel: Any, device: int) -> CompileEvent | None:
    finished = _finished(kernel)
    try:
        return None if finished is None else _read(finished, device)
    except Exception as error:  # noqa: BLE001  # the seam: a kernel object of another shape must not end the user's program
        _LOG.warning("a loaded kernel cannot be recorded (%s: %s)", type(error).__name__, error)
        return None


def _finished(kernel: Any) -> Any | None:
    """Return the compiled kernel behind a cache value; asking an unfinished one for anything would
    wait for its compile.
    """
    kind: Any = getattr(sys.modules.get("triton.runtime._async_compile"), "FutureKernel", None)
    if kind is None or type(kernel) is not kind:
        return kernel
    inner, future = vars(kernel).get("kernel"), vars(kernel).get("future")
    if inner is not None or future is None:
        return inner
    ended = future.done() and not future.cancelled() and future.exception() is None
    return future.result() if ended else None


def _read(kernel: Any, device: int) -> CompileEvent:
    metadata = kernel.metadata._asdict()
    compiler: Any = sys.modules["triton.compiler.compiler"]
    backend = compiler.make_backend(metadata["target"])
    path = next(path for name, path in kernel.metadata_group.items() if name.endswith(".json"))
    return CompileEvent(
        key=kernel_key(kernel.hash),
        hash=kernel.hash,
        directory=os.path.dirname(path),
        name=metadata["name"],
        target=target_of(metadata["target"]),
        src=kernel.src,
        options=backend.parse_options({name: as_tuples(value) for name, value in metadata.items()}),
        backend=backend,
        env_vars={
            name: value for name, value in metadata.items() if _ENVIRONMENT_NAME.fullmatch(name)
        },
        device=device,
    )
