# SPDX-License-Identifier: Apache-2.0
"""`run`: signals that ask a command to end: each becomes an exception, so that clean-up runs, and
then the exit status.

`main` runs every command through it; the command `run` holds signals back for the program that it
runs.  `serve` and `top`, which signals end in the usual way, ask `asked_to_end`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

# A shell reports a program that a signal ended with this number more than the signal's.
SIGNAL_STATUS = 128
# After so long the exception is raised again, if somebody swallowed it.
AGAIN_S = 0.1
ENDING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Interrupted(BaseException):
    """A signal asked the command to end.  Not a `KeyboardInterrupt`, for which click has an exit
    status of its own.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = number


class Interruption:
    """Raises `Interrupted` in the main thread for each signal of `ENDING`, unless one is
    propagating already.

    While it propagates, further signals change nothing: a second Ctrl-C does not stop the clean-up.
    (SIGQUIT still ends the
    process at once.)  An exception that was swallowed, as Python does in a destructor and Triton where it imports torch, is raised
    again.
    """

    def __init__(self) -> None:
        self._raised: weakref.ref[Interrupted] | None = None
        self._number = 0

    def begin(self) -> None:
        """Listen from now on; a signal that the parent process has ignored stays ignored, as
        `nohup` wants it.
        """
        # Registered first, so called last: after threads have ended and other exit handlers have
        # run.
        atexit.register(self._leave)
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._hear)

    def end(self) -> None:
        """Listen no more.  A command that was interrupted lets its threads finish; any other may be
        ended at once.
        """
        action = signal.SIG_DFL if self._raised is None else signal.SIG_IGN
        for number in ENDING:
            if signal.getsignal(number) == self._hear:
                signal.signal(number, action)
        if self._raised is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if self._raised is None:
            self._number = number
            signal.signal(signal.SIGALRM, self._hear)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
        if self._raised is None or self._raised() is None:
            raise self._new()

    def _new(self) -> Interrupted:
        # Not in `_hear`, whose frame is in the traceback: frame and exception would keep each other
        # alive.
        error = Interrupted(self._number)
        self._raised = weakref.ref(error)
        return error

    def _leave(self) -> None:
        """End the process of an interrupted command here: a library that was half imported may
        crash in its own clean-up.
        """
        if self._raised is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(SIGNAL_STATUS + self._number)


def run(command: Callable[[], None]) -> None:
    """Run the command; when a signal asks it to end, say so and exit with the signal's status, 130
    for Ctrl-C.
    """
    interruption = Interruption()
    try:
        try:
            interruption.begin()
            command()
        finally:
            interruption.end()
    except Interrupted as interrupted:
        # A terminal shows ^C where the cursor is.
        line_break = "\n" if sys.stderr.isatty() else ""
        print(
            f"{line_break}error: interrupted by {signal.Signals(interrupted.number).name}",
            file=sys.stderr,
        )
        sys.exit(SIGNAL_STATUS + interrupted.number)


class Ending:
    """Whether the command was asked to end.

    Not an `Event`: its lock may be held by the very thread that a signal interrupts, which would
    then wait for itself.
    """

    def __init__(self) -> None:
        self._asked, (self._read, self._write) = False, os.pipe()

    def set(self) -> None:
        """Ask; a signal's handler may do so at any place."""
        if not self._asked:
            self._asked = True
            os.write(self._write, b"1")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until somebody asks, or the time is over; tells whether somebody did."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """Release what is held."""
        os.close(self._read)
        os.close(self._write)


@contextlib.contextmanager
def asked_to_end() -> Iterator[Ending]:
    """Yield what SIGTERM and Ctrl-C set; after the block a second one interrupts the command as any
    other.
    """
    before = {}
    with contextlib.closing(Ending()) as ending:
        for number in (signal.SIGTERM, signal.SIGINT):
            if (
                threading.current_thread() is threading.main_thread()
                and signal.getsignal(number) is not signal.SIG_IGN
            ):
                before[number] = signal.signal(number, lambda _number, _frame: ending.set())
        try:
            yield ending
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
