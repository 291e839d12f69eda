# SPDX-License-Identifier: Apache-2.0
"""Files in this user's cache directory, each written whole, for its owner alone: generated modules
(`source_modules`) and programs (`bundler/codegen/kept_programs.py`), whose text is run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from bundler.backends import file_steps
from bundler.backends.backend_errors import BackendDenied, BackendError, BackendFull, UntrustedRoot
from bundler.errors import AccessDenied, BundlerError, ConfigError, StoreFull, StoreUnavailable


def user_directory(name: str) -> str:
    """Return where files of a kind lie in the user's cache directory, which need not be there."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "triton-bundler", name)


def is_trusted(folder: str) -> bool:
    """Whether there is a directory; one that others could write to raises `UntrustedRoot`."""
    return file_steps.check_root(folder, file_steps.PRIVATE)


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
