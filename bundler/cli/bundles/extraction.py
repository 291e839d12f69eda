# SPDX-License-Identifier: Apache-2.0
"""The command `extract`, and `inspect --show`: a kernel's files, all into a directory, or one as
text on the terminal.

`app.py` lists `extract`; `inspection.py` calls `show_text`.  `disassemble` gives the machine code
of a device binary as text, by the disassembler that Triton or the GPU's vendor installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import click

from bundler.cli import wording
from bundler.cli.command import KERNEL_HELP, chosen_kernels, command, flag, option
from bundler.cli.terminal import Screen
from bundler.errors import ConfigError, NotFound, ToolchainMismatch
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import os_errors
from bundler.format.entries import Artifact, Kernel, Target
from bundler.format.summary import printable
from bundler.images.bundle_sources import open_bundle
from bundler.toolchain.ptxas import candidates

SASS = "sass"
KINDS_SHOWN = ("source", "ttir", "ttgir", "llir", "ptx", "amdgcn", SASS)
_FILES_SHOWN = 6


def show_text(screen: Screen, bundle: Bundle, kernel: Kernel, kind: str, source: str) -> None:
    """Print the file of one kind of a kernel; `sass` is its device binary, disassembled.

    Raises:
        NotFound: the bundle does not have it, and what it has; or there is no disassembler here.
        FormatError, DigestMismatch: the stored bytes are damaged.
        ToolchainMismatch: the disassembler that is here cannot read the binary.
    """
    artifact = kernel.binary if kind == SASS else _of_kind(kernel, kind, source)
    data = bundle.read(artifact)
    if kind == SASS:
        text = disassemble(data, kernel.target)
    else:
        text = data.decode("utf-8", "backslashreplace")
    screen.text(text)
    screen.finish(
        {
            **wording.kernel_facts(kernel),
            "kind": kind,
            "file": artifact.filename,
            "text": text,
        }
    )


def _of_kind(kernel: Kernel, kind: str, source: str) -> Artifact:
    kinds = {artifact.kind: artifact for artifact in reversed(kernel.artifacts)}
    if kind in kinds:
        return kinds[kind]
    shown = [*(name for name in KINDS_SHOWN if name in kinds), SASS]
    why = ""
    if kernel.artifacts == kernel.launch_set:
        why = "; it holds what a launch needs alone (--keep launch)"
    raise NotFound(
        f"{kernel.name} ({wording.short_key(kernel.key)}) has no {kind} in {source}{why}; it can be"
        f" shown as {', '.join(shown)}",
        key=kernel.key,
        kind=kind,
        kinds=[artifact.kind for artifact in kernel.artifacts],
    )


@command(
    "Take kernels' files out of a bundle.",
    "extract model.tbundle --kernel CZHLNR6H -o matmul",
    "extract model.tbundle --kernel 'add*' -o kernels",
)
@click.argument("bundle")
@option("--kernel K", "wanted", KERNEL_HELP, required=True)
@option(
    "-o", "--output DIR", "The directory to write into; made if it is not there.", required=True
)
@flag("--force", "Replace files that are there.")
def extract(screen: Screen, bundle: str, wanted: str, output: str, force: bool) -> None:
    """Write the files of one kernel of BUNDLE to DIR, or of several, each to a directory named by
    its key.

    They are the bytes that the bundle holds: binary, IR, metadata. A path of the machine that
    compiled stays a placeholder, such as [[triton_dir]]; `restore` puts this machine's in its
    place. Nothing is written when a file is damaged, or there already.
    """
    with open_bundle(bundle) as opened:
        kernels = chosen_kernels(opened.kernels, wanted, bundle)
        files = {
            artifact.filename
            if len(kernels) == 1
            else f"{kernel.key}/{artifact.filename}": artifact
            for kernel in kernels
            for artifact in kernel.artifacts
        }
        with (
            screen.progress(f"extracting to {output}", len(files)) as bar,
            _staged(Path(output), files, force=force) as stage,
        ):
            for name, artifact in files.items():
                path = stage / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(opened.read(artifact))
                bar.advance()
    screen.lines(
        [f"{name}  {wording.size(artifact.size)}" for name, artifact in files.items()],
        _FILES_SHOWN,
        "more file",
    )
    size = sum(artifact.size for artifact in files.values())
    number = wording.count(len(files), "file")
    of = wording.count(len(kernels), "kernel")
    screen.done(f"wrote {number} of {of} to {output}: {wording.size(size)}")
    screen.finish(
        {
            "directory": output,
            "kernels": list(map(wording.kernel_facts, kernels)),
            "size_bytes": size,
            "files": [os.path.join(output, name) for name in files],
        }
    )


def _check_absent(folder: Path, names: Iterable[str]) -> None:
    there = [name for name in names if os.path.lexists(folder / name)]
    if there:
        others = f" and {wording.count(len(there) - 1, 'other file')}" if len(there) > 1 else ""
        raise ConfigError(
            f"{folder / there[0]}{others} would be overwritten; give another directory, or --force",
            path=str(folder),
            files=there,
        )


@contextlib.contextmanager
def _staged(folder: Path, names: Collection[str], *, force: bool) -> Iterator[Path]:
    """Yield a directory to write files into, which are moved to `folder` when the block ends well,
    and else are removed.
    """
    if not force:
        _check_absent(folder, names)
    with os_errors(folder, "write"):
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        # Inside the target folder, so that a file is moved by one rename.
        stage = Path(tempfile.mkdtemp(prefix=".extract.", suffix=".tmp", dir=folder))
        try:
            yield stage
            if not force:
                _check_absent(folder, names)
            for name in names:
                (folder / name).parent.mkdir(exist_ok=True)
                os.replace(stage / name, folder / name)
        except BaseException:
            shutil.rmtree(stage)
            if made:
                with contextlib.suppress(OSError):  # something else is in it meanwhile
                    folder.rmdir()
            raise
        shutil.rmtree(stage)


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
