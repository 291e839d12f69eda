# SPDX-License-Identifier: Apache-2.0
"""`chosen_options`: the options of a recorded compile that were chosen: those that differ from the
defaults of its target.

All other options follow from the target, and another target has its own: architecture, libraries,
lists of fp8 types.

Retargeting passes the chosen ones to the compile for another target.  Tuners ask which options
there are: `options_of` a target, `options_anywhere`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from bundler.format.constant_values import Value
from bundler.format.entries import Target
from bundler.format.launch_spec import LaunchFacts, Named
from bundler.toolchain.compile_call import decode_value
from bundler.toolchain.declared_target import triton_target
from bundler.toolchain.keys.encoding import encode_value, portable_value

# Facts about a target, whatever a recording says of them.
_DERIVED_TEXT = """
    allowed_dot_input_precisions arch backend_name base_arch deprecated_fp8_dot_operand_dtypes
    extern_libs max_num_imprecise_acc_default ptx_version supported_fp8_dtypes warp_size
"""
_DERIVED = frozenset(_DERIVED_TEXT.split())

# One target of each backend; which options a backend has does not depend on the architecture.
_OF_EACH_BACKEND = (Target("cuda", "90", 32), Target("hip", "gfx942", 64))

# Options of the compiler whose value differs by target without a note to the user.
_OF_THE_COMPILER = frozenset({"default_dot_input_precision"})


def chosen_named(facts: LaunchFacts, recorded: Target) -> Named:
    """Return the options of a recorded compile that differ from the defaults of its target, as they
    are encoded.
    """
    usual = _defaults(recorded)
    return tuple(
        (name, value)
        for name, value in facts.options
        if name not in _DERIVED and _as_tuple(value) != usual.get(name)
    )


def chosen_options(
    facts: LaunchFacts, recorded: Target, target: Target
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (options to compile with for `target`, names of those chosen that it does not
    have).
    """
    known = _defaults(target)
    chosen = {name: decode_value(_as_tuple(value)) for name, value in chosen_named(facts, recorded)}
    return {name: value for name, value in chosen.items() if name in known}, tuple(
        sorted(chosen.keys() - known.keys())
    )


def other_defaults(
    facts: LaunchFacts, recorded: Target, target: Target
) -> tuple[tuple[str, Any, Any], ...]:
    """Return (name, recorded value, new value) of options that were at their default, and whose
    default is another here.
    """
    before, after = _defaults(recorded), _defaults(target)
    return tuple(
        (name, value.plain(), after[name].plain())
        for name, value in facts.options
        if name not in _DERIVED | _OF_THE_COMPILER
        and name in after
        and _as_tuple(value) == before.get(name) != after[name]
    )


def options_of(target: Target) -> frozenset[str]:
    """Return the names of the options that a target's backend has."""
    return frozenset(_defaults(target))


def float8_types(target: Target) -> frozenset[str]:
    """Return the 8-bit floats that a target's compiler has, as signatures name them: fp8e5 and so
    on.
    """
    return frozenset(_unchosen(target).supported_fp8_dtypes)


def options_anywhere() -> frozenset[str]:
    """Return the names of the options that any backend has; none where Triton was not imported."""
    if "triton" not in sys.modules:
        return frozenset()
    return frozenset().union(*map(options_of, _OF_EACH_BACKEND))


def encoded(options: dict[str, Any]) -> Named:
    """Return options as a job has them."""
    return tuple((name, encode_value(value)) for name, value in options.items())


@functools.lru_cache(maxsize=32)
def _defaults(target: Target) -> dict[str, Value]:
    """Return every option that a target's backend has, with its default."""
    fields = vars(_unchosen(target)).items()
    return {name: _as_tuple(encode_value(portable_value(value))) for name, value in fields}


def _unchosen(target: Target) -> Any:
    """Return the options of a compile of which none was chosen."""
    from triton.compiler.compiler import make_backend

    return make_backend(triton_target(target)).parse_options({})


def _as_tuple(value: Value) -> Value:
    """Undo what JSON did to tuples, which options are made of."""
    if value.tag in {"list", "tuple"}:
        return Value("tuple", tuple(map(_as_tuple, value.payload)))
    return value
