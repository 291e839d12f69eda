# SPDX-License-Identifier: Apache-2.0
"""`run`: what the programs `replay` and `slim` share: options, a folder, a table of rows, a result
file and an exit status.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.shared import measurement


def run(
    name: str, description: str | None, check_all: Callable[[Path], list[dict[str, Any]]]
) -> int:
    """Run every row in a folder of its own, print the table, write the result; 1 when any row is
    wrong.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=measurement.RESULTS, help=f"where {name}.json goes"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=f"{name}.") as folder:
        rows = check_all(Path(folder))
    for row in rows:
        print(f"{'ok  ' if row['ok'] else 'FAIL'}  {row['check']:<60}  {row['found']}")
    print(f"\nwritten to {measurement.save(name, {'rows': rows}, options.results)}")
    return 0 if all(row["ok"] for row in rows) else 1
