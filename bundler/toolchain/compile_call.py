# SPDX-License-Identifier: Apache-2.0
"""`compile_function`, `compile_ir`: call Triton's compiler for one specialized kernel, given as
data, and return its event.

Compile jobs call them, and `compile_request`, which takes the JIT's own objects; other modules use
`decode_value` and `type_of`, which make Triton's objects from data.

`chosen_options`: the options of a recorded compile that were chosen: those that differ from the
defaults of its target.  All other options follow from the target, and another target has its own:
architecture, libraries, lists of fp8 types.  Retargeting passes the chosen ones to the compile for
another target.  Tuners ask which options there are: `options_of` a target, `options_anywhere`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any

from bundler.errors import BundlerError, CompileFailed
from bundler.format.constant_values import Value
from bundler.format.entries import Target
from bundler.format.launch_spec import LaunchFacts, Named, Path
from bundler.toolchain.declared_target import declared, triton_target
from bundler.toolchain.diagnostics import reason_of
from bundler.toolchain.encoding import encode_value, portable_value
from bundler.toolchain.events import CompileEvent
from bundler.toolchain.instances import pick, subtypes
from bundler.toolchain.jit_specialization import CompileRequest, hash_again
from bundler.toolchain.recording.compile_listener import listening


def compile_function(
    function: Any,
    signature: Named,
    constants: Sequence[tuple[Path, Value]],
    attributes: Sequence[tuple[Path, Value]],
    options: Named,
    target: Target,
    cache_dir: str,
    *,
    helpers_first: bool | None = None,
) -> CompileEvent:
    """Compile a JIT function, or find it in `cache_dir`; what is given is what `specialize`
    returned.

    Raises:
        CompileFailed: with the compiler's message, and the line of the source where it says one.
    """
    with _compiling(function, target, cache_dir, helpers_first=helpers_first):
        function.create_binder()  # tells the function its kind of source: Triton's, or Gluon's
        source = function.ASTSource(
            function,
            {name: type_of(kind) for name, kind in signature},
            {path: decode_value(value) for path, value in constants},
            {path: decode_value(value) for path, value in attributes},
        )
        return _compile(source, target, _decoded(options))


def compile_request(
    request: CompileRequest, target: Target, cache_dir: str, *, helpers_first: bool | None = None
) -> CompileEvent:
    """Compile what the JIT was about to compile, with its own objects; see `compile_function`,
    which makes them of data.
    """
    with _compiling(request.source.fn, target, cache_dir, helpers_first=helpers_first):
        return _compile(request.source, target, dict(vars(request.options)))


def compile_ir(
    text: bytes, name: str, options: Named, target: Target, cache_dir: str, folder: str
) -> CompileEvent:
    """Compile Triton's IR (TTIR), written to a file in `folder` first since Triton reads a file.

    Some IR crashes the process (descriptors for AMD): call this in a worker.

    Raises:
        CompileFailed: with the compiler's message.
    """
    path = FilePath(folder, "kernel.ttir")
    path.write_bytes(text)
    with declared(target), cache_in(cache_dir), _told(name, None):
        return _compile(str(path), target, _decoded(options))


@contextlib.contextmanager
def _compiling(
    function: Any, target: Target, cache_dir: str, *, helpers_first: bool | None
) -> Iterator[None]:
    """Declare a target and a cache directory, and hash the function as the asking process did."""
    with declared(target), cache_in(cache_dir), _told(function.__name__, function):
        if helpers_first is not None:
            hash_again(function, helpers_first=helpers_first)
        yield


def _compile(source: Any, target: Target, options: dict[str, Any]) -> CompileEvent:
    import triton

    return listening.heard(
        lambda: triton.compile(source, target=triton_target(target), options=options)
    )


def _decoded(options: Named) -> dict[str, Any]:
    return {name: decode_value(value) for name, value in options}


@contextlib.contextmanager
def cache_in(directory: str) -> Iterator[None]:
    """Let Triton keep kernels in a directory, and nowhere else, while the block runs.

    The setting's dictionary is changed, not the setting: an assignment would write
    TRITON_CACHE_DIR, and a scope of Triton's would restore TRITON_CACHE_MANAGER, which another
    thread may have changed meanwhile.
    """
    from triton import knobs

    settings = vars(knobs.cache)
    before = {"dir": settings["dir"]} if "dir" in settings else {}
    settings["dir"] = os.path.abspath(directory)
    try:
        yield
    finally:
        settings.pop("dir", None)
        settings.update(before)


@contextlib.contextmanager
def _told(name: str, function: Any) -> Iterator[None]:
    """Raise `CompileFailed` for what the compiler raises, with the line of the JIT function."""
    try:
        yield
    except BundlerError:
        raise
    except Exception as error:  # the compiler may raise anything
        place = None if function is None else _line_of(function, error)
        file, line = place or (None, None)
        reason = reason_of(error)
        at = f" ({file}:{line})" if file else ""
        raise CompileFailed(
            f"{name} does not compile{at}: {reason}",
            name=name,
            reason=reason,
            file=file,
            line=line,
            words=str(error),
        ) from error


def _line_of(function: Any, error: Exception) -> tuple[str, int] | None:
    """Return file and line of the innermost source line that a compile error names."""
    found = None
    inner: BaseException | None = error
    while inner is not None:
        line = getattr(getattr(inner, "node", None), "lineno", None)
        if line is not None:
            found = _locate(function, getattr(inner, "src", None) or function.src, line)
        inner = inner.__cause__
    return found


def _locate(function: Any, text: str, line: int) -> tuple[str, int] | None:
    """Say where a line of a function's text, which begins at its `def`, is in its file."""
    kinds = subtypes(sys.modules["triton.runtime.jit"].JITCallable)
    for known in (function, *pick(dict.values(function.__globals__), kinds)):
        if known.src == text:
            decorators = next(
                (i for i, raw in enumerate(known.raw_src) if raw.lstrip().startswith("def ")), 0
            )
            return known.fn.__code__.co_filename, known.starting_line_number + decorators + line - 1
    return None


