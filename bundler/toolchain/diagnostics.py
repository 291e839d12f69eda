# SPDX-License-Identifier: Apache-2.0
"""`telling_line`, `reason_of`: find, in all that a compiler printed, the one line that says why it
refused.

Errors of compiles, in this process and in workers, take their reason from it.
"""

from __future__ import annotations

import re

# Lines of ptxas, MLIR, LLVM and lld that report an error, each with an example:
#   ptxas fatal   : Value 'sm_999a' is not defined for option 'gpu-name'
#   ptxas /tmp/x.ptx, line 12; error   : Feature 'wgmma' requires .target sm_90a
#   kernel.py:20:4: error: size mismatch          loc("kernel.py":20:4): error: size mismatch        <unknown>:0: error: …
#   LLVM ERROR: Cannot select: …                  ld.lld: error: undefined symbol: …
# Indented lines are left out: they are the kernel's own source, which may hold anything.
_TELLING = re.compile(
    r"^(?:ptxas\S*(?=\s).*?\b(?:fatal|error)\s*:"
    r"|(?:[^\s:]+:\d+(?::\d+)?: |loc\(.*\): |<unknown>:0: |[\w./-]*lld: )?(?:fatal )?error: "
    r"|LLVM ERROR: ).*",
    re.MULTILINE,
)
# Triton puts what ptxas says between these two.
_HEADING, _REPRODUCER = "`ptxas` stderr:", "Repro command: "
# Triton's last line where it knows no more than the place.
_CARET = "^"
_BLANKS = re.compile(r"\s+")
_BEFORE_COLON = re.compile(r"\s+:")


def telling_line(text: str) -> str | None:
    """Return the first line in which a compiler reports an error, with its blanks made one; None
    when none does.
    """
    found = _TELLING.search(text)
    return None if found is None else _BEFORE_COLON.sub(":", _BLANKS.sub(" ", found[0])).strip()


def reason_of(error: Exception) -> str:
    """Return what an error of the compiler says, in one line that begins with its class."""
    # Where no tool reports an error, it is Triton itself that refused: its own errors end with what
    # is wrong.
    text = str(error)
    lines = [
        line.strip()
        for line in text.partition(_REPRODUCER)[0].splitlines()
        if line.strip() not in {"", _HEADING}
    ]
    line = telling_line(text) or (lines[-1] if lines else "")
    if line == _CARET:
        return _of_cause(error, lines)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _of_cause(error: Exception, lines: list[str]) -> str:
    """Return the reason of an error that only shows a line of the source: the innermost cause knows
    more, as of an error in a helper.
    """
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    if isinstance(inner, Exception) and inner is not error:
        return reason_of(inner)
    return f"{type(error).__name__}: at `{lines[-2]}`" if len(lines) > 1 else type(error).__name__
