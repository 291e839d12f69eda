# SPDX-License-Identifier: Apache-2.0
"""`key_here`: the key that this machine's Triton will ask for, for a kernel that was compiled by
another build of the same release.

Two things besides the kernel move its key: the hash of Triton's binary, which differs between
Python versions of one release, and on AMD before Triton 3.9 the path where Triton is installed.
Where nothing else differs, the key is computed anew by Triton's own code, from the launch facts.

`restore(rekey=True)` calls it through `bundler/lifecycle/rekeyed_kernels.py`; `device_caches`
uses `option_here`.

`key_moved` does the same for a kernel of which only the lines differ;
`bundler/lifecycle/rekeyed_kernels.py` calls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from bundler.errors import ToolchainMismatch
from bundler.format.constant_values import Value
from bundler.format.entries import Target
from bundler.format.keyparts import (
    FUNCTIONS_PART,
    HASH_PART,
    LINE_PART,
    LINES_PART,
    KeyParts,
    decode_lines,
)
from bundler.format.launch_spec import LaunchFacts
from bundler.toolchain import keytext
from bundler.toolchain.compile_call import decode_value, type_of
from bundler.toolchain.declared_target import triton_target
from bundler.toolchain.encoding import TRITON_DIR_TEXT
from bundler.toolchain.events import kernel_hash, kernel_key
from bundler.toolchain.identity import LOCATION_PART, triton_dir
from bundler.toolchain.keytext import hashes_at, lines_parts, source_lines

_BINARY, _CODE = "triton.binary", "triton.code"
_MAY_DIFFER = frozenset({_BINARY, _CODE, LOCATION_PART})
# Not compared: the hash of the source covers the first six, and the constants are made from the
# recorded facts themselves, where a function is a stand-in without a name.
_SOURCE_ONLY = frozenset({"source.text", "source.constants", LINE_PART, LINES_PART, FUNCTIONS_PART})
_SOURCE_ONLY |= {keytext.PATH_PART, keytext.COLUMN_PART}


def hashed_function(name: str, arg_names: Sequence[str], cache_key: str) -> Any:
    """Return a function as far as Triton's source object needs one for its hash; it cannot be
    compiled.
    """
    return SimpleNamespace(__name__=name, arg_names=arg_names, cache_key=cache_key)


def key_here(key: str, facts: LaunchFacts, parts: KeyParts, target: Target) -> tuple[str, KeyParts]:
    """Return (kernel key, its named parts) as this machine's Triton makes them for the same
    compile.

    Imports Triton; needs no GPU, and executes nothing of what is given.

    Args:
        key, facts, parts, target: of the kernel as it was recorded.

    Raises:
        ToolchainMismatch: it is not sure to be the same compile, with the reason.
    """
    if not parts.proven:
        raise ToolchainMismatch("its key was not proven when it was recorded")
    if facts.source_kind != "ast":
        raise ToolchainMismatch("it was built from IR, and no JIT asks for it")
    with _repeating():
        made = _Remade(facts, parts, target)
    _check_parts(parts, made.parts)
    made.check_original(key, parts)
    return kernel_key(made.hash), KeyParts(tuple(made.merged(parts)), proven=True)


def key_moved(
    key: str, facts: LaunchFacts, parts: KeyParts, target: Target, function: Any
) -> tuple[str, KeyParts]:
    """Return (kernel key, its named parts) as this machine's Triton makes them for the same compile
    of a function that only moved.

    Triton's own code makes three hashes: that of the function at the lines that were recorded,
    which has to be the recorded one; the recorded kernel's key of it, which has to be its own; and
    the key of the function where it stands now.

    Args:
        key, facts, parts, target: of the kernel as it was recorded.
        function: the JIT function of this process.

    Raises:
        ToolchainMismatch: it is not sure that nothing but lines differs, with the reason.
    """
    known = dict(parts.parts)
    lines = decode_lines(known.get(LINES_PART, ""))
    if facts.source_kind != "ast" or lines is None or FUNCTIONS_PART not in known:
        raise ToolchainMismatch("the lines of its source were not recorded")
    with _repeating():
        if known[HASH_PART] not in hashes_at(function, lines):
            raise ToolchainMismatch("its source differs in more than lines", part=HASH_PART)
        if _Remade(facts, parts, target).hash != kernel_hash(key):
            raise ToolchainMismatch(
                "its recorded key is not the one that is made here of its parts"
            )
        moved = {
            HASH_PART: function.cache_key,
            LINE_PART: str(function.starting_line_number),
            **dict(lines_parts(function)),
        }
        here = KeyParts(tuple((n, moved.get(n, text)) for n, text in parts.parts), parts.proven)
        return kernel_key(_Remade(facts, here, target).hash), here


@contextlib.contextmanager
def _repeating() -> Iterator[None]:
    try:
        yield
    except ToolchainMismatch:
        raise
    except Exception as error:  # Triton's own code, on facts that come from anybody
        raise ToolchainMismatch(
            f"this Triton cannot repeat its compile call ({type(error).__name__}: {error!s:.300})"
        ) from error


def only_moved(parts: KeyParts, function: Any) -> bool:
    """Tell whether a JIT function of this process is, as far as recorded parts tell, the source of
    a kernel, and it or a function that it calls stands at another line.
    """
    known, here = dict(parts.parts), source_lines(function)
    return (
        here is not None
        and known.get(FUNCTIONS_PART) == here.functions
        and decode_lines(known.get(LINES_PART, "")) not in (None, here.lines)
    )


class _Remade:
    """The compile call of a recorded kernel, made again of Triton's own objects."""

    def __init__(self, facts: LaunchFacts, parts: KeyParts, target: Target) -> None:
        import triton.runtime.cache
        from triton.compiler.compiler import ASTSource, make_backend

        backend = make_backend(triton_target(target))
        options = backend.parse_options({name: option_here(value) for name, value in facts.options})
        known = dict(parts.parts)
        names = [argument.name for argument in facts.arguments]
        source: Any = ASTSource(
            hashed_function(known.get("source.name", ""), names, known[HASH_PART]),
            {name: type_of(kind) for name, kind in facts.signature},
            {path: _constant(value) for path, value in facts.constants},
            {path: decode_value(value) for path, value in facts.attributes},
        )
        environment, stages = keytext.environment_in_keys(), keytext.stages_key_now()
        self.parts = dict(keytext.named_parts(source, backend, options, environment, stages))
        self._text = (
            triton.runtime.cache.get_cache_key(source, backend, options, env_vars=environment)
            + stages
        )
        self._code = triton.runtime.cache.triton_key()

    @property
    def hash(self) -> str:
        """The hash that Triton will make here, as hexadecimal text."""
        return keytext.text_hash(self._text)

    def merged(self, recorded: KeyParts) -> list[tuple[str, str]]:
        """Return the recorded parts with this machine's values, in their order."""
        return [
            (name, text if name in _SOURCE_ONLY else self.parts.get(name, text))
            for name, text in recorded.parts
        ]

    def check_original(self, key: str, recorded: KeyParts) -> None:
        """Make sure that exchanging what may differ for what was there gives the recorded key."""
        theirs = dict(recorded.parts)
        code = self._code
        if theirs.get(_CODE) != self.parts.get(_CODE):
            # The binary's hash is one of the many that the text is made of; the others must be
            # equal.
            code = code.replace(self.parts[_BINARY], theirs[_BINARY])
            if keytext.text_hash(code) != theirs.get(_CODE):
                raise ToolchainMismatch(
                    "other files of its Triton differ from this machine's too, not only the binary"
                )
        if LOCATION_PART in theirs:
            # the other machine's install path is not known, so that all other parts are equal has
            # to be enough
            return
        if keytext.text_hash(self._text.replace(self._code, code, 1)) != kernel_hash(key):
            raise ToolchainMismatch(
                "its recorded key cannot be computed again from what is known of it"
            )


