# SPDX-License-Identifier: Apache-2.0
"""`specialize`: asks Triton's JIT what it would hand to its compiler for a call on a declared
target.

The JIT's own `run` is called with stand-ins for arguments and stopped where it would compile, so
that types, attributes, constants and options, and with them the kernel's key, are its own on every
release.

Build plans use `specialize`, the tuner `specialize_call` and `stop_call` for calls with real
arguments; `jit_function` finds the function inside decorators.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from bundler.errors import ConfigError
from bundler.format.constant_values import Value
from bundler.format.entries import Target
from bundler.format.launch_spec import Named, Path
from bundler.toolchain import keytext
from bundler.toolchain.argument_specs import Spec, same_type, stand_in
from bundler.toolchain.declared_target import declared
from bundler.toolchain.descriptor_arguments import with_descriptors
from bundler.toolchain.encoding import encode_type, encode_value

# More decorators than any kernel has.
_WRAPPERS = 16
_ABSENT: Any = object()
_KNOWN_HASHES = "_bundler_hashes"


@dataclass(frozen=True)
class Specialized:
    """One compile that a call leads to, as data.

    `keys` are the kernel keys that a JIT may ask for, each with whether the functions that the
    kernel calls were hashed before it; None where that makes no difference.
    """

    signature: Named
    constants: tuple[tuple[Path, Value], ...]
    attributes: tuple[tuple[Path, Value], ...]
    options: Named
    keys: tuple[tuple[str, bool | None], ...]


@dataclass(frozen=True)
class CompileRequest:
    """What the JIT was about to compile: its own objects, for its source, its options and the
    target's backend.
    """

    source: Any
    options: Any
    backend: Any


def jit_function(kernel: Any) -> Any:
    """Return the JIT function inside an autotuned or heuristic kernel; None when there is none."""
    kind = _jit_class("JITFunction")
    for _ in range(_WRAPPERS):
        if kernel is None or isinstance(kernel, kind):
            return kernel
        kernel = getattr(kernel, "fn", None)
    return None


def is_kernel(value: Any) -> bool:
    """Whether a value is a JIT function, bare or inside an autotuner or heuristics; never imports
    Triton.
    """
    if "triton.runtime.jit" not in sys.modules or isinstance(value, type):
        return False
    kinds = (_jit_class("JITFunction"), _jit_class("KernelInterface"))
    # Kernels of `bundler.autotune` belong to no class of Triton's.
    known = isinstance(value, kinds) or (hasattr(value, "fn") and hasattr(value, "configs"))
    return known and jit_function(value) is not None


def _jit_class(name: str) -> Any:
    return getattr(sys.modules["triton.runtime.jit"], name)


def specialize(
    kernel: Any, arguments: Mapping[str, Spec], keywords: Mapping[str, Any], target: Target
) -> Iterator[Specialized]:
    """Yield what a call of `kernel` is compiled to: one compile, or one for each configuration of
    an autotuner.

    Args:
        kernel: a JIT function, perhaps autotuned or with heuristics, which run on the stand-ins.
        arguments: name -> spec (`arguments`).
        keywords: constants, and options such as `num_warps`.
        target: which GPU to declare.

    Raises:
        ConfigError: a name is no argument of the kernel, a spec is none, or Triton finds another
            type.
        Exception: whatever Triton, or a heuristic of the kernel, raises for such a call.
    """
    _check_names(jit_function(kernel), arguments)
    with declared(target):
        given = {name: stand_in(spec, name) for name, spec in arguments.items()} | dict(keywords)
        for call in _calls(kernel, given, target):
            stopped = stop_call(jit_function(kernel), call)
            # A descriptor takes the place of a pointer that was given.
            as_given = {n: spec for n, spec in arguments.items() if call.get(n) is given[n]}
            _check_types(stopped.source.signature, as_given)
            yield as_data(stopped)


def _calls(kernel: Any, call: dict[str, Any], target: Target) -> Iterator[dict[str, Any]]:
    """Yield the keywords with which the innermost function is called, as the wrappers around it
    would make them.
    """
    if isinstance(kernel, _jit_class("JITFunction")):
        yield with_descriptors(kernel, call)
    elif hasattr(kernel, "configs"):
        for config in kernel.configs:
            # `bundler.autotune` leaves options out that the target does not have; a tuner of
            # Triton's has the JIT refuse them.
            keywords_of = getattr(kernel, "keywords_of", None)
            chosen = config.all_kwargs() if keywords_of is None else keywords_of(config, target)
            given = sorted(call.keys() & chosen.keys())
            if given:
                raise ConfigError(
                    f"{', '.join(given)}: given, and chosen by the autotuner too; leave it to the"
                    " autotuner"
                )
            yield from _calls(kernel.fn, _prepared(config, {**call, **chosen}), target)
    elif hasattr(kernel, "values"):
        for name, heuristic in kernel.values.items():
            call = {**call, name: heuristic(call)}
        yield from _calls(kernel.fn, call, target)
    else:
        raise ConfigError(
            f"{kernel!r} is no JIT function, and neither autotuned nor with heuristics",
            got=repr(kernel),
        )


def _prepared(config: Any, call: dict[str, Any]) -> dict[str, Any]:
    # A hook that sets the block shape of a descriptor changes what is compiled, so it runs; other
    # hooks touch memory, and do not.
    descriptors = {
        name: replace(value) for name, value in call.items() if hasattr(value, "block_shape")
    }
    if config.pre_hook is None or not descriptors:
        return call
    call = {**call, **descriptors}
    config.pre_hook(call)
    return call


def stopped_run(
    function: Any, device_caches: Any, call: Mapping[str, Any]
) -> tuple[str, Any, int, Any, Any, Any]:
    """Run the JIT up to where it would compile, and return what it would hand on: the text under
    which it keeps the kernel, signature, device, constants, options, attributes.

    Args:
        function: a JIT function.
        device_caches: what the JIT has for each device.
        call: arguments and options by name.

    Raises:
        Exception: whatever Triton raises for such a call.
    """
    heard: list[tuple[str, Any, int, Any, Any, Any]] = []
    # A copy, since another thread may launch the function meanwhile, and its launch would silently
    # do nothing.
    copied: Any = copy.copy(function)
    # where the JIT's work ends and the compiler's begins
    copied._do_compile = lambda *request: heard.append(request[:6])  # noqa: SLF001
    copied.device_caches = device_caches
    copied.pre_run_hooks = []  # hooks expect real arguments
    try:
        copied.run(grid=(1,), warmup=True, **call)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        # Triton 3.6 and 3.7 import torch for AMD before it looks at an argument, and then needs
        # nothing of it.
        with _torch_named():
            copied.run(grid=(1,), warmup=True, **call)
    return heard[0]


@contextlib.contextmanager
def _torch_named() -> Iterator[None]:
    """Give Triton a module called torch, of which no tensor is one."""
    before = sys.modules.get("torch", _ABSENT)
    module: Any = ModuleType("torch")
    module.Tensor = type("Tensor", (), {})
    sys.modules["torch"] = module
    try:
        yield
    finally:
        del sys.modules["torch"]
        if before is not _ABSENT:
            sys.modules["torch"] = before


def _check_names(function: Any, arguments: Mapping[str, Spec]) -> None:
    unknown = [name for name in arguments if name not in function.arg_names]
    if unknown:
        raise ConfigError(
            f"it has no argument {', '.join(unknown)}; its arguments are"
            f" {', '.join(function.arg_names)}",
            expected=tuple(function.arg_names),
            got=tuple(unknown),
        )


def _check_types(signature: Mapping[str, Any], arguments: Mapping[str, Spec]) -> None:
    for name, spec in arguments.items():
        if not same_type(signature[name], spec):
            raise ConfigError(
                f"argument {name}: given as {spec!r}, but Triton takes it for {signature[name]!r};"
                " a number is i32, i64 or u64 by its size, unless the function's own annotation"
                " says otherwise",
                name=name,
                expected=str(spec),
                got=str(signature[name]),
            )


def as_data(stopped: CompileRequest, *, portable: bool = True) -> Specialized:
    """Return what the JIT was about to compile as data.

    Args:
        stopped: what it was.
        portable: refuse a constant that no other process can make again.

    Raises:
        ConfigError: such a constant.
    """
    source = stopped.source
    specialized = Specialized(
        tuple((name, encode_type(kind)) for name, kind in source.signature.items()),
        tuple((tuple(path), encode_value(value)) for path, value in source.constants.items()),
        tuple((tuple(path), encode_value(value)) for path, value in source.attrs.items()),
        tuple((name, encode_value(value)) for name, value in vars(stopped.options).items()),
        tuple(_keys(stopped)),
    )
    for path, value in specialized.constants:
        if portable and not value.portable:
            name = source.fn.arg_names[path[0]]
            raise ConfigError(
                f"argument {name}: a constant of type {value.payload} cannot be sent to a worker",
                name=name,
            )
    return specialized


def _keys(stopped: CompileRequest) -> Iterator[tuple[str, bool | None]]:
    """Yield the keys that a JIT may ask for.

    Before Triton 3.9 a function's hash has the constants of a module that the functions it calls
    use, only if these were hashed before it: two programs may ask for the same kernel under two
    keys.
    """
    function = stopped.source.fn
    alone, after_helpers = _hashes(function)
    for digest, helpers_first in ((alone, False), (after_helpers, True)):
        if helpers_first and after_helpers == alone:
            return
        function.hash = digest
        key = keytext.kernel_key_here(stopped.source, stopped.backend, stopped.options)
        if key is None:
            raise ConfigError(
                "the kernel's key cannot be computed; the log of bundler.toolchain says why, at"
                " level debug"
            )
        yield key, None if after_helpers == alone else helpers_first


def _hashes(function: Any) -> tuple[str, str]:
    """Return a function's hash in a process that hashed nothing before, and in one that hashed all
    that it calls.
    """
    known = vars(function).get(_KNOWN_HASHES)
    if known is not None and known[0] == function.src:
        return known[1], known[2]
    hashes = hash_again(function, helpers_first=False), hash_again(function, helpers_first=True)
    vars(function)[_KNOWN_HASHES] = (function.src, *hashes)
    return hashes


def hash_again(function: Any, *, helpers_first: bool) -> str:
    """Compute a JIT function's hash anew, as in a process that hashed all that it calls before, or
    nothing; returns the hash.
    """
    # Whatever else this process hashed: of two helpers, the one that was hashed first decides about
    # the hash of the other.
    for other in functions_of(function):
        other.hash, other.used_global_vals = None, {}
    if helpers_first:
        _ = function.cache_key  # hashes whatever it calls
        function.hash, function.used_global_vals = None, {}
    key: str = function.cache_key
    return key


def functions_of(function: Any) -> list[Any]:
    """Return a JIT function and every one that its hash is made of: those that it may call, and
    those that these may.
    """
    found: dict[int, Any] = {}
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _jit_class("JITCallable")) and id(value) not in found:
            found[id(value)] = value
            waiting += _mentioned(value)
        else:
            waiting += (
                getattr(value, "hash_attrs", ()) if hasattr(value, "__triton_aggregate__") else ()
            )
    return list(found.values())


def _mentioned(function: Any) -> Iterator[Any]:
    """Yield what the names in a function's text may mean: globals, members of modules, variables
    around it.
    """
    names, scope = function.fn.__code__.co_names, function.get_capture_scope()
    for name in names:
        value = scope.get(name)
        yield value
        if isinstance(value, ModuleType):
            yield from (getattr(value, member, None) for member in names)
    yield from (scope.get(name) for name in function.fn.__code__.co_freevars)


def stop_call(function: Any, call: Mapping[str, Any]) -> CompileRequest:
    """Return what the JIT would compile for a call.

    Args:
        function: a JIT function.
        call: every argument by name, and options.

    Raises:
        Exception: whatever Triton raises for such a call.
    """
    copied: Any = copy.copy(function)  # a binder sets attributes of its function
    binders: Any = defaultdict(copied.create_binder)
    _, signature, device, constants, options, attributes = stopped_run(copied, binders, call)
    source = copied.ASTSource(function, signature, constants, attributes)
    return CompileRequest(source, options, binders[device][3])


def specialize_call(function: Any, call: Mapping[str, Any]) -> Specialized:
    """Return what a call with real arguments is compiled to, as data; see `stop_call`.

    Raises:
        ConfigError: a constant cannot be sent to another process.
    """
    return as_data(stop_call(function, call))
