# SPDX-License-Identifier: Apache-2.0
"""The command `demo`: the whole life of a bundle in one command, and the count that proves it.

It runs `demo_program.py` twice, as child processes; a ptxas that refuses to assemble
counts what a child compiles (`PtxasWatch`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import bundler
from bundler.cli import wording
from bundler.cli.bundles.report_page import SourceFolder, report_page
from bundler.cli.command import FINE, PROBLEM, command, flag, option, repeated
from bundler.cli.pack import check_output
from bundler.cli.terminal import Column, Screen
from bundler.errors import BundlerError, RecordingError, ToolchainMismatch
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import cleaned_up, os_errors, replace_content
from bundler.format.entries import Kernel
from bundler.project import install
from bundler.toolchain import identity
from bundler.toolchain.diagnostics import telling_line
from bundler.toolchain.events import kernel_key
from bundler.toolchain.ptxas import candidates

DEFAULT_TARGETS = ("cuda:90", "hip:gfx942")
FOLDER = Path(__file__).absolute().parent
PROGRAM, KERNELS = FOLDER / "demo_program.py", FOLDER / "demo_kernels.py"
COLUMNS = (
    Column("kernel", shrinks=True),
    Column("target"),
    Column("warps", True, needs=70),
    Column("binary", True, needs=60),
    Column("compiled in", True),
    Column("found in", True),
)
_TARGET = re.compile(r"cuda:\d{2,3}|hip:gfx[0-9a-f]{3,5}")
# Triton's settings that would make it compile whatever the cache holds, look elsewhere, or not
# compile at all.
_DISTURBING = (
    "TRITON_ALWAYS_COMPILE",
    "TRITON_CACHE_AUTOTUNING",
    "TRITON_CACHE_MANAGER",
    "TRITON_DUMP_DIR",
    "TRITON_INTERPRET",
    "TRITON_KERNEL_DUMP",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_OVERRIDE_DIR",
    "TRITON_REMOTE_CACHE_BACKEND",
)
PTXAS = {"TRITON_PTXAS_PATH": "ptxas", "TRITON_PTXAS_BLACKWELL_PATH": "ptxas-blackwell"}
_VERSION, _ASSEMBLE = "version", "assemble"
_WRAPPER = """#!/bin/sh
if [ "$1" = --version ]; then echo {version} >> {log}; exec {real} --version; fi
echo {assemble} >> {log}
echo 'this ptxas only tells its version' >&2
exit 1
"""


def _check_targets(
    _context: click.Context, _option: click.Parameter, targets: tuple[str, ...]
) -> tuple[str, ...]:
    for target in targets:
        if not _TARGET.fullmatch(target):
            raise click.BadParameter(f"{target!r} is not a target; write cuda:90 or hip:gfx942")
    return tuple(dict.fromkeys(targets))


@command(
    "See it work: compile, bundle, restore, recompile nothing.",
    "demo",
    "demo --target cuda:80 --keep-dir",
)
@repeated(
    "--target T",
    "targets",
    "Compile for T, GPU or not; repeat for several.",
    default=DEFAULT_TARGETS,
    callback=_check_targets,
)
@flag(
    "--keep-dir",
    "Keep the bundle and the restored directory, and say where; else they are deleted, and that"
    " is said.",
)
@option(
    "--report FILE",
    "report_path",
    "Also write the page that the report command makes of the bundle.",
)
def demo(screen: Screen, targets: tuple[str, ...], keep_dir: bool, report_path: str | None) -> int:
    """Compile real kernels, bundle them, restore them elsewhere, and count what is compiled again:
    nothing.

    It needs Triton and no GPU. Exit status 1 when a kernel was compiled again.
    """
    if identity.triton_dir() is None:
        raise RecordingError(
            f"Triton is not installed, so nothing can be compiled: {install('triton')}"
        )
    if report_path is not None:
        check_output(report_path)
    folder = Path(tempfile.gettempdir(), f"triton-bundler-demo-{secrets.token_hex(8)}")

    def run() -> int:
        with os_errors(folder, "make"):
            folder.mkdir(0o700)
        return _Demo(screen, folder, targets, keep_dir, report_path).run()

    if not keep_dir:
        return cleaned_up(run, lambda: shutil.rmtree(folder, ignore_errors=True))
    try:
        return run()
    except BundlerError as error:
        error.facts["directory"] = str(folder)
        screen.line(f"kept in {folder}")
        raise


@dataclass(frozen=True)
class _Demo:
    """The steps, in a folder of their own."""

    screen: Screen
    folder: Path
    targets: tuple[str, ...]
    kept: bool
    report_path: str | None

    @property
    def bundle_path(self) -> Path:
        """Where the first process writes the bundle."""
        return self.folder / "demo.tbundle"

    def run(self) -> int:
        """Record, move, count; returns the exit status."""
        self.record()
        watch = PtxasWatch(self.folder)
        with Bundle.load(self.bundle_path) as bundle:
            restored = self.restore(bundle)
            heard = self.compile_again(watch)
            return self.conclude(bundle, restored, heard, watch)

    def record(self) -> None:
        """Compile in a first process, under a recording."""
        where = ", ".join(self.targets)
        seconds = self.in_child(
            "record",
            self.bundle_path,
            environment(self.folder / "first"),
            f"compiling for {where}",
        )
        size = self.bundle_path.stat().st_size
        self.screen.line(
            f"1  compiled for {where} in a first process, in {wording.duration(seconds)}; "
            f"recorded into {self.bundle_path.name}, {wording.size(size)}"
        )

    def restore(self, bundle: Bundle) -> int:
        """Remove the first directory, restore into a second, and return how many kernels
        are there.
        """
        shutil.rmtree(self.folder / "first")
        self.screen.line("2  deleted the cache directory of the first process")
        # Everything: the kernels are for targets that this machine need not have.
        report = bundler.restore(bundle, self.folder / "second", only="all")
        self.screen.line(
            f"3  restored {wording.count(report.usable, 'kernel')} into another directory, in "
            f"{wording.duration(report.seconds)}"
        )
        return report.usable

    def compile_again(self, watch: PtxasWatch) -> list[dict[str, Any]]:
        """Compile the same kernels in a second process that finds the restored directory, and a
        ptxas that refuses; returns what Triton's listener said of each compile call.
        """
        output = self.folder / "heard.json"
        env = environment(self.folder / "second", watch.variables)
        seconds = self.in_child("check", output, env, "compiling again")
        heard: list[dict[str, Any]] = json.loads(output.read_bytes())
        hits = sum(one["hit"] for one in heard)
        self.screen.line(
            f"4  compiled the same kernels in a second process, in {wording.duration(seconds)}:"
            f" Triton's own listener heard {wording.count(hits, 'hit')} and"
            f" {wording.count(len(heard) - hits, 'compile')}"
        )
        if any(target.startswith("cuda") for target in self.targets):
            watch.require_asked()
            self.screen.line(
                "   its ptxas would have refused: it was asked to assemble"
                f" {wording.count(watch.calls()[1], 'time')}"
            )
        if any(target.startswith("hip") for target in self.targets):
            self.screen.line(
                "   kernels for hip are assembled inside the process, so for them the listener"
                " alone counts"
            )
        return heard

    def in_child(self, step: str, output: Path, env: dict[str, str], what: str) -> float:
        """Run one of the two processes and return how many seconds it took.

        Raises:
            BundlerError: it failed, with the line in which a compiler says why, or the last one.
        """
        started = time.monotonic()
        arguments = [str(PROGRAM), step, str(output), str(KERNELS), *self.targets]
        with self.screen.progress(what) as bar, tempfile.TemporaryFile() as errors:
            # -P: files beside the program must not be importable by their short names.
            with subprocess.Popen(
                [sys.executable, "-P", *arguments],
                env=env,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as child:
                assert child.stdout is not None
                try:
                    for line in child.stdout:
                        bar.advance(f"{what}: {line.strip()}")
                except BaseException:
                    child.kill()  # after Ctrl-C nobody needs what it compiles
                    raise
            if child.returncode:
                errors.seek(0)
                text = errors.read().decode("utf-8", "replace").strip()
                said = text.splitlines() or ["it said nothing"]
                raise BundlerError(
                    f"{what} failed with status {child.returncode}: {telling_line(text) or said[-1]}",
                    status=child.returncode,
                    stderr=said,
                )
        return time.monotonic() - started

    def conclude(
        self, bundle: Bundle, restored: int, heard: list[dict[str, Any]], watch: PtxasWatch
    ) -> int:
        """Print the table and the count; returns the exit status."""
        found = {kernel_key(one["hash"]): one["ms"] for one in heard if one["hit"]}
        recorded = {kernel.key for kernel in bundle.kernels}
        compiled = {kernel_key(one["hash"]) for one in heard if not one["hit"]}
        compiled |= recorded - found.keys()
        total = len(recorded | found.keys() | compiled)
        rows = [_facts(bundle, kernel, found.get(kernel.key)) for kernel in bundle.kernels]
        warps = [str(kernel.spec.num_warps) for kernel in bundle.kernels]
        self.screen.line()
        self.screen.table(COLUMNS, map(_cells, rows, warps))
        self.screen.line()
        if rows and found:
            self.screen.line(
                f"in all {sum(row['compile_ms'] or 0 for row in rows):,.0f} ms to compile and "
                f"{sum(found.values()):,.0f} ms to find; with {heard[0]['name']}, the first kernel"
                " of each process, Triton also read its own files, whose hash is part of every key"
            )
        versions, assembled = watch.calls()
        size = self.bundle_path.stat().st_size
        if self.report_path is not None:
            page = report_page((self.bundle_path.name, bundle), sources=SourceFolder(FOLDER))
            replace_content(self.report_path, page.text.encode())
        self.tell_where()
        hits = sum(one["hit"] for one in heard)
        self.screen.finish(
            {
                "recompiled": len(compiled),
                "total": total,
                "targets": list(self.targets),
                "digest": bundle.digest,
                "size_bytes": size,
                "restored": restored,
                "hits": hits,
                "compiles": len(heard) - hits,
                "ptxas": {"asked_for_version": versions, "asked_to_assemble": assembled},
                "kernels": rows,
                "directory": str(self.folder) if self.kept else None,
                "report": self.report_path,
            }
        )
        self.screen.done(f"recompiled {len(compiled)} of {wording.count(total, 'kernel')}")
        if self.report_path is not None:
            self.screen.line(f"open in a browser: {os.path.abspath(self.report_path)}")
        return PROBLEM if compiled or not total else FINE

    def tell_where(self) -> None:
        """Say where the bundle is, or delete it and say that it is gone."""
        if self.kept:
            self.screen.line(
                f"kept {self.bundle_path.name} and the restored directory in {self.folder}"
            )
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.exists():
            self.screen.warn(f"{self.folder} could not be deleted")
        else:
            self.screen.line(
                f"deleted {self.bundle_path.name} and the restored directory; --keep-dir keeps them"
            )


def _facts(bundle: Bundle, kernel: Kernel, hit_ms: float | None) -> dict[str, Any]:
    seen = bundle.observed.kernels.get(kernel.key)
    return {
        **wording.kernel_facts(kernel),
        "binary_bytes": kernel.binary.size,
        "compile_ms": wording.milliseconds(seen.times_us) if seen is not None else None,
        "hit_ms": None if hit_ms is None else round(hit_ms, 3),
    }


def _cells(row: dict[str, Any], warps: str) -> tuple[str, ...]:
    return (
        row["name"],
        row["target"],
        warps,
        wording.size(row["binary_bytes"]),
        "-" if row["compile_ms"] is None else f"{row['compile_ms']:,.0f} ms",
        "compiled" if row["hit_ms"] is None else f"{row['hit_ms']:.1f} ms",
    )


def environment(cache_dir: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child that compiles into `cache_dir`."""
    quiet = {
        name: value
        for name, value in os.environ.items()
        if name not in _DISTURBING and not name.startswith("TRITON_BUNDLER_")
    }
    return quiet | {"TRITON_CACHE_DIR": str(cache_dir)} | dict(more or {})


