# SPDX-License-Identifier: Apache-2.0
"""`multi_kernels_of`: the multi-kernels of a graph's wrapper: which kernels each chooses from, and
which arguments each of them gets.

`load_generated` reads a wrapper's syntax tree with it; nothing of a wrapper is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from bundler.errors import ConfigError, FormatError
from bundler.integrations.inductor_kernels import GeneratedKernel, TunerSettings
from bundler.runtime.tuning.benchmark import CudaClock
from bundler.runtime.tuning.multi_kernel import (
    MultiKernel,
    MultiKernelRecords,
    ShapeKernel,
    timed_on_clones,
)

# So long Inductor measures each kernel of a multi-kernel.
REP_MS = 40
_MEASURED, _BY_SHAPE = "multi_kernel", "size_hint_multi_kernel"
Dispatcher = MultiKernel | ShapeKernel
# Of each kernel the shapes, or its number, its name, and the kernel; and by its number which of a
# call's arguments it gets.
_Choices = list[tuple[Any, str, GeneratedKernel]]
_Slices = Mapping[int, list[slice]]


def multi_kernels_of(
    tree: ast.Module, kernels: Mapping[str, GeneratedKernel], settings: TunerSettings, where: str
) -> dict[str, Dispatcher]:
    """Return the multi-kernels of a wrapper by name, in its order.

    Args:
        tree: of the wrapper.
        kernels: its kernels, by name.
        settings: the tuner's options, and the clock.
        where: the wrapper's name, for errors.

    Raises:
        FormatError: one is written in a way that is not known.
        ConfigError: one names kernels that the wrapper does not have.
    """
    found: dict[str, Dispatcher] = {}
    slices: _Slices = {}
    for target, value in _assignments(tree):
        # Each multi-kernel is preceded by the slices of the arguments that its kernels get, always
        # under the same name.
        if target == "arg_index":
            slices = _slices(value, where)
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            kind = value.func.attr
            if kind in {_MEASURED, _BY_SHAPE}:
                name, choices = _choices(value, kernels, where)
                found[name] = (
                    _measured(name, choices, slices, settings, where)
                    if kind == _MEASURED
                    else _by_shape(name, choices, slices)
                )
    return found


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value


def _slices(value: ast.expr, where: str) -> dict[int, list[slice]]:
    try:
        assert isinstance(value, ast.Dict)
        pairs = zip(value.keys, value.values, strict=True)
        return {
            ast.literal_eval(key): [_slice(p) for p in parts.elts]  # type: ignore[arg-type, attr-defined]
            for key, parts in pairs
        }
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise FormatError(
            f"{where}: its arg_index is not understood: {ast.unparse(value)[:80]}", name=where
        ) from error


def _slice(value: ast.expr) -> slice:
    match value:
        case ast.Call(func=ast.Name(id="slice"), args=[*bounds], keywords=[]):
            found = slice(*map(ast.literal_eval, bounds))
            whole = type(found.stop) is int and type(found.start or 0) is int
            if whole and found.step in {None, 1}:
                return slice(found.start or 0, found.stop)
    raise ValueError(ast.unparse(value))


def _choices(
    call: ast.Call, kernels: Mapping[str, GeneratedKernel], where: str
) -> tuple[str, _Choices]:
    """Return a multi-kernel's name, and its kernels."""
    match call.args:
        case [ast.Constant(value=str() as name), ast.List(elts=elements)]:
            keyed = list(enumerate(elements))
        case [ast.Constant(value=str() as name), ast.Dict(keys=keys, values=elements)]:
            pairs = zip(keys, elements, strict=True)
            keyed = [(ast.literal_eval(key), element) for key, element in pairs if key]
        case _:
            raise FormatError(
                f"{where}: a multi-kernel is not understood: {ast.unparse(call)[:80]}", name=where
            )
    found = []
    for key, element in keyed:
        kernel = kernels.get(element.id) if isinstance(element, ast.Name) else None
        if kernel is None:
            raise ConfigError(
                f"{where}: {name} chooses from {ast.unparse(element)[:80]}, and there is no such"
                " kernel",
                name=name,
            )
        found.append((key, kernel.__name__, kernel))
    return name, found


def _positions(slices: _Slices, number: int) -> tuple[int, ...] | None:
    """Return which arguments of a call the kernel with this number gets; None for all."""
    if number not in slices:
        return None
    return tuple(place for part in slices[number] for place in range(part.start, part.stop))


def _measured(
    name: str, choices: _Choices, slices: _Slices, settings: TunerSettings, where: str
) -> MultiKernel:
    by_name = {kernel: made for _, kernel, made in choices}
    if len(by_name) != len(choices):
        raise ConfigError(f"{where}: {name} names a kernel twice", name=name)
    positions = {kernel: _positions(slices, number) for number, kernel in enumerate(by_name)}

    def measure(kernel: Any, args: tuple[Any, ...]) -> float:
        # Only here, since a clock needs a GPU, and a choice that is known already does not.
        clock = CudaClock(rep_ms=REP_MS) if settings.clock is None else settings.clock()
        return timed_on_clones(clock)(kernel, args)

    return MultiKernel(
        name,
        {kernel: made.run for kernel, made in by_name.items()},
        measure,
        arguments={kernel: places for kernel, places in positions.items() if places is not None},
        # What the kernels' own metadata says of caches holds for the choice among them too.
        records=MultiKernelRecords(name, by_name, choices[0][2].tuned.options),
    )


def _by_shape(name: str, choices: _Choices, slices: _Slices) -> ShapeKernel:
    def runs(kernel: GeneratedKernel, places: tuple[int, ...] | None) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            kernel.run(*(args if places is None else [args[place] for place in places]), **kwargs)

        return run

    numbered = enumerate(choices)
    return ShapeKernel(
        name, {key: runs(made, _positions(slices, number)) for number, (key, _, made) in numbered}
    )
