# SPDX-License-Identifier: Apache-2.0
"""A warning points at the line of the user's program that led to it, however deep in the package it
arises.
"""

import ast
import contextlib
import warnings
from pathlib import Path

import pytest
from store_builders import Files

import bundler
from bundler.user_warnings import warn

ROOT = Path(bundler.__file__).parent


@pytest.fixture
def unusable(tmp_path):
    """The path of a bundle of which nothing can be used on any machine."""
    files = Files()
    path = tmp_path / "unusable.tbundle"
    files.bundle(files.kernel(extra={"launcher.so": b"\x7fELF"})).save(path)
    return path


def places(call):
    """Return file and line of each warning that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert caught
    return {(warning.filename, warning.lineno, warning.category) for warning in caught}


def library(name, **used):
    """Return a function of another module that calls what it is given."""
    space = {"__name__": name, "warn": warn, "contextlib": contextlib, **used}
    exec(
        "def call(function, *args, **named):\n    return function(*args, **named)\n"
        "@contextlib.contextmanager\ndef block():\n    warn('at the end')\n    yield\n",
        space,
    )
    return space


@pytest.mark.parametrize(
    "way", ["restore", "check", "store", "through triton", "through ourselves"]
)
def test_a_warning_points_at_the_line_that_called(unusable, tmp_path, way):
    """Whatever stands between that line and the warning: other methods of ours, or a library that
    calls us.
    """
    with bundler.open_store("memory:") as store, bundler.Bundle.load(unusable) as opened:
        store.push(opened, "t")
        call = {
            "restore": lambda: bundler.restore(unusable, tmp_path / "c"),
            "check": lambda: bundler.check(unusable, tmp_path / "c"),
            "store": lambda: store.restore("t", cache_dir=tmp_path / "c"),
            "through triton": lambda: library("triton.compiler")["call"](
                bundler.restore, unusable, tmp_path / "c"
            ),
            "through ourselves": lambda: library("bundler.deep")["call"](
                bundler.check, unusable, tmp_path / "c"
            ),
        }[way]
        assert places(call) == {(__file__, call.__code__.co_firstlineno, bundler.BundlerWarning)}


def test_a_warning_of_a_context_manager_points_at_its_block():
    """The frames of contextlib, between a generator of ours and the block, are passed over."""
    block = library("bundler.deep")["block"]

    def enter():
        with block():
            pass

    assert places(enter) == {(__file__, enter.__code__.co_firstlineno + 1, bundler.BundlerWarning)}


def test_each_line_is_told_once(unusable, tmp_path):
    """Python's default filter tells of one line once and of each other line again, as for any
    warning.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            bundler.check(unusable, tmp_path / "c")
        bundler.check(unusable, tmp_path / "c")
    assert len(caught) == 2


def test_no_module_gives_warnings_by_itself():
    """Every warning of the package goes through the one function that knows the user's line."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    calls = {
        str(path.relative_to(ROOT))
        for path, text in texts.items()
        if "warn" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"warnings.warn", "warnings.warn_explicit"}
    }
    # The stand-in is for children that have no package of ours, so it stands alone.
    assert calls == {"user_warnings.py", "toolchain/recording/stand_in/bundler.py"}
