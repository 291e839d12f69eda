# SPDX-License-Identifier: Apache-2.0
"""`named_parts`, `recompute`: the text that Triton hashes into a kernel's key, taken apart into
named parts, and hashed again to prove them.

`jit_specialization` computes keys with it, `rekeyed_key` those of another build.

`launch_facts`, `key_parts`, `toolchain_of`: from the live objects of one compile to data.  They only
read; the one thing that they run of others' code is Triton's own computing of the key.  They can be
called later than the compile and from another thread, as long as the kernel's source was not edited
in between.  Recordings and spooled records are made with them.

`source_lines`, `hashes_at`: what Triton's hash of a JIT function would be, did it and its helpers
stand at other lines.  Triton's hash of a function holds the number of its first line, and the
hashes of the functions that it calls, so a comment above any of these changes it.  Here Triton's
own code computes the hash once more, of copies of the functions that differ in these numbers alone;
nothing of the functions themselves is changed.  Both are parts of a key; `rekeyed_key` compares
with them, `rekeyed_kernels` proves by them that a kernel only moved.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import os
import re
import stat
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bundler.format.constant_values import Value
from bundler.format.entries import Toolchain
from bundler.format.keyparts import FUNCTIONS_PART, LINES_PART, KeyParts
from bundler.format.launch_spec import Argument, LaunchFacts
from bundler.format.limits import DEFAULT_LIMITS
from bundler.package_loggers import logger
from bundler.toolchain.compile_frames import source_text
from bundler.toolchain.encoding import (
    encode_type,
    encode_value,
    portable_text,
    portable_value,
    render,
)
from bundler.toolchain.events import kernel_key
from bundler.toolchain.identity import LOCATION_PART, installed_triton, triton_dir
from bundler.toolchain.ptxas import ptxas_version, short_version

_LOG = logger("bundler.toolchain")

Part = tuple[str, str]


def recompute(
    src: Any, backend: Any, options: Any, env_vars: Mapping[str, str], stages_key: str
) -> str | None:
    """Return the hash (hex) that Triton makes of these objects, in the way `triton.compile` does;
    None if it cannot.
    """
    get_cache_key = getattr(sys.modules.get("triton.runtime.cache"), "get_cache_key", None)
    if get_cache_key is None:
        return None
    try:
        text = get_cache_key(src, backend, options, env_vars=env_vars) + stages_key
    except Exception as error:  # noqa: BLE001  # the seam: unproven is an answer, and this runs code of backends and of constants
        _LOG.debug(
            "the key of %s cannot be recomputed: %s", getattr(src, "name", "a kernel"), error
        )
        return None
    return text_hash(text)


def kernel_key_here(source: Any, backend: Any, options: Any) -> str | None:
    """Return the kernel key that Triton would make of a compile now; None when it cannot be
    computed.
    """
    # `compile` parses the options that the JIT parsed once more, and makes its key from those.
    parsed = backend.parse_options(dict(vars(options)))
    digest = recompute(source, backend, parsed, environment_in_keys(), stages_key_now())
    return None if digest is None else kernel_key(digest)


def environment_in_keys() -> dict[str, str]:
    """Return the environment variables that Triton makes part of every key; it has to be
    imported.
    """
    variables: dict[str, str] = sys.modules["triton._C.libtriton"].get_cache_invalidating_env_vars()
    return variables


def stages_key_now() -> str:
    """Return what a stage inspection hook that is installed adds to keys; empty without one."""
    runtime = getattr(sys.modules.get("triton.knobs"), "runtime", None)
    hook = getattr(runtime, "add_stages_inspection_hook", None)
    compiler = getattr(sys.modules.get("triton.compiler.compiler"), "compile", None)
    variables = getattr(getattr(compiler, "__code__", None), "co_varnames", ())
    # Triton 3.6 has the hook, but not as part of the key, and calls it with arguments.
    if hook is None or "inspect_stages_key" not in variables:
        return ""
    key: str = hook()[0]
    return key


def named_parts(
    src: Any,
    backend: Any,
    options: Any,
    env_vars: Mapping[str, str],
    stages_key: str,
    *,
    lines: bool = True,
) -> Iterator[Part]:
    """Yield (name, text) for each part of a key; a text longer than a part may be is replaced by
    its digest.  Without `lines` those of the source are left out, which take longer than all else.
    """
    for name, text in _all_parts(src, backend, options, env_vars, stages_key, lines):
        encoded = text.encode("utf-8", "replace")
        too_long = len(encoded) > DEFAULT_LIMITS.string_bytes
        yield name, f"sha256:{text_hash(text)}" if too_long else encoded.decode()


def _all_parts(
    src: Any,
    backend: Any,
    options: Any,
    env_vars: Mapping[str, str],
    stages_key: str,
    lines: bool,
) -> Iterator[Part]:
    yield from _triton_parts(options)
    yield from _ast_parts(src, lines) if hasattr(src, "fn") else _ir_parts(src)
    yield "backend.name", str(backend.target.backend)
    yield "backend.hash", portable_text(str(backend.hash()))
    if stages_key:
        yield "backend.stages", text_hash(stages_key)
    yield from _option_parts(options)
    for name, value in sorted(env_vars.items()):
        yield f"env.{name}", str(value)


def _triton_parts(options: Any) -> Iterator[Part]:
    installed = installed_triton()
    if installed is not None and installed.release:
        yield "triton.release", installed.release
    if installed is not None and installed.binary:
        yield "triton.binary", installed.binary
    triton_key = getattr(sys.modules.get("triton.runtime.cache"), "triton_key", None)
    if triton_key is not None:
        yield "triton.code", text_hash(triton_key())
    directory = triton_dir()
    if directory is not None and paths_count(options) and directory in str(vars(options)):
        # Such a kernel misses in any other installation, and only this part can say so; not as a
        # path, which would travel.
        yield LOCATION_PART, location_text(directory)


def location_text(directory: str) -> str:
    """Return what stands for an install directory in key parts: enough to tell two apart, and no
    path.
    """
    return text_hash(directory)[:16]


def _ast_parts(src: Any, lines: bool) -> Iterator[Part]:
    names = list(getattr(src.fn, "arg_names", ()))
    yield "source.name", str(src.name)
    text = source_text(src)
    if text is not None:
        yield "source.text", text_hash(text)
    if hasattr(src.fn, "starting_line_number"):
        yield "source.line", str(src.fn.starting_line_number)
    yield from place_parts(src.fn)
    yield "source.hash", str(src.fn.cache_key)
    if lines and hasattr(src.fn, "starting_line_number"):
        yield from lines_parts(src.fn)
    signature = (f"{name}: {kind}" for name, kind in sorted(src.signature.items()))
    yield "source.signature", ", ".join(signature)
    # Sorted by path as Triton does it for constants; attributes count in the order in which they
    # were given.
    yield "source.constants", _by_argument(names, sorted(src.constants.items()))
    yield "source.attributes", _by_argument(names, src.attrs.items())


def _ir_parts(src: Any) -> Iterator[Part]:
    yield "source.name", str(src.name)
    yield "source.format", str(src.ext)
    yield "source.text", text_hash(src.src)
    yield "source.hash", str(src.hash())


def _by_argument(names: list[str], items: Any) -> str:
    return ", ".join(
        f"{_path_name(names, path)}={render(encode_value(value), value)}" for path, value in items
    )


def _path_name(names: list[str], path: tuple[int, ...]) -> str:
    first, *rest = path
    return (names[first] if first < len(names) else str(first)) + "".join(
        f"[{index}]" for index in rest
    )


def _option_parts(options: Any) -> Iterator[Part]:
    by_content = not paths_count(options)
    for name, value in sorted(vars(options).items()):
        if name == "extern_libs" and by_content:
            digests = (f"{library}=sha256:{_file_digest(path)}" for library, path in value)
            yield f"option.{name}", ", ".join(digests)
        else:
            portable = portable_value(value)
            yield f"option.{name}", render(encode_value(portable), portable)


def paths_count(options: Any) -> bool:
    """Whether the paths of libraries are part of the options' hash (AMD before Triton 3.9), instead
    of their content.

    Told by the hash itself: it is that of the plain rendering of all fields.
    """
    plain = "_".join(f"{name}-{value}" for name, value in vars(options).items())
    return bool(text_hash(plain) == options.hash())


def _file_digest(path: str) -> str:
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return _digest_of(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        _LOG.debug("%s cannot be read: %s", path, error)
    return "unreadable"


@functools.lru_cache(maxsize=64)
def _digest_of(path: str, _size_bytes: int, _mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_hash(text: str) -> str:
    """Return the SHA-256 of a text in UTF-8, as hexadecimal text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


