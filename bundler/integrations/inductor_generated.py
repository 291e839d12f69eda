# SPDX-License-Identifier: Apache-2.0
"""`load_generated`: Inductor's generated kernel modules on this runtime.  Provisional: it follows
torch's private format.

Users call it, and `compile_generated`, which compiles all kernels in workers, as functions of
`bundler.integrations.inductor`.  `multi_kernels_of` reads the multi-kernels of a graph's wrapper
from its syntax tree: which kernels each chooses from, and which arguments each of them gets; nothing
of a wrapper is run.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from bundler.compile.compile_job import SourceRef
from bundler.compile.compile_worker import import_triton
from bundler.compile.job_futures import CompileFuture
from bundler.compile.other_languages import LANGUAGES, refusal
from bundler.compile.service import CompileService
from bundler.compile.source_modules import module_of_text
from bundler.errors import CompileFailed, ConfigError, FormatError
from bundler.format.bundle_file import os_errors, read_regular
from bundler.format.digest import sha256
from bundler.format.entries import Target
from bundler.format.limits import DEFAULT_LIMITS
from bundler.integrations.inductor_kernels import GeneratedKernel, TunerSettings, stand_ins
from bundler.project import install
from bundler.runtime.tuning.benchmark import Clock, CudaClock
from bundler.runtime.tuning.heuristic_kernel import HeuristicKernel
from bundler.runtime.tuning.multi_kernel import (
    MultiKernel,
    MultiKernelRecords,
    ShapeKernel,
    timed_on_clones,
)
from bundler.runtime.tuning.tuner_options import TunerOptions

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


_PACKAGE = "torch._inductor.runtime"
_HEURISTICS = f"{_PACKAGE}.triton_heuristics"
_HELPERS = f"{_PACKAGE}.triton_helpers"
_MODULE_PREFIX = "bundler_generated_"
_WORKERS_IMPORTER = "bundler.integrations.inductor_generated:module_for_worker"
# A worker compiles kernels of so many modules without importing one twice.
WORKER_MODULES = 1024


class GeneratedKernels(dict[str, GeneratedKernel]):
    """What `load_generated` returns: kernels by name.

    Attributes:
        multi_kernels: dispatchers over these kernels, by name, called as the wrapper calls them.
        others: kernels of the wrapper in other languages: name -> method of torch's compile
            service; who asks for one gets an `UnsupportedLanguage`.
    """

    multi_kernels: dict[str, Dispatcher]

    def __init__(
        self,
        kernels: Mapping[str, GeneratedKernel] | None = None,
        others: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(kernels or {})
        self.multi_kernels, self.others = {}, dict(others or {})

    def __missing__(self, name: str) -> GeneratedKernel:
        if name in self.others:
            raise refusal(self.others[name], name)
        raise KeyError(name)


def load_generated(
    path: str | os.PathLike[str],
    *,
    options: TunerOptions | None = None,
    clock: Callable[[], Clock] | None = None,
) -> GeneratedKernels:
    """Import Inductor's generated kernels with their heuristics bound to this runtime.

    A kernel module is imported: its code runs, so the file must be one that you trust as you trust
    your program.  A graph's wrapper is parsed and never imported; the kernel modules that stand in
    it as text are.  torch's heuristics module, and the call that would look for a GPU, are replaced
    while the import runs, in the whole process, and put back afterwards.

    Provisional: it follows a private format of torch, which any release may change.

    Args:
        path: a kernel module or a wrapper, `.py`, from Inductor's cache directory.
        options: of the kernels' tuner, such as a bundle whose records and kernels are used; what
            the kernels' metadata says of tuning holds where these do not.
        clock: makes what times a launch; None for the GPU's own.

    Returns:
        The kernels by name: one of a kernel module, all of a wrapper, in its order, by the names
        that it launches them by; a dictionary whose `multi_kernels` are those of the wrapper, which
        look their choice up in the tuner's records before they measure.

    Raises:
        FormatError: the file is neither, or no Python.
        UnsupportedLanguage: no kernel of the wrapper is one of Triton.
        CompileFailed: a module raises when it is imported; the error is its cause.
        ConfigError: torch is not installed, or a kernel's metadata cannot be understood.
        NotFound, AccessDenied: the file cannot be read.
    """
    name, settings = os.fspath(path), TunerSettings(options or TunerOptions(), clock)
    with os_errors(name, "read"):
        data = read_regular(name, DEFAULT_LIMITS.file_bytes)
    try:
        text = data.decode()
        tree = ast.parse(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise FormatError(f"{name}: not a Python module: {error}", name=name) from error
    if _is_kernel_module(tree):
        return GeneratedKernels(_import(text, name, settings))
    sources, others = _kernel_sources(tree), _other_kernels(tree)
    if not sources and others:
        raise refusal(next(iter(others.values())), name)
    if not sources:
        raise FormatError(
            f"{name}: neither a kernel module of Inductor's nor a wrapper with kernels in it;"
            " expected a function under @triton_heuristics, or calls of async_compile.triton",
            name=name,
        )
    found = GeneratedKernels(others=others)
    for kernel, source in sources.items():
        made = _import(source, f"{name}:{kernel}", settings)
        if len(made) == 1:
            (found[kernel],) = made.values()
        else:
            found |= made
    found.multi_kernels = multi_kernels_of(tree, found, settings, name)
    return found


def compile_generated(
    path: str | os.PathLike[str],
    service: CompileService,
    *,
    options: TunerOptions | None = None,
    clock: Callable[[], Clock] | None = None,
    target: Target | None = None,
) -> dict[str, CompileFuture[HeuristicKernel]]:
    """Load Inductor's generated kernels, and compile every candidate of each in the workers of a
    service, all at once.

    Args:
        path, options, clock: as for `load_generated`.
        service: where to compile; made with
            `preload="bundler.integrations.inductor_generated:import_helpers"`, its workers share
            one import of torch.
        target: what for; None takes the target that the kernels were generated for.

    Returns:
        A future for each kernel, by name; `service.wait` puts the kernels in their place.

    Raises:
        As `load_generated`; `ConfigError` for a kernel whose target is neither CUDA nor HIP.
    """
    found = load_generated(path, options=options, clock=clock)
    return {name: kernel.compile_in(service, target=target) for name, kernel in found.items()}


def import_helpers() -> None:
    """Import what generated kernels need, in the process that forks workers: Triton, and torch's
    helper functions.
    """
    import_triton()
    importlib.import_module(_HELPERS)


@functools.lru_cache(maxsize=WORKER_MODULES)
def module_for_worker(text: str, path: str) -> ModuleType:
    """Return a module with the kernels of a generated module, in a process that compiles them; jobs
    name this function.
    """
    module = ModuleType(_MODULE_PREFIX + "worker")
    vars(module).update(_import(text, path, TunerSettings()))
    return module


def _is_kernel_module(tree: ast.Module) -> bool:
    """Whether a module has a function of its own under one of torch's heuristics."""
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    for decorator in itertools.chain.from_iterable(one.decorator_list for one in functions):
        match decorator:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="triton_heuristics"))):
                return True
    return False


