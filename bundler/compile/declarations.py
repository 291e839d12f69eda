# SPDX-License-Identifier: Apache-2.0
"""What an author declares to compile of a kernel ahead of time: in code by `prebuild`, in a plain
list, or in a build file, TOML that lists kernels by module and function.

::

    targets = ["cuda:90", "hip:gfx942"]

    [[kernel]]
    module = "kernels.py"               # a file beside the build file, or a module's dotted name
    function = "matmul_kernel"
    signature = { a = "*fp16:16", n = ["i32:16", "i32"] }
    constants = { BLOCK = [64, 128], ACC = { dtype = "fp32" }, ACT = { function = "relu" } }
    options = { num_warps = [4, 8] }
    configs = [{ STAGES = 2, num_stages = 3 }]
    targets = ["cuda:90"]

`Declaration` is one such wish, checked; `read_build_file` returns each `[[kernel]]` as
`ListedKernel`.  `build_plan.py` makes jobs of them and resolves their constants.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from bundler.config import toml_of
from bundler.errors import ConfigError
from bundler.format.bundle_file import os_errors, read_regular
from bundler.format.entries import Target
from bundler.format.limits import MIB
from bundler.toolchain.argument_specs import Spec

K = TypeVar("K")

# A module that does not import this package may list mappings under this name.
LIST = "PREBUILD"
# Far more than any build file has; a kernel takes a few hundred bytes.
MAX_BYTES = 16 * MIB
_TOP = frozenset({"targets", "kernel"})
_FIELDS = frozenset({"signature", "constants", "options", "configs", "targets"})


@dataclass(frozen=True)
class Declaration:
    """One kernel to build, in each of its variants.

    Attributes:
        signature: argument name -> spec (`toolchain/argument_specs.py`), or a list of specs,
            each of which is a variant.
        constants, options: name -> value, or a list of values, each of which is a variant; all
            combinations are built.
        configs: further mappings of names to values, each of which is a variant of all
            combinations.
        targets: which targets to build it for; empty for all that are asked for.
    """

    signature: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    configs: Sequence[Mapping[str, Any]] = ()
    targets: tuple[Target, ...] = ()

    @staticmethod
    def of(
        what: str,
        signature: Mapping[str, Any] | None = None,
        constants: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        configs: Any = None,
        targets: Any = None,
    ) -> Declaration:
        """Check what an author wrote; `what` names the place in messages.  Raises `ConfigError`."""
        for name, value in (
            ("signature", signature),
            ("constants", constants),
            ("options", options),
        ):
            if value is not None and not _is_named(value):
                raise ConfigError(
                    f"{what}: {name} should map names to values, got {value!r:.80}", name=name
                )
        chosen = () if configs is None else configs
        if (
            isinstance(chosen, str)
            or not isinstance(chosen, Sequence)
            or not all(map(_is_named, chosen))
        ):
            raise ConfigError(
                f"{what}: configs should be a list of mappings of names to values, got"
                f" {configs!r:.80}"
            )
        if isinstance(targets, str) or not all(isinstance(target, str) for target in targets or ()):
            raise ConfigError(
                f"{what}: targets should be a list such as ['cuda:90'], got {targets!r}",
                got=targets,
            )
        return Declaration(
            signature or {},
            constants or {},
            options or {},
            tuple(chosen),
            tuple(map(Target.parse, targets or ())),
        )

    @staticmethod
    def of_mapping(what: str, mapping: Mapping[str, Any]) -> Declaration:
        """Check a mapping of the names above; raises `ConfigError` for any other name."""
        unknown = sorted(mapping.keys() - _FIELDS)
        if unknown:
            raise ConfigError(
                f"{what}: unknown {', '.join(unknown)}; expected {', '.join(sorted(_FIELDS))}",
                got=unknown,
            )
        return Declaration.of(what, **mapping)

    def calls(self) -> Iterator[tuple[dict[str, Spec], dict[str, Any]]]:
        """Yield (arguments, keywords) of each variant, in the order in which they were written."""
        for config in self.configs or ({},):
            keywords = {**self.constants, **self.options, **config}
            for specs in _combinations(self.signature):
                arguments = {name: _spec(spec) for name, spec in specs.items()}
                for chosen in _combinations(keywords):
                    yield dict(arguments), chosen

    def wants(self, target: Target) -> bool:
        """Whether it is to be built for a target."""
        return not self.targets or target in self.targets


def _is_named(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _spec(spec: Any) -> Any:
    return tuple(map(_spec, spec)) if isinstance(spec, (tuple, list)) else spec


def _combinations(named: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    choices = [value if isinstance(value, list) else [value] for value in named.values()]
    for chosen in itertools.product(*choices):
        yield dict(zip(named, chosen, strict=True))


class _Declared:
    """The declarations of each decorated kernel, for as long as the kernel lives."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Any], list[Declaration]]] = {}

    def add(self, kernel: Any, declaration: Declaration) -> None:
        number = id(kernel)
        reference = weakref.ref(kernel, lambda _: self._of.pop(number, None))
        self._of.setdefault(number, (reference, []))[1].append(declaration)

    def of(self, kernel: Any) -> tuple[Declaration, ...]:
        # Decorators are applied from the bottom up; authors read them from the top down.
        return tuple(reversed(self._of.get(id(kernel), (None, []))[1]))