def decode_value(value: Value, find: Callable[[str, str], Any] | None = None) -> Any:
    """Return the object that a value was encoded from.

    Args:
        value: the value.
        find: returns a JIT function by `module:qualified name` and its hash; None looks among the
            imported modules.

    Raises:
        CompileFailed: it cannot be made again here.
    """

    def decode(item: Value) -> Any:
        return decode_value(item, find)

    match value.tag:
        case "tuple":
            return tuple(map(decode, value.payload))
        case "list":
            return list(map(decode, value.payload))
        case "dict":
            return {key: decode(item) for key, item in value.payload}
        case "dtype":
            return importlib.import_module("triton.language").dtype(value.payload)
        case "constexpr":
            return importlib.import_module("triton.language").constexpr(decode(value.payload))
        case "jit":
            return (find or _function_named)(*value.payload)
        case "other":
            raise CompileFailed(
                f"a constant of type {value.payload} cannot be made again here", reason="constant"
            )
        case _:
            return value.plain()


def _function_named(place: str, cache_key: str) -> Any:
    module, _, path = place.partition(":")
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    if getattr(found, "cache_key", None) != cache_key:
        raise no_such_function(place)
    return found


def no_such_function(place: str) -> CompileFailed:
    """Return the error for a constant that is a function (`module:qualified name`) which is not
    here as it was.
    """
    return CompileFailed(
        f"the constant {place} is not the function it was: it is not imported here, or its source"
        " changed",
        name=place,
    )


def type_of(kind: Value) -> Any:
    """Return a signature's type as Triton has it: a text, or a tuple of types."""
    return tuple(map(type_of, kind.payload)) if kind.tag == "tuple" else kind.payload


def warm() -> None:
    """Import Triton and its compiler, and have its installation hashed; a process forked afterwards
    has all of it.

    No driver is asked, no CUDA initialized and no thread started.

    Raises:
        ImportError: Triton is not installed.
    """
    importlib.import_module("triton.compiler")
    cache: Any = importlib.import_module("triton.runtime.cache")
    cache.triton_key()


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
