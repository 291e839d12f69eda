# SPDX-License-Identifier: Apache-2.0
"""The command `doctor`: what this machine has, and what keeps kernels from being found.

A check looks, changes nothing, and says what to do. `all_checks` has all of them: among these those
of releases and of the keys that Triton makes (`toolchain_checks`), of the cache manager and its
store where the environment sets them (`plug_checks`), and those whose findings `doctor --fix` mends
by itself, without losing anything that is in use (`mendable_checks`). `app.py` lists the command.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import importlib.metadata
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import bundler
from bundler import config
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
from bundler.runtime.launch.drivers import launchers
from bundler.runtime.launch.jit import jit_modules
from bundler.store.store_urls import local_directory, with_settings
from bundler.toolchain import (
    directories,
    driver_modules,
    identity,
    inductor_caches,
    keytext,
    ptxas,
    targets,
)
from bundler.toolchain.recording import child_recording
from bundler.toolchain.recording.manager_environment import MANAGER_VARIABLE
from bundler.toolchain.recording.manager_environment import SESSION_MANAGER as MANAGER
from bundler.user_settings import Settings

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
from bundler.toolchain.inductor_caches import NEEDED, NEEDED_TO_KEEP, missing
print(*missing(dict.fromkeys((*NEEDED, *NEEDED_TO_KEEP))))
"""
_PATH_COUNTS = """
import triton.runtime.jit, triton.knobs
from bundler.toolchain import keytext
print(keytext.path_counts())
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
PROBLEM = "problem"
_UNTRIED = "cannot be tried"


class Finding(NamedTuple):
    """One line of the doctor's: `status` is ok, warning or problem; `fix` says what to do, and
    `mend`, where there is one, does it.
    """

    status: str
    what: str
    value: str
    fix: str = ""
    mend: Callable[[], object] | None = None


_ok = partial(Finding, "ok")
_warning = partial(Finding, "warning")
_problem = partial(Finding, PROBLEM)
_STYLES = {"warning": "yellow", PROBLEM: "bold red"}


def all_checks() -> Iterator[Finding]:
    """Yield every finding, quick ones first."""
    yield _ok("Python", f"{platform.python_version()}, {sys.executable}")
    yield _ok("triton-bundler", f"{bundler.__version__}, {os.path.dirname(bundler.__file__)}")
    for check in (
        _libraries,
        _package_name,
        _triton,
        _ptxas,
        _torch,
        toolchain_checks,
        _gpu,
        _launch_path,
        _jit_launchers,
        _caches,
        _compiler,
        _children,
        plug_checks,
        _settings,
        mendable_checks,
    ):
        yield from check()


def _libraries() -> Iterator[Finding]:
    versions = {name: identity.version_of(name) for name in _LIBRARIES}
    installed = [f"{name} {version}" for name, version in versions.items() if version is not None]
    yield _ok("libraries", ", ".join(installed))


def _package_name() -> Iterator[Finding]:
    """Look for another distribution that brings a package `bundler`: pip lets each overwrite the
    other's files.
    """
    others = sorted(
        {*importlib.metadata.packages_distributions().get(_PACKAGE, ())} - {_DISTRIBUTION}
    )
    if others:
        yield _problem(
            "package name",
            f"{', '.join(others)} brings a package {_PACKAGE} too, and overwrites ours",
            f"pip uninstall {' '.join(others)}, then install triton-bundler again",
        )
    else:
        yield _ok(
            "package name",
            f"{_PACKAGE} is ours alone; a distribution called {_PACKAGE} would overwrite it",
        )


def _triton() -> Iterator[Finding]:
    directory, toolchain = identity.triton_dir(), identity.installed_triton()
    if directory is None or toolchain is None:
        fix = f"bundles can be made and looked at; to compile: {install('triton')}"
        yield _warning("Triton", "not installed", fix)
        return
    value = f"{toolchain.release or 'unknown release'}, {directory}"
    broken, _ = _run(_IMPORT_TRITON)
    if broken is not None:
        fix = "install it again: pip install --force-reinstall triton"
        yield _problem("Triton", f"{value}: {broken}", fix)
        return
    yield _ok("Triton", value)
    if toolchain.binary is None:
        yield _problem("Triton's binary", f"not found in {directory}", "install Triton again")
    else:
        yield _ok("Triton's binary", f"sha256 {toolchain.binary}")


def _run(code: str, *arguments: str, folder: str | None = None) -> tuple[str | None, str]:
    """Run code in a process of its own, since this one stays without Triton and torch; returns why
    it failed, None where it did not, and what it printed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", code, *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_IMPORT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{_UNTRIED} ({error})", ""
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return lines[-1] if done.returncode else None, done.stdout.strip()


