# SPDX-License-Identifier: Apache-2.0
"""`PreparedProcess`: a process that has imported what takes seconds, and runs programs in forks of
itself.

The import of torch and of the generator costs four seconds of a processor; a fork costs none of
them.  A program still has a process of its own: its arguments, environment, output, exit status and
folder, and `__main__`.  What it does not see is its own start: a test of that starts a Python.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


class PreparedProcess:
    """Runs programs, one after the other.

    Args:
        modules: what the process imports first.
        variables: of its environment, beside those of this process; a program may be given others.
    """

    def __init__(self, *modules, **variables):
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what was read ahead would be hidden from `select`
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        )

    def run(self, program, *arguments, environment, timeout):
        """Run a file, or a module that is given as `-m NAME`; returns the finished process, like
        `subprocess.run`, which raises where it takes too long.
        """
        line = [*map(str, (program, *arguments))]
        with tempfile.TemporaryDirectory() as folder:
            said = [Path(folder, name) for name in ("stdout", "stderr")]
            order = [line, dict(environment), os.getcwd(), [*map(str, said)]]
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            number = self._answer()
            try:
                self._wait(timeout)
            except BaseException:
                os.killpg(number, signal.SIGKILL)
                self._answer()
                raise
            status = self._answer()
            return subprocess.CompletedProcess(line, status, *(path.read_text() for path in said))

    def _wait(self, timeout):
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise TimeoutError("the program takes too long")

    def _answer(self):
        return json.loads(self._process.stdout.readline())

    def close(self):
        """End the process."""
        self._process.communicate()


def _serve():
    """Return what to run, in a fork, each time that a line comes; at the end of the input, None."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector of a program does not look at what was imported
    while line := sys.stdin.buffer.readline():
        sys.stdout.flush()
        number = os.fork()
        if number == 0:
            return json.loads(line)
        _, status = os.waitpid(number, 0)
        _tell(os.waitstatus_to_exitcode(status))
    return None


def _tell(number):
    os.write(sys.stdout.fileno(), f"{number}\n".encode())


def _become(line, environment, folder, said):
    """Give this process what a program begins with; its group is told when it has one."""
    os.setsid()
    _tell(os.getpid())
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, path in enumerate(said, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if line[0] == "-m":
        sys.argv = line[1:]
        runpy.run_module(line[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = line
        sys.path.insert(0, str(Path(line[0]).parent))
        runpy.run_path(line[0], run_name="__main__")


if __name__ == "__main__":
    if (order := _serve()) is not None:
        _become(*order)
