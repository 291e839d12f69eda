# SPDX-License-Identifier: Apache-2.0
"""The port by which every room tells what happens: numbers, states, and steps that take time;
nothing is kept of them but states.

::

    a room ──count, state──▶ listeners                 integrations/prometheus_meters.py is one
           ──step, ended───▶ listeners, spans (`trace_spans.py`) and the logger `bundler.events`

Where nobody listens a call costs a look at a tuple, and `step` gives back an object that does
nothing.  Every room may import this module. docs/metrics.md lists what is told.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Protocol, Self, TypeVar

from bundler.package_loggers import logger

if TYPE_CHECKING:
    from bundler.trace_spans import Fact

P = ParamSpec("P")
R = TypeVar("R")
Labels = Mapping[str, str]
LOG = logger("bundler.events")
#: What a field of a log record begins with, so that it hides none of logging's own.
FIELD = "bundler_"
# A program may open stores without end; what was told of so many is enough to look at.
_MOST_STATES = 1000
_TRACING = "opentelemetry.trace"
_INFO = 20  # logging.INFO


class Listener(Protocol):
    """Who is told; called in whatever thread something happens, and must be quick and not raise."""

    def count(self, name: str, number: float, labels: Labels) -> None:
        """Hear that something happened."""

    def state(self, name: str, value: float, labels: Labels) -> None:
        """Hear what is the case now."""

    def step(self, name: str, seconds: float, facts: Mapping[str, Fact]) -> None:
        """Hear that a step has ended; `facts` has `error` where it failed."""


#: Read only: `listen` and `leave` change it.
listeners: tuple[Listener, ...] = ()
_states: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}


def listen(listener: Listener) -> None:
    """Tell somebody from now on, and at once what is the case."""
    global listeners  # noqa: PLW0603  # one tuple that is replaced, so that who tells needs no lock
    for (name, labels), value in list(_states.items()):
        listener.state(name, value, dict(labels))
    if listener not in listeners:
        listeners = (*listeners, listener)


def leave(listener: Listener) -> None:
    """Tell somebody no more."""
    global listeners  # noqa: PLW0603  # as in `listen`
    listeners = tuple(one for one in listeners if one is not listener)


def count(name: str, number: float = 1, **labels: str) -> None:
    """Tell that something happened."""
    for listener in listeners:
        listener.count(name, number, labels)


def state(name: str, value: float, **labels: str) -> None:
    """Tell what is the case now; who listens later is told it too."""
    known = name, tuple(sorted(labels.items()))
    if known in _states or len(_states) < _MOST_STATES:
        _states[known] = value
    for listener in listeners:
        listener.state(name, value, labels)


class Step:
    """Something that takes time: a context manager, which tells at its end how it went.

    Attributes:
        observed: whether anybody will hear of it; what is dear to find out is found out only then.
    """

    observed = True

    def __init__(self, name: str, facts: dict[str, Fact]) -> None:
        self._name, self._facts = name, facts
        self._span: AbstractContextManager[Callable[[Mapping[str, Fact]], None]] | None = None
        self._finish: Callable[[Mapping[str, Fact]], None] | None = None

    def note(self, **facts: Fact | None) -> None:
        """Add what is known of it; None is left out."""
        self._facts.update({name: value for name, value in facts.items() if value is not None})

    def __enter__(self) -> Self:
        if _traces():
            from bundler.trace_spans import span

            self._span = span(self._name)
            self._finish = self._span.__enter__()
        self._began_s = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = time.monotonic() - self._began_s
        if kind is not None:
            self._facts["error"] = str(getattr(value, "code", "") or kind.__name__)
        _tell(self._name, seconds, self._facts)
        if self._span is not None and self._finish is not None:
            self._finish(self._facts)
            self._span.__exit__(kind, value, traceback)


class _Unobserved(Step):
    observed = False

    def note(self, **facts: Fact | None) -> None:
        """Nobody hears of it."""


_UNOBSERVED = nullcontext[Step](_Unobserved("", {}))


def observed() -> bool:
    """Tell whether anybody hears of steps now: a listener, a program that traces, or one that logs
    what happens.
    """
    return bool(listeners) or _traces() or _logs()


def _logs() -> bool:
    """Tell whether lines of the level INFO are wanted; without `logging` in this process they are
    not.
    """
    return "logging" in sys.modules and LOG.isEnabledFor(_INFO)


def _traces() -> bool:
    """Tell whether the program traces: some libraries, redis-py is one, import OpenTelemetry
    wherever it is installed.
    """
    tracing = sys.modules.get(_TRACING)
    return tracing is not None and not isinstance(
        tracing.get_tracer_provider(), tracing.ProxyTracerProvider
    )


def step(name: str, **facts: Fact | None) -> AbstractContextManager[Step]:
    """Return a step to put a `with` statement around."""
    if not observed():
        return _UNOBSERVED
    begun = Step(name, {})
    begun.note(**facts)
    return begun


def ended(name: str, seconds: float, **facts: Fact) -> None:
    """Tell of a step that has ended just now, and that others timed."""
    if not observed():
        return
    _tell(name, seconds, facts)
    if _traces():
        from bundler.trace_spans import past_span

        past_span(name, seconds, facts)


def observing(name: str, *told: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make each call of a function a step.

    Args:
        name: of the step.
        told: attributes of the result that are facts; the first argument's `name`, where it has
            one, is the fact `store`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with step(name) as begun:
                result = function(*args, **kwargs)
                if begun.observed:
                    begun.note(
                        store=getattr(args[0], "name", None),
                        **{fact: getattr(result, fact) for fact in told},
                    )
                return result

        return call

    return decorate


def _tell(name: str, seconds: float, facts: Mapping[str, Fact]) -> None:
    for listener in listeners:
        listener.step(name, seconds, facts)
    if _logs():
        words = " ".join(f"{fact}={value}" for fact, value in facts.items())
        fields = {f"{FIELD}event": name, f"{FIELD}seconds": seconds}
        LOG.info(
            "%s %.6f s %s",
            name,
            seconds,
            words,
            extra=fields | {f"{FIELD}{k}": v for k, v in facts.items()},
        )
