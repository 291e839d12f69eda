# SPDX-License-Identifier: Apache-2.0
"""`mendable_checks`: the checks of `doctor` whose findings `doctor --fix` can mend by itself, without losing anything that is in use.

`doctor_checks.py` puts them among the others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Literal

from bundler import settings_files
from bundler.cli import wording
from bundler.config import signature_settings
from bundler.errors import ConfigError
from bundler.format.bundle_file import STALE_AFTER_S
from bundler.lifecycle.cache_directory import TEMPORARY_PREFIX, remove_leftover
from bundler.toolchain import directories

Mend = Callable[[], object]
Found = tuple[Literal["ok", "warning", "problem"], str, str, str, Mend | None]


def mendable_checks() -> Iterator[Found]:
    """Yield (status, what, value, fix, mend) of each thing looked at; what is wrong with a setting is not told here."""
    with contextlib.suppress(ConfigError):
        yield from _settings_files()
    with contextlib.suppress(ConfigError):
        yield from _signing_key()
    with contextlib.suppress(ConfigError, OSError):
        yield from _leftovers(directories.triton_cache_dir())


def _settings_files() -> Iterator[Found]:
    for file in settings_files.candidates():
        if file.passed_over is None:
            yield "ok", "settings' file", file.path, "", None
            continue
        ours = hasattr(os, "geteuid") and os.stat(file.path).st_uid == os.geteuid()
        mend = functools.partial(_take, file.path, stat.S_IWOTH) if ours else None
        yield "warning", "settings' file", f"{file.path} is not read", file.passed_over, mend


def _signing_key() -> Iterator[Found]:
    path = signature_settings().signing_key
    if path is None or not os.path.isfile(path):
        return
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        others = functools.partial(_take, path, stat.S_IRWXG | stat.S_IRWXO)
        yield (
            "problem",
            "signing key",
            f"{path}: mode {mode:04o}, so that others may read it",
            f"chmod 600 {path}",
            others,
        )
    else:
        yield "ok", "signing key", path, "", None


def _leftovers(directory: str) -> Iterator[Found]:
    """Look for what restores left that were killed a day ago or earlier; a restore into the directory removes it, too."""
    with os.scandir(directory) as entries:
        left = [one.path for one in entries if one.name.startswith(TEMPORARY_PREFIX)
                and time.time() - one.stat(follow_symlinks=False).st_ctime > STALE_AFTER_S]  # fmt: skip
    if left:
        value = (
            f"{wording.count(len(left), 'directory')} of restores that were killed, in {directory}"
        )
        yield (
            "warning",
            "leftovers",
            value,
            f"remove {directory}/{TEMPORARY_PREFIX}*",
            functools.partial(_remove, left),
        )


def _take(path: str, bits: int) -> None:
    os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & ~bits)


def _remove(paths: list[str]) -> None:
    for path in paths:
        remove_leftover(path)
