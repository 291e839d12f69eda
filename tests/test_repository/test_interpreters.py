# SPDX-License-Identifier: Apache-2.0
"""What the package does in the further interpreters of a process: with the lock of the main one it
works, with a lock of their own it says that it does not.

`make dist` tries both on each Python, with the extensions.
"""

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import bundler
from bundler import BundlerError, UnsupportedInterpreter

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "v2.0" / "triton-3.7.1.tbundle"
REFUSED = "module msgspec._core does not support loading in subinterpreters"
# Python 3.13 gave the module another name and its calls another form.
RUN = """
import sys
try:
    import _interpreters
except ImportError:
    import _xxsubinterpreters as old
    made = old.create(isolated={isolated})
    old.run_string(made, {code!r})
    old.destroy(made)
else:
    made = _interpreters.create("isolated" if {isolated} else "legacy")
    error = _interpreters.exec(made, {code!r})
    _interpreters.destroy(made)
    if error is not None:
        sys.exit(error.formatted)
"""


def in_subinterpreter(code, *, isolated):
    """Run code in a subinterpreter of a new process, and return what it printed."""
    code = f"import sys\nsys.path[:] = {sys.path!r}\n" + textwrap.dedent(code)
    program = RUN.format(code=code, isolated=isolated)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_subinterpreter_with_the_lock_of_the_main_one_restores(tmp_path):
    """As hosts of WSGI programs make them: threads, files and digests are as elsewhere."""
    code = f"""
        import bundler
        report = bundler.restore({str(GOLDEN)!r}, {str(tmp_path / "cache")!r}, keep="all")
        print(report.restored, bundler.pack({str(tmp_path / "cache")!r}).digest)
    """
    expected = bundler.restore(GOLDEN, tmp_path / "here", keep="all").restored
    digest = bundler.pack(tmp_path / "here").digest
    assert in_subinterpreter(code, isolated=False).split("\n")[0] == f"{expected} {digest}"


@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="Python 3.11 has no subinterpreter with a lock of its own"
)
def test_a_subinterpreter_with_a_lock_of_its_own_is_refused():
    """The package is imported there, and its first use is an error of ours, also an ImportError."""
    code = """
        import bundler
        try:
            bundler.restore
        except bundler.UnsupportedInterpreter as error:
            print(isinstance(error, ImportError), error)
    """
    told = in_subinterpreter(code, isolated=True)
    assert told.startswith("True triton-bundler does not work in a subinterpreter with a lock of")


def test_what_does_not_load_in_a_subinterpreter_is_an_error_of_ours(monkeypatch):
    """Any other import that fails is what it was."""

    def refuse(name):
        raise ImportError(sentence)

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.delitem(vars(bundler), "pack", raising=False)
    sentence = REFUSED
    with pytest.raises(UnsupportedInterpreter, match=r"msgspec\._core") as caught:
        bundler.pack  # noqa: B018
    assert isinstance(caught.value.__cause__, ImportError)
    sentence = "No module named 'msgspec'"
    with pytest.raises(ImportError, match="No module named") as caught:
        bundler.pack  # noqa: B018
    assert not isinstance(caught.value, BundlerError)
