# SPDX-License-Identifier: Apache-2.0
"""What commands print: numbers and reasons for people, plain text in a pipe, tables that fit."""

import ast
import dataclasses
import io
import json
import os
import pty
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import MappingProxyType

import pytest
from rich.console import Console

import bundler
from bundler.cli import wording
from bundler.cli.terminal import Column, Screen, warnings_on
from bundler.errors import BundlerError, BundlerWarning
from bundler.format.bundle import MemoryBlobs
from bundler.format.entries import Artifact, Target
from bundler.format.manifest import Content, Observed
from bundler.format.sentinel import Span

COLUMNS = (Column("name", shrinks=True), Column("wide", needs=60), Column("size", numeric=True))


def screen(width=80, **options):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, **options)
    return Screen(
        out=console, err=Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    )


def in_terminal(*line, **environment):
    """Run a command whose standard output and error are a terminal, and return what it wrote."""
    ours, theirs = pty.openpty()
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}
    }
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
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (99_949, "99.9 KB"),
        (99_950, "100 KB"),
        (141_234, "141 KB"),
        (999_499, "999 KB"),
        (999_500, "1.0 MB"),
        (15_400_000, "15.4 MB"),
        (2_000_000_000_000_000, "2000 TB"),
    ],
)
def test_sizes(number, text):
    """Sizes have three digits and a unit."""
    assert wording.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "12 ms"), (4.21, "4.2 s"), (185, "3 min 5 s")]
)
def test_durations(seconds, text):
    """Durations have the unit that fits."""
    assert wording.duration(seconds) == text


def test_reasons_are_grouped():
    """Each reason stands once, the most frequent first, with examples by name."""
    reasons = [("A", "old"), ("B", "old"), ("C", "old"), ("D", "new")]
    assert wording.grouped(reasons, {"A": "gelu", "B": "matmul"}) == [
        (3, "old", "gelu, matmul, …"),
        (1, "new", "D"),
    ]


def test_json_has_the_fields_of_values():
    """Of dataclasses and of structs, one in the other too, such as the span that an error
    is about.
    """
    span = {"offset": 1, "place": 0, "style": 2}
    artifact = {"filename": "k.json", "digest": "sha256:00", "size": 3, "spans": [span]}
    value = Artifact("k.json", "sha256:00", 3, (Span(1, 0, 2),))
    told = {
        "span": Span(1, 0, 2),
        "of": Target("cuda", "90"),
        "files": MappingProxyType({"a": value}),
    }
    assert json.loads(wording.to_json(told)) == {
        "span": span,
        "of": {"backend": "cuda", "arch": "90", "warp_size": 32},
        "files": {"a": artifact},
    }


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
    """A narrow terminal gets fewer columns and cut names, no row is longer than it, and what is
    hidden is named.
    """
    row = ("a_kernel_with_a_rather_long_name_that_does_not_fit", "value", "12 KB")
    narrow, wide = screen(40), screen(100)
    for one in (narrow, wide):
        one.table(COLUMNS, [row])
    *lines, last = narrow.out.file.getvalue().splitlines()
    assert last == "1 column hidden: wide; widen the terminal or use --json"
    assert max(map(len, lines)) <= 40
    assert lines[-1].endswith("12 KB")
    assert "value" not in lines[-1]
    assert row[0] in wide.out.file.getvalue()
    assert "hidden" not in wide.out.file.getvalue()


def test_no_column_is_hidden_where_all_fit():
    """A column that needs a wide terminal is shown in a narrow one that has room for it."""
    out = screen(40)
    out.table(COLUMNS, [("short", "value", "12 KB")])
    assert "value" in out.out.file.getvalue()
    assert "hidden" not in out.out.file.getvalue()


def test_a_text_keeps_its_lines_and_tabs():
    """A text of many lines is printed as it is, but for what could command the terminal."""
    out = screen()
    out.text("a\tb\r\n\n  c\x1b[2J\x85d\x0be\n")
    assert out.out.file.getvalue() == "a\tb\n\n  c\\x1b[2J\\x85d\\x0be\n"


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
    assert (out.err.file.getvalue(), out.warned, others) == (
        "warning: ours\n",
        ["ours"],
        ["theirs"],
    )


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
    assert f"restoring {packed}"[:16] in written
    assert re.search(r"[\d.]+/[\d.]+ [kM]B", written), "no bytes of so many, with a unit"
    assert "4 of 4 kernels in place" in written
    status, written = in_terminal(*line, "--no-progress")
    assert (status, "restoring" in written, "4 of 4 kernels in place" in written) == (
        0,
        False,
        True,
    )


