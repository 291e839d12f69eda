# SPDX-License-Identifier: Apache-2.0
"""`with_descriptors`: a call with tensor descriptors in the place of the pointers that a function
declares to be some (`format/host_descriptors.py`).

Compiles, Triton's interpreter and launches by Triton see descriptors; our own launches take what
the caller passed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from bundler.format.host_descriptors import PARAMETER, Declared, declared
from bundler.toolchain.argument_specs import tensor_descriptor


def with_descriptors(function: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's keywords with descriptors, of tensors or of what stands in for them; as they
    are where the function takes none, or has them already.

    Args:
        function: a JIT function, or an interpreted one.
        call: every argument by name, and options.
    """
    found = declared_by(function)
    if found is None or not call.get(found.condition):
        return dict(call)
    return dict(call) | {
        name: tensor_descriptor(
            call[name], shape, strides, [call[n] if isinstance(n, str) else n for n in block]
        )
        for name, shape, strides, block in found.descriptors
        if not hasattr(call[name], "block_shape")
    }


def declared_by(function: Any) -> Declared | None:
    """Return which pointers a function declares to be descriptors, None where it declares none."""
    if PARAMETER not in function.arg_names:
        return None
    parameter = inspect.signature(function.fn).parameters[PARAMETER]
    return declared(parameter.default)
