# SPDX-License-Identifier: Apache-2.0
"""`source_module`: kernel source given as text becomes a module file that its digest names,
imported once a process.

::

    <directory>/bundler_source_<64 hex>.py      created whole, for its owner alone, never changed

Triton's key of a kernel depends on its text, its line numbers and, for recursive functions, its
module's name, never on the path: all three follow from the text here, so that keys are equal on
every machine.

Compile jobs with a `text` source load it; programs may make a `SourceModule` themselves.
`module_of_text` serves Inductor's generated modules too.  `write_whole` puts any file of this user's
that is run later where only its owner can change it, also programs
(`bundler/codegen/kept_programs.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.util
import io
import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType

from bundler.backends import file_steps
from bundler.backends.backend_errors import BackendDenied, BackendError, BackendFull, UntrustedRoot
from bundler.backends.port import Unread
from bundler.compile.module_import import line_in
from bundler.errors import (
    AccessDenied,
    BundlerError,
    CompileFailed,
    ConfigError,
    DigestMismatch,
    FormatError,
    NotFound,
    StoreFull,
    StoreUnavailable,
)
from bundler.fork_safety import ForkSafeLock
from bundler.format.limits import DEFAULT_LIMITS

PREFIX = "bundler_source_"


# One import at a time: of two threads that load one module, the second gets the module of the
# first.
_IMPORTS = ForkSafeLock()


@dataclass(frozen=True)
class SourceModule:
    """A file with the source of kernels, named by its digest.

    Guarantees: what is imported has that digest, whatever happened to the file since; `inspect` and
    tracebacks show that text. Importing runs the text, so only make one of text that you trust as
    you trust your program. Thread-safe; a forked child shares what its parent had imported.

    Attributes:
        digest: sha256 of the text, 64 hex digits.
        directory: where the file is.
    """

    digest: str
    directory: str

    @property
    def name(self) -> str:
        """What the module is called; equal on every machine."""
        return PREFIX + self.digest

    @property
    def path(self) -> str:
        """The file."""
        return os.path.join(self.directory, f"{self.name}.py")

    def read(self) -> str:
        """Return the text.

        Raises:
            NotFound: the file is gone.
            DigestMismatch: the file was changed.
            AccessDenied, StoreUnavailable: it cannot be read.
        """
        with _errors():
            data = file_steps.read(self.path, DEFAULT_LIMITS.file_bytes)
        if isinstance(data, Unread):
            raise StoreUnavailable(f"{data.why}; remove it", path=self.path)
        if data is None:
            raise NotFound(f"{self.path} is gone; make the source module again", path=self.path)
        got = hashlib.sha256(data).hexdigest()
        if got != self.digest:
            raise DigestMismatch(
                f"{self.path}: expected sha256 {self.digest}, got {got}; somebody changed the file,"
                " remove it",
                path=self.path,
                expected=self.digest,
                got=got,
            )
        return data.decode()

    def load(self) -> ModuleType:
        """Return the module, imported at the first call in this process.

        Raises:
            NotFound, DigestMismatch, AccessDenied, StoreUnavailable: see `read`.
            CompileFailed: running the text raised; `line` is where, and the error is its cause.
        """
        with _IMPORTS.lock:
            module = sys.modules.get(self.name)
            return module if module is not None else self._import()

    def unload(self) -> None:
        """Forget the module and its lines; the next `load` imports it again.  Whoever holds its
        kernels keeps them.
        """
        with _IMPORTS.lock:
            module = sys.modules.pop(self.name, None)
            linecache.cache.pop(self.path if module is None else str(module.__file__), None)

    def _import(self) -> ModuleType:
        text = self.read()
        module, loader = module_of_text(self.name, self.path, text)
        sys.modules[self.name] = module
        try:
            loader.exec_module(module)
        except BaseException as error:
            self.unload()
            if not isinstance(error, Exception):
                raise
            line = line_in(error, self.path)
            where = f"{self.path}:{line}" if line else self.path
            raise CompileFailed(
                f"the source module {where} cannot be imported: {type(error).__name__}: {error};"
                " mend its text",
                name=self.name,
                reason=f"{type(error).__name__}: {error}",
                line=line,
            ) from error
        return module


class TextLoader(importlib.abc.ExecutionLoader):
    """Imports a text that was read before; reads neither the file again nor a .pyc that somebody
    may have put beside it.
    """

    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text

    def get_filename(self, fullname: str) -> str:
        """Return the path that tracebacks name."""
        return self._path

    def get_source(self, fullname: str) -> str:
        """Return the text."""
        return self._text


def module_of_text(name: str, path: str, text: str) -> tuple[ModuleType, TextLoader]:
    """Return a new module whose source is a text, and the loader that runs the text in it."""
    # Triton asks `inspect` for a kernel's text, which asks linecache.  An entry without a time is
    # never read again from disk.
    linecache.cache[path] = (len(text), None, io.StringIO(text).readlines(), path)
    loader = TextLoader(path, text)
    spec = importlib.util.spec_from_loader(name, loader, origin=path)
    assert spec is not None
    spec.has_location = True  # sets __file__
    return importlib.util.module_from_spec(spec), loader


def source_module(text: str, directory: str | os.PathLike[str] | None = None) -> SourceModule:
    """Make a module file of a text, unless it is there already.

    Args:
        text: Python source; line ends become newlines, and the last line gets one.  A declared
            encoding counts for nothing: it is text.
        directory: where to put it, made for its owner alone; None takes `triton-bundler/sources` in
            the user's cache directory.

    Returns:
        The module, not yet imported.  Two processes that make the same one at once are fine.

    Raises:
        ConfigError: others may write to the directory, or the text is no Unicode.
        LimitExceeded: the text is larger than a file may be.
        AccessDenied, StoreFull, StoreUnavailable: the file cannot be written.
    """
    data = _plain(text)
    DEFAULT_LIMITS.check("file_bytes", len(data), "source text")
    where = os.path.abspath(user_directory("sources") if directory is None else directory)
    module = SourceModule(hashlib.sha256(data).hexdigest(), where)
    with _errors():
        if not (is_trusted(where) and file_steps.read(module.path, len(data)) == data):
            write_whole(module.path, data)
    return module


def _plain(text: str) -> bytes:
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    try:
        return (lines if lines.endswith("\n") else lines + "\n").encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the source text is not Unicode: {error}; expected text that UTF-8 can hold"
        ) from error


def _errors() -> AbstractContextManager[None]:
    return errors_of("the directory of source modules")


def user_directory(name: str) -> str:
    """Return where files of a kind lie in the user's cache directory, which need not be there."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "triton-bundler", name)