def test_a_transfer_shows_rate_and_time_left():
    """A bar of bytes counts what was read, in bytes, with rate and time left."""
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    out = Screen(err=console)
    with out.transfer("sending", 8_000_000) as bar:
        for _ in range(4):
            bar.read(b"x" * 1_000_000)
            time.sleep(0.15)
    assert "4.0/8.0 MB" in console.file.getvalue()
    assert re.search(r"[\d.]+ MB/s\S* \S*0:00:0\d", console.file.getvalue())


def test_counted_work_shows_rate_and_time_left():
    """A bar whose total is told while the work runs counts objects, with rate and time left."""
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Screen(err=console).progress("verifying", counted=True) as bar:
        for done in range(4):
            bar.reach(done, 8)
            time.sleep(0.15)
    assert "3/8" in console.file.getvalue()
    assert re.search(r"[\d.]+/s\S* \S*0:00:0\d", console.file.getvalue())


def test_quiet_leaves_errors(cli, tmp_path):
    """With --quiet, before the command or after it, nothing is printed but errors."""
    made = tmp_path / "made.tbundle"
    bundler.Bundle(Content(), Observed(), MemoryBlobs({})).save(made)
    for line in (("--quiet", "inspect", made), ("inspect", made, "-q")):
        result = cli(*line)
        assert (result.exit_code, result.output) == (0, "")
    result = cli("inspect", tmp_path / "nothing", "--quiet")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)


def test_verbose_shows_the_log(cli, tmp_path):
    """With --verbose, before the command or after it, what the package logs is on standard error,
    and only then.
    """
    made, url = tmp_path / "made.tbundle", f"file://{tmp_path}/store"
    bundler.Bundle(Content(), Observed(), MemoryBlobs({})).save(made)
    assert cli("push", made, "--store", url, "--tag", "t", "--allow-empty").stderr == ""
    (manifest,) = [path for path in (tmp_path / "store" / "data").rglob("*") if path.is_file()]
    for line in (("--verbose", "push"), ("push", "-v"), ("push",)):
        manifest.write_bytes(b"damaged")
        result = cli(
            *line, made, "--store", url, "--tag", "t", "--mode", "replace", "--allow-empty"
        )
        assert result.exit_code == 0
        assert ("bundler.store: WARNING: " in result.stderr) == (len(line) == 2)


def test_quiet_and_verbose_are_opposites(cli, tmp_path):
    """Both at once is a usage error."""
    assert cli("-q", "inspect", tmp_path, "-v").exit_code == 2


@pytest.mark.toolchain
def test_a_pipe_gets_no_bar_and_no_color(command, packed, tmp_path):
    """In a pipe there are no escape sequences and no bar."""
    done = command("restore", packed, "--cache-dir", tmp_path / "c", "--only", "all")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


@pytest.mark.toolchain
def test_no_color_is_respected(tmp_path):
    """With NO_COLOR a terminal gets no colors."""
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


# Messages of what no command calls, and those whose case a command rules out before.
_FOR_PYTHON = ("expected one of: a kernel's key, name=..., last=True",)
_ARGUMENT = re.compile(
    r"\b[a-z_]+=(?:'|True|False|None|\.\.\.)|\bcache_dir\b|(?<!--)\bmode replace\b|\bLimits with\b"
)
_ROOMS = ("format", "store", "lifecycle", "compile", "integrations")


def messages(folder):
    """Yield each text in the sources of a folder that is no docstring and has more than one
    word.
    """
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bodies = [
            node.body
            for node in ast.walk(tree)
            if hasattr(node, "body") and isinstance(node.body, list)
        ]
        docstrings = {
            id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            text = (
                node.value
                if isinstance(node, ast.Constant) and id(node) not in docstrings
                else None
            )
            if isinstance(text, str) and " " in text.strip():
                yield text


def test_messages_of_the_library_become_the_commands():
    """Each message of the library that names an argument of Python's is said as the option; there
    are such messages.
    """
    package = Path(bundler.__file__).parent
    named = [text for room in _ROOMS for text in messages(package / room) if _ARGUMENT.search(text)]
    shown = [text for text in named if text not in _FOR_PYTHON]
    assert len(shown) > 5
    assert [text for text in shown if _ARGUMENT.search(wording.in_command_words(text))] == []
    assert wording.in_command_words("a kernel x='y' with mode=1") == "a kernel x='y' with mode=1"
