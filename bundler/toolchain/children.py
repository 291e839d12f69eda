# SPDX-License-Identifier: Apache-2.0
"""Recording in child processes: the environment that makes them write to a spool, and reading what they wrote.  Never imports Triton."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from bundler.config import SPOOL_DIRECTORY, SPOOL_INNER
from bundler.errors import FormatError
from bundler.format.limits import DEFAULT_LIMITS
from bundler.toolchain import records
from bundler.toolchain.records import SpooledEvent, SpooledFile

__all__ = ["ChildSpool", "SpooledEvent", "SpooledFile", "check_interpreter"]

MANAGER_VARIABLE = "TRITON_CACHE_MANAGER"
MANAGER = "bundler.toolchain.spooling:SpoolCacheManager"
_PATH_VARIABLE = "PYTHONPATH"
# A Python that starts and imports a few small modules; a slow network file system included.
_CHECK_TIMEOUT_S = 60
_CHECK = """
import importlib.util, sys
if importlib.util.find_spec("triton") is not None:  # without Triton nobody asks for a cache manager
    import bundler.config, bundler.toolchain.capture, bundler.toolchain.records
    import os
    if os.environ.get("TRITON_BUNDLER_SPOOL_INNER", "").startswith("bundler.integrations."):
        import bundler.integrations._process
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

    Guarantees: a record is there as soon as Triton has stored the kernel, whatever becomes of the child; a child that outlives the
    spool goes on as if nobody recorded; `os.environ` gets back the values it had.
    Does not guarantee: records of children whose environment was made before, of those that set `triton.knobs.cache.manager_class`
    in Python.  The spools of one process end in reverse order.

    Attributes:
        problems: (record, reason) for each that could not be read.
    """

    def __init__(self) -> None:
        self.problems: list[tuple[str, str]] = []
        self._directory: str | None = None
        self._read: dict[str, SpooledEvent | SpooledFile | None] = {}
        self._saved: dict[str, str | None] | None = None
        self._closed = False

    def environ(self) -> dict[str, str]:
        """Return the whole environment for a child process: this process's, with recording on."""
        return {**os.environ, **self._settings()}

    def __enter__(self) -> Self:
        settings = self._settings()
        self._saved = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Read what is there, give the environment back and remove the directory; may be called twice."""
        if self._closed:
            return
        self._closed = True
        for name, value in (self._saved or {}).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._read_new()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def events(self) -> list[SpooledEvent]:
        """Return every kernel recorded so far, in order of time; also after `close`."""
        return [record for record in self._all() if isinstance(record, SpooledEvent)]

    def files(self) -> list[SpooledFile]:
        """Return every helper library and tuning file recorded so far, in order of time; also after `close`."""
        return [record for record in self._all() if isinstance(record, SpooledFile)]

    def _settings(self) -> dict[str, str]:
        if self._directory is None:
            self._directory = records.make_spool()
        settings = {
            MANAGER_VARIABLE: MANAGER,
            # A recording inside another, in this process or in one that is recorded itself: children write to both.
            SPOOL_DIRECTORY: os.pathsep.join(filter(None, [self._directory, os.environ.get(SPOOL_DIRECTORY)])),
        }
        inner = os.environ.get(MANAGER_VARIABLE)
        if inner and inner != MANAGER:
            settings[SPOOL_INNER] = inner
        package_parent = hidden_package_parent()
        if package_parent is not None:
            settings[_PATH_VARIABLE] = os.pathsep.join(filter(None, [package_parent, os.environ.get(_PATH_VARIABLE)]))
        return settings

    def _all(self) -> list[SpooledEvent | SpooledFile | None]:
        if not self._closed:
            self._read_new()
        return [self._read[name] for name in sorted(self._read)]

    def _read_new(self) -> None:
        if self._directory is None:
            return
        for path in sorted(Path(self._directory).glob("*" + records.SUFFIX)):
            if path.name not in self._read:
                self._read[path.name] = self._read_one(path)

    def _read_one(self, path: Path) -> SpooledEvent | SpooledFile | None:
        try:
            with path.open("rb") as file:
                data = file.read(DEFAULT_LIMITS.manifest_bytes + 1)
            if len(data) > DEFAULT_LIMITS.manifest_bytes:
                raise FormatError(f"larger than {DEFAULT_LIMITS.manifest_bytes} bytes")
            return records.decode(data)
        except (OSError, FormatError) as error:
            self.problems.append((path.name, f"a child process's record cannot be read: {error}"))
            return None


def hidden_package_parent() -> str | None:
    """Return the directory to put on a child's path; None where a child with this interpreter finds our package anyway.

    Only then, since a checkout's root holds more than the package, and would shadow modules of the child.
    """
    parent = str(Path(records.__file__).absolute().parents[2])
    if parent in {os.path.abspath(path) for path in [*site.getsitepackages(), site.getusersitepackages()]}:
        return None
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('bundler') is None)"
    try:
        found = subprocess.run([sys.executable, "-c", probe], cwd=os.sep, check=False, timeout=_CHECK_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return parent
    return None if found.returncode == 0 else parent


def check_interpreter(executable: str, env: Mapping[str, str]) -> str | None:
    """Return why a child Python could not record, in one sentence; None when it can, or has no Triton.

    Triton would fail in the user's program if the cache manager it is told cannot be imported, so this is asked first.

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
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"]
    return f"{executable} cannot import this package ({lines[-1]}); install triton-bundler there too"
