# SPDX-License-Identifier: Apache-2.0
"""What the first restore of a new process imports; tools/bench/fresh.py measures how long all of it
takes.
"""

import json
import subprocess
import sys

import pytest

import bundler
from bundler import package_loggers

# Each takes a new process 0.2 to 10 ms, what it imports included, and time again when the process
# ends.
NOT_NEEDED = {
    "argparse",
    "base64",
    "concurrent",
    "ctypes",
    "dataclasses",
    "fnmatch",
    "glob",
    "hashlib",
    "importlib.metadata",
    "importlib.util",
    "inspect",
    "json",
    "logging",
    "msgpack",
    "pathlib",
    "pickle",
    "select",
    "shutil",
    "signal",
    "subprocess",
    "sysconfig",
    "tempfile",
    "threading",
    "tomllib",
    "traceback",
    "zipfile",
}
# What msgspec imports, of Python and of itself, is not ours to choose.
BARE = "import msgspec"
RESTORE = """
import bundler, sys
with bundler.Bundle.load(sys.argv[1]) as bundle:
    assert bundler.restore(bundle, sys.argv[2], "launch", only=sys.argv[3]).restored
"""


def modules_after(code, *arguments):
    """Return the names of the modules that a new Python has loaded after some code."""
    told = f"{code}\nimport sys\nnames = sorted(sys.modules)\nimport json\nprint(json.dumps(names))"
    command = [sys.executable, "-P", "-c", told, *map(str, arguments)]
    return set(
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    )


@pytest.mark.parametrize("only", ["all", "usable"])
def test_a_first_restore_imports_few_modules(planted, tmp_path, only):
    """Beside msgspec at most 40 modules of ours and 20 others; none for what few restores need."""
    bundler.pack(planted).save(tmp_path / "x.tbundle")
    loaded = modules_after(
        RESTORE, tmp_path / "x.tbundle", tmp_path / "there", only
    ) - modules_after(BARE)
    ours = {name for name in loaded if name.partition(".")[0] == "bundler"}
    assert sorted(loaded & NOT_NEEDED) == []
    assert len(ours) <= 40, sorted(ours)
    assert len(loaded - ours) <= 20, sorted(loaded - ours)


def test_a_program_that_does_not_configure_logging_sees_no_lines():
    """Python shows warnings that nobody handles: a logger of ours has a handler, whoever imported
    `logging` first.
    """
    code = "from bundler.package_loggers import logger; logger('bundler.toolchain').warning('seen')"
    for before in ("pass", "import logging", "import bundler.errors, logging"):
        done = subprocess.run(
            [sys.executable, "-c", f"{before}\n{code}"], capture_output=True, text=True, check=True
        )
        assert done.stdout + done.stderr == ""
    shown = "import logging; logging.basicConfig()\n" + code
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    assert done.stderr == "WARNING:bundler.toolchain:seen\n"


def test_each_logger_of_ours_is_made_in_one_place():
    """No other module asks `logging` for one: its lines would be shown by a program that did not
    ask for any.
    """
    folder = bundler.__path__[0]
    found = subprocess.run(
        ["grep", "-rlE", "--include=*.py", "--exclude-dir=backends", r"getLogger\(", folder],
        capture_output=True,
        text=True,
    )
    named = {line.removeprefix(f"{folder}/") for line in found.stdout.splitlines()}
    assert named == {"package_loggers.py", "cli/terminal.py"}
    assert package_loggers.__file__.startswith(folder)
