# SPDX-License-Identifier: Apache-2.0
"""`size`, `duration`, `grouped`, `to_json`: numbers, reasons and names as a person reads them.

Every command prints through it; `in_command_words` turns a message of the library into one of the
command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import msgspec
from msgspec import Struct

from bundler.format import summary
from bundler.format.bundle import Bundle
from bundler.format.bundle_union import entry_name
from bundler.format.entries import Entry, Kernel, entry_kind

KEY_CHARACTERS = 12
EXAMPLES = 2
EXAMPLE_CHARACTERS = 40
_UNITS = ("KB", "MB", "GB", "TB")
_STEP = 1000
_SECRET_IN_URL = re.compile(r"(?<=://)[^/@\s]*@")
plain = summary.printable
count = summary.count
listed = summary.listed
plural = summary.plural

# The library names its arguments where a command has options; here each such phrase is said as the
# command's.
_COMMAND_WORDS = (
    (re.compile(r"\b(trust|keep|strip)='(\w+)'"), r"--\1 \2"),
    (re.compile(r"\bmode='merge' or 'replace'"), "--mode merge or --mode replace"),
    (re.compile(r"\bwith mode replace\b"), "with --mode replace"),
    (re.compile(r"\bmode='replace'"), "--mode replace"),
    (re.compile(r"\bgive one by key= or\b"), "give one by --key or"),
    (re.compile(r"\brekey=True\b"), "--rekey"),
    (re.compile(r"--allow-empty, or allow_empty=True,"), "--allow-empty"),
    (re.compile(r"\bpass store=\.\.\., or set\b"), "give --store, or set"),
    (
        re.compile(r"\bcache_dir is an empty text; give a directory, or None for\b"),
        "--cache-dir is empty; give a directory, or leave it out for",
    ),
    (
        re.compile(r"\bpass Limits with (?:a larger value|larger values)\b"),
        "load it in Python with larger bundler.Limits",
    ),
)
# What holds such phrases in the object of `--json`; other texts there are facts.
_MESSAGES = frozenset(
    {
        "message",
        "warnings",
        "skipped",
        "missing",
        "left_out",
        "damaged",
        "problems",
        "failures",
        "notes",
    }
)


def some(number: int, noun: str, more: str = "") -> str:
    """Return how many there are and what more is said of them, nothing where there are none: such
    lines `Screen.facts` leaves out.
    """
    return f"{count(number, noun)}{more}" if number else ""


def in_command_words(text: str) -> str:
    """Return a message of the library in the words of the command line."""
    for phrase, words in _COMMAND_WORDS if "=" in text or " " in text else ():
        text = phrase.sub(words, text)
    return text


def masked(text: str) -> str:
    """Return a text that may hold URLs without the names and passwords in them."""
    return _SECRET_IN_URL.sub("***@", text)


def size(size_bytes: int) -> str:
    """Return `512 B`, `1.5 KB`, `120 MB`: decimal units, as disks and networks have them."""
    if size_bytes < _STEP:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in _UNITS:
        value /= _STEP
        if value < _STEP - 0.5 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}" if value < 100 - 0.05 else f"{value:.0f} {unit}"  # three digits


def duration(seconds: float) -> str:
    """Return `35 ms`, `4.2 s`, `3 min 5 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:  # noqa: PLR2004  # seconds in a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def span(seconds: float) -> str:
    """Return a round length of time as an option has it: `90 s`, `30 min`, `24 h`, `7 d`."""
    for unit, each, least in (("d", 86400, 2), ("h", 3600, 1), ("min", 60, 1)):
        if seconds >= least * each and seconds % each == 0:
            return f"{seconds / each:.0f} {unit}"
    return f"{seconds:g} s"


def milliseconds(times_us: Iterable[tuple[str, int]]) -> float | None:
    """Return the sum of stage times, None when there are none."""
    durations = [us for _, us in times_us]
    return round(sum(durations) / 1000, 1) if durations else None


def short_key(key: str) -> str:
    """Return the beginning of a kernel key, enough to recognize it."""
    return (
        f"{key[:KEY_CHARACTERS]}…"
        if len(key) > KEY_CHARACTERS and "/" not in key and "." not in key
        else key
    )


def grouped(
    reasons: Iterable[tuple[str, str]], names: Mapping[str, str] | None = None
) -> list[tuple[int, str, str]]:
    """Group (name, reason) pairs: (how many, reason, examples), the most frequent first.

    Args:
        reasons: pairs of a kernel key or file, and why.
        names: kernel key -> name, to give examples by name.
    """
    groups: dict[str, list[str]] = {}
    for name, reason in reasons:
        groups.setdefault(in_command_words(reason), []).append(name)
    rows = []
    for reason, members in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        called = (_short((names or {}).get(member, short_key(member))) for member in members)
        shown = list(dict.fromkeys(called))
        more = ", …" if len(shown) > EXAMPLES else ""
        rows.append((len(members), reason, ", ".join(shown[:EXAMPLES]) + more))
    return rows


def _short(name: str) -> str:
    return name if len(name) <= EXAMPLE_CHARACTERS else name[: EXAMPLE_CHARACTERS - 1] + "…"


def kernel_names(bundle: Bundle) -> dict[str, str]:
    """Return kernel key -> name."""
    return {kernel.key: kernel.name for kernel in bundle.kernels}


def kernel_facts(kernel: Kernel) -> dict[str, Any]:
    """Return what identifies a kernel, for `--json`."""
    return {"key": kernel.key, "name": kernel.name, "target": str(kernel.target)}


def entry_facts(entry: Entry) -> dict[str, Any]:
    """Return what identifies an entry, for `--json`."""
    facts: dict[str, Any] = {"kind": entry_kind(entry), "key": entry_name(entry)}
    if isinstance(entry, Kernel):
        facts |= kernel_facts(entry)
    return facts


def to_json(value: Any) -> str:
    """Return one JSON document; what JSON does not know becomes text, and messages use the
    command's words.
    """
    return json.dumps(_plain(value), indent=2)


def _plain(value: Any, *, messages: bool = False) -> Any:
    if isinstance(value, str):
        return in_command_words(value) if messages else value
    if isinstance(value, Struct):
        value = msgspec.structs.asdict(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {
            key: _plain(item, messages=messages or key in _MESSAGES) for key, item in value.items()
        }
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, messages=messages) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
