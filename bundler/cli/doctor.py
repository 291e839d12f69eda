# SPDX-License-Identifier: Apache-2.0
"""The command `doctor`: what this machine has, and what keeps kernels from being found.

A check looks, changes nothing, and says what to do. `all_checks` has all of them: those of releases
and of the keys that Triton makes (`toolchain_checks`), of the cache manager and its store where the
environment sets them (`plug_checks`), and those whose findings `doctor --fix` mends by itself,
without losing anything that is in use (`mendable_checks`). `app.py` lists the command.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import bundler
from bundler import settings_files
from bundler.cli import wording
from bundler.cli.command import FINE, command, flag
from bundler.cli.command import PROBLEM as PROBLEM_STATUS
from bundler.cli.terminal import Screen
from bundler.config import PREFIX, settings, signature_settings, unknown_variables
from bundler.errors import BundlerError, ConfigError
from bundler.format import names
from bundler.format.bundle_file import STALE_AFTER_S
from bundler.lifecycle.cache_directory import TEMPORARY_PREFIX, remove_leftover
from bundler.lifecycle.machine_store import open_store
from bundler.project import install, page
from bundler.runtime.launch import jit_modules, launchers
from bundler.store.store_urls import local_directory, with_settings
from bundler.toolchain import (
    child_recording,
    directories,
    driver_modules,
    identity,
    inductor_caches,
    line_information,
    ptxas,
    targets,
    tried_releases,
)
from bundler.toolchain.manager_environment import MANAGER_VARIABLE
from bundler.toolchain.manager_environment import SESSION_MANAGER as MANAGER
from bundler.user_settings import Settings

_Status = Literal["ok", "warning", "problem"]
_Found = tuple[_Status, str, str, str]
_Mend = Callable[[], object]
_Mendable = tuple[_Status, str, str, str, _Mend | None]
_LITTLE_SPACE_BYTES = 1 << 30
# Importing Triton or torch from a slow network file system takes a while.
_IMPORT_TIMEOUT_S = 120
_IMPORT_TRITON = "import triton, triton.compiler, triton.knobs; triton.knobs.compilation.listener"
# One capability for each choice that Triton's releases make between their two ptxas.
_CAPABILITIES = (80, 90, 100)
_SECRET_NAME = re.compile(r"PASSWORD|SECRET|TOKEN", re.IGNORECASE)
_SETTINGS = ("TRITON_", "TORCHINDUCTOR_")
_PACKAGE, _DISTRIBUTION = "bundler", "triton-bundler"
_LIBRARIES = ("msgpack", "zstandard", "filelock", "click", "rich", "redis", "obstore")
_MISSING = """
from bundler.toolchain import inductor_caches, inductor_hooks
print(*inductor_caches.missing(dict.fromkeys((*inductor_caches.NEEDED, *inductor_hooks.NEEDED))))
"""
_PATH_COUNTS = """
import triton.runtime.jit, triton.knobs
from bundler.toolchain import line_information
print(line_information.path_counts())
"""
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
_OK, _WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: `status` is ok, warning or problem; `fix` says what to do, and
    `mend`, where there is one, does it.
    """

    status: str
    what: str
    value: str
    fix: str = ""
    mend: _Mend | None = None


def all_checks() -> Iterator[Finding]:
    """Yield every finding, quick ones first."""
    yield Finding(_OK, "Python", f"{platform.python_version()}, {sys.executable}")
    yield Finding(
        _OK, "triton-bundler", f"{bundler.__version__}, {os.path.dirname(bundler.__file__)}"
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
        for name in _LIBRARIES
        if (version := identity.version_of(name)) is not None
    ]
    yield Finding(_OK, "libraries", ", ".join(installed))


def _package_name() -> Iterator[Finding]:
    """Look for another distribution that brings a package `bundler`: pip lets each overwrite the
    other's files.
    """
    others = sorted(
        {*importlib.metadata.packages_distributions().get(_PACKAGE, ())} - {_DISTRIBUTION}
    )
    if others:
        yield Finding(
            PROBLEM,
            "package name",
            f"{', '.join(others)} brings a package {_PACKAGE} too, and overwrites ours",
            f"pip uninstall {' '.join(others)}, then install triton-bundler again",
        )
    else:
        yield Finding(
            _OK,
            "package name",
            f"{_PACKAGE} is ours alone; a distribution called {_PACKAGE} would overwrite it",
        )


def _triton() -> Iterator[Finding]:
    directory, toolchain = identity.triton_dir(), identity.installed_triton()
    if directory is None or toolchain is None:
        yield Finding(
            _WARNING,
            "Triton",
            "not installed",
            f"bundles can be made and looked at; to compile: {install('triton')}",
        )
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
    yield Finding(_OK, "Triton", value)
    if toolchain.binary is None:
        yield Finding(
            PROBLEM, "Triton's binary", f"not found in {directory}", "install Triton again"
        )
    else:
        yield Finding(_OK, "Triton's binary", f"sha256 {toolchain.binary}")