PATH_PART, COLUMN_PART = "source.path", "source.column"
VARIABLE = "TRITON_DISABLE_LINE_INFO"
#: The fix, for every message about it.
ADVICE = f"set {VARIABLE}=1 where kernels are recorded and where they are used"
_DIGITS = 16
#: No file lies there: for a function with this path Python asks the loader of the function's
#: module, so it finds this module's text.
_OTHER_PLACE = os.path.join(os.path.dirname(__file__), "another place", os.path.basename(__file__))


def path_counts() -> bool:
    """Tell whether the keys that Triton makes now hold the path of the source; False where Triton
    is not imported.
    """
    jit: Any = getattr(sys.modules.get("triton.runtime.jit"), "JITCallable", None)
    compilation = getattr(sys.modules.get("triton.knobs"), "compilation", None)
    return jit is not None and _probed(jit, bool(getattr(compilation, "disable_line_info", False)))


@functools.lru_cache(maxsize=4)
def _probed(jit: Any, _disabled: bool) -> bool:
    """Compare the hashes of one function at two paths; Triton's own code is the only one that
    knows.
    """
    moved = types.FunctionType(
        _probe.__code__.replace(co_filename=_OTHER_PLACE), globals(), _probe.__name__
    )
    try:
        return bool(jit(_probe).cache_key != jit(moved).cache_key)
    except Exception:  # noqa: BLE001  # Triton's own code, of any release: what cannot be asked is taken for the Triton we know
        return False


