# SPDX-License-Identifier: Apache-2.0
"""Compile kernels in this process and in two children, as training programs do. It needs triton, and no GPU.

One child is a program started with ``subprocess``, one is the worker of a ``multiprocessing`` pool; each compiles other kernels
than its parent. Each process prints one line that says what it compiled:

    python examples/child.py
    python examples/child.py --target hip:gfx942
"""

import argparse
import multiprocessing
import os
import subprocess
import sys

from kernels import compile_one

PARENT_KERNEL = "softmax"
PROGRAM_KERNEL = "row_sum"
POOL_KERNELS = ("gelu", "swiglu")


def compile_and_say(who: str, names: tuple[str, ...], target: str) -> str:
    """Compile the named kernels in this process and return the line to print."""
    compiled = [kernel for name in names for kernel in compile_one(name, target)]
    return (
        f"{who} (process {os.getpid()}): compiled {len(compiled)} for {target}: {', '.join(names)}"
    )


def in_a_program(target: str) -> None:
    """Start this file again as a program of its own; the child prints its line itself."""
    subprocess.run([sys.executable, __file__, "--child", "--target", target], check=True)


def in_a_pool(target: str) -> str:
    """Compile in a pool's one worker, which is spawned, not forked, and is killed when the pool closes."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(compile_and_say, ("pool worker", POOL_KERNELS, target))


def main() -> None:
    """Compile in this process, then in a child of each kind."""
    parser = argparse.ArgumentParser(
        description="Compile Triton kernels in this process and in two children."
    )
    parser.add_argument(
        "--target",
        default="cuda:90",
        help="what to compile for, e.g. hip:gfx942 (default: %(default)s)",
    )
    parser.add_argument("--child", action="store_true", help="be the child program")
    options = parser.parse_args()
    if options.child:
        print(compile_and_say("child program", (PROGRAM_KERNEL,), options.target), flush=True)
        return
    print(compile_and_say("parent", (PARENT_KERNEL,), options.target), flush=True)
    in_a_program(options.target)
    print(in_a_pool(options.target), flush=True)


if __name__ == "__main__":
    main()