def is_trusted(folder: str) -> bool:
    """Whether there is a directory; one that others could write to raises `UntrustedRoot`."""
    return file_steps.check_root(folder, file_steps.PRIVATE)


def read_trusted(path: str, most: int, directory: str) -> bytes | None:
    """Return a file that `write_whole` put somewhere; None where there is none.  Where files that
    nobody read for longest go, it is one that was read now.

    Args:
        path: of the file.
        most: how many bytes it may have.
        directory: whose it is, for errors.

    Raises:
        BundlerError: others could write to the directory, or the file cannot be read, is larger, or
            is no plain file.
    """
    with errors_of(directory):
        data = file_steps.read(path, most) if is_trusted(os.path.dirname(path)) else None
    if isinstance(data, Unread):
        raise FormatError(f"{directory}: {data.why}")
    if data is not None:
        with contextlib.suppress(OSError):
            os.utime(path)
    return data


def write_whole(path: str, data: bytes) -> None:
    """Put a whole file at `path`, in place of one that is there; its directory is made."""
    folder = os.path.dirname(path)
    file_steps.make_directories(folder, folder, file_steps.PRIVATE)
    is_trusted(folder)
    temporary = os.path.join(folder, file_steps.temporary_name())

    def write_and_rename() -> None:
        file_steps.write_new(temporary, data, file_steps.PRIVATE)
        os.replace(temporary, path)

    file_steps.with_temporary(temporary, write_and_rename)


@contextlib.contextmanager
def errors_of(directory: str) -> Iterator[None]:
    """Raise this package's errors for those of the file system; `directory` says whose it is."""
    kinds: dict[type[BackendError], type[BundlerError]] = {
        BackendFull: StoreFull,
        BackendDenied: AccessDenied,
        UntrustedRoot: ConfigError,
    }
    try:
        with file_steps.errors_by_meaning(directory, "use"):
            yield
    except BackendError as error:
        raise kinds.get(type(error), StoreUnavailable)(str(error)) from error
