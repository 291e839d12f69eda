# SPDX-License-Identifier: Apache-2.0
"""`run_program`, `PtxasWatch`: the demo's two child processes: their environment, their end, and the ptxas that refuses to assemble.

`demo.py` is the caller.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bundler.errors import BundlerError, ToolchainMismatch
from bundler.toolchain import identity
from bundler.toolchain.diagnostics import telling_line

# Triton's settings that would make it compile whatever the cache holds, look elsewhere, or not compile at all.
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


def environment(cache_dir: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child that compiles into `cache_dir`."""
    quiet = {name: value for name, value in os.environ.items()
             if name not in _DISTURBING and not name.startswith("TRITON_BUNDLER_")}  # fmt: skip
    return quiet | {"TRITON_CACHE_DIR": str(cache_dir)} | dict(more or {})


class PtxasWatch:
    """Programs in place of Triton's ptxas that tell the real one's version, which is part of each key, and assemble nothing.

    Args:
        folder: an existing directory for the programs and for the log of their calls.
    """

    def __init__(self, folder: Path) -> None:
        self._log = folder / "ptxas.log"
        self.variables: dict[str, str] = {}
        for variable, program in PTXAS.items():
            real = _real(variable, program)
            if real is not None:
                wrapper = folder / program
                wrapper.write_text(
                    _WRAPPER.format(
                        real=shlex.quote(real),
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
        """Raise if Triton never asked: then another ptxas was in use, and the count would prove nothing."""
        if not self.calls()[0]:
            raise ToolchainMismatch(
                "the second process did not ask our ptxas for its version, so it was not watched; programs may not be "
                f"executed in {self._log.parent}: set TMPDIR to a directory where they may"
            )


def _real(variable: str, program: str) -> str | None:
    """Return the ptxas that the first process used: the one the environment names, or Triton's own."""
    own = os.path.join(identity.triton_dir() or "", "backends", "nvidia", "bin", program)
    for path in (os.environ.get(variable), own):
        if path and os.access(path, os.X_OK):
            return os.path.abspath(path)
    return None


def run_program(
    program: Path,
    arguments: Sequence[str],
    env: Mapping[str, str],
    tell: Callable[[str], None],
    what: str,
) -> None:
    """Run one of the demo's programs; `tell` gets each line that it prints.

    Raises:
        BundlerError: it failed, with the line in which a compiler says why, or the last one.
    """
    with tempfile.TemporaryFile() as errors:
        # -P: files beside the program must not be importable by their short names.
        with subprocess.Popen(
            [sys.executable, "-P", str(program), *arguments], env=dict(env), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child:  # fmt: skip
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    tell(line.strip())
            except BaseException:
                child.kill()  # after Ctrl-C nobody needs what it compiles
                raise
        if child.returncode:
            errors.seek(0)
            text = errors.read().decode("utf-8", "replace").strip()
            said = text.splitlines() or ["it said nothing"]
            raise BundlerError(
                f"{what} failed with status {child.returncode}: {telling_line(text) or said[-1]}",
                status=child.returncode, stderr=said,
            )  # fmt: skip