class PtxasWatch:
    """Programs in place of Triton's ptxas that tell the real one's version, which is part of each
    key, and assemble nothing.

    Args:
        folder: an existing directory for the programs and for the log of their calls.
    """

    def __init__(self, folder: Path) -> None:
        self._log = folder / "ptxas.log"
        self.variables: dict[str, str] = {}
        for variable, program in PTXAS.items():
            # What the first process used: the one that the environment names, or Triton's own.
            real = next((one for one in candidates(program) if os.access(one, os.X_OK)), None)
            if real is not None:
                wrapper = folder / program
                wrapper.write_text(
                    _WRAPPER.format(
                        real=shlex.quote(os.path.abspath(real)),
                        log=shlex.quote(str(self._log)),
                        version=_VERSION,
                        assemble=_ASSEMBLE,
                    ),
                    encoding="utf-8",
                )
                wrapper.chmod(0o755)
                self.variables[variable] = str(wrapper)

    def calls(self) -> tuple[int, int]:
        """Return how often a version was asked for, and how often something was to be assembled."""
        lines = self._log.read_text(encoding="utf-8").split() if self._log.exists() else []
        return lines.count(_VERSION), lines.count(_ASSEMBLE)

    def require_asked(self) -> None:
        """Raise if Triton never asked: then another ptxas was in use, and the count would prove
        nothing.
        """
        if not self.calls()[0]:
            raise ToolchainMismatch(
                "the second process did not ask our ptxas for its version, so it was not watched;"
                f" programs may not be executed in {self._log.parent}: set TMPDIR to a directory"
                " where they may"
            )
