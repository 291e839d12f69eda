# SPDX-License-Identifier: Apache-2.0
"""`plug_checks`: the checks of `doctor` about the cache manager and its store, where the environment sets them.

`doctor_checks.py` adds them to its own.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

from bundler.config import PREFIX, settings, unknown_variables
from bundler.errors import BundlerError
from bundler.lifecycle.machine_store import open_store
from bundler.project import page
from bundler.store.store_urls import local_directory, with_settings
from bundler.toolchain import identity
from bundler.toolchain.manager_environment import MANAGER_VARIABLE
from bundler.toolchain.manager_environment import SESSION_MANAGER as MANAGER
from bundler.user_settings import Settings

# Importing from a slow network file system takes a while.
_TIMEOUT_S = 120
# Imports a manager as Triton does, which knows the class by the name of its base.
_IMPORT = """
import importlib, sys
module, mark, name = sys.argv[1].partition(":")
if not mark:
    sys.exit("it is not of the form module:Class")
found = getattr(importlib.import_module(module), name)
if not any(base.__name__ == "CacheManager" for base in getattr(found, "__mro__", ())):
    sys.exit("it is not a CacheManager")
"""
_IMPORT_WITHOUT_TRITON = "import bundler.integrations._process"
# How similar (of 1) a name must be to our manager's to count as a misspelling of it.
_NEAR = 0.7

Status = Literal["ok", "warning", "problem"]
Found = tuple[Status, str, str, str]


def plug_checks() -> Iterator[Found]:
    """Yield (status, what, value, fix) of each thing looked at; nothing where neither manager nor store is set."""
    manager = os.environ.get(MANAGER_VARIABLE)
    for name, near in unknown_variables().items():
        fix = f"did you mean {near}?" if near else f"unset it, or see {page('api')}"
        yield (
            "problem",
            "settings",
            f"{name} is no setting of triton-bundler and changes nothing",
            fix,
        )
    if manager:
        yield _importable(manager)
    try:
        chosen = settings()
    except BundlerError as error:
        yield (
            "problem",
            "settings",
            error.message,
            "correct it; the cache manager goes on without a store",
        )
        return
    if manager == MANAGER:
        if not chosen.store:
            yield (
                "warning",
                "store",
                "none",
                f"set {PREFIX}STORE: the cache manager has nowhere to look",
            )
    elif chosen.store:
        yield (
            "warning",
            "cache manager",
            manager or "Triton's own",
            f"set {MANAGER_VARIABLE}={MANAGER} for {PREFIX}STORE",
        )
    for url in chosen.store:
        yield _store(url, chosen)


def _importable(manager: str) -> Found:
    """Tell whether a process that starts elsewhere could import the manager: Triton fails where it cannot."""
    fix = f"install triton-bundler there, or unset {MANAGER_VARIABLE}: Triton fails in processes that cannot import it"
    if manager != MANAGER:
        near = difflib.get_close_matches(manager, [MANAGER], cutoff=_NEAR)
        fix = (
            f"did you mean {MANAGER}?"
            if near
            else f"correct it, or unset {MANAGER_VARIABLE}: Triton fails with it"
        )
    if identity.triton_dir() is None:
        if manager != MANAGER:
            return "warning", "cache manager", f"{manager} cannot be tried without Triton", fix
        code = _IMPORT_WITHOUT_TRITON
    else:
        code = _IMPORT
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, manager],
            cwd=os.sep, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, timeout=_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return "problem", "cache manager", f"{manager} cannot be tried ({error})", fix
    if done.returncode == 0:
        return "ok", "cache manager", f"{manager}, found by child processes", ""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [
        f"status {done.returncode}"
    ]
    return "problem", "cache manager", f"a child process cannot import {manager} ({lines[-1]})", fix


def _store(url: str, chosen: Settings) -> Found:
    try:
        directory = local_directory(url)
        if directory is not None and not os.path.isdir(directory):
            return "ok", "store", f"{directory} is not there yet", ""
        with open_store(with_settings(url, chosen.server), read_only=True) as store:
            store.file_records().look_up("doctor")
            return "ok", "store", f"{store.name} answers", ""
    except BundlerError as error:
        return (
            "problem",
            "store",
            error.message,
            "the cache manager compiles as if there were no store",
        )
