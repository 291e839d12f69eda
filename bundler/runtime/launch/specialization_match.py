# SPDX-License-Identifier: Apache-2.0
"""`Specialization`: one recorded kernel, which says of a call whether Triton would compile this
kernel for it.

`specialization_choice` compares calls with those that may fit; `bind` puts a call's arguments to the parameters they fill.  `Kernels` and the tuner make them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.errors import CannotLaunchStatically
from bundler.format.cached_properties import cached_property
from bundler.format.constant_values import Value
from bundler.format.entries import Kernel
from bundler.format.host_descriptors import HostDescriptor, by_place
from bundler.format.launch_spec import Argument, LaunchFacts, Tagged, read_alike, with_constants
from bundler.format.summary import count, short
from bundler.runtime.launch.argument_types import (
    CONSTEXPR,
    ArgumentType,
    same_constant,
    specialize,
)

# What Triton's backends take for an option that a call does not name.  Only options that change
# what is launched, and whose default depends on neither chip nor release; the others have to be
# equal in all specializations that fit otherwise.
DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {
    "cuda": {
        "num_warps": 4,
        "num_ctas": 1,
        "num_stages": 3,
        "maxnreg": None,
        "ir_override": None,
        "launch_pdl": False,
        "launch_cooperative_grid": False,
    },
    "hip": {
        "num_warps": 4,
        "num_ctas": 1,
        "num_stages": 2,
        "waves_per_eu": 0,
        "matrix_instr_nonkdim": 0,
        "kpack": 1,
        "launch_cooperative_grid": False,
    },
}
_DIVISIBLE, _SMALL = "tt.divisibility", "tt.pointer_range"
_MISSING = object()
_READ = frozenset({"alike", "tagged", "arguments", "profile", "_own"})


@dataclass(frozen=True)
class Call:
    """A call's arguments by the parameters they fill, and the options among its keywords."""

    values: tuple[Any, ...]
    options: Mapping[str, Any]