def _ptxas() -> Iterator[Finding]:
    if identity.triton_dir() is None:
        return
    visible = {
        int(t.arch)
        for t in targets.visible_targets() or ()
        if t.backend == "cuda" and t.arch.isdecimal()
    }
    versions: dict[str | None, list[int]] = {}
    for capability in sorted({*_CAPABILITIES, *visible}):
        versions.setdefault(ptxas.ptxas_version(capability), []).append(capability)
    silent = versions.pop(None, [])
    for version, used_for in versions.items():
        yield _ok("ptxas", f"{version} (for {_targets(used_for)})")
    if silent:
        yield Finding(
            PROBLEM if visible & {*silent} else "warning",
            "ptxas",
            f"none that answers for {_targets(silent)}",
            "set TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH, or install Triton again",
        )


def _targets(capabilities: list[int]) -> str:
    return ", ".join(f"cuda:{capability}" for capability in capabilities)


def _torch() -> Iterator[Finding]:
    version = identity.version_of("torch")
    yield _ok("torch", version or "not installed (only needed to launch kernels)")
    compiler = inductor_caches.expected_compiler()
    if compiler is not None:
        yield _ok(
            "torch's graph keys",
            f"hold the C++ compiler, here {compiler}; with another $CXX a graph is not found",
        )


def _gpu() -> Iterator[Finding]:
    facts = dict(identity.environment())
    visible = targets.visible_targets()
    if visible is None:
        yield _warning(
            "GPU",
            "none is visible",
            "kernels can be compiled and bundled, not launched; restore does not check the target",
        )
    else:
        yield _ok("GPU", ", ".join(filter(None, [*map(str, visible), facts.get("gpu")])))
    if "driver" in facts:
        yield _ok("driver", facts["driver"])


def _launch_path() -> Iterator[Finding]:
    if launchers.compiled_type() is None:
        yield _ok(
            "launch path",
            "ctypes, since the compiled extension was not built here",
            "a launch costs less with it: install a C compiler and Python's headers, then this"
            " package again from its source (pip install --force-reinstall . in a checkout)",
        )
    else:
        yield _ok("launch path", "compiled extension")


def _jit_launchers() -> Iterator[Finding]:
    """Say whose launchers Triton uses in a session on CUDA."""
    if identity.triton_dir() is None:
        return
    told = "Triton's own, which its C compiler builds: "
    if _launcher() == "triton":
        told += f"{PREFIX}LAUNCHER=triton"
    elif jit_modules.compiled_driver() is None:
        told += "our compiled extension was not built here"
    elif (family := driver_modules.known_family()) is None:
        told += "this release was not compared with ours"
    else:
        told = f"ours in a session on CUDA, in the form of {family}: no C compiler is run"
    yield _ok("Triton's launchers", told)


def _launcher() -> str:
    try:
        return settings().launcher
    except ConfigError:  # `plug_checks` tells what is wrong with a setting
        return "bundler"


def _caches() -> Iterator[Finding]:
    what = "Triton's cache"
    try:
        directory = directories.triton_cache_dir()
    except ConfigError as error:
        yield _problem(what, "no directory", error.message)
    else:
        kernels = _count_kernels(directory)
        yield _cache(_problem, what, directory, "TRITON_CACHE_DIR", kernels)
    if identity.version_of("torch") is not None:
        directory = directories.inductor_cache_dir()
        kernels = sum(map(_count_kernels, glob.glob(f"{glob.escape(directory)}/triton/*")))
        yield _cache(_warning, "Inductor's cache", directory, "TORCHINDUCTOR_CACHE_DIR", kernels)


def _cache(
    bad: Callable[..., Finding], what: str, directory: str, variable: str, kernels: int
) -> Finding:
    if os.path.lexists(directory) and not os.path.isdir(directory):
        return bad(what, f"{directory} is not a directory", f"remove it, or set {variable}")
    existing = directory
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    if not os.access(existing, os.W_OK | os.X_OK):
        fix = f"set {variable} to a directory of yours"
        return bad(what, f"{directory} cannot be written", fix)
    state = wording.count(kernels, "kernel") if existing == directory else "not there yet"
    free = shutil.disk_usage(existing).free
    value = f"{directory}: {state}, {wording.size(free)} free"
    if free < _LITTLE_SPACE_BYTES:
        return _warning(what, value, f"free some space, or set {variable} to another disk")
    return _ok(what, value)


