# SPDX-License-Identifier: Apache-2.0
"""`parser`: the options that several of these programs have, each written once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tools.shared import measurement


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N, as 1/40")
    return int(number), int(count)


# Those that have a help text alone are switches.
_COMMON: dict[str, dict[str, Any]] = {
    "names": {"nargs": "*", "metavar": "NAME", "help": "graphs; without one all"},
    "results": {"type": Path, "default": measurement.RESULTS, "help": "folder of the result"},
    "check": {"help": "run nothing; exit 1 when the result misses a target"},
    "drawn-candidates": {"help": "one candidate a kernel, and no timing"},
    "seconds": {"type": float, "help": "begin nothing new after so long"},
    "processes": {"type": int, "help": "how many work side by side"},
    "workers": {"type": int, "help": "how many processes work side by side"},
    "first": {"type": int, "default": 0, "help": "first seed"},
    "device": {"choices": ("cuda", "cpu"), "help": "cpu: Triton's interpreter"},
    "shard": {
        "type": _shard,
        "default": (1, 1),
        "metavar": "I/N",
        "help": "the I-th of N parts, from 1",
    },
    "resume": {"help": "only what the result has no answer for"},
    "again": {"help": "only what the result says is not right"},
}


def parser(about: str | None, names: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with some of the common options.

    Args:
        about: the program's docstring.
        names: of the options, with spaces between, without their dashes.
        defaults: of these, as `argparse` names them.
    """
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in names.split():
        settings = _COMMON[name]
        if settings.keys() == {"help"}:
            settings = settings | {"action": "store_true"}
        made.add_argument(name if name == "names" else f"--{name}", **settings)
    made.set_defaults(**defaults)
    return made
