# SPDX-License-Identifier: Apache-2.0
"""`Config`: one candidate of a kernel, as a value whose identity is everything that reaches the
compiler.

Rules and users make them; the tuner compiles, measures and records them.  Candidates that need no
rule, since their author decided on them, are made here: templates, fixed and user-written configs,
lists of kernels (foreach).  The decorators of the same names and Inductor's generated modules call
these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from bundler.errors import ConfigError, FormatError
from bundler.format import wire
from bundler.format.constant_values import Value
from bundler.format.digest import digest_text, sha256
from bundler.toolchain.compile_call import decode_value
from bundler.toolchain.encoding import encode_value

DEFAULT_WARPS, DEFAULT_STAGES, DEFAULT_CTAS = 4, 3, 1
# What of a config is neither a parameter of the kernel nor an option by name -> the least it may be.
_LEAST = {"num_warps": 1, "num_stages": 0, "num_ctas": 1, "maxnreg": 1}
COUNTS = tuple(_LEAST)


@dataclass(frozen=True, eq=False)
class Config:
    """One way to compile a kernel: values for its constexpr parameters, and options for the
    compiler.

    Two configs are equal, and hash alike, when `key` is: order of the mappings does not matter;
    `pre_hook`, `dynamic_scale` and `origin` do not count, since the compiler never sees them.
    Immutable; safe in any thread; pickles when its values do.

    Attributes:
        kwargs: constexpr parameter -> value, in the order given.
        num_warps, num_stages, num_ctas: as in Triton.
        maxnreg: most registers of a thread, None for no limit.
        options: every other compiler option -> value.
        pre_hook: called with the arguments of each launch before it, as Triton calls it.
        dynamic_scale: whether a reduction block may be halved when the kernel turns out to use many
            registers.
        origin: the rule that proposed it, for people.

    Raises:
        ConfigError: a field has the wrong type or is too small, or a name stands in two places.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = DEFAULT_WARPS
    num_stages: int = DEFAULT_STAGES
    num_ctas: int = DEFAULT_CTAS
    maxnreg: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    pre_hook: Callable[..., Any] | None = None
    dynamic_scale: bool = True
    origin: str = ""
    _key: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            _check_count(name, getattr(self, name), least)
        for name in ("kwargs", "options"):
            _check_names(name, getattr(self, name))
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        twice = sorted(self.kwargs.keys() & self.options.keys())
        if twice:
            raise ConfigError(
                f"config: {twice[0]!r} is both a parameter and an option; give it once",
                name=twice[0],
            )
        key = (_identity(self.kwargs), *self.counts.values(), _identity(self.options))
        object.__setattr__(self, "_key", key)

    @property
    def counts(self) -> dict[str, int | None]:
        """The fields that are numbers, by name."""
        return {name: getattr(self, name) for name in COUNTS}

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes this config itself: hashable, independent of order, comparable within one
        process.
        """
        return self._key

    @property
    def portable(self) -> bool:
        """Whether every value can travel, so that `to_wire` and `digest` work."""
        return all(
            isinstance(value, Value) for part in (self._key[0], self._key[-1]) for _, value in part
        )

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the identity, the same in every process and for every order.

        Raises:
            ConfigError: the config is not portable.
        """
        kwargs, *rest = replace(
            self, kwargs=_sorted(self.kwargs), options=_sorted(self.options)
        ).to_wire()
        return digest_text(sha256(wire.pack([kwargs, *rest[:5]])))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        rest = (dict(self.options), self.pre_hook, self.dynamic_scale, self.origin)
        return Config, (dict(self.kwargs), *self.counts.values(), *rest)

    def __str__(self) -> str:
        shown = {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.num_ctas != DEFAULT_CTAS:
            shown["num_ctas"] = self.num_ctas
        if self.maxnreg is not None:
            shown["maxnreg"] = self.maxnreg
        return ", ".join(f"{name}={value}" for name, value in {**shown, **self.options}.items())

    def all_kwargs(self) -> dict[str, Any]:
        """Return parameters and options together, as a call of a Triton kernel takes them; None
        stands for "not given".
        """
        counts = {
            name: getattr(self, name) for name in ("num_warps", "num_ctas", "num_stages", "maxnreg")
        }
        return {
            **self.kwargs,
            **{
                name: value
                for name, value in {**counts, **self.options}.items()
                if value is not None
            },
        }

    def with_kwargs(self, **changes: Any) -> Config:
        """Return this config with some parameters added or changed."""
        return replace(self, kwargs={**self.kwargs, **changes})

    def without_kwargs(self, *names: str) -> Config:
        """Return this config without some parameters; names it does not have are no error."""
        return replace(
            self, kwargs={name: value for name, value in self.kwargs.items() if name not in names}
        )

    def for_parameters(self, parameters: Collection[str]) -> Config:
        """Return this config for a function with these parameters: other names among `kwargs` are
        compiler options, as for Triton.
        """
        apart = {name: value for name, value in self.kwargs.items() if name not in parameters}
        return (
            replace(self.without_kwargs(*apart), options={**self.options, **apart})
            if apart
            else self
        )

    # ------------------------------------------------------------------------------ Triton's object

    @staticmethod
    def from_triton(config: Any) -> Config:
        """Take over a Triton `Config`, or anything shaped like one; what its `all_kwargs()` adds
        becomes options.

        Raises:
            ConfigError: it is not shaped like one.
        """
        if isinstance(config, Config):
            return config
        kwargs = getattr(config, "kwargs", None)
        if not isinstance(kwargs, Mapping):
            raise ConfigError(
                "config: expected a Config with kwargs, num_warps and num_stages, got"
                f" {config!r:.80}",
                got=type(config).__name__,
            )
        counts = {
            name: getattr(config, name)
            for name in _LEAST
            if getattr(config, name, None) is not None
        }
        everything = config.all_kwargs() if callable(getattr(config, "all_kwargs", None)) else {}
        options = {
            name: value
            for name, value in everything.items()
            if name not in COUNTS and name not in kwargs
        }
        return Config(kwargs, **counts, options=options, pre_hook=getattr(config, "pre_hook", None))

    def to_triton(self, kind: Callable[..., Any]) -> Any:
        """Return it as `triton.Config`, which the caller gives as `kind`.

        Raises:
            ConfigError: that class does not know one of the options.
        """
        try:
            return kind(dict(self.kwargs), **self.counts, pre_hook=self.pre_hook, **self.options)
        except TypeError as error:
            raise ConfigError(f"config: this Triton cannot hold {self}: {error}") from error

    # ----------------------------------------------------------------------------------- plain data

    def to_dict(self) -> dict[str, Any]:
        """Return the identity as a plain dictionary, for people and JSON; the values stay as they
        are.
        """
        return {"kwargs": dict(self.kwargs), **self.counts, "options": dict(self.options)}

    @staticmethod
    def from_dict(data: Any) -> Config:
        """Read what `to_dict` returned; fields that are left out have their defaults.

        Raises:
            ConfigError: anything else.
        """
        if not isinstance(data, Mapping) or not data.keys() <= {"kwargs", "options", *COUNTS}:
            raise ConfigError(
                f"config: expected a mapping of kwargs, options, {', '.join(_LEAST)}; got"
                f" {data!r:.80}",
                got=type(data).__name__,
            )
        return Config(**data)

    def to_wire(self) -> list[Any]:
        """Return the positional form for msgpack, values tagged; `pre_hook` and `origin` stay
        behind.

        Raises:
            ConfigError: a value cannot travel.
        """
        counts = self.counts.values()
        return [_tagged(self.kwargs), *counts, _tagged(self.options), self.dynamic_scale]

    @staticmethod
    def from_wire(data: Any) -> Config:
        """Decode what `to_wire` wrote; raises `FormatError` for anything else."""
        kwargs, warps, stages, ctas, maxnreg, options, scale = wire.fields(
            data, "config", list, int, int, int, (int, type(None)), list, bool
        )
        try:
            return Config(
                _untagged(kwargs),
                warps,
                stages,
                ctas,
                maxnreg,
                _untagged(options),
                dynamic_scale=scale,
            )
        except ConfigError as error:
            raise FormatError(str(error)) from error


# Options of Triton releases with explicit warp specialization; 0 says "none", and then a compiler
# need not know them.
_WARP_SPECIALIZATION = ("num_consumer_groups", "num_buffers_warp_spec")
_FOREACH_WARPS, _FOREACH_TRIED = 8, (1, 2, 4, 8)


def template_configs(num_stages: int, num_warps: int, **options: Any) -> list[Config]:
    """Return the one candidate of a template, whose blocks stand in its source.

    Args:
        num_stages, num_warps: as decided with the template.
        options: further options of the compiler; those that are None, and counts of 0, are left
            out.
    """
    given = {name: value for name, value in options.items() if _is_given(name, value)}
    return [
        Config({}, num_warps=num_warps, num_stages=num_stages, options=given, origin="template")
    ]


def fixed_configs(config: Mapping[str, Any]) -> list[Config]:
    """Return the one candidate that a flat dictionary describes: parameters and counts side by
    side.

    Raises:
        ConfigError: a count has the wrong type.
    """
    return [_from_flat(config, "fixed")]


def user_configs(configs: Sequence[Mapping[str, Any]]) -> list[Config]:
    """Return the candidates that a user wrote, in their order; without any the compiler's defaults.

    Args:
        configs: flat dictionaries.

    Raises:
        ConfigError: an entry is no dictionary, or a count has the wrong type.
    """
    if not configs:
        return [Config(origin="default")]
    return [_from_flat(config, "user") for config in configs]


def foreach_configs(*, max_autotune: bool) -> list[Config]:
    """Return the candidates of a kernel over a list of tensors, which differ in their warps; with
    `max_autotune` there are several.
    """
    tried = _FOREACH_TRIED if max_autotune else (_FOREACH_WARPS,)
    return [Config({}, num_warps=warps, num_stages=1, origin="foreach") for warps in tried]


def _from_flat(config: Mapping[str, Any], origin: str) -> Config:
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config: expected a dictionary of parameters and counts, got {config!r:.80}",
            got=type(config).__name__,
        )
    counts = {name: config[name] for name in COUNTS if config.get(name) is not None}
    options = {
        name: config[name] for name in _WARP_SPECIALIZATION if _is_given(name, config.get(name))
    }
    kwargs = {
        name: value for name, value in config.items() if name not in COUNTS + _WARP_SPECIALIZATION
    }
    return Config(kwargs, **counts, options=options, origin=origin)