def _count_kernels(directory: str) -> int:
    try:
        return sum(names.is_kernel_key(name) for name in os.listdir(directory))
    except OSError:
        return 0


def _compiler() -> Iterator[Finding]:
    chosen = os.environ.get("CC")
    found = shutil.which(chosen) if chosen else shutil.which("gcc") or shutil.which("clang")
    if found is None:
        yield _warning(
            "C compiler",
            f"CC={chosen} is not a program" if chosen else "none",
            "Triton needs gcc or clang, or what CC names, before its first launch, but where a"
            " session gives it our launchers",
        )
    else:
        yield _ok("C compiler", found + (" (from CC)" if chosen else ""))


def _children() -> Iterator[Finding]:
    with contextlib.closing(child_recording.ChildSpool()) as spool:
        reason = child_recording.check_interpreter(sys.executable, spool.environ())
    if reason is None:
        yield _ok("child processes", "can be recorded")
    else:
        fix = "without that, run breaks them, as do recordings of child processes in Python"
        yield _problem("child processes", reason, fix)


def _settings() -> Iterator[Finding]:
    for name in sorted(os.environ.keys() - unknown_variables().keys()):
        if name.startswith(_SETTINGS):
            secret = _SECRET_NAME.search(name)
            yield _ok("setting", f"{name}={'***' if secret else wording.masked(os.environ[name])}")


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
        told = f"{finding.status:<7}  {finding.what:<{width}}  {finding.value}"
        screen.line(told, _STYLES.get(finding.status, ""))
        if finding.fix:
            by_us = ", or run doctor --fix" if finding.mend is not None else ""
            screen.line(f"{'':<7}  {'':<{width}}  {finding.fix}{by_us}")
    counts = Counter(finding.status for finding in findings)
    problems, warnings = counts[PROBLEM], counts["warning"]
    some = wording.count(warnings, "warning") if problems or warnings else ""
    found = wording.count(problems, "problem") if problems else "no problem found"
    screen.line()
    screen.done(", ".join(filter(None, [found, some])))
    listed = [
        {
            "status": finding.status,
            "what": finding.what,
            "value": finding.value,
            "fix": finding.fix,
            "mendable": finding.mend is not None,
        }
        for finding in findings
    ]
    screen.finish({"ok": not problems, "problems": problems, "checks": listed})
    return PROBLEM_STATUS if problems else FINE


def _mended(finding: Finding) -> Finding:
    """Mend what a finding tells, where that is possible; returns what is to be said then."""
    if finding.mend is None:
        return finding
    try:
        finding.mend()
    except OSError as error:
        value = f"{finding.value}; mending it failed ({error.strerror})"
        return finding._replace(value=value, mend=None)
    return _ok(finding.what, f"{finding.value}: mended")


def toolchain_checks() -> Iterator[Finding]:
    """Yield one warning for all releases never tried with this package, one for keys that hold
    paths.
    """
    toolchain = identity.installed_triton()
    here = {
        "triton": toolchain.release if toolchain is not None else None,
        "torch": identity.version_of("torch"),
    }
    untried = {name: one for name, one in here.items() if identity.untried(name, one)}
    if untried:
        told = ", ".join(f"{name} {release}" for name, release in untried.items())
        lists = "; ".join(f"{name} {', '.join(identity.TRIED[name])}" for name in untried)
        lacking = _torch_lacks() if "torch" in untried else ""
        yield _warning(
            "releases",
            f"{told}: never tried with this package (tried: {lists}){lacking}",
            "nothing is refused for it; see to it that a restored bundle is found: triton-bundler"
            f" demo, {page('integrations')}; have generated programs compared with eager torch:"
            f" verify=True, {page('codegen')}",
        )
    if toolchain is not None and _run(_PATH_COUNTS) == (None, "True"):
        yield _warning(
            "line information",
            "this Triton's keys hold path and column of the source: they differ between checkouts",
            keytext.ADVICE,
        )


def _torch_lacks() -> str:
    """Return in words which of torch's own names, that `inductor.save` and `load` use, are not in
    this torch.
    """
    failed, lacking = _run(_MISSING)
    if failed is not None:
        return "; torch cannot be asked for the names that torch.compile's bundles need"
    if not lacking:
        return "; torch has every name that torch.compile's bundles need"
    return (
        f"; torch has no {', '.join(lacking.split())}, so inductor.save packs its whole cache"
        " directory"
    )


