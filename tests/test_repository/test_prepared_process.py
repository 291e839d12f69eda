# SPDX-License-Identifier: Apache-2.0
"""`PreparedProcess`: a program that runs in a fork has a process of its own, as one that is started
has.
"""

import os

import pytest
from prepared_process import PreparedProcess


@pytest.fixture
def prepared():
    """A process that has imported a module of Python's."""
    made = PreparedProcess("colorsys", LEFT="by the process")
    yield made
    made.close()


@pytest.fixture
def run(prepared, tmp_path):
    """Run lines of Python as a program."""

    def ran(lines, *arguments, timeout=60, **variables):
        program = tmp_path / "program.py"
        program.write_text(lines)
        environment = {**os.environ, **variables}
        return prepared.run(program, *arguments, environment=environment, timeout=timeout)

    return ran


def test_a_program_has_arguments_environment_output_and_status_of_its_own(run):
    """Nothing of one program reaches the next, and what was prepared is there in each."""
    lines = """
import os, sys
assert "colorsys" in sys.modules
print(__name__, sys.argv[1:], os.environ.get("ASKED"), os.environ.get("LEFT"), sys.stdin.read())
print("told", file=sys.stderr)
os.environ["LEFT"] = "behind"
sys.modules.pop("colorsys")
sys.exit(3)
"""
    for words, asked in ((("one", "two"), "first"), ((), "second")):
        done = run(lines, *words, ASKED=asked)
        assert done.returncode == 3
        assert done.stdout == f"__main__ {[*words]} {asked} None \n"
        assert done.stderr == "told\n"


def test_a_program_that_fails_or_hangs_ends_no_other(run):
    """An exception is a traceback and status 1, a signal is a negative status, and what takes too
    long is ended.
    """
    done = run("raise ValueError('of the program')")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ValueError: of the program")
    assert run("import os; os.abort()").returncode == -6
    with pytest.raises(TimeoutError):
        run("import time; time.sleep(60)", timeout=0.5)
    assert run("print('next')").stdout == "next\n"