def _why_triton_fails() -> str | None:
    """Import Triton in a process of its own, since this one stays without."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _IMPORT_TRITON],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
            timeout=_IMPORT_TIMEOUT_S,
        )
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
        yield Finding(_OK, "ptxas", f"{version} (for {', '.join(used_for)})")
    if silent:
        yield Finding(
            PROBLEM if set(silent) & set(visible) else _WARNING,
            "ptxas",
            f"none that answers for {', '.join(f'cuda:{capability}' for capability in silent)}",
            "set TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH, or install Triton again",
        )


def _torch() -> Iterator[Finding]:
    version = identity.version_of("torch")
    yield Finding(_OK, "torch", version or "not installed (only needed to launch kernels)")
    compiler = inductor_caches.expected_compiler()
    if compiler is not None:
        yield Finding(
            _OK,
            "torch's graph keys",
            f"hold the C++ compiler, here {compiler}; with another $CXX a graph is not found",
        )


def _toolchain() -> Iterator[Finding]:
    yield from (Finding(*found) for found in toolchain_checks())


def _gpu() -> Iterator[Finding]:
    facts = dict(identity.environment())
    visible = targets.visible_targets()
    if visible is None:
        yield Finding(
            _WARNING,
            "GPU",
            "none is visible",
            "kernels can be compiled and bundled, not launched; restore does not check the target",
        )
    else:
        yield Finding(_OK, "GPU", ", ".join(filter(None, [*map(str, visible), facts.get("gpu")])))
    if "driver" in facts:
        yield Finding(_OK, "driver", facts["driver"])


def _launch_path() -> Iterator[Finding]:
    if launchers.compiled_type() is None:
        yield Finding(
            _OK,
            "launch path",
            "ctypes, since the compiled extension was not built here",
            "a launch costs less with it: install a C compiler and Python's headers, then this"
            " package again from its source (pip install --force-reinstall . in a checkout)",
        )
    else:
        yield Finding(_OK, "launch path", "compiled extension")


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
            _OK,
            "Triton's launchers",
            f"ours in a session on CUDA, in the form of {family}: no C compiler is run",
        )
    if reason:
        yield Finding(
            _OK, "Triton's launchers", f"Triton's own, which its C compiler builds: {reason}"
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
            _WARNING,
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
    if free < _LITTLE_SPACE_BYTES:
        return Finding(_WARNING, what, value, f"free some space, or set {variable} to another disk")
    return Finding(_OK, what, value)


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
        yield Finding(
            _WARNING,
            "C compiler",
            f"CC={chosen} is not a program" if chosen else "none",
            "Triton needs gcc or clang, or what CC names, before its first launch, but where a"
            " session gives it our launchers",
        )
    else:
        yield Finding(_OK, "C compiler", found + (" (from CC)" if chosen else ""))


def _children() -> Iterator[Finding]:
    spool = child_recording.ChildSpool()
    try:
        reason = child_recording.check_interpreter(sys.executable, spool.environ())
    finally:
        spool.close()
    if reason is None:
        yield Finding(_OK, "child processes", "can be recorded")
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
            yield Finding(_OK, "setting", f"{name}={_masked(name, os.environ[name])}")


def _mendable() -> Iterator[Finding]:
    yield from (Finding(*found) for found in mendable_checks())


def _masked(name: str, value: str) -> str:
    return "***" if _SECRET_NAME.search(name) else wording.masked(value)


STYLES = {_OK: "green", _WARNING: "yellow", PROBLEM: "bold red"}


@command("Say what this machine has, and what is in the way.", "doctor", "doctor --fix")
@flag(
    "--fix", "mends", "Mend what can be mended without losing anything: modes of files, leftovers."
)
def doctor(screen: Screen, mends: bool) -> int:
    """Say what this machine has: Python, Triton, ptxas, GPU, cache directories, C compiler,
    settings.

    Exit status 1 when something is broken; what is merely absent is a warning.
    """
    with screen.progress("looking") as bar:
        findings = []
        for finding in all_checks():
            bar.advance(finding.what)
            findings.append(_mended(finding) if mends else finding)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        screen.line(
            f"{finding.status:<7}  {finding.what:<{width}}  {finding.value}",
            STYLES[finding.status] if finding.status != _OK else "",
        )
        if finding.fix:
            by_us = ", or run doctor --fix" if finding.mend is not None else ""
            screen.line(f"{'':<7}  {'':<{width}}  {finding.fix}{by_us}")
    counts = {
        status: sum(finding.status == status for finding in findings)
        for status in (PROBLEM, _WARNING)
    }
    screen.line()
    screen.done(_verdict(counts[PROBLEM], counts[_WARNING]))
    told = [
        {
            "status": f.status,
            "what": f.what,
            "value": f.value,
            "fix": f.fix,
            "mendable": f.mend is not None,
        }
        for f in findings
    ]
    screen.finish({"ok": not counts[PROBLEM], "problems": counts[PROBLEM], "checks": told})
    return PROBLEM_STATUS if counts[PROBLEM] else FINE


def _mended(finding: Finding) -> Finding:
    """Mend what a finding tells, where that is possible; returns what is to be said then."""
    if finding.mend is None:
        return finding
    try:
        finding.mend()
    except OSError as error:
        return replace(
            finding, value=f"{finding.value}; mending it failed ({error.strerror})", mend=None
        )
    return Finding(_OK, finding.what, f"{finding.value}: mended")


def _verdict(problems: int, warnings: int) -> str:
    if problems:
        return (
            f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        )
    return "no problem found" + (f", {warnings} warning{'s' * (warnings != 1)}" if warnings else "")


def toolchain_checks() -> Iterator[_Found]:
    """Yield (status, what, value, fix): one warning for all releases never tried with this package,
    one for keys that hold paths.
    """
    toolchain = identity.installed_triton()
    here = {
        "triton": toolchain.release if toolchain is not None else None,
        "torch": identity.version_of("torch"),
    }
    untried = {
        name: release for name, release in here.items() if tried_releases.untried(name, release)
    }
    if untried:
        told = ", ".join(f"{name} {release}" for name, release in untried.items())
        lists = "; ".join(f"{name} {', '.join(tried_releases.TRIED[name])}" for name in untried)
        lacking = _torch_lacks() if "torch" in untried else ""
        fix = (
            "nothing is refused for it; see to it that a restored bundle is found: triton-bundler"
            f" demo, {page('integrations')}; have generated programs compared with eager torch:"
            f" verify=True, {page('codegen')}"
        )
        yield (
            "warning",
            "releases",
            f"{told}: never tried with this package (tried: {lists}){lacking}",
            fix,
        )
    if toolchain is not None and _asked(_PATH_COUNTS) == "True":
        yield (
            "warning",
            "line information",
            "this Triton's keys hold path and column of the source: they differ between checkouts",
            line_information.ADVICE,
        )


def _asked(code: str) -> str | None:
    """Return what a process of its own printed, since this one stays without Triton and torch; None
    where it failed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=_IMPORT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


