# SPDX-License-Identifier: Apache-2.0
"""A program: compares our rules of specialization, and the options that we take for defaults, with
those of the Triton there is.

Prints each difference; exits with 1 when there is one.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compile_calls

compile_calls.stand_in_for_torch()

import triton.language as tl  # noqa: E402
from triton._utils import type_canonicalisation_dict  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from bundler.errors import CannotLaunchStatically  # noqa: E402
from bundler.runtime.launch.argument_types import TYPE_NAMES, specialize  # noqa: E402
from bundler.runtime.launch.specialization_match import DEFAULT_OPTIONS  # noqa: E402
from bundler.toolchain.keytext import launch_facts  # noqa: E402

REFUSED = "refused"


def plain(pair):
    """Make our pair and Triton's comparable: what Triton keeps of a constant is its hash, or
    itself.
    """
    kind, key = pair
    if isinstance(key, tuple) and isinstance(kind, tuple):
        return kind, tuple(plain(inner)[1] for inner in zip(kind, key, strict=True))
    key = getattr(key, "cache_key", key)
    letters = isinstance(key, str) and set(key) <= {"D", "S"}
    return kind, key if kind == "constexpr" or letters else None


def of_triton(binder, function, parameter, value):
    arguments = {other.name: value if other is parameter else 3 for other in function.params}
    try:
        return plain(binder(**arguments)[1][parameter.num])
    except (TypeError, OverflowError, KeyError):
        return REFUSED


def ours(argument, value, backend):
    try:
        seen = specialize(value, argument, backend)
    except CannotLaunchStatically:
        return REFUSED
    return plain((seen.type, seen.key))


def values(calls, kernels):
    return [
        0,
        1,
        2,
        16,
        -16,
        -1,
        2**31 - 1,
        2**31,
        -(2**31),
        -(2**31) - 1,
        2**63 - 1,
        2**63,
        2**64 - 1,
        2**64 - 16,
        True,
        False,
        1.0,
        2.5,
        None,
        (),
        (1,),
        (1, 2.5, (None, 16)),
        calls.X,
        calls.ODD,
        calls.HALF,
        calls.HUGE,
        calls.Tensor("bool"),
        (calls.X, 3),
        tl.constexpr(3),
        kernels.double,
        calls.Tensor(address=0),
        "word",
        [1],
    ]


def facts_of(function):
    class Source:
        fn, signature = function, {}

    return launch_facts(Source, None).arguments


def compare(target, calls, kernels):
    name = target.partition(":")[0]
    driver.set_active(compile_calls.fake_driver(target))
    for function in kernels.FUNCTIONS.values():
        function.device_caches.clear()
        binder = function.device_caches[0][-1]
        for parameter, argument in zip(function.params, facts_of(function), strict=True):
            for value in values(calls, kernels):
                pair = of_triton(binder, function, parameter, value), ours(argument, value, name)
                if pair[0] != pair[1]:
                    yield (
                        f"{target} {function.__name__}.{argument.name}: {value!r}: Triton"
                        f" {pair[0]}, we {pair[1]}"
                    )
    options = vars(
        make_backend(compile_calls.fake_driver(target).get_current_target()).parse_options({})
    )
    for option, default in DEFAULT_OPTIONS[name].items():
        if options.get(option, default) != default:
            yield f"{target} option {option}: Triton {options[option]!r}, we {default!r}"


def main():
    calls, kernels = compile_calls.load("launch_calls"), compile_calls.load("launch_kernels")
    found = [
        f"type {name}"
        for name in type_canonicalisation_dict
        if TYPE_NAMES.get(name) != type_canonicalisation_dict[name]
    ]
    for target in compile_calls.TARGETS:
        found += compare(target, calls, kernels)
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
