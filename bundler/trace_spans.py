# SPDX-License-Identifier: Apache-2.0
"""`span`, `past_span`: steps as spans of OpenTelemetry, for programs that trace.

`observers.py` imports it when the program itself has imported `opentelemetry.trace`, and calls it
for each step.  Where the program configured no provider, OpenTelemetry's own spans record nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

#: What is told of a step: a value that a span's attribute can have.
Fact = str | int | float | bool
#: What the name of a span, and of its attributes, begins with.
PREFIX = "triton_bundler."
_NAME = "triton-bundler"


@contextlib.contextmanager
def span(name: str) -> Iterator[Callable[[Mapping[str, Fact]], None]]:
    """Open a span, the current one while the block runs; yields what to give it attributes by, at
    its end.

    An error that leaves the block is recorded in it.
    """
    with trace.get_tracer(_NAME).start_as_current_span(f"{PREFIX}{name}") as opened:
        yield lambda facts: opened.set_attributes(_attributes(facts))


def past_span(name: str, seconds: float, facts: Mapping[str, Fact]) -> None:
    """Record a span that ends now, and began so many seconds ago."""
    end_ns = time.time_ns()
    opened = trace.get_tracer(_NAME).start_span(
        f"{PREFIX}{name}", start_time=end_ns - int(seconds * 1e9), attributes=_attributes(facts)
    )
    if "error" in facts:
        opened.set_status(Status(StatusCode.ERROR, str(facts["error"])))
    opened.end(end_ns)


def _attributes(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    return {f"{PREFIX}{name}": value for name, value in facts.items()}
