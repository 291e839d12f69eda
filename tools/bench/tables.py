# SPDX-License-Identifier: Apache-2.0
"""Tables of the page that several sections have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tools.shared.measurement import shown, table, target, verdict

Row = Mapping[str, Any]
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "work": lambda line: line["work"],
    "ours": lambda line: shown(line["ours_ms"], "ms"),
    "figure": verdict,
    "peer": lambda line: line["peer"],
    "target": target,
}


def of_rows(lines: Iterable[Row], **head: str) -> str:
    """Return a table of rows; `head` says which columns it has, and what they are called."""
    return table([*head.values()], [[_COLUMNS[name](line) for name in head] for line in lines])


def of_times(lines: Iterable[Row], work: str = "work") -> str:
    """Return the table of rows with the times of two sides."""
    return of_rows(lines, work=work, ours="ours", peer="peer", figure="ratio", target="target")


def of_checks(result: Row) -> str:
    """Return the table of a result whose rows are checks."""
    rows = [
        [row["check"], "ok" if row["ok"] else "**wrong**", row["found"]] for row in result["rows"]
    ]
    return table(["check", "", "found"], rows)
