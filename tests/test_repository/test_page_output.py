# SPDX-License-Identifier: Apache-2.0
"""Output that a page shows is told from what was printed, and what differs each time is not."""

import pytest
from page_output import fault, steps


def test_a_console_is_commands_with_their_output():
    """A command has the lines beneath it, and goes on after a backslash; who shows an error expects
    the command to fail.
    """
    (first, second, third) = steps("$ a \\\n  b\nprinted\n$ c\n$ d\nerror: no\n")
    assert (first.command, first.shown, first.fails) == ("a \\\n  b", ["printed"], False)
    assert (second.command, second.shown) == ("c", [])
    assert third.fails


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("wrote x: 7.6 KB, sha256:42fe5b16a605…", f"wrote x: 12 B, sha256:{'a1' * 32}"),
        ("in 3 ms, until 2026-01-02 03:04:05 UTC", "in 1.25 s, until 2027-11-12 13:14:15 UTC"),
        ("into  …/elsewhere", "into /tmp/a/elsewhere"),
        ("…\nlast", "first\nsecond\nlast"),
        ("…\nlast", "last"),
        ("3YLK47WM4W3N…  gelu", f"{'AB2' * 17}A  gelu"),
        ("a   b\n─────", "a b\n\n───"),
    ],
)
def test_what_differs_each_time_is_no_difference(shown, printed):
    """Sizes, times, dates, digests and keys are compared by their kind, and … is any text."""
    assert fault(shown.splitlines(), printed) is None


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("1 of 1 kernel in place", "0 of 1 kernel in place"),
        (
            "hits 1, misses 0, compiles 0, seconds saved 0.1",
            "hits 0, misses 1, compiles 1, seconds saved 0.1",
        ),
        ("first", "first\nsecond"),
        ("…\nlast", "last\nmore"),
        ("sha256:42fe5b16a605…", "none"),
        ("in 3 ms", "in 3 KB"),
        ("3 kernels", "13 kernels"),
    ],
)
def test_another_output_is_a_fault(shown, printed):
    """Another count, another word, and a line more or less are told with both texts."""
    assert printed.split("\n", maxsplit=1)[0].split()[0] in fault(shown.splitlines(), printed)
