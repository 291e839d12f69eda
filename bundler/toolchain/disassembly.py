# SPDX-License-Identifier: Apache-2.0
"""`disassemble`: the machine code of a device binary as text, by the disassembler that Triton or
the GPU's vendor installed.

`triton-bundler inspect --show sass` calls it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from bundler.errors import NotFound, ToolchainMismatch
from bundler.format.entries import Target
from bundler.format.summary import printable
from bundler.toolchain.ptxas import candidates

# A large kernel takes seconds.  The binary may come from anybody: a tool that hangs on it must not
# hang this process.
_TIMEOUT_S = 120
_SAID_CHARACTERS = 300
# Triton's wheel for NVIDIA brings both.  The first prints code alone; the second finds the first
# beside itself.
_CUDA = (("nvdisasm", ("--print-code",)), ("cuobjdump", ("-sass",)))
_FIXES = {
    "cuda": (
        "install triton, whose wheel brings nvdisasm and cuobjdump, or put the CUDA toolkit's on"
        " PATH"
    ),
    "hip": (
        "install ROCm, or an LLVM that knows this GPU, and put its llvm-objdump on PATH; or look at"
        " the kernel's amdgcn text"
    ),
}


def disassemble(binary: bytes, target: Target) -> str:
    """Return the machine code of a device binary as text.

    Args:
        binary: a cubin or an hsaco.
        target: what it was compiled for.

    Raises:
        NotFound: there is no disassembler for this target here; it says which to install.
        ToolchainMismatch: the one that is here cannot read the binary.
    """
    tried, refusal = [], ""
    for name, paths, arguments in _tools(target):
        tried.append(name)
        there = (path for path in paths if os.access(path, os.X_OK))
        path = next(there, None) or shutil.which(name)
        if path is None:
            continue
        text, refusal = _run([path, *arguments], binary)
        if text:
            return text
    if not tried:
        raise NotFound(f"no disassembler is known for {target}", target=str(target))
    fix = _FIXES[target.backend]
    if refusal:
        raise ToolchainMismatch(
            f"a binary for {target} cannot be disassembled here ({refusal}): {fix}",
            target=str(target),
        )
    raise NotFound(
        f"{' and '.join(tried)} {'is' if len(tried) == 1 else 'are'} not here: {fix}",
        target=str(target),
    )


def _tools(target: Target) -> Iterator[tuple[str, list[str], tuple[str, ...]]]:
    """Yield (program, where it may be beside PATH, its arguments), the best first."""
    if target.backend == "cuda":
        for name, arguments in _CUDA:
            yield name, candidates(name), arguments
    elif target.backend == "hip":
        root = os.environ.get("ROCM_PATH") or "/opt/rocm"
        path = os.path.join(root, "llvm", "bin", "llvm-objdump")
        for_amd = ("--disassemble", "--triple=amdgcn-amd-amdhsa", f"--mcpu={target.arch}")
        yield "llvm-objdump", [path], for_amd


def _run(command: list[str], binary: bytes) -> tuple[str, str]:
    """Return what a disassembler printed, and if that is nothing, why."""
    name = os.path.basename(command[0])
    with tempfile.NamedTemporaryFile(prefix="triton-bundler-", suffix=".bin") as file:
        file.write(binary)
        file.flush()
        try:
            done = subprocess.run(
                [*command, file.name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return "", f"{name}: {error}"
        text = done.stderr.decode("utf-8", "replace").replace(file.name, "the binary")
    if done.returncode or not done.stdout.strip():
        # The line with the error: warnings come before it, and the frames of a crash after it.
        said = text.strip().splitlines() or ["it printed nothing"]
        worst = [line for line in said if re.search("error|fatal", line, re.IGNORECASE)]
        return "", f"{name}: {printable((worst or said)[0])[:_SAID_CHARACTERS]}"
    return done.stdout.decode("utf-8", "replace"), ""
