# SPDX-License-Identifier: Apache-2.0
"""What commands print: numbers and reasons for people, plain text in a pipe, tables that fit."""

import dataclasses
import io
import os
import pty
import subprocess
import sys
import warnings

import pytest
from rich.console import Console

import bundler
from bundler.cli import words
from bundler.cli.screen import Column, Screen, warnings_on
from bundler.errors import BundlerError, BundlerWarning
from bundler.format.manifest import Content

COLUMNS = (Column("name", shrinks=True), Column("wide", needs=60), Column("size", numeric=True))


def screen(width=80, **options):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, **options)
    return Screen(out=console, err=Console(file=io.StringIO(), width=width, highlight=False, markup=False))


def in_terminal(*line, **environment):
    """Run a command whose standard output and error are a terminal, and return what it wrote."""
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}}
    env |= {"TERM": "xterm-256color"} | environment
    with subprocess.Popen(line, stdout=theirs, stderr=theirs, stdin=theirs, env=env) as child:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 1 << 16):
                written += part
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(ours)
    return child.returncode, written.decode()


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (99_949, "99.9 KB"), (99_950, "100 KB"), (141_234, "141 KB"),
     (999_499, "999 KB"), (999_500, "1.0 MB"), (15_400_000, "15.4 MB"), (2_000_000_000_000_000, "2000 TB")],
)  # fmt: skip
def test_sizes(number, text):
    """Sizes have three digits and a unit."""
    assert words.size(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0123, "12 ms"), (4.21, "4.2 s"), (185, "3 min 5 s")])
def test_durations(seconds, text):
    """Durations have the unit that fits."""
    assert words.duration(seconds) == text


def test_reasons_are_grouped():
    """Each reason stands once, the most frequent first, with examples by name."""
    reasons = [("A", "old"), ("B", "old"), ("C", "old"), ("D", "new")]
    assert words.grouped(reasons, {"A": "gelu", "B": "matmul"}) == [(3, "old", "gelu, matmul, …"), (1, "new", "D")]


def test_names_cannot_command_the_terminal():
    """Control characters in a name are printed as escapes, in lines and in tables."""
    out = screen()
    out.line("a\x1b[2Jb\rc")
    out.table(COLUMNS, [("\x1b]0;title\x07", "", "")])
    text = out.out.file.getvalue()
    assert "a\\x1b[2Jb\\rc" in text
    assert "\x1b" not in text


def test_a_bracket_is_no_markup():
    """Names with brackets are printed as they are."""
    out = screen()
    out.line("[bold]name[/]")
    assert out.out.file.getvalue() == "[bold]name[/]\n"


def test_tables_fit_narrow_terminals():
    """A narrow terminal gets fewer columns and cut names, and no line is longer than it."""
    row = ("a_kernel_with_a_rather_long_name_that_does_not_fit", "value", "12 KB")
    narrow, wide = screen(40), screen(100)
    for one in (narrow, wide):
        one.table(COLUMNS, [row])
    lines = narrow.out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[-1].endswith("12 KB")
    assert "value" not in lines[-1]
    assert row[0] in wide.out.file.getvalue()


def test_lines_of_tables_end_where_the_text_ends():
    """No line of a table ends in blanks."""
    out = screen()
    out.table((Column("a"), Column("b", folds=True)), [("x", ""), ("x", "y")])
    assert all(line == line.rstrip() for line in out.out.file.getvalue().splitlines())


def test_an_error_is_one_line():
    """An error's message becomes one line, whatever is in it."""
    out = screen()
    out.fail(BundlerError("first\nsecond\x1b[0m"))
    assert out.err.file.getvalue() == "error: first second\\x1b[0m\n"


def test_only_our_warnings_become_lines():
    """Our warnings are lines on standard error; others go where they went."""
    out, others = screen(), []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: others.append(str(message))
        with warnings_on(out):
            warnings.warn("ours", BundlerWarning, stacklevel=1)
            warnings.warn("theirs", UserWarning, stacklevel=1)
    assert (out.err.file.getvalue(), out.warned, others) == ("warning: ours\n", ["ours"], ["theirs"])


@pytest.mark.toolchain
def test_a_terminal_gets_a_progress_bar(packed, tmp_path):
    """On a terminal long work shows a bar, which is gone at the end; the result stays."""
    line = (
        sys.executable,
        "-m",
        "bundler",
        "restore",
        str(packed),
        "--cache-dir",
        str(tmp_path / "c"),
        "--only",
        "all",
    )
    status, written = in_terminal(*line)
    assert status == 0
    assert f"restoring {packed}"[:20] in written
    assert "4 of 4 kernels in place" in written


@pytest.mark.toolchain
def test_a_pipe_gets_no_bar_and_no_colour(command, packed, tmp_path):
    """In a pipe there are no escape sequences and no bar."""
    done = command("restore", packed, "--cache-dir", tmp_path / "c", "--only", "all")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


@pytest.mark.toolchain
def test_no_color_is_respected(tmp_path):
    """With NO_COLOR a terminal gets no colours."""
    line = (sys.executable, "-P", "-m", "bundler", "verify", str(tmp_path / "nothing"))
    assert "\x1b[1;31m" in in_terminal(*line)[1]
    assert "31m" not in in_terminal(*line, NO_COLOR="1")[1]


@pytest.mark.toolchain
def test_a_hostile_kernel_name_is_harmless(cli, packed, tmp_path):
    """A bundle whose kernel is named with escape sequences is printed without them."""
    path = tmp_path / "hostile.tbundle"
    with bundler.Bundle.load(packed) as bundle:
        kernels = [dataclasses.replace(kernel, name="\x1b[2J[red]x") for kernel in bundle.kernels]
        bundler.Bundle(Content.of(kernels), bundle.observed, bundle.blobs).save(path)
    for line in (("inspect", path), ("diff", packed, path), ("verify", path)):
        assert "\x1b" not in cli(*line).stdout


@pytest.mark.toolchain
def test_names_that_a_terminal_cannot_write(command, tmp_path):
    """A path whose characters the output's encoding has not, is written as escapes."""
    done = command("inspect", tmp_path / "jürgen", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 1
    assert "j\\xfcrgen" in done.stderr
