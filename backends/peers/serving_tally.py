# SPDX-License-Identifier: Apache-2.0
"""`ServingTally`: what a server of objects did so far, for programs and as text for Prometheus.

The only place where a server counts; `PeerServer`, its requests and `ServedObjects` add to it, `GET
/metrics` shows it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

_PREFIX = "triton_bundler_serve_"
_Labels = tuple[tuple[str, str], ...]
#: What is counted, and what is the case now, each with what it means.
METRICS = {
    "requests_total": ("counter", "Requests that were answered, by route and status."),
    "objects_total": (
        "counter",
        "Objects that were asked for, by result: sent, absent, or damaged in the source.",
    ),
    "sent_bytes_total": ("counter", "Bytes of objects, tags and lists that were sent."),
    "source_reads_total": (
        "counter",
        "Objects that were read from the source; others came from memory, or with another's read.",
    ),
    "source_errors_total": ("counter", "Reads that failed in the source."),
    "connections_total": (
        "counter",
        "Connections, by result: accepted, refused since there were too many, cut for being slow.",
    ),
    "connections": ("gauge", "Connections that are open."),
    "memory_bytes": ("gauge", "Bytes of objects that are kept in memory."),
}


class ServingTally:
    """Counts; safe under threads.

    Args:
        more: gives metrics of others, in the text format of Prometheus, which `text` shows too.
    """

    def __init__(self, more: Callable[[], str] = str) -> None:
        self._lock, self._more = threading.Lock(), more
        self._values: Counter[tuple[str, _Labels]] = Counter()

    def add(self, name: str, number: int = 1, **labels: str) -> None:
        """Count something of `METRICS`; for what is the case now the number may be negative."""
        with self._lock:
            self._values[name, tuple(sorted(labels.items()))] += number

    def total(self, name: str, **labels: str) -> int:
        """Return a number, of all labels that agree with these."""
        with self._lock:
            values = dict(self._values)
        return sum(
            value
            for (of, held), value in values.items()
            if of == name and labels.items() <= dict(held).items()
        )

    def text(self) -> str:
        """Return all numbers in the text format of Prometheus."""
        with self._lock:
            values = sorted(self._values.items())
        lines = []
        for name, (kind, meaning) in METRICS.items():
            lines += [f"# HELP {_PREFIX}{name} {meaning}", f"# TYPE {_PREFIX}{name} {kind}"]
            found = [(labels, value) for (of, labels), value in values if of == name]
            for labels, value in found or [((), 0)]:
                held = ",".join(f'{label}="{text}"' for label, text in labels)
                lines.append(f"{_PREFIX}{name}{f'{{{held}}}' if held else ''} {value}")
        return "\n".join([*lines, ""]) + self._more()
