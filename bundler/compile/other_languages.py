# SPDX-License-Identifier: Apache-2.0
"""`OtherLanguages`: what torch's compile service takes beside Triton, each refused by name.

`CompileService` has these methods, as torch's `AsyncCompile` has them, so that generated code that
asks for another compiler learns what this package does not compile.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from bundler.errors import UnsupportedLanguage

# Method of torch's service -> what it compiles.
LANGUAGES = {
    "cpp": "C++ for the CPU",
    "cpp_pybinding": "C++ for the CPU",
    "cuda": "C++ with CUTLASS for CUDA",
    "cutlass": "C++ with CUTLASS",
    "xpu": "C++ with CUTLASS for Intel's GPUs",
    "rocm": "C++ with Composable Kernel for ROCm",
    "halide": "Halide",
    "cutedsl": "CuTe DSL",
    "pallas": "Pallas",
    "nv_universal_gemm": "NVIDIA's universal GEMM",
    "metal": "Metal",
}


def refusal(method: str, where: str) -> UnsupportedLanguage:
    """Return the error for a request that names a compiler which this package lacks.

    Args:
        method: of torch's service.
        where: what asks for it.
    """
    language = LANGUAGES[method]
    return UnsupportedLanguage(
        f"{where}: {method} compiles {language}: expected a Triton kernel, the only kind that this"
        " package compiles, bundles and launches; have torch's own service compile it, or choose a"
        " backend of Triton kernels for this graph",
        language=language,
        method=method,
    )


class OtherLanguages:
    """The methods of torch's service that this one has no compiler for: each raises
    `UnsupportedLanguage`, whatever it is given.
    """

    # Hidden from type checkers: to them it would make every misspelt name an `Any`.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in LANGUAGES:
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            return partial(_refuse, name)


def _refuse(method: str, *_: Any, **__: Any) -> None:
    raise refusal(method, "compile service")
