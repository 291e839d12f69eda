# SPDX-License-Identifier: Apache-2.0
"""`calls_of`: the launches that somebody captured or recorded in a bundle, as calls to compile; a guess only where there is none.

`compile.py --captured` uses it: exact calls of `triton-bundler capture`, or of a recording on a GPU, in place of guesses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from bundler.errors import BundlerError
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel
from bundler.toolchain import compile_call
from bundler.toolchain.imagined_arguments import recorded_arguments
from tools.clients.found_kernels import FoundKernel
from tools.clients.guesses import Call
from tools.clients.trials import CAPTURED, Calls


def calls_of(path: Path, otherwise: Calls) -> Calls:
    """Return a source of calls: those of the bundle's kernels, by function, and after them others."""
    recorded: dict[str, list[Call]] = defaultdict(list)
    with Bundle.load(path) as bundle:
        for kernel in bundle.kernels:
            for call in _call(kernel):
                recorded[kernel.name].append(call)

    def calls(kernel: FoundKernel) -> Iterator[tuple[str, Call]]:
        names = kernel.function.arg_names
        for specs, constants in recorded.get(kernel.function.__name__, ()):
            # Another function of that name has other arguments.
            if {*specs, *constants} <= set(names):
                yield CAPTURED, (specs, constants)
        yield from otherwise(kernel)

    return calls


def _call(kernel: Kernel) -> Iterator[Call]:
    try:
        specs, values = recorded_arguments(kernel.launch.require_facts())
        yield specs, {name: compile_call.decode_value(value) for name, value in values.items()}
    except BundlerError:
        return  # came by `pack`, or has a constant that only its program can make