def _check_parts(recorded: KeyParts, here: dict[str, str]) -> None:
    theirs = dict(recorded.parts)
    for name in [*theirs, *here]:
        if name not in _MAY_DIFFER | _SOURCE_ONLY and theirs.get(name) != here.get(name):
            raise ToolchainMismatch(
                f"{name} is {_shown(theirs.get(name))} there and {_shown(here.get(name))} here",
                part=name,
                expected=theirs.get(name),
                got=here.get(name),
            )
    if _BINARY not in theirs or _BINARY not in here:
        raise ToolchainMismatch("the binary of one Triton is not known")


def _shown(text: str | None) -> str:
    return "unset" if text is None else f"{text:.60}"


def option_here(value: Value) -> Any:
    """Return a recorded option as it is on this machine: Triton's install directory is where its
    placeholder was.
    """
    return _localized(decode_value(value))


def _localized(obj: Any) -> Any:
    """Put this installation's directory where its placeholder is."""
    here = triton_dir()
    if isinstance(obj, str) and here is not None:
        return obj.replace(TRITON_DIR_TEXT + "/", here + "/")
    if isinstance(obj, (tuple, list)):
        return type(obj)(map(_localized, obj))
    return obj


def _constant(value: Value) -> Any:
    if value.tag != "jit" and any(item.tag == "jit" for item in value.walk()):
        # Triton hashes the text of such a constant, which holds the name of the function's module.
        raise ToolchainMismatch("a tuple of functions is among its constants")
    return decode_value(value, lambda _, cache_key: SimpleNamespace(cache_key=cache_key))
