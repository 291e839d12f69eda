# SPDX-License-Identifier: Apache-2.0
"""`Session`: one use of a store by this process's Triton, from start to end.

`_process.py` makes it for `bundler.install` and `bundler.session`, which return it to users.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from bundler.config import Strict
    from bundler.integrations.lookup_engine import Engine
    from bundler.integrations.process_report import Counters
    from bundler.integrations.prometheus_meters import EndpointServer
    from bundler.integrations.replayed_kernels import ReplayReport


FLUSH_S = 2.0
# At the end of a process nobody waits longer than this for a store.
LAST_FLUSH_S = 5.0


class Session:
    """What `bundler.install` and `bundler.session` return: Triton's compiles go through it until it
    is closed.

    A context manager.  Its methods may be called by any thread.  A forked child has a copy that
    counts from nought, publishes for itself, and leaves the tag to its parent.

    Args of `bundler.install` say what it does.
    """

    def __init__(
        self,
        engine: Engine,
        report: str | None,
        leave: Callable[[Session], None],
        *,
        owned: bool = False,
        endpoint: EndpointServer | None = None,
    ) -> None:
        self._engine, self._report, self._leave, self._owned = engine, report, leave, owned
        self._endpoint = endpoint
        self._pid, self._closed = os.getpid(), False

    @property
    def counters(self) -> Counters:
        """What it did so far in this process: a snapshot."""
        return self._engine.tally.snapshot()

    @property
    def replayed(self) -> ReplayReport | None:
        """What was replayed at the start; None when nothing was to be, or the tag is not there."""
        return self._engine.replayed

    @property
    def metrics_url(self) -> str | None:
        """Where its metrics are read; None without `metrics_port`."""
        return self._endpoint.url if self._endpoint is not None else None

    def arm_strict(self, mode: Strict) -> None:
        """Say what a compile is from now on: fine (`off`), a warning (`warn`), or a
        `StrictModeViolation` (`error`).

        Raises:
            ConfigError: another mode.
        """
        self._engine.strict_mode.set_mode(mode)

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until everything that was compiled so far is in the store.

        Args:
            timeout_s: how long to wait, in seconds.

        Returns:
            False when the time was too short.  What could not be stored is in `counters.errors`,
            and is not waited for.
        """
        return self._engine.publisher.flush(timeout_s)

    def close(self) -> None:
        """Publish what is left, give the tag what was used, write the report, and give Triton back
        the manager it had.

        Closing twice is fine.

        Raises:
            BundlerError: in strict mode, that the tag could not be pushed.
        """
        if self._closed:
            return
        self._closed = True
        self._leave(self)
        try:
            self._finish()
        finally:
            if self._endpoint is not None:
                self._endpoint.close()
            if self._owned and self._engine.store is not None:
                self._engine.store.close()

    def _finish(self) -> None:
        engine = self._engine
        engine.end_turns()
        engine.publisher.flush(LAST_FLUSH_S)
        engine.end_notes()
        try:
            with engine.failures.tolerating(f"tag {engine.options.tag} was not pushed"):
                if os.getpid() == self._pid:
                    engine.push_tag()
        finally:
            if self._report is not None:
                self._tell(self._report)

    def _tell(self, report: str) -> None:
        """Write the report, and its summary on standard error."""
        from bundler.integrations.process_report import summary, write_report

        counters, engine = self.counters, self._engine
        try:
            tally = engine.tally
            path = write_report(report, counters, engine.store, tally.hits_of(), tally.moved_from())
        except OSError as error:
            engine.failures.count(error, f"the report {report} was not written")
            return
        # A process may have no standard error, or have closed it.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(f"{summary(counters, path)}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        store = self._engine.store
        return f"<Session {store.name if store is not None else 'without a store'}>"
