# SPDX-License-Identifier: Apache-2.0
"""`show_resources`: what kernels take of a GPU, read from their binaries, as a table.

`inspection.py` calls it for `inspect --resources`.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from bundler.cli import wording
from bundler.cli.command import FINE, PROBLEM
from bundler.cli.terminal import Column, Row, Screen
from bundler.errors import DigestMismatch, FormatError
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel
from bundler.lifecycle.binary_resources import BinaryResources, read_resources

RESOURCES = (
    Column("name", folds=True),
    Column("target"),
    Column("warps", True, needs=80),
    Column("registers", True),
    Column("scalars", True, needs=125),
    Column("spills", True),
    Column("stack", True),
    Column("static", True),
    Column("dynamic", True),
    Column("barriers", True, needs=150),
    Column("constants", True, needs=160),
    Column("binary", True, needs=90),
    Column("key", needs=110),
)
_UNKNOWN = "-"


def show_resources(screen: Screen, bundle: Bundle, kernels: list[Kernel], source: str) -> int:
    """Print a row for each kernel, and say which binaries cannot be read; those have exit status 1."""
    with screen.progress(f"reading binaries of {source}", len(kernels)) as bar:
        found = []
        for kernel in kernels:
            bar.advance()
            found.append(_resources_of(bundle, kernel))
    if kernels:
        screen.table(
            RESOURCES,
            [_row(kernel, known) for kernel, (known, _) in zip(kernels, found, strict=True)],
        )
        screen.line()
        screen.line(
            "a thread: registers, spills, bytes of stack; a block: bytes of shared memory, static and dynamic; - is not known"
        )
        screen.line()
    problems = [problem for _, problem in found if problem is not None]
    if problems:
        screen.complain(
            f"the binaries of {wording.count(len(problems), 'kernel')} cannot be read: {problems[0]}; fetch the bundle again"
        )
    screen.done(wording.count(len(kernels), "kernel"))
    facts = [_facts(kernel, *pair) for kernel, pair in zip(kernels, found, strict=True)]
    screen.finish({"path": source, "digest": bundle.digest, "kernels": facts})
    return PROBLEM if problems else FINE


def _resources_of(bundle: Bundle, kernel: Kernel) -> tuple[BinaryResources | None, str | None]:
    """Return what the binary says, or why it cannot be read."""
    try:
        return read_resources(bundle.read(kernel.binary), kernel.spec.entry), None
    except (FormatError, DigestMismatch) as error:
        return None, error.message


def _facts(kernel: Kernel, known: BinaryResources | None, problem: str | None) -> dict[str, Any]:
    return {
        "key": kernel.key,
        "name": kernel.name,
        "target": str(kernel.target),
        "warps": kernel.spec.num_warps,
        "dynamic_shared_bytes": kernel.spec.shared_bytes,
        "binary_bytes": kernel.binary.size,
        "resources": None
        if known is None
        else asdict(known) | {"constant_bytes": dict(known.constant_bytes)},
        "problem": problem,
    }


def _row(kernel: Kernel, known: BinaryResources | None) -> Row:
    banks = [size for _, size in known.constant_bytes] if known is not None else []

    def told(name: str) -> str:
        figure = getattr(known, name, None)
        return _UNKNOWN if figure is None else str(figure)

    return (
        kernel.name,
        str(kernel.target),
        str(kernel.spec.num_warps),
        told("registers"),
        told("scalar_registers"),
        told("spilled_registers"),
        told("stack_bytes"),
        told("shared_bytes"),
        str(kernel.spec.shared_bytes),
        told("barriers"),
        str(sum(banks)) if banks else _UNKNOWN,
        wording.size(kernel.binary.size),
        wording.short_key(kernel.key),
    )