_declared = _Declared()
declarations_of = _declared.of


def prebuild(
    signature: Mapping[str, Any],
    *,
    constants: Mapping[str, Any] | None = None,
    configs: Sequence[Mapping[str, Any]] | None = None,
    targets: Sequence[str] | None = None,
) -> Callable[[K], K]:
    """Say what `triton-bundler build` compiles of a kernel; a program that runs is not affected.

    Stands above `triton.jit` and `triton.autotune`, and may be repeated::

        @bundler.prebuild(
            {"x": "*fp16:16", "n": ["i32:16", "i32"]}, constants={"BLOCK": [256, 1024]}
        )
        @triton.jit
        def kernel(x, n, BLOCK: tl.constexpr): ...

    Args:
        signature: argument name -> what it is: `*fp16:16` a tensor at a multiple of 16 bytes,
            `*fp16` one of which nothing is known, with `:large` one of 2 GB or more; `i32`,
            `i32:16` a multiple of 16, `i32:1` one; `fp32`; `i1`; `none`; `tensordesc<fp16[64,
            32]>`; a tuple of these.  A list gives variants.
        constants: constexpr argument -> value; a list gives variants.  An autotuner's own constants
            are left out.
        configs: mappings of constants and of options such as `num_warps`, each a variant.
        targets: such as `["cuda:90"]`; None for all that a build asks for.

    Returns:
        A decorator that returns the kernel itself.

    Raises:
        ConfigError: one of these has another shape, or a target is none.
    """

    def declare(kernel: K) -> K:
        what = f"prebuild of {getattr(kernel, '__name__', None) or getattr(kernel, 'fn', kernel)}"
        _declared.add(kernel, Declaration.of(what, signature, constants, None, configs, targets))
        return kernel

    return declare


@dataclass(frozen=True)
class NamedConstant:
    """A constant that is a type of Triton's language (`dtype`), or a JIT function of the kernel's
    module (`function`).
    """

    kind: str
    name: str


@dataclass(frozen=True)
class ListedKernel:
    """One `[[kernel]]` of a build file."""

    module: str
    function: str
    declaration: Declaration


def read_build_file(
    path: str | os.PathLike[str],
) -> tuple[tuple[ListedKernel, ...], tuple[Target, ...]]:
    """Return the kernels of a build file, and the targets that it names for all of them.

    Raises:
        ConfigError: not TOML, an unknown or missing name, or a value of another shape; with the
            place.
        LimitExceeded: it is larger than 16 MiB.
        NotFound, AccessDenied, BundlerError: the file cannot be read, or is none.
    """
    with os_errors(path, "read"):
        data = read_regular(path, MAX_BYTES)
    try:
        parsed = toml_of(data)
    except ValueError as error:
        raise ConfigError(f"{path}: not a TOML file: {error}", path=str(path)) from error
    unknown = sorted(parsed.keys() - _TOP)
    if unknown:
        raise ConfigError(
            f"{path}: unknown {', '.join(unknown)}; expected targets and [[kernel]]", got=unknown
        )
    kernels = parsed.get("kernel", [])
    if not isinstance(kernels, list) or not kernels:
        raise ConfigError(f"{path}: no [[kernel]] in it", path=str(path))
    folder = os.path.dirname(os.path.abspath(path))
    listed = tuple(
        _kernel(f"{path}: kernel {number}", kernel, folder)
        for number, kernel in enumerate(kernels, 1)
    )
    return listed, Declaration.of(str(path), targets=parsed.get("targets")).targets


def _kernel(what: str, kernel: Any, folder: str) -> ListedKernel:
    if not isinstance(kernel, dict):
        raise ConfigError(f"{what}: expected a table, got {kernel!r:.80}")
    rest = dict(kernel)
    module, function = rest.pop("module", None), rest.pop("function", None)
    if not isinstance(module, str) or not isinstance(function, str):
        raise ConfigError(f"{what}: expected module and function, got {module!r} and {function!r}")
    declaration = Declaration.of_mapping(f"{what} ({function})", rest)
    configs = tuple(_constants(what, config) for config in declaration.configs)
    declaration = replace(
        declaration, constants=_constants(what, declaration.constants), configs=configs
    )
    if module.endswith(".py"):
        module = os.path.join(folder, module)
    return ListedKernel(module, function, declaration)


def _constants(what: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _variants(f"{what}: {name}", value) for name, value in named.items()}


def _variants(what: str, value: Any) -> Any:
    return (
        [_constant(what, item) for item in value]
        if isinstance(value, list)
        else _constant(what, value)
    )


def _constant(what: str, value: Any) -> Any:
    if isinstance(value, list):  # a list inside the list of variants is one variant
        return tuple(_constant(what, item) for item in value)
    if not isinstance(value, dict):
        return value
    (kind, name) = next(iter(value.items()), ("", None))
    if len(value) != 1 or kind not in {"dtype", "function"} or not isinstance(name, str):
        raise ConfigError(
            f'{what}: expected {{dtype = "fp32"}} or {{function = "name"}}, got {value!r:.80}'
        )
    return NamedConstant(kind, name)