def plug_checks() -> Iterator[Finding]:
    """Yield what is wrong with settings, the cache manager and its stores; nothing of the last two
    where neither is set.
    """
    manager = os.environ.get(MANAGER_VARIABLE)
    for name, near in unknown_variables().items():
        value = f"{name} is no setting of triton-bundler and changes nothing"
        fix = f"did you mean {near}?" if near else f"unset it, or see {page('api')}"
        yield _problem("settings", value, fix)
    if manager:
        yield _importable(manager)
    try:
        chosen = settings()
    except BundlerError as error:
        fix = "correct it; the cache manager goes on without a store"
        yield _problem("settings", error.message, fix)
        return
    if manager == MANAGER and not chosen.store:
        fix = f"set {PREFIX}STORE: the cache manager has nowhere to look"
        yield _warning("store", "none", fix)
    elif manager != MANAGER and chosen.store:
        fix = f"set {MANAGER_VARIABLE}={MANAGER} for {PREFIX}STORE"
        yield _warning("cache manager", manager or "Triton's own", fix)
    for url in chosen.store:
        yield _store(url, chosen)


def _importable(manager: str) -> Finding:
    """Tell whether a process that starts elsewhere could import the manager: Triton fails where it
    cannot.
    """
    what = "cache manager"
    if manager == MANAGER:
        fix = (
            f"install triton-bundler there, or unset {MANAGER_VARIABLE}: Triton fails in processes"
            " that cannot import it"
        )
    elif difflib.get_close_matches(manager, [MANAGER], cutoff=_NEAR):
        fix = f"did you mean {MANAGER}?"
    else:
        fix = f"correct it, or unset {MANAGER_VARIABLE}: Triton fails with it"
    code = _IMPORT
    if identity.triton_dir() is None:
        if manager != MANAGER:
            return _warning(what, f"{manager} cannot be tried without Triton", fix)
        code = _IMPORT_WITHOUT_TRITON
    reason, _ = _run(code, manager, folder=os.sep)
    if reason is None:
        return _ok(what, f"{manager}, found by child processes")
    if reason.startswith(_UNTRIED):
        return _problem(what, f"{manager} {reason}", fix)
    return _problem(what, f"a child process cannot import {manager} ({reason})", fix)


def _store(url: str, chosen: Settings) -> Finding:
    try:
        directory = local_directory(url)
        if directory is not None and not os.path.isdir(directory):
            return _ok("store", f"{directory} is not there yet")
        with open_store(with_settings(url, chosen.server), read_only=True) as store:
            store.file_records().look_up("doctor")
            return _ok("store", f"{store.name} answers")
    except BundlerError as error:
        fix = "the cache manager compiles as if there were no store"
        return _problem("store", error.message, fix)


def mendable_checks() -> Iterator[Finding]:
    """Yield what `--fix` mends, where that is possible; what is wrong with a setting is not told
    here.
    """
    with contextlib.suppress(ConfigError):
        yield from _settings_files()
    with contextlib.suppress(ConfigError):
        yield from _signing_key()
    with contextlib.suppress(ConfigError, OSError):
        yield from _leftovers(directories.triton_cache_dir())


def _settings_files() -> Iterator[Finding]:
    for file in config.settings_files():
        if file.passed_over is None:
            yield _ok("settings' file", file.path)
            continue
        ours = hasattr(os, "geteuid") and os.stat(file.path).st_uid == os.geteuid()
        mend = partial(_take, file.path, stat.S_IWOTH) if ours else None
        yield _warning("settings' file", f"{file.path} is not read", file.passed_over, mend)


def _signing_key() -> Iterator[Finding]:
    path = signature_settings().signing_key
    if path is None or not os.path.isfile(path):
        return
    mode, others = stat.S_IMODE(os.stat(path).st_mode), stat.S_IRWXG | stat.S_IRWXO
    if mode & others:
        value = f"{path}: mode {mode:04o}, so that others may read it"
        yield _problem("signing key", value, f"chmod 600 {path}", partial(_take, path, others))
    else:
        yield _ok("signing key", path)


def _leftovers(directory: str) -> Iterator[Finding]:
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
        number = wording.count(len(left), "directory")
        yield _warning(
            "leftovers",
            f"{number} of restores that were killed, in {directory}",
            f"remove {directory}/{TEMPORARY_PREFIX}*",
            partial(_remove, left),
        )


def _take(path: str, bits: int) -> None:
    os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & ~bits)


def _remove(paths: list[str]) -> None:
    for path in paths:
        remove_leftover(path)
