# SPDX-License-Identifier: Apache-2.0
"""`all_checks`: the checks of `doctor`; each looks, changes nothing, and says what to do.

`doctor.py` prints the findings.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import bundler
from bundler.cli import wording
from bundler.cli.mendable_checks import Mend, mendable_checks
from bundler.cli.plug_checks import plug_checks
from bundler.cli.toolchain_checks import toolchain_checks
from bundler.config import PREFIX, settings, unknown_variables
from bundler.errors import ConfigError
from bundler.format import names
from bundler.project import install
from bundler.runtime.launch import jit_modules, launchers
from bundler.toolchain import (
    child_recording,
    directories,
    driver_modules,
    identity,
    inductor_caches,
    ptxas,
    targets,
)

OK, WARNING, PROBLEM = "ok", "warning", "problem"
LITTLE_SPACE_BYTES = 1 << 30
# Importing Triton from a slow network file system takes a while.
_IMPORT_TIMEOUT_S = 120
_IMPORT_TRITON = "import triton, triton.compiler, triton.knobs; triton.knobs.compilation.listener"
# One capability for each choice that Triton's releases make between their two ptxas.
_CAPABILITIES = (80, 90, 100)
_SECRET_NAME = re.compile(r"PASSWORD|SECRET|TOKEN", re.IGNORECASE)
_SETTINGS = ("TRITON_", "TORCHINDUCTOR_")
_PACKAGE, _DISTRIBUTION = "bundler", "triton-bundler"
LIBRARIES = ("msgpack", "zstandard", "filelock", "click", "rich", "redis", "obstore")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: `status` is ok, warning or problem; `fix` says what to do, and `mend`, where there is one, does it."""

    status: str
    what: str
    value: str
    fix: str = ""
    mend: Mend | None = None


def all_checks() -> Iterator[Finding]:
    """Yield every finding, quick ones first."""
    yield Finding(OK, "Python", f"{platform.python_version()}, {sys.executable}")
    yield Finding(
        OK, "triton-bundler", f"{bundler.__version__}, {os.path.dirname(bundler.__file__)}"
    )
    for check in (
        _libraries,
        _package_name,
        _triton,
        _ptxas,
        _torch,
        _toolchain,
        _gpu,
        _launch_path,
        _jit_launchers,
        _triton_cache,
        _inductor_cache,
        _compiler,
        _children,
        _plug,
        _settings,
        _mendable,
    ):
        yield from check()


def _libraries() -> Iterator[Finding]:
    installed = [
        f"{name} {version}"
        for name in LIBRARIES
        if (version := identity.version_of(name)) is not None
    ]
    yield Finding(OK, "libraries", ", ".join(installed))


def _package_name() -> Iterator[Finding]:
    """Look for another distribution that brings a package `bundler`: pip lets each overwrite the other's files."""
    others = sorted(
        {*importlib.metadata.packages_distributions().get(_PACKAGE, ())} - {_DISTRIBUTION}
    )
    if others:
        yield Finding(PROBLEM, "package name", f"{', '.join(others)} brings a package {_PACKAGE} too, and overwrites ours",
                      f"pip uninstall {' '.join(others)}, then install triton-bundler again")  # fmt: skip
    else:
        yield Finding(OK, "package name",
                      f"{_PACKAGE} is ours alone; a distribution called {_PACKAGE} would overwrite it")  # fmt: skip


def _triton() -> Iterator[Finding]:
    directory, toolchain = identity.triton_dir(), identity.installed_triton()
    if directory is None or toolchain is None:
        yield Finding(WARNING, "Triton", "not installed",
                      f"bundles can be made and looked at; to compile: {install('triton')}")  # fmt: skip
        return
    value = f"{toolchain.release or 'unknown release'}, {directory}"
    broken = _why_triton_fails()
    if broken is not None:
        yield Finding(
            PROBLEM,
            "Triton",
            f"{value}: {broken}",
            "install it again: pip install --force-reinstall triton",
        )
        return
    yield Finding(OK, "Triton", value)
    if toolchain.binary is None:
        yield Finding(
            PROBLEM, "Triton's binary", f"not found in {directory}", "install Triton again"
        )
    else:
        yield Finding(OK, "Triton's binary", f"sha256 {toolchain.binary}")