def _probe(number: int) -> int:
    """Return the number: Triton hashes this function, nobody calls it."""
    return number


def place_parts(fn: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of a JIT function's key that tell where it stands, where those count; nothing
    elsewhere.

    The path itself would travel, so a digest stands for it.
    """
    code = getattr(getattr(fn, "fn", None), "__code__", None)
    path = getattr(fn, "file_name", None) or getattr(code, "co_filename", None)
    if not isinstance(path, str) or not path_counts():
        return
    yield PATH_PART, text_hash(path)[:_DIGITS]
    column = getattr(fn, "def_file_col_number", None)
    if column is not None:
        yield COLUMN_PART, str(column)


_NOWHERE = 0
# Stands in a function's attributes: what was found, and the hash that it had then.
_KNOWN = "_bundler_source_lines"


class SourceLines(NamedTuple):
    """Where a function and those that it calls begin, and what they are.

    Attributes:
        functions: a digest of their texts, and of all else that Triton's hash of the function has
            but the lines.
        lines: the first line of each, the function's own first, then in the order in which Triton
            finds them.
    """

    functions: str
    lines: tuple[int, ...]


def source_lines(function: Any) -> SourceLines | None:
    """Return the lines of a JIT function; None where this Triton's hash is not made as we know it.

    Safe while other threads launch.
    """
    hashed, known = function.hash, vars(function).get(_KNOWN)
    if hashed is not None and known is not None and known[0] == hashed:
        return known[1]  # type: ignore[no-any-return]
    try:
        found = _found(function)
    except Exception as error:  # noqa: BLE001  # Triton's own code on a user's function: not to know is an answer
        _LOG.debug("the lines of %s are not known: %s", function, error)
        found = None
    # What is not hashed yet may be of a module that is being imported, and lack a helper.
    if hashed is not None:
        vars(function)[_KNOWN] = (hashed, found)
    return found


def hashes_at(function: Any, lines: tuple[int, ...]) -> frozenset[str]:
    """Return the hashes that Triton would make of a function at other lines: before Triton 3.9 one
    source has two, by what was hashed before.

    Args:
        function: a JIT function.
        lines: as of `SourceLines`.

    Raises:
        Exception: whatever Triton raises for a function that it cannot hash.
    """
    found = {_RelinedFunctions(lines).hash_of(function, first) for first in (False, True)}
    return frozenset(filter(None, found))


def lines_parts(function: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of a key that tell of the lines of its source."""
    found = source_lines(function)
    if found is not None:
        yield FUNCTIONS_PART, found.functions
        yield LINES_PART, " ".join(map(str, found.lines))


def _found(function: Any) -> SourceLines | None:
    seen = _RelinedFunctions(None)
    digest = seen.hash_of(function, helpers_first=True)
    lines = tuple(one.starting_line_number for one in seen.originals)
    # Held to Triton's own hash of it as it stands: what is computed in another way helps nobody.
    hashed = function.hash
    if digest is None or (hashed is not None and hashed not in hashes_at(function, lines)):
        return None
    return SourceLines(text_hash(f"lines of functions, 1: {digest}"), lines)


class _RelinedFunctions:
    """Copies of functions that stand at other lines, each made when Triton's code first finds it.

    Args:
        lines: where they stand, in the order in which they are found; None for one line for all.

    Attributes:
        originals: the functions, in that order.
    """

    def __init__(self, lines: tuple[int, ...] | None) -> None:
        self._lines = lines
        self._copies: dict[int, Any] = {}
        self.originals: list[Any] = []

    def hash_of(self, function: Any, helpers_first: bool) -> str | None:
        """Return Triton's hash of a function, as in a process that hashed all that it calls before,
        or nothing; None where there are not as many functions as lines.
        """
        root = self.copy_of(function)
        if helpers_first:
            _ = root.cache_key
            vars(root).update(hash=None, used_global_vals={})
        digest: str = root.cache_key
        fits = self._lines is None or len(self._lines) == len(self.originals)
        return digest if fits else None

    def copy_of(self, function: Any) -> Any:
        """Return the copy of a function."""
        if id(function) not in self._copies:
            line = self._next_line()
            self.originals.append(function)
            made = copy.copy(function)
            vars(made).update(
                hash=None,
                used_global_vals={},
                starting_line_number=line,
                _hash_lock=threading.RLock(),
            )
            made.__class__ = self._class_of(type(function))
            self._copies[id(function)] = made
        return self._copies[id(function)]

    def _next_line(self) -> int:
        if self._lines is None or len(self.originals) >= len(self._lines):
            return _NOWHERE
        return self._lines[len(self.originals)]

    def _class_of(self, kind: type) -> type:
        """Return a class whose `cache_key` is Triton's, but finds copies in place of functions."""
        getter = kind.cache_key.fget  # type: ignore[attr-defined]
        finder = getter.__globals__["DependenciesFinder"]
        copies = self

        class Finder(finder):  # type: ignore[misc, valid-type]
            def _update_hash(self, func: Any) -> None:
                super()._update_hash(copies.copy_of(func))

        known = {**getter.__globals__, "DependenciesFinder": Finder}
        hashed = types.FunctionType(
            getter.__code__, known, getter.__name__, getter.__defaults__, getter.__closure__
        )
        return type(kind.__name__, (kind,), {"cache_key": property(hashed)})


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def launch_facts(src: Any, options: Any) -> LaunchFacts:
    """Return what Triton's metadata lacks.

    Args:
        src: Triton's `ASTSource` (or Gluon's), or an `IRSource`, which has a signature only.
        options: the backend's options object, or None when they are not known; Triton's install
            directory inside them becomes a placeholder, so that two installations give equal facts.
    """
    fn = getattr(src, "fn", None)
    chosen = vars(options) if options is not None else {}
    return LaunchFacts(
        source_kind="ir" if fn is None else "ast",
        arguments=tuple(_argument(param) for param in getattr(fn, "params", ())),
        signature=tuple((str(name), encode_type(kind)) for name, kind in src.signature.items()),
        constants=_by_path(getattr(src, "constants", None)),
        attributes=_by_path(getattr(src, "attrs", None)),
        options=tuple(
            (name, encode_value(portable_value(value))) for name, value in sorted(chosen.items())
        ),
    )


def _argument(param: Any) -> Argument:
    default = param.default
    return Argument(
        name=param.name,
        annotation=_ADDRESS.sub("", str(param.annotation)),
        default=None if default is inspect.Parameter.empty else encode_value(default),
        constexpr=bool(param.is_constexpr),
        do_not_specialize=bool(param.do_not_specialize),
        do_not_specialize_on_alignment=bool(param.do_not_specialize_on_alignment),
    )


def _by_path(mapping: Mapping[Any, Any] | None) -> tuple[tuple[tuple[int, ...], Value], ...]:
    return tuple(
        (tuple(path), encode_value(value)) for path, value in sorted((mapping or {}).items())
    )


def key_parts(
    src: Any,
    backend: Any,
    options: Any,
    env_vars: Mapping[str, str],
    key_hash: str,
    stages_key: str | None = None,
    *,
    lines: bool = True,
) -> KeyParts:
    """Return the named parts of a kernel's key, in a fixed order.

    `proven` says that recomputing the key from the same objects gave `key_hash`.  The same compile
    in another process, with another installation of the same Triton or from another checkout gives
    the same parts.  A part that cannot be had is left out.

    Args:
        src, backend, options: Triton's objects of the compile.
        env_vars: the environment that is part of the key.
        key_hash: the kernel's hash, as hexadecimal text.
        stages_key: what a stage inspection hook added to the key; None asks the hook that is
            installed now, if any.
        lines: as `named_parts` has it.
    """
    if stages_key is None:
        stages_key = stages_key_now()
    parts = named_parts(src, backend, options, env_vars, stages_key, lines=lines)
    return KeyParts(
        tuple(parts), recompute(src, backend, options, env_vars, stages_key) == key_hash
    )


def toolchain_of(backend_name: str, arch: int | str) -> Toolchain:
    """Return who compiles for a target in this process; for use after such a compile.

    Triton asks ptxas for its version once a process and keeps the answer; that answer, which its
    keys were made with, is the one returned here.
    """
    installed = installed_triton() or Toolchain()
    ptxas = None
    if backend_name == "cuda" and str(arch).isdecimal():
        ptxas = _ptxas_in_use(int(arch)) or ptxas_version(int(arch))
    return Toolchain(installed.release, installed.binary, ptxas)


def _ptxas_in_use(arch: int) -> str | None:
    answer = getattr(sys.modules.get("triton.backends.nvidia.compiler"), "get_ptxas_version", None)
    if answer is None:
        return None
    try:
        return short_version(answer(arch))
    except (RuntimeError, OSError, ValueError):
        return None
