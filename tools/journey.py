# SPDX-License-Identifier: Apache-2.0
"""How much of the package a reader meets on the way of a kernel, and how much of it there is.

    python -m tools.journey                what a restore, a hit in a store and a hit in Triton's
                                           directory go through: modules, classes, functions
    python -m tools.journey --names hit    the same, by name, in the order in which they are met
    python -m tools.journey --lines        lines of code by room, without docstrings, comments and
                                           blank lines
    python -m tools.journey --check        exit 1 when a journey goes through more than it may

What a journey may go through is said of the package as it is installed: in pure Python two modules
more look at what the compiled writer looks at.  Each journey is made in a process of its own, and
counted while it runs: a module, or a class, counts when one of its functions is called; what runs
while a module is imported does not.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tools.shared import example_kernels, programs
from tools.shared.processes import ROOT, output

BUNDLE = ROOT / "tests" / "data" / "v2.0" / "triton-3.7.1.tbundle"
ROOMS = ("bundler", "backends", "tools")
# What each journey may go through at most: modules, and classes.
MOST = {"restore": (25, 20), "hit": (25, 20), "triton": (6, 5)}
_TWO = 2
Found = dict[str, list[str]]


class Journey:
    """Notes modules, classes and functions of the package while a function runs, each once.

    For one thread, the one that enters; what the package does in threads of its own does not count.
    """

    def __init__(self) -> None:
        self._found: dict[str, dict[str, None]] = {"modules": {}, "classes": {}, "functions": {}}
        self._importing = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)

    @property
    def found(self) -> Found:
        """Return the names, by kind, in the order in which they were met."""
        return {kind: list(names) for kind, names in self._found.items()}

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            self._importing += {"call": 1, "return": -1}.get(event, 0)
        module = frame.f_globals.get("__name__", "")
        if event != "call" or self._importing or module.partition(".")[0] not in ROOMS:
            return
        name = f"{module}.{code.co_qualname}"
        if name in self._found["functions"]:
            return
        self._found["modules"][module] = None
        self._found["functions"][name] = None
        owner = code.co_qualname.rpartition(".")[0]
        if not owner or "<locals>" in owner:
            return  # what a function is given is not its own
        self._found["classes"][f"{module}.{owner}"] = None
        # A method that a class inherits is one of its own.
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        kind = first if isinstance(first, type) else type(first)
        if kind.__module__.partition(".")[0] in ROOMS:
            self._found["classes"][f"{kind.__module__}.{kind.__qualname__}"] = None


def _restore(folder: str) -> Found:
    """Two kernels of a bundle file, into an empty directory."""
    import bundler

    two, path = bundler.Bundle.load(BUNDLE).select(target="cuda:90"), f"{folder}/two.tbundle"
    two.save(path)
    with Journey() as journey:
        report = bundler.restore(path, f"{folder}/cache", only="all")
    if len(report.restored) != len(two.kernels) or len(two.kernels) != _TWO:
        raise RuntimeError(f"expected {_TWO} kernels, {report}")
    return journey.found


def _found_in(folder: str, *, warm: bool) -> Found:
    """A kernel that Triton asks for: in its own directory where that is warm, else in a store."""
    from triton import knobs
    from triton.compiler import compiler

    import bundler

    kernels, store = example_kernels.load(), f"file://{folder}/store"
    name, other = list(kernels.RECIPES)[:2]
    knobs.cache.dir = f"{folder}/first"
    with bundler.session(store, "journey"):
        for one in (name, other):
            kernels.compile_one(one, "cuda:90")
    make, journey = compiler.get_cache_manager, Journey()
    knobs.cache.dir = f"{folder}/{'first' if warm else 'second'}"
    asked: list[bool] = []

    def noted(*arguments: Any, **more: Any) -> Any:
        with journey:
            manager = make(*arguments, **more)
        get_group = manager.get_group

        def noted_get_group(filename: str) -> Any:
            with journey:
                group = get_group(filename)
            asked.append(group is not None)
            return group

        manager.get_group = noted_get_group
        return manager

    with bundler.session(store, push=None):
        kernels.compile_one(other, "cuda:90")  # the first one looks at the directory
        compiler.get_cache_manager = noted
        kernels.compile_one(name, "cuda:90")
    if asked != [True]:
        raise RuntimeError(f"the kernel was not found: {asked}")
    return journey.found


JOURNEYS: dict[str, Callable[[str], Found]] = {
    "restore": _restore,
    "hit": lambda folder: _found_in(folder, warm=False),
    "triton": lambda folder: _found_in(folder, warm=True),
}


def journey(name: str) -> Found:
    """Return what a journey goes through, made in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="journey.") as folder:
        environment = {"XDG_CACHE_HOME": folder, "PYTHONWARNINGS": "ignore"}
        answer = output("tools.journey", "--step", name, folder, environment=environment)
    found: Found = json.loads(answer.splitlines()[-1])
    return found


def code_lines(path: Path) -> int:
    """Return how many lines of a file have code: no docstring, comment or blank line."""
    text = path.read_text(encoding="utf-8")
    kept: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in {*skipped, tokenize.ENDMARKER}:
            kept |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            kept -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(kept)


def lines() -> Counter[str]:
    """Return the lines of code of each room of the package, and of the backends and tools."""
    found: Counter[str] = Counter()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            if not path.is_symlink() and "bundler/backends" not in path.as_posix():
                found["/".join(parts[: 2 if room == "bundler" else 1])] += code_lines(path)
    return found


def main() -> int:
    """Count what the command line asks for."""
    if programs.run_step(JOURNEYS):
        return 0
    parser = programs.parser(
        __doc__,
        lines=(False, "lines of code by room"),
        check=(False, "exit 1 when a journey is too long"),
    )
    parser.add_argument("--names", choices=JOURNEYS, help="the names of one journey")
    options = parser.parse_args()
    if options.lines:
        return _show_lines()
    if options.names:
        for kind, names in journey(options.names).items():
            print(f"{kind}:", *names, sep="\n    ")
        return 0
    return _show(check=options.check)


def _show(*, check: bool) -> int:
    too_long = False
    print(f"{'journey':10} {'modules':>12} {'classes':>12} {'functions':>10}")
    for name, (modules, classes) in MOST.items():
        found = {kind: len(names) for kind, names in journey(name).items()}
        too_long |= found["modules"] > modules or found["classes"] > classes
        shown = (f"{found['modules']} of {modules}", f"{found['classes']} of {classes}")
        print(f"{name:10} {shown[0]:>12} {shown[1]:>12} {found['functions']:>10}")
    return int(check and too_long)


def _show_lines() -> int:
    found = lines()
    for room, count in found.most_common():
        print(f"{count:>8,}  {room}")
    rest = sum(found.values())
    print(f"{rest:>8,}  in all, {rest - found['bundler/codegen']:,} outside of bundler/codegen")
    return 0


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
