# SPDX-License-Identifier: Apache-2.0
"""What mypy --strict and pyright say to a user's program."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bundler

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PROGRAM, MISTAKES = "typed_user.py", "typed_mistakes.py"


def mypy(folder, name):
    """Return the lines that mypy complains about."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
        name,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.stderr == ""
    assert not re.search(r"import-(not-found|untyped)", done.stdout), done.stdout
    return {int(line) for line in re.findall(rf"^{name}:(\d+): error:", done.stdout, re.MULTILINE)}


def pyright(folder, name):
    """Return the lines that pyright complains about."""
    (folder / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", "include": [name]})
    )
    command = [
        sys.executable,
        "-P",
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        name,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == 1, told
    errors = [one for one in told["generalDiagnostics"] if one["severity"] == "error"]
    return {one["range"]["start"]["line"] + 1 for one in errors}


@pytest.fixture(scope="module", params=[mypy, pyright], ids=["mypy", "pyright"])
def checked(request, tmp_path_factory):
    """Return a function that has a checker read one of our programs where a user would have it:
    outside our checkout.
    """
    checker = request.param
    if importlib.util.find_spec(checker.__name__) is None:
        pytest.skip(f"{checker.__name__} is not installed; pip install 'triton-bundler[test]'")
    if checker is pyright:
        # Without Node.js, or as a release that does not bring pyright itself along, it would have
        # to download something first.
        tried = subprocess.run(
            [sys.executable, "-P", "-m", "pyright", "--version"], capture_output=True, text=True
        )
        if tried.returncode != 0:
            pytest.skip(
                f"pyright does not run here: {tried.stderr.strip()[-200:]}; pip install"
                " 'pyright[nodejs]>=1.1.414'"
            )
    folder = tmp_path_factory.mktemp("typed")

    def check(name, text=None):
        (folder / name).write_text((HERE / name).read_text() if text is None else text)
        return checker(folder, name)

    return check


@pytest.mark.timeout(300)
def test_a_typed_program_is_fine(checked):
    """A program that uses every part of the public surface has no error in it."""
    assert checked(PROGRAM) == set()


@pytest.mark.timeout(300)
def test_every_public_name_is_known(checked):
    """Type checkers know each name of __all__, of the package and of its runtime."""
    modules = [bundler, importlib.import_module("bundler.runtime")]
    names = [f"print({module.__name__}.{name})\n" for module in modules for name in module.__all__]
    assert checked("typed_names.py", "".join(["import bundler.runtime\n", *names])) == set()


@pytest.mark.timeout(300)
def test_mistakes_are_found(checked):
    """A misspelt name, a wrong argument and what is no driver are errors, and nothing else is."""
    lines = (HERE / MISTAKES).read_text().splitlines()
    assert checked(MISTAKES) == {
        number for number, line in enumerate(lines, 1) if line.endswith("# wrong")
    }
