# SPDX-License-Identifier: Apache-2.0
"""What the page says of a missed target: by how much, and why, with what its time or memory
consists of where the result has that.

`page.py` calls `not_reached` for each result.  A reason belongs to the rows of one result that it
names, and to no others: a row that nobody has explained stands there without a word.
"""

from __future__ import annotations

import fnmatch
from typing import Any, NamedTuple

from tools.bench import floors, launch_tables, scale
from tools.shared.measurement import shown, target


class Reason(NamedTuple):
    """Why rows are missed.

    Attributes:
        work: the name of the row, as a pattern of shells.
        profile: which steps of the result are its; empty for none.
        words: what they show.
    """

    work: str
    profile: str
    words: str


_KERNELS_ALIKE = (
    "it is the same work for each kernel as for everything, and a third of the writing: a kernel's"
    " two files, its group file, one directory and one rename."
)
_TORCH = (
    "torch writes the same files with the same calls, and the write loop, which both sides pay, is"
    " most of its time; we also parse a manifest, hash every byte, and rename every directory."
)
_BUNDLE = (
    Reason(
        "*: restore everything, digests verified",
        "restore",
        "one thread finds the files and checks metadata, and decodes frames with up to three"
        " others, while more of them hash and write; where there are two processors, they share all"
        " of it, and where there are many, nothing is faster than that one thread.",
    ),
    Reason("*: restore the launch set", "restore launch", _KERNELS_ALIKE),
    Reason("*: load and restore everything: how much faster", "restore", _TORCH),
    Reason(
        "*: load and restore the launch set: how much faster",
        "restore launch",
        f"{_TORCH} For the launch set {_KERNELS_ALIKE}",
    ),
    Reason(
        "fresh process: *",
        "fresh",
        "most of it is imports: msgspec brings half of the standard library's typing tools with it,"
        " then our own modules, then the restore itself.",
    ),
    Reason(
        "*: push again, *",
        "push",
        "every unit is marked as in use, and read and compared with its digest, so that the push"
        " mends what was lost or damaged.",
    ),
    Reason(
        "*: collect and save",
        "collect",
        "tar only copies bytes; we read every file, check that the kernel is whole and from one"
        " compile, hash it, take paths out of its metadata, and compress at level 9, to a quarter"
        " of tar's size.",
    ),
    Reason(
        "restore * times the kernels: peak memory",
        "",
        "the manifest is in memory: digests, names and launch facts of every kernel. The files are"
        " not, whose bytes grow seven times as fast.",
    ),
)
_REMOTE = (
    "five or six exchanges with the server, and what our own process does, of which one thread does"
    " all but marks and writers."
)
#: By the name of the result's file.
REASONS: dict[str, tuple[Reason, ...]] = {
    "bench-basics": (
        Reason(
            "a hit in a store in a directory, *",
            "store hit",
            "the record and the units of the kernel are read from files of their own, compared with"
            " their digests, decompressed, decoded and marked as in use, before the files are"
            " checked and written.",
        ),
        Reason(
            "judging a signature, first *",
            "judging",
            "our modules and the package cryptography are imported; the rest is what each judgement"
            " takes.",
        ),
    ),
    "bench-bundle": _BUNDLE,
    "bench-bundle-16-cores": _BUNDLE,
    "bench-remote": (
        Reason("*: restore everything*", "start all", _REMOTE),
        Reason("*: restore the launch set*", "start", _REMOTE),
    ),
}


def not_reached(name: str, result: dict[str, Any]) -> list[str]:
    """Return a line for each missed target of a result: by how much, and why; `name` is that of its
    file.
    """
    lines = []
    for line in result["rows"]:
        if line["ok"]:
            continue
        if "check" in line:
            lines.append(f"{line['check']}: {line['found']}{launch_tables.why(line, result)}")
            continue
        bound = line["most"] if line["most"] is not None else line["least"]
        off = abs(line["figure"] / bound - 1) * 100
        figure = f"{shown(line['figure'], line['unit'])}, {target(line)}: {off:.0f} % off."
        more = scale.told(line, result) + floors.told(line, result)
        lines.append(f"**{line['work']}**: {figure}{_why(name, line, result)}{more}")
    return lines


def matches(reason: Reason, work: str) -> bool:
    """Tell whether a reason is of the row with this name."""
    return fnmatch.fnmatchcase(work, reason.work)


def _why(name: str, line: dict[str, Any], result: dict[str, Any]) -> str:
    for reason in REASONS.get(name, ()):
        if matches(reason, line["work"]):
            return (
                f" Why: {reason.words}{_alone(result.get('profile', {}).get(reason.profile, {}))}"
            )
    return ""


def _alone(steps: dict[str, float]) -> str:
    """Return what each actor's steps take together, in words: the table of the steps is in the
    section of the result.
    """
    together: dict[str, float] = {}
    for step, seconds in steps.items():
        actor = step.partition(":")[0]
        together[actor] = together.get(actor, 0.0) + seconds
    told = ", ".join(f"{actor} {shown(seconds * 1e3, 'ms')}" for actor, seconds in together.items())
    return f" Alone: {told}." if told else ""