class Specialization:
    """One recorded kernel, ready to be compared with calls.

    Immutable; any thread may use it.  What was recorded of the kernel is decoded when it is first
    asked for: a bundle has thousands, and a process launches some.

    Attributes:
        alike: what was recorded of the compile, but for the constants, which may be another
            kernel's: kernels share these objects.
        tagged: the constants as tags and payloads, for who asks many kernels for theirs.
        arguments: the parameters of the kernel function; of a compile from IR, which has no names,
            by their numbers.
        profile: equal for kernels that differ in nothing but constants, as far as they share the
            decoded objects.
    """

    # The dictionary is made when it is needed, for what few kernels are asked for: Python's
    # collector walks each.
    __slots__ = (
        "__dict__",
        "_own",
        "alike",
        "arguments",
        "kernel",
        "key",
        "profile",
        "tagged",
        "target",
    )

    alike: LaunchFacts
    tagged: Tagged
    arguments: tuple[Argument, ...]
    profile: tuple[int, ...]
    _own: LaunchFacts | None

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.key, self.target = kernel.key, kernel.target

    def __repr__(self) -> str:
        return (
            f"<specialization {self.key[:8]} of {self.kernel.name} for {self.target}:"
            f" {short(self.describe())}>"
        )

    def __getattr__(self, name: str) -> Any:
        """Decode what was recorded of the kernel, when the first of what follows from it is asked
        for; raises as `_read`.
        """
        if name not in _READ:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        self._read()
        return getattr(self, name)

    def _read(self) -> None:
        """Set what follows from the recorded facts.

        Raises:
            CannotLaunchStatically: nothing was recorded.
            FormatError: it cannot be read.
        """
        packed = self.kernel.facts_bytes
        facts, tagged = (
            (self.kernel.launch.require_facts(), None) if packed is None else read_alike(packed)
        )
        self._own = facts if tagged is None else None
        if tagged is None:
            tagged = tuple([(path, (value.tag, value.payload)) for path, value in facts.constants])
        self.alike, self.tagged = facts, tagged
        # Without recorded options the kernel's own numbers stand for them.
        self.profile = id(facts.signature), id(facts.attributes), id(facts.options or self)
        self.arguments = facts.arguments or tuple(
            Argument(name, "", None, False, False, False) for name, _ in facts.signature
        )

    @cached_property
    def facts(self) -> LaunchFacts:
        """What was recorded of the compile; raises as `_read`."""
        return with_constants(self.alike, self.tagged) if self._own is None else self._own

    @cached_property
    def types(self) -> tuple[Value, ...]:
        """The recorded type of each parameter."""
        return tuple(kind for _, kind in self.alike.signature)

    @cached_property
    def constants(self) -> dict[tuple[int, ...], Value]:
        """The constants that were compiled in, by the path of their argument."""
        return dict(self.facts.constants)

    @cached_property
    def _descriptors(self) -> Mapping[int, HostDescriptor]:
        """The pointers that may be descriptors here, by their place."""
        return by_place(self.arguments)

    @cached_property
    def _options(self) -> dict[str, Value]:
        """The options of the compile; without the facts of it, what the launch itself needs of
        them.
        """
        spec = self.kernel.spec
        known = {"num_warps": Value("int", spec.num_warps), "num_ctas": Value("int", spec.num_ctas)}
        return dict(self.alike.options) or known

    def option(self, name: str, default: Any) -> Any:
        """Return an option of the compile, `default` when it is not recorded."""
        # A compile has thirty options, and a call is compared by a few: they are decoded one by
        # one.
        value = self._options.get(name)
        return default if value is None else value.plain()

    @cached_property
    def attributes(self) -> Mapping[tuple[int, ...], frozenset[str]]:
        """What was promised of an argument: the names of its attributes, by its path."""
        return _promises(self.alike.attributes)

    def describe(self) -> str:
        """Return the types, constants and options of this specialization as a line for people."""
        words = [
            _words(argument.name, kind, (index,), self)
            for index, (argument, kind) in enumerate(zip(self.arguments, self.types, strict=False))
        ]
        defaults = DEFAULT_OPTIONS.get(self.target.backend, {})
        words += [
            f"{n}={self.option(n, d)!r}"
            for n, d in defaults.items()
            if self.option(n, d) != d or n == "num_warps"
        ]
        return ", ".join(words)

    def seen(self, call: Call) -> list[ArgumentType]:
        """Return what Triton would make of a call's arguments."""
        backend = self.target.backend
        return [
            specialize(value, argument, backend)
            for argument, value in zip(self.arguments, call.values, strict=True)
        ]

    def differences(
        self, call: Call, call_seen: Sequence[ArgumentType], besides: Collection[int] = ()
    ) -> Iterator[str]:
        """Yield in words what keeps this specialization from being the one for a call; nothing when
        it is.

        Args:
            call: the call.
            call_seen: what Triton makes of its arguments.
            besides: parameters that are not to be compared.
        """
        for index, (argument, kind, seen, value) in enumerate(
            zip(self.arguments, self.types, call_seen, call.values, strict=True)
        ):
            if index not in besides:
                yield from self._argument_differences(argument.name, (kind, seen, value), (index,))
        yield from self._option_differences(call.options)

    def _argument_differences(
        self, name: str, trio: tuple[Value, ArgumentType, Any], path: tuple[int, ...]
    ) -> Iterator[str]:
        kind, seen, value = trio
        if (
            kind.tag == "tuple"
            and isinstance(seen.type, tuple)
            and len(kind.payload) == len(seen.type)
        ):
            for index, item in enumerate(kind.payload):
                inner = (item, ArgumentType(seen.type[index], seen.key[index]), value[index])
                yield from self._argument_differences(f"{name}[{index}]", inner, (*path, index))
            return
        if len(path) == 1 and path[0] in self._descriptors and _becomes(seen, kind.plain()):
            if "D" not in (seen.key or ""):
                yield f"{name} is divisible by 16, here it is not"
        elif seen.type != kind.plain():
            yield f"{name} is {_type_words(kind)}, here {seen.type}"
        elif seen.type == CONSTEXPR:
            recorded = self.constants.get(path)
            if recorded is None or not same_constant(recorded, value):
                yield (
                    f"{name} is {'unknown' if recorded is None else repr(recorded.plain())}, here"
                    f" {value!r:.80}"
                )
        else:
            yield from self._promise_differences(name, seen, path)

    def _promise_differences(
        self, name: str, seen: ArgumentType, path: tuple[int, ...]
    ) -> Iterator[str]:
        promised = self.attributes.get(path, frozenset())
        letters = seen.key if isinstance(seen.key, str) else ""
        if (_DIVISIBLE in promised) != ("D" in letters):
            yield (
                f"{name} is {'' if _DIVISIBLE in promised else 'not '}divisible by 16, here it"
                f" is{' not' * (_DIVISIBLE in promised)}"
            )
        if _SMALL in promised and "S" not in letters:
            yield f"{name} is smaller than 2 GiB, here it is not"

    def _option_differences(self, given: Mapping[str, Any]) -> Iterator[str]:
        for name, value in given.items():
            recorded = self.option(name, _MISSING)
            if recorded is _MISSING:
                yield f"it has no parameter and no option {name!r}"
            elif recorded != value or type(recorded) is not type(value):
                yield f"{name} is {recorded!r}, here {value!r:.80}"
        for name, default in DEFAULT_OPTIONS.get(self.target.backend, {}).items():
            if name not in given and self.option(name, default) != default:
                yield (
                    f"{name} is {self.option(name, default)!r}, here Triton's default, {default!r}"
                )

    def closeness(self, call_seen: Sequence[ArgumentType]) -> tuple[int, int]:
        """Order specializations that fit: more promises used first, then those recorded by the JIT
        for just this call.
        """
        used = exact = 0
        attributes = self.attributes
        for index, seen in enumerate(call_seen):
            used += _SMALL in attributes.get((index,), ())
            # The JIT writes down an empty promise where it looked and found none, and nothing where
            # it did not look.
            exact += isinstance(seen.key, str) == ((index,) in attributes)
        return used, exact


