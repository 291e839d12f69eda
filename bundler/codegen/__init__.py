# SPDX-License-Identifier: Apache-2.0
"""The kernel generator: from a PyTorch function to Triton sources that can be built for any GPU,
and a program that launches them.

    program = bundler.codegen.generate(function, [x, weight])
    bundle = program.build(["cuda:90", "hip:gfx942"])

`docs/codegen.md` says how the machine works. What is public is listed here; nothing of it imports
torch or Triton before `generate` is called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bundler.codegen.program import (
        FallbackCall,
        GenerateOptions,
        Program,
        build_programs,
        generate,
    )
    from bundler.codegen.program_policy import ProgramPolicy

__all__ = [
    "FallbackCall",
    "GenerateOptions",
    "Program",
    "ProgramPolicy",
    "build_programs",
    "generate",
]

# Hidden from type checkers: to them it would make every misspelt name an `Any`.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("bundler.codegen.program"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