def _is_given(name: str, value: Any) -> bool:
    return value is not None and not (name in _WARP_SPECIALIZATION and value == 0)


def unique(configs: Iterable[Config]) -> list[Config]:
    """Return the configs in their order, each once; of equal ones the first."""
    return list(dict.fromkeys(configs))


def _check_count(name: str, value: Any, least: int) -> None:
    if value is None and name == "maxnreg":
        return
    if type(value) is not int or value < least:
        raise ConfigError(
            f"config: {name} is a number of at least {least}, got {value!r}", name=name, got=value
        )


def _check_names(what: str, given: Any) -> None:
    if not isinstance(given, Mapping) or not all(type(name) is str for name in given):
        raise ConfigError(
            f"config: {what} map names to values, got {given!r:.80}",
            name=what,
            got=type(given).__name__,
        )
    taken = sorted(given.keys() & COUNTS)
    if taken:
        raise ConfigError(
            f"config: {taken[0]} is a field of its own, not one of the {what}", name=taken[0]
        )


def _sorted(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in sorted(given)}


def _identity(given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return sorted pairs; what has no encoding is itself: the object, or its id where it does not
    hash.
    """
    return tuple((name, _hashable(given[name])) for name in sorted(given))


def _hashable(obj: Any) -> Any:
    value = encode_value(obj)
    if value.portable:
        return value
    try:
        hash(obj)
    except TypeError:
        return id(obj)
    return obj


def _tagged(given: Mapping[str, Any]) -> list[Any]:
    values = [(name, encode_value(value)) for name, value in given.items()]
    for name, value in values:
        if not value.portable:
            raise ConfigError(
                f"config: the value of {name!r} cannot travel: {value.payload}; use numbers, text,"
                " types or lists of them",
                name=name,
                got=value.payload,
            )
    return [[name, value.to_wire()] for name, value in values]


def _untagged(data: list[Any]) -> dict[str, Any]:
    pairs = [wire.fields(pair, "config's value", str, object) for pair in data]
    decoded = {name: decode_value(Value.from_wire(value)) for name, value in pairs}
    if len(decoded) != len(pairs):
        raise FormatError("config: a name stands there twice")
    return decoded