def _why_triton_fails() -> str | None:
    """Import Triton in a process of its own, since this one stays without."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _IMPORT_TRITON],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, timeout=_IMPORT_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot be tried ({error})"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return (lines[-1] if lines else f"status {done.returncode}") if done.returncode else None


def _ptxas() -> Iterator[Finding]:
    if identity.triton_dir() is None:
        return
    visible = [
        int(t.arch)
        for t in targets.visible_targets() or ()
        if t.backend == "cuda" and t.arch.isdecimal()
    ]
    versions: dict[str, list[str]] = {}
    silent = []
    for capability in sorted({*_CAPABILITIES, *visible}):
        version = ptxas.ptxas_version(capability)
        if version is None:
            silent.append(capability)
        else:
            versions.setdefault(version, []).append(f"cuda:{capability}")
    for version, used_for in versions.items():
        yield Finding(OK, "ptxas", f"{version} (for {', '.join(used_for)})")
    if silent:
        yield Finding(PROBLEM if set(silent) & set(visible) else WARNING, "ptxas",
                      f"none that answers for {', '.join(f'cuda:{capability}' for capability in silent)}",
                      "set TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH, or install Triton again")  # fmt: skip


def _torch() -> Iterator[Finding]:
    version = identity.version_of("torch")
    yield Finding(OK, "torch", version or "not installed (only needed to launch kernels)")
    compiler = inductor_caches.expected_compiler()
    if compiler is not None:
        yield Finding(
            OK,
            "torch's graph keys",
            f"hold the C++ compiler, here {compiler}; with another $CXX a graph is not found",
        )


def _toolchain() -> Iterator[Finding]:
    yield from (Finding(*found) for found in toolchain_checks())


def _gpu() -> Iterator[Finding]:
    facts = dict(identity.environment())
    visible = targets.visible_targets()
    if visible is None:
        yield Finding(WARNING, "GPU", "none is visible", "kernels can be compiled and bundled, not launched; restore "
                      "does not check the target")  # fmt: skip
    else:
        yield Finding(OK, "GPU", ", ".join(filter(None, [*map(str, visible), facts.get("gpu")])))
    if "driver" in facts:
        yield Finding(OK, "driver", facts["driver"])


def _launch_path() -> Iterator[Finding]:
    if launchers.compiled_type() is None:
        yield Finding(OK, "launch path", "ctypes, since the compiled extension was not built here",
                      "a launch costs less with it: install a C compiler and Python's headers, then this package again "
                      "from its source (pip install --force-reinstall . in a checkout)")  # fmt: skip
    else:
        yield Finding(OK, "launch path", "compiled extension")


def _jit_launchers() -> Iterator[Finding]:
    """Say whose launchers Triton uses in a session on CUDA."""
    if identity.triton_dir() is None:
        return
    reason = ""
    if _launcher() == "triton":
        reason = f"{PREFIX}LAUNCHER=triton"
    elif jit_modules.compiled_driver() is None:
        reason = "our compiled extension was not built here"
    elif (family := driver_modules.known_family()) is None:
        reason = "this release was not compared with ours"
    else:
        yield Finding(
            OK,
            "Triton's launchers",
            f"ours in a session on CUDA, in the form of {family}: no C compiler is run",
        )
    if reason:
        yield Finding(
            OK, "Triton's launchers", f"Triton's own, which its C compiler builds: {reason}"
        )


def _launcher() -> str:
    try:
        return settings().launcher
    except ConfigError:  # `_plug` tells what is wrong with a setting
        return "bundler"


def _triton_cache() -> Iterator[Finding]:
    try:
        directory = directories.triton_cache_dir()
    except ConfigError as error:
        yield Finding(PROBLEM, "Triton's cache", "no directory", error.message)
        return
    yield _cache("Triton's cache", directory, "TRITON_CACHE_DIR", PROBLEM, _count_kernels)


def _inductor_cache() -> Iterator[Finding]:
    if identity.version_of("torch") is not None:
        directory = directories.inductor_cache_dir()
        yield _cache(
            "Inductor's cache",
            directory,
            "TORCHINDUCTOR_CACHE_DIR",
            WARNING,
            _count_inductor_kernels,
        )


def _cache(
    what: str, directory: str, variable: str, severity: str, count: Callable[[str], int]
) -> Finding:
    if os.path.lexists(directory) and not os.path.isdir(directory):
        return Finding(
            severity, what, f"{directory} is not a directory", f"remove it, or set {variable}"
        )
    existing = directory
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            severity,
            what,
            f"{directory} cannot be written",
            f"set {variable} to a directory of yours",
        )
    state = wording.count(count(directory), "kernel") if existing == directory else "not there yet"
    free = shutil.disk_usage(existing).free
    value = f"{directory}: {state}, {wording.size(free)} free"
    if free < LITTLE_SPACE_BYTES:
        return Finding(WARNING, what, value, f"free some space, or set {variable} to another disk")
    return Finding(OK, what, value)


def _count_kernels(directory: str) -> int:
    try:
        return sum(names.is_kernel_key(name) for name in os.listdir(directory))
    except OSError:
        return 0


def _count_inductor_kernels(directory: str) -> int:
    folder = os.path.join(directory, "triton")
    try:
        return sum(_count_kernels(os.path.join(folder, device)) for device in os.listdir(folder))
    except OSError:
        return 0


def _compiler() -> Iterator[Finding]:
    chosen = os.environ.get("CC")
    found = shutil.which(chosen) if chosen else shutil.which("gcc") or shutil.which("clang")
    if found is None:
        yield Finding(WARNING, "C compiler", f"CC={chosen} is not a program" if chosen else "none",
                      "Triton needs gcc or clang, or what CC names, before its first launch, but where a session gives it our launchers")  # fmt: skip
    else:
        yield Finding(OK, "C compiler", found + (" (from CC)" if chosen else ""))


def _children() -> Iterator[Finding]:
    spool = child_recording.ChildSpool()
    try:
        reason = child_recording.check_interpreter(sys.executable, spool.environ())
    finally:
        spool.close()
    if reason is None:
        yield Finding(OK, "child processes", "can be recorded")
    else:
        yield Finding(
            PROBLEM,
            "child processes",
            reason,
            "without that, run breaks them, as do recordings of child processes in Python",
        )


def _plug() -> Iterator[Finding]:
    yield from (Finding(*found) for found in plug_checks())


def _settings() -> Iterator[Finding]:
    for name in sorted(os.environ.keys() - unknown_variables().keys()):
        if name.startswith(_SETTINGS):
            yield Finding(OK, "setting", f"{name}={_masked(name, os.environ[name])}")


def _mendable() -> Iterator[Finding]:
    yield from (Finding(*found) for found in mendable_checks())


def _masked(name: str, value: str) -> str:
    return "***" if _SECRET_NAME.search(name) else wording.masked(value)
