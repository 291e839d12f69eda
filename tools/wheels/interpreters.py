# SPDX-License-Identifier: Apache-2.0
"""`find`: the Python interpreters that wheels are built for and tried on; `environment` makes a
virtual environment of one.

An interpreter is looked for on PATH, then among those of pyenv and of uv, and counts when it runs,
has venv, and has the C headers that an extension needs.  `release.py` and `trial.py` use it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.shared.processes import captured, said

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
# Without the lock of the interpreter.  They have no wheel of their own, and are tried with the one
# that has no machine code.
FREE_THREADED = ("3.14t",)
_ASK = (
    "import json, os, sys, sysconfig, venv; include = sysconfig.get_paths()['include'];"
    "print(json.dumps(['%d.%d' % sys.version_info[:2]"
    " + 't' * bool(sysconfig.get_config_var('Py_GIL_DISABLED')),"
    " sys.version.split()[0], include, os.path.isfile(os.path.join(include, 'Python.h'))]))"
)


@dataclass(frozen=True)
class Interpreter:
    """One Python: `version` as 3.12, or 3.14t where it is free-threaded, `release` as 3.12.1, and
    where its program and its headers are.
    """

    version: str
    release: str
    program: str
    include: str

    @property
    def tag(self) -> str:
        """The name of the version in a wheel's name."""
        return "cp" + self.version.replace(".", "")

    @property
    def free_threaded(self) -> bool:
        """Whether it was built without the lock of the interpreter."""
        return self.version.endswith("t")


def find(versions: Iterable[str] = SUPPORTED) -> list[Interpreter]:
    """Return an interpreter of each version that there is here."""
    return [found for version in versions if (found := _find(version)) is not None]


def environment(
    interpreter: Interpreter, folder: Path, *packages: str | Path, options: Iterable[str] = ()
) -> str:
    """Make a virtual environment with packages, and return its Python.

    Raises:
        subprocess.CalledProcessError: a package cannot be installed; what pip wrote was printed.
    """
    command = [interpreter.program, "-m", "venv", "--without-pip", "--clear", str(folder)]
    subprocess.run(command, check=True, env=clean_variables())
    python = str(folder / "bin" / "python")
    if packages:
        pip("--python", python, "install", *options, *map(str, packages))
    return python


def pip(*words: str) -> None:
    """Run this environment's pip, which prints only what fails.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *words]
    succeeded(captured(*command, env=clean_variables()))


def succeeded(done: subprocess.CompletedProcess[str]) -> None:
    """Print what a program said that failed, and raise `subprocess.CalledProcessError`."""
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()


def clean_variables() -> dict[str, str]:
    """Return the environment without what would lead another Python to the packages of this one."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "DISTUTILS"))
    }


def _find(version: str) -> Interpreter | None:
    for program in _candidates(version):
        done = captured(program, "-c", _ASK, env=clean_variables())
        if done.returncode:
            # pyenv puts a program on PATH for versions that are not selected, and Debian's may lack
            # venv
            continue
        found, release, include, headers = json.loads(done.stdout)
        if found == version and headers:
            return Interpreter(version, release, program, include)
    return None


def _candidates(version: str) -> Iterator[str]:
    if version == "{}.{}".format(*sys.version_info[:2]):
        yield str(getattr(sys, "_base_executable", sys.executable))
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    if (root := said("pyenv", "root")) is not None:
        yield from (
            str(path)
            for path in sorted(Path(root, "versions").glob(f"{version}*/bin/python{version}"))
        )
    if (found := said("uv", "python", "find", "--no-project", version)) is not None:
        yield found
