# SPDX-License-Identifier: Apache-2.0
"""`steps`, `fault`: the commands that a page shows, each with its output, and whether a real output
is the one that is shown.

What a page shows beneath a command is compared; a command with nothing beneath it is only run.  In
a page `…` stands for any text of a line, and alone on a line for any number of lines.  What differs
from run to run is replaced by its kind on both sides: sizes, times, dates, digests, kernel keys,
and numbers of processes.
"""

import re
from typing import NamedTuple

from tools.docs_site.code_blocks import PROMPT

ANY = "…"
_NUMBER = r"(?<![\w.])\d+(?:[.,]\d+)*"
# The order counts: a digest is no kernel key, and a date holds no time.
_KINDS = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b"), "DATE"),
    (re.compile(r"(?<![0-9a-f])[0-9a-f]{12,64}(?![0-9a-z])(?:…)?"), "DIGEST"),
    (re.compile(r"(?<![0-9A-Z])(?=[A-Z]*[2-7])[A-Z2-7]{12,52}(?![0-9A-Z])(?:…)?"), "KEY"),
    (re.compile(rf"{_NUMBER} (?:B|KB|MB|GB)(?!\w)"), "SIZE"),
    (re.compile(rf"{_NUMBER} ?(?:µs|ms|s|seconds)(?!\w)"), "TIME"),
    (re.compile(r"\bseconds saved [\d.]+"), "seconds saved TIME"),
    (re.compile(r"\bprocess \d+"), "process NUMBER"),
    (re.compile(r"[─━]+"), "─"),
    (re.compile(r"[ \t]+"), " "),
)


class Step(NamedTuple):
    """A command, and the lines that a page shows beneath it."""

    command: str
    shown: list[str]

    @property
    def fails(self):
        """Whether the page shows that the command ends with another status than 0."""
        return any(line.startswith("error: ") for line in self.shown)


def steps(text):
    """Return the steps of a console; a command goes on in the next line after a backslash."""
    found = []
    for line in text.splitlines():
        if line.startswith(PROMPT):
            found.append(Step(line.removeprefix(PROMPT), []))
        elif found and found[-1].command.endswith("\\") and not found[-1].shown:
            found[-1] = Step(f"{found[-1].command}\n{line}", [])
        elif found:
            found[-1].shown.append(line)
    return found


def alike(text):
    """Return lines with what differs from run to run replaced by its kind."""
    for pattern, kind in _KINDS:
        text = pattern.sub(kind, text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def fault(shown, output):
    """Return what is wrong with an output, or None where it is what a page shows."""
    wanted, real = alike("\n".join(shown)), alike(output)
    pattern = "".join(
        "(?:.*\n)*?" if line == ANY else ".*".join(map(re.escape, line.split(ANY))) + "\n"
        for line in wanted
    )
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in real)):
        return None
    return "\n".join(("the page shows", *wanted, "", "and it printed", *real))
