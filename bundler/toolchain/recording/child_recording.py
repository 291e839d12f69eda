# SPDX-License-Identifier: Apache-2.0
"""Recording in child processes: the environment that makes them write to a spool, and reading what
they wrote.  Never imports Triton.

`ChildSpool` is one such spool: a recording (`bundler/lifecycle/recorder.py`) and the command `run`
open one, and `recorder.py` reads it. `run` and `doctor` call `check_interpreter`; an installed
session calls `hidden_package_parent` for the environment of its children.
"""

from __future__ import annotations

import functools
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from bundler.errors import FormatError
from bundler.format.bundle_file import read_regular
from bundler.format.limits import DEFAULT_LIMITS
from bundler.toolchain.private_directory import is_ours
from bundler.toolchain.recording import spool_records
from bundler.toolchain.recording.manager_environment import (
    PATH_VARIABLE,
    STAND_IN,
    Active,
    manager_environment,
)
from bundler.toolchain.recording.spool_records import SpooledEvent, SpooledFile

__all__ = ["ChildSpool", "SpooledEvent", "SpooledFile", "check_interpreter"]

# A Python that starts and imports a few small modules; a slow network file system included.
_CHECK_TIMEOUT_S = 60
_CHECK = """
import importlib.util, sys
if importlib.util.find_spec("triton") is not None:  # without Triton nobody asks for a cache manager
    import bundler.config, bundler.toolchain.keytext, bundler.toolchain.recording.spool_records
    import os
    if os.environ.get("TRITON_BUNDLER_SPOOL_INNER", "").startswith("bundler.integrations."):
        import bundler.integrations.lookup_engine, bundler.integrations.sessions, bundler.lifecycle.machine_store
"""


class ChildSpool:
    """A directory where child processes leave a record of each kernel they compile or find.

    ::

        with ChildSpool() as spool:  # os.environ is set: whatever starts now is recorded
            start_workers()
        spool.events()

        spool = ChildSpool()  # or: os.environ stays, and the one child gets the environment
        subprocess.run(command, env=spool.environ())
        spool.close()

    Guarantees: a record is there as soon as Triton has stored the kernel, whatever becomes of the
    child; a child that outlives the spool goes on as if nobody recorded; `os.environ` gets back the
    values it had, in whatever order several spools, and sessions, end (`ManagerEnvironment`). Does
    not guarantee: records of children whose environment was made before, of those that set
    `triton.knobs.cache.manager_class` in Python.

    Attributes:
        problems: (record, reason) for each that could not be read.
    """

    def __init__(self) -> None:
        self.problems: list[tuple[str, str]] = []
        self._pid = os.getpid()
        self._directory: str | None = None
        self._read: dict[str, SpooledEvent | SpooledFile | None] = {}
        self._active: Active | None = None
        self._closed = False

    def environ(self) -> dict[str, str]:
        """Return the whole environment for a child process: this process's, with recording on."""
        return manager_environment.current(self._activity())

    def __enter__(self) -> Self:
        try:
            self._active = self._activity()
            manager_environment.add(self._active)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the environment back, read what is there and remove the directory; may be called
        twice.

        In a forked child it does nothing: the directory, and the environment of who records, are
        the parent's.
        """
        if self._closed or self._pid != os.getpid():
            return
        if self._active is not None:
            manager_environment.remove(self._active)
        self._read_new()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._closed = True  # last: what Ctrl-C stops is done by the next call

    def events(self) -> list[SpooledEvent]:
        """Return every kernel recorded so far, in order of time; also after `close`."""
        return [record for record in self._all() if isinstance(record, SpooledEvent)]

    def files(self) -> list[SpooledFile]:
        """Return every helper library and tuning file recorded so far, in order of time; also after
        `close`.
        """
        return [record for record in self._all() if isinstance(record, SpooledFile)]

    def _activity(self) -> Active:
        if self._directory is None:
            # Known before it is made, so that it is removed whenever we are stopped.
            self._directory = spool_records.spool_path()
            try:
                os.mkdir(self._directory, 0o700)
            except OSError:
                self._directory = None
                raise
        return Active(spool=self._directory, path=hidden_package_parent())

    def _all(self) -> list[SpooledEvent | SpooledFile | None]:
        if not self._closed:
            self._read_new()
        return [self._read[name] for name in sorted(self._read)]

    def _read_new(self) -> None:
        if self._directory is None or not is_ours(self._directory):
            return
        for path in sorted(Path(self._directory).glob("*" + spool_records.SUFFIX)):
            if path.name not in self._read:
                self._read[path.name] = self._read_one(path)

    def _read_one(self, path: Path) -> SpooledEvent | SpooledFile | None:
        try:
            data = read_regular(path, DEFAULT_LIMITS.manifest_bytes, links=False)
            return spool_records.decode(data)
        except (OSError, FormatError) as error:
            self.problems.append((path.name, f"a child process's record cannot be read: {error}"))
            return None


def hidden_package_parent() -> tuple[str, ...]:
    """Return the directory to put on a child's path; nothing where a child with this interpreter
    finds our package anyway.

    Only then, since a checkout's root holds more than the package, and would shadow modules of the
    child.
    """
    path = manager_environment.before(PATH_VARIABLE) or ""
    entries = [entry for entry in path.split(os.pathsep) if entry != STAND_IN]
    return _hidden_parent(sys.executable, os.pathsep.join(entries))


# Asking costs the start of a Python, and a program may record a thousand times.
@functools.lru_cache(maxsize=8)
def _hidden_parent(executable: str, path: str) -> tuple[str, ...]:
    parent = str(Path(spool_records.__file__).absolute().parents[3])
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    if parent in map(os.path.abspath, installed):
        return ()
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('bundler') is None)"
    environment = {**manager_environment.current(), PATH_VARIABLE: path}
    try:
        # Ctrl-C in a terminal stops it too, and its traceback is nothing to the user.
        found = subprocess.run(
            [executable, "-c", probe],
            cwd=os.sep,
            env=environment,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=_CHECK_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return (parent,)
    return () if found.returncode == 0 else (parent,)


def check_interpreter(executable: str, env: Mapping[str, str]) -> str | None:
    """Return why a child Python could not record, in one sentence; None when it can, or has no
    Triton.

    Triton would fail in the user's program if the cache manager it is told cannot be imported, so
    this is asked first.

    Args:
        executable: the child's Python.
        env: the child's environment, as `ChildSpool.environ` gives it.
    """
    try:
        done = subprocess.run(
            [executable, "-P", "-c", _CHECK],
            env=dict(env),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
            timeout=_CHECK_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{executable} cannot be run: {error}"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    why = lines[-1] if lines else f"exit status {done.returncode}"
    return f"{executable} cannot import this package ({why}); install triton-bundler there too"