def _kernel_sources(tree: ast.Module) -> dict[str, str]:
    """Return the kernels that a wrapper hands to its compile service: name -> module text, in
    order.

    A kernel's name is the one that the wrapper launches it by.  A user's function is compiled once
    for each of its signatures, every time under its own name, so that one tells them not apart.
    """
    found, named = {}, set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=variable)], value=ast.Call() as call):
                if (source := _source_of(call)) is not None:
                    named.add(id(call))
                    found[variable] = source[1]
            case ast.Call() if id(node) not in named:
                if (source := _source_of(node)) is not None:
                    found[source[0]] = source[1]
    return found


def _other_kernels(tree: ast.Module) -> dict[str, str]:
    """Return the kernels of a wrapper in other languages: name -> method of the compile service."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=variable)],
                value=ast.Call(func=ast.Attribute(attr=method, value=ast.Name(id="async_compile"))),
            ) if method in LANGUAGES:
                found[variable] = method
    return found


def _source_of(call: ast.Call) -> tuple[str, str] | None:
    """Return the name and the text of the kernel that a call hands to the compile service; None for
    any other call.
    """
    match call:
        case ast.Call(
            func=ast.Attribute(attr="triton"),
            args=[ast.Constant(value=str() as name), ast.Constant(value=str() as text), *_],
        ):
            return name, text
    return None


def _import(text: str, path: str, settings: TunerSettings) -> dict[str, GeneratedKernel]:
    """Run one kernel module and return its kernels."""
    module, loader = module_of_text(_MODULE_PREFIX + sha256(text.encode()).hex()[:32], path, text)
    settings = replace(
        settings, text=SourceRef("text", "", _WORKERS_IMPORTER, path, data=text.encode())
    )
    with _bound(settings):
        try:
            loader.exec_module(module)
        except ConfigError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CompileFailed(
                f"{path} cannot be imported: {reason}", name=path, reason=reason
            ) from error
    kernels = {
        name: value for name, value in vars(module).items() if isinstance(value, GeneratedKernel)
    }
    if not kernels:
        raise FormatError(f"{path}: defines no kernel under @triton_heuristics", name=path)
    return kernels


# ------------------------------------------------------------------- What torch's heuristics become

_binding = threading.RLock()


@contextlib.contextmanager
def _bound(settings: TunerSettings) -> Iterator[None]:
    """Put our heuristics in the place of torch's, and keep its helpers from asking for a GPU, while
    the block runs.

    One thread at a time; another one that imports Inductor's code meanwhile would see our
    heuristics too.
    """
    with _binding:
        try:
            package, helpers = importlib.import_module(_PACKAGE), importlib.import_module(_HELPERS)
        except ImportError as error:
            raise ConfigError(
                "Inductor's kernels use torch's helper functions, and torch cannot be imported:"
                f" {error}; install it: {install('torch')}"
            ) from error
        ours = ModuleType(_HEURISTICS)
        vars(ours).update(stand_ins(settings))
        with (
            _replaced(vars(package), "triton_heuristics", ours),
            _replaced(sys.modules, _HEURISTICS, ours),
            _replaced(vars(helpers), "set_driver_to_gpu", _no_driver),
        ):
            yield


@contextlib.contextmanager
def _replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = place.get(name, missing)
    place[name] = value
    try:
        yield
    finally:
        if before is missing:
            del place[name]
        else:
            place[name] = before


def _no_driver() -> None:
    """Stand for the call that would look for a GPU."""
