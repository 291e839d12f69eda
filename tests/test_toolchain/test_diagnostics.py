# SPDX-License-Identifier: Apache-2.0
"""Which line of a compiler's text tells what is wrong."""

import pytest

from bundler.toolchain.diagnostics import reason_of, telling_line

PTXAS = """PTXAS error: Internal Triton PTX codegen error
`ptxas` stderr:
ptxas /tmp/x.ptx, line 35; error   : Parsing error near 'no': syntax error
ptxas fatal   : Ptx assembly aborted due to errors

Repro command: ptxas -lineinfo -v --gpu-name=sm_90a /tmp/x.ptx -o /tmp/x.ptx.o
"""
SILENT = """PTXAS error: `ptxas` raised SIGSEGV
`ptxas` stderr:

Repro command: ptxas /tmp/x.ptx
"""
SOURCE = """at 3:4:
def bad(x):
    error: tl.int32 = 1
    tl.store(x, undefined_name)
                ^
NameError('undefined_name is not defined')"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (PTXAS, "ptxas /tmp/x.ptx, line 35; error: Parsing error near 'no': syntax error"),
        (
            "a\nptxas-blackwell fatal   : Value 'sm_999a' is not\nb",
            "ptxas-blackwell fatal: Value 'sm_999a' is not",
        ),
        ('loc("k.ttir":3:21): error: use of value\n x', 'loc("k.ttir":3:21): error: use of value'),
        ("k.py:3:21: error: use of value", "k.py:3:21: error: use of value"),
        ("<unknown>:0: error: failed", "<unknown>:0: error: failed"),
        ("error: invalid instruction\n  asm\n  ^\nld.lld: error: no", "error: invalid instruction"),
        ("note\nld.lld: error: undefined symbol: f", "ld.lld: error: undefined symbol: f"),
        ("LLVM ERROR: Cannot select: x\nStack dump:", "LLVM ERROR: Cannot select: x"),
        ("PassManager::run failed", None),
        (SOURCE, None),
        ("", None),
    ],
)
def test_the_first_line_that_reports_an_error_tells(text, line):
    """Lines of each tool are known; the kernel's own source, which is indented, is none."""
    assert telling_line(text) == line


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError(PTXAS),
            "RuntimeError: ptxas /tmp/x.ptx, line 35; error: Parsing error near 'no': syntax error",
        ),
        (RuntimeError(SILENT), "RuntimeError: PTXAS error: `ptxas` raised SIGSEGV"),
        (RuntimeError(SILENT.replace("stderr:", "stderr:\nno")), "RuntimeError: no"),
        (ValueError(SOURCE), "ValueError: NameError('undefined_name is not defined')"),
        (RuntimeError("PassManager::run failed"), "RuntimeError: PassManager::run failed"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_reason_is_one_line_that_begins_with_its_class(error, reason):
    """What a tool reports comes first, else the last line of what Triton says."""
    assert reason_of(error) == reason


def _caused(outer, inner):
    """An error as Triton raises it for a helper: its text ends with a caret, the cause
    knows why.
    """
    try:
        raise outer from inner
    except ValueError as error:
        return error


def test_a_reason_that_is_only_a_caret_is_that_of_the_cause():
    """A compile that fails inside a helper shows the caller's line; the innermost cause says what
    is wrong, if anything does.
    """
    place = "at 90:35:\n    blocks = tl.cdiv(length, BLOCK)\n             ^"
    inner = _caused(ValueError("at 3:4:\n    assert x\n    ^"), TypeError("unexpected type fp16"))
    assert reason_of(_caused(ValueError(place), inner)) == "TypeError: unexpected type fp16"
    assert reason_of(_caused(ValueError(place), AssertionError())) == "AssertionError"
    assert reason_of(ValueError(place)) == "ValueError: at `blocks = tl.cdiv(length, BLOCK)`"