def _torch_lacks() -> str:
    """Return in words which of torch's own names, that `inductor.save` and `load` use, are not in
    this torch.
    """
    names = _asked(_MISSING)
    if names is None:
        return "; torch cannot be asked for the names that torch.compile's bundles need"
    if not names:
        return "; torch has every name that torch.compile's bundles need"
    return (
        f"; torch has no {', '.join(names.split())}, so inductor.save packs its whole cache"
        " directory"
    )


def plug_checks() -> Iterator[_Found]:
    """Yield (status, what, value, fix) of each thing looked at; nothing where neither manager nor
    store is set.
    """
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


def _importable(manager: str) -> _Found:
    """Tell whether a process that starts elsewhere could import the manager: Triton fails where it
    cannot.
    """
    fix = (
        f"install triton-bundler there, or unset {MANAGER_VARIABLE}: Triton fails in processes that"
        " cannot import it"
    )
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
            cwd=os.sep,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
            timeout=_IMPORT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "problem", "cache manager", f"{manager} cannot be tried ({error})", fix
    if done.returncode == 0:
        return "ok", "cache manager", f"{manager}, found by child processes", ""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [
        f"status {done.returncode}"
    ]
    return "problem", "cache manager", f"a child process cannot import {manager} ({lines[-1]})", fix


def _store(url: str, chosen: Settings) -> _Found:
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


def mendable_checks() -> Iterator[_Mendable]:
    """Yield (status, what, value, fix, mend) of each thing looked at; what is wrong with a setting
    is not told here.
    """
    with contextlib.suppress(ConfigError):
        yield from _settings_files()
    with contextlib.suppress(ConfigError):
        yield from _signing_key()
    with contextlib.suppress(ConfigError, OSError):
        yield from _leftovers(directories.triton_cache_dir())


def _settings_files() -> Iterator[_Mendable]:
    for file in settings_files.candidates():
        if file.passed_over is None:
            yield "ok", "settings' file", file.path, "", None
            continue
        ours = hasattr(os, "geteuid") and os.stat(file.path).st_uid == os.geteuid()
        mend = functools.partial(_take, file.path, stat.S_IWOTH) if ours else None
        yield "warning", "settings' file", f"{file.path} is not read", file.passed_over, mend


def _signing_key() -> Iterator[_Mendable]:
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


def _leftovers(directory: str) -> Iterator[_Mendable]:
    """Look for what restores left that were killed a day ago or earlier; a restore into the
    directory removes it, too.
    """
    with os.scandir(directory) as entries:
        left = [
            one.path
            for one in entries
            if one.name.startswith(TEMPORARY_PREFIX)
            and time.time() - one.stat(follow_symlinks=False).st_ctime > STALE_AFTER_S
        ]
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
