# SPDX-License-Identifier: Apache-2.0
"""`Requests`: what Triton's JIT would ask its compiler for, made again from the launch facts of a
recorded kernel, and proven by its key.

::

    launch facts ──▶ specialization of each argument ──▶ the JIT's own `run` ──▶ Request
                                                         (its binder is replaced)  │
    key of the recorded kernel ◀── must be equal ── Triton's own key ◀─────────────┘

`run` is stopped where it would compile.

The text under which the JIT keeps a kernel in memory, types, constants, attributes and options are
thus Triton's own on every release. `device_caches` fills the JIT's caches with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bundler.errors import ToolchainMismatch
from bundler.format.launch_spec import LaunchFacts, Path
from bundler.toolchain.compile_call import decode_value, type_of
from bundler.toolchain.jit_specialization import stopped_run
from bundler.toolchain.keys.keytext import kernel_key_here
from bundler.toolchain.replay.rekeyed_key import hashed_function, option_here

# What a backend's specialization of an argument may be, as the JIT writes it; `parse_attr` of the
# backend says what each means.
_DESCRIPTIONS = ("", "D", "S", "DS")
# Options that programs and tuners write out also where they are as they would be anyway, in the
# order of Triton's tuner.
_COUNTS = ("num_warps", "num_ctas", "num_stages", "maxnreg")
# How often users write some of them out: all that a kernel needs, and these.
_WRITTEN_OUT = (
    (),
    ("num_warps",),
    ("num_warps", "num_stages"),
    ("num_warps", "num_ctas", "num_stages"),
)


class Request(NamedTuple):
    """One compile as the JIT asks for it; all but the first are Triton's own objects.

    Attributes:
        place: the text under which the JIT keeps the kernel in memory.
        signature, constants, options, attributes: as the JIT hands them to the compiler.
    """

    place: str
    signature: Any
    constants: Any
    options: Any
    attributes: Any


def key_of(function: Any, request: Request, source_hash: str, backend: Any) -> str | None:
    """Return the kernel key that Triton here makes of a request; None when it cannot be computed.

    Args:
        function: the JIT function, which had its device cache made.
        request: what is asked for.
        source_hash: Triton's hash of the function.
        backend: Triton's backend object.
    """
    hashed = hashed_function(function.__name__, function.arg_names, source_hash)
    source = function.ASTSource(hashed, request.signature, request.constants, request.attributes)
    return kernel_key_here(source, backend, request.options)


class Requests:
    """The requests that lead to one recorded kernel: one for each way in which a call may write its
    options.

    Args:
        function: the JIT function.
        facts: of the kernel.
        device: index of the device in use.

    Raises:
        ToolchainMismatch: the facts are not of this function's arguments, or this Triton has no
            such specialization.
        CompileFailed: a constant cannot be made again here.
    """

    def __init__(self, function: Any, facts: LaunchFacts, device: int) -> None:
        self._function, self._device = function, device
        _, _, self._target, self.backend, _ = function.device_caches[device]
        if [name for name, _ in facts.signature] != list(function.arg_names):
            raise ToolchainMismatch("its recorded arguments are not those of the function")
        self._constants = {path: decode_value(value) for path, value in facts.constants}
        self._attributes = {path: decode_value(value) for path, value in facts.attributes}
        kinds = [(name, type_of(kind)) for name, kind in facts.signature]
        self._specialization = [
            self._specialized((number,), kind) for number, (_, kind) in enumerate(kinds)
        ]
        self._bound = {
            name: self._value((number,), kind) for number, (name, kind) in enumerate(kinds)
        }
        self._recorded = {name: option_here(value) for name, value in facts.options}

    def __iter__(self) -> Iterator[Request]:
        plain = self._asked({})
        needed = {
            n: v
            for n, v in self._recorded.items()
            if n in vars(plain.options) and vars(plain.options)[n] != v
        }
        seen = set()
        for written_out in _WRITTEN_OUT:
            options = self._options(needed, written_out)
            request = self._asked(options) if options else plain
            if request.place not in seen:
                seen.add(request.place)
                yield request

    def _options(self, needed: Mapping[str, Any], written_out: tuple[str, ...]) -> dict[str, Any]:
        counts = [
            name
            for name in _COUNTS
            if name in needed or (name in written_out and name in self._recorded)
        ]
        others = [name for name in needed if name not in _COUNTS]
        return {name: self._recorded[name] for name in (*counts, *others)}

    def _specialized(self, path: Path, kind: Any) -> tuple[Any, Any]:
        """Return the (type, specialization) that the JIT finds for an argument, or for a member of
        a tuple.
        """
        if isinstance(kind, tuple):
            members = [
                self._specialized((*path, number), member) for number, member in enumerate(kind)
            ]
            return kind, tuple(specialization for _, specialization in members)
        if kind == "constexpr":
            return kind, self._constant(path)
        if path not in self._attributes:
            return kind, None
        attribute = self._attributes[path]
        parse = self.backend.parse_attr
        description = next((text for text in _DESCRIPTIONS if parse(text) == attribute), None)
        if description is None:
            raise ToolchainMismatch(
                f"this Triton has no specialization of an argument as {attribute!r:.100}"
            )
        return kind, description

    def _value(self, path: Path, kind: Any) -> Any:
        """Return what the JIT is given for an argument, as far as it looks at it: constants
        alone.
        """
        if isinstance(kind, tuple):
            return tuple(self._value((*path, number), member) for number, member in enumerate(kind))
        return self._constant(path) if kind == "constexpr" else None

    def _constant(self, path: Path) -> Any:
        if path not in self._constants:
            raise ToolchainMismatch("a constant of its signature was not recorded")
        return self._constants[path]

    def _asked(self, options: dict[str, Any]) -> Request:
        """Let the JIT run up to where it would compile."""

        def bind(*_: Any, **given: Any) -> tuple[Any, Any, Any]:
            return dict(self._bound), list(self._specialization), given

        caches: Any = {self._device: ({}, {}, self._target, self.backend, bind)}
        place, signature, _, constants, chosen, attributes = stopped_run(
            self._function, caches, options
        )
        return Request(place, signature, constants, chosen, attributes)