def _becomes(seen: ArgumentType, kind: Any) -> bool:
    """Whether a call's argument is a tensor of the elements of which a kernel takes a
    descriptor.
    """
    element = str(seen.type).removeprefix("*")
    return f"*{element}" == seen.type and str(kind).startswith(f"tensordesc<{element}[")


@functools.lru_cache(maxsize=1024)
def _promises(
    attributes: tuple[tuple[tuple[int, ...], Value], ...],
) -> Mapping[tuple[int, ...], frozenset[str]]:
    found = {}
    for path, value in attributes:
        pairs = value.plain()
        names = [pair[0] for pair in pairs if pair] if isinstance(pairs, (list, tuple)) else []
        found[path] = frozenset(name for name in names if isinstance(name, str))
    return found


def _words(name: str, kind: Value, path: tuple[int, ...], of: Specialization) -> str:
    if kind.plain() == CONSTEXPR:
        value = of.constants.get(path)
        return f"{name}={'?' if value is None else repr(value.plain())}"
    divisible = " (16)" if _DIVISIBLE in of.attributes.get(path, ()) else ""
    return f"{name}: {_type_words(kind)}{divisible}"


def _type_words(kind: Value) -> str:
    return "a constant" if kind.plain() == CONSTEXPR else str(kind.plain())


def bind(
    name: str, arguments: Sequence[Argument], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Call:
    """Match a call's arguments to parameters, as Python would; keywords that are no parameter are
    options.

    Raises:
        CannotLaunchStatically: too many arguments, one given twice, or one missing.
    """
    if len(args) > len(arguments):
        raise CannotLaunchStatically(
            f"{name}: takes {count(len(arguments), 'argument')}"
            f" ({', '.join(a.name for a in arguments)}), got {len(args)}",
            kernel=name,
            expected=len(arguments),
            got=len(args),
        )
    options = dict(keywords)
    values = list(args)
    for argument in arguments[: len(args)]:
        if argument.name in options:
            raise CannotLaunchStatically(
                f"{name}: argument {argument.name!r} is given twice",
                kernel=name,
                argument=argument.name,
            )
    for argument in arguments[len(args) :]:
        if argument.name in options:
            values.append(options.pop(argument.name))
        else:
            values.append(default_of(name, argument))
    return Call(tuple(values), options)


def default_of(name: str, argument: Argument) -> Any:
    """Return the default of a parameter; raises `CannotLaunchStatically` when it has none, or none
    that was kept.
    """
    if argument.default is None:
        raise CannotLaunchStatically(
            f"{name}: argument {argument.name!r} is missing, and has no default",
            kernel=name,
            argument=argument.name,
        )
    if not argument.default.portable:
        raise CannotLaunchStatically(
            f"{name}: the default of argument {argument.name!r} was not kept"
            f" ({argument.default.plain()}); give it",
            kernel=name,
            argument=argument.name,
        )
    return argument.default.plain()
