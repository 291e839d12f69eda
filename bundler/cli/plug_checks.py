# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says of the cache manager and its store, where one of them is set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

from bundler.config import PREFIX, Settings, settings
from bundler.errors import BundlerError
from bundler.integrations.plugging import MANAGER
from bundler.lifecycle.storing import open_store
from bundler.store.opening import is_server, local_directory
from bundler.toolchain.children import MANAGER_VARIABLE

# Importing from a slow network file system takes a while.
_TIMEOUT_S = 120
_IMPORT = "import bundler.integrations._process"

Status = Literal["ok", "warning", "problem"]
Found = tuple[Status, str, str, str]


def plug_checks() -> Iterator[Found]:
    """Yield (status, what, value, fix) of each thing looked at; nothing where neither manager nor store is set."""
    manager = os.environ.get(MANAGER_VARIABLE)
    try:
        chosen = settings()
    except BundlerError as error:
        yield "problem", "settings", error.message, "correct it; the cache manager goes on without a store"
        return
    if manager == MANAGER:
        yield _importable()
        if not chosen.store:
            yield "warning", "store", "none", f"set {PREFIX}STORE: the cache manager has nowhere to look"
    elif chosen.store:
        yield (
            "warning",
            "cache manager",
            manager or "Triton's own",
            f"set {MANAGER_VARIABLE}={MANAGER} for {PREFIX}STORE",
        )
    for url in chosen.store:
        yield _store(url, chosen)


def _importable() -> Found:
    """Tell whether a process that starts elsewhere could import the manager: Triton fails where it cannot."""
    fix = f"install triton-bundler there, or unset {MANAGER_VARIABLE}: Triton fails in processes that cannot import it"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _IMPORT],
            cwd=os.sep, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, timeout=_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return "problem", "cache manager", f"cannot be tried ({error})", fix
    if done.returncode == 0:
        return "ok", "cache manager", f"{MANAGER}, found by child processes", ""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"status {done.returncode}"]
    return "problem", "cache manager", f"a child process cannot import it ({lines[-1]})", fix


def _store(url: str, chosen: Settings) -> Found:
    try:
        directory = local_directory(url)
        if directory is not None and not os.path.isdir(directory):
            return "ok", "store", f"{directory} is not there yet", ""
        server = chosen.server if is_server(url) else {}
        with open_store(url, read_only=True, **server) as store:
            store.file_records().look_up("doctor")
            return "ok", "store", f"{store.name} answers", ""
    except BundlerError as error:
        return "problem", "store", error.message, "the cache manager compiles as if there were no store"
