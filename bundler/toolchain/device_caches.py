# SPDX-License-Identifier: Apache-2.0
"""`DeviceCaches`: hands restored kernels to Triton's JIT, so that a first call neither asks the
compiler nor fires a hook of it.

::

    replay ──▶ offer ─┬▶ fill: functions that are here
                      ├▶ import: functions of modules that are imported later, when that ends
                      └▶ gate: where the JIT would compile, Triton's own key decides
    each of them ──▶ every recorded specialization ──▶ the JIT's in-memory cache

The gate is for a function that no import made, another device, options written otherwise, and a
kernel without launch facts.

A kernel goes to a function only where Triton itself, here and now, makes the kernel's key of what
would be compiled: the hit that it would have on disk, without its compiler, its listener and its
hooks.  `bundler/integrations/replayed_kernels.py` calls `offer`.

`Requests`: what the JIT would ask its compiler for, made again from the launch facts of a recorded
kernel, and proven by its key.

::

    launch facts ──▶ specialization of each argument ──▶ the JIT's own `run` ──▶ Request
                                                         (its binder is replaced)  │
    key of the recorded kernel ◀── must be equal ── Triton's own key ◀─────────────┘

`run` is stopped where it would compile.  The text under which the JIT keeps a kernel in memory,
types, constants, attributes and options are thus Triton's own on every release.

`agreeing_hashes`, `difference`: whether a function has the source that a kernel was recorded with.
Before Triton 3.9 a function's hash depends on whether the functions that it calls were hashed
before it, so one source has two.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, Literal, NamedTuple, get_args

from bundler.errors import (
    BundlerError,
    DriverUnavailable,
    NotFound,
    RecordingError,
    ToolchainMismatch,
)
from bundler.fork_safety import ForkSafeLock
from bundler.format.entries import Kernel
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import LaunchFacts, Path
from bundler.package_loggers import logger
from bundler.toolchain import instances
from bundler.toolchain.compile_call import decode_value, type_of
from bundler.toolchain.compile_frames import find_jit_call
from bundler.toolchain.events import kernel_hash, target_of
from bundler.toolchain.instances import when_imported
from bundler.toolchain.jit_specialization import functions_of, hash_again, stopped_run
from bundler.toolchain.keytext import kernel_key_here, text_hash
from bundler.toolchain.rekeyed_key import hashed_function, option_here

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


_LOG = logger("bundler.toolchain")
# Stands in a function's attributes: for which devices, and which offers, its kernels were looked
# for.
_FILLED = "_bundler_filled"
# Stands in a function's attributes: places in its cache that were filled while the JIT was looking
# for the first kernel of a process.
_SILENT = "_bundler_silent"

Outcome = Literal["replayed", "later", "skipped", "elsewhere", "changed", "not found"]
# Where several functions have one name, the best outcome counts: they stand in this order.
_BEST_FIRST: tuple[Outcome, ...] = get_args(Outcome)


class OfferedKernel(NamedTuple):
    """One kernel that may be handed to the JIT.

    Attributes:
        kernel: as it was recorded.
        roots: Triton's cache directories in which it may have been restored.
        modules: it goes to functions of these modules, and of those below them, alone; None for
            all.
    """

    kernel: Kernel
    roots: tuple[str, ...]
    modules: tuple[str, ...] | None = None

    @property
    def function_name(self) -> str:
        """The name of the Python function that it was compiled from, as far as known."""
        return self._part("source.name") or self.kernel.name

    @property
    def source_hash(self) -> str | None:
        """Triton's hash of that function; None where it was not recorded."""
        return self._part("source.hash")

    def _part(self, name: str) -> str | None:
        parts = self.kernel.parts
        return None if parts is None else dict(parts.parts).get(name)


def of_modules(function: Any, modules: tuple[str, ...] | None) -> bool:
    """Whether a function is of one of these modules, or of one below them; None for all."""
    module = f"{function.module}."
    return modules is None or any(module.startswith(f"{allowed}.") for allowed in modules)


def _of_modules_of(function: Any, kernels: dict[str, OfferedKernel]) -> dict[str, OfferedKernel]:
    """Return the kernels that may go to a function."""
    return {key: one for key, one in kernels.items() if of_modules(function, one.modules)}


class ReplayOutcome(NamedTuple):
    """What became of one kernel, and why; `reason` is empty for one that is in the JIT's cache."""

    outcome: Outcome
    reason: str = ""


class DeviceCaches:
    """The kernels that were offered to the JIT of this process.

    Any thread may offer, and launch meanwhile: what a launch put into the JIT's cache stays.  A
    forked child goes on with a copy.
    """

    def __init__(self) -> None:
        self._holder = ForkSafeLock()
        # By function name, then by key.  Replaced, never changed, so that launches read them
        # without the lock.
        self._offered: dict[str, dict[str, OfferedKernel]] = {}
        self._offers = 0

    def offer(
        self, kernels: Iterable[OfferedKernel], threads: Executor
    ) -> dict[str, ReplayOutcome]:
        """Hand kernels to the functions that are here, and keep them for those that are not;
        returns what became of each, by key.

        Raises:
            DriverUnavailable: Triton finds no GPU.
            RecordingError: Triton is not installed.
            ToolchainMismatch: its JIT is not as in the releases that we know.
        """
        device, target = _device_now()
        _install_gate(self)
        told: dict[str, ReplayOutcome] = {}
        mine: dict[str, dict[str, OfferedKernel]] = {}
        for offered in kernels:
            key, wanted = offered.kernel.key, offered.kernel.target
            if _always_compiles():
                told[key] = ReplayOutcome("skipped", "TRITON_ALWAYS_COMPILE is set")
            elif wanted == target_of(target):
                mine.setdefault(offered.function_name, {})[key] = offered
            else:
                told[key] = ReplayOutcome(
                    "elsewhere", f"it is for {wanted}, not {target_of(target)}"
                )
        with self._holder.lock:
            self._offers += 1
            self._offered = {
                **self._offered,
                **{name: {**self._offered.get(name, {}), **group} for name, group in mine.items()},
            }
            every = instances.instances(instances.JIT_FUNCTION)
            named = [one for one in every if one.__name__ in mine]
            for name, group in mine.items():
                functions = [one for one in named if one.__name__ == name]
                told |= self._fill_all(name, group, functions, device, threads)
        instances.when_made(instances.JIT_FUNCTION, self._await)
        self._silence(named, device)
        return told

    def _silence(self, functions: Iterable[Any], device: int) -> None:
        """Spare the user's hook the kernels that Triton is looking for on disk at this moment,
        where that is what began the replay.

        By environment alone a session begins with the first kernel that Triton looks for: it has
        become a replayed one meanwhile, and so have those of other threads, which wait for the
        session.
        """
        call = find_jit_call()
        if call is None:
            return
        for function in functions:
            if vars(function).get(_FILLED, {}).get(device) == self._offers:
                vars(function)[_SILENT] = set(function.device_caches[device][0])
        place, asking = call["key"], call["self"]
        request = Request(
            place, call["signature"], call["constexprs"], call["options"], call["attrs"]
        )
        if self.instead_of_compiling(asking, call["device"], request) is not None:
            vars(asking).setdefault(_SILENT, set()).add(place)

    def _await(self, function: Any) -> None:
        """Fill a function that is being defined when its module is whole; one that no import makes
        is filled at its first call.
        """
        if function.__name__ in self._offered:
            when_imported(function.module, functools.partial(self._imported, function))

    def _imported(self, function: Any) -> None:
        kernels = self._suited(function)
        if kernels and not _always_compiles():
            device, target = _device_now()
            with self._holder.lock:
                mine = {k: o for k, o in kernels.items() if o.kernel.target == target_of(target)}
                self._fill(function, mine, device, None)

    def _fill_all(
        self,
        name: str,
        kernels: dict[str, OfferedKernel],
        functions: list[Any],
        device: int,
        threads: Executor,
    ) -> dict[str, ReplayOutcome]:
        why = f"no function {name} of the modules asked for is here yet"
        told = dict.fromkeys(kernels, ReplayOutcome("not found", why))
        for function in functions:
            suited = _of_modules_of(function, kernels)
            for key, new in self._fill(function, suited, device, threads).items():
                if _BEST_FIRST.index(new.outcome) <= _BEST_FIRST.index(told[key].outcome):
                    told[key] = new
        refused = {key for key, one in told.items() if one.outcome == "skipped"}
        if refused:
            left = {key: o for key, o in self._offered[name].items() if key not in refused}
            self._offered = {**self._offered, name: left}
        return told

    def _fill(
        self,
        function: Any,
        kernels: dict[str, OfferedKernel],
        device: int,
        threads: Executor | None,
    ) -> dict[str, ReplayOutcome]:
        """Fill one function's cache for one device; never raises but for a fault of ours."""
        if not kernels:
            return {}
        vars(function).setdefault(_FILLED, {})[device] = self._offers
        wanted = frozenset(filter(None, (offered.source_hash for offered in kernels.values())))
        try:
            agreeing = agreeing_hashes(function, wanted)
            cache = function.device_caches[device][0]
        except BundlerError as error:
            return dict.fromkeys(kernels, ReplayOutcome("later", error.message))
        told: dict[str, ReplayOutcome] = {}
        found: list[tuple[OfferedKernel, list[Request]]] = []
        for key, offered in kernels.items():
            answer = _proven(function, offered, agreeing, device)
            if isinstance(answer, ReplayOutcome):
                told[key] = answer
            else:
                found.append((offered, answer))
        loaded = (threads.map if threads is not None else map)(
            functools.partial(_loaded, function), found
        )
        for (offered, requests), one in zip(found, loaded, strict=True):
            if isinstance(one, ReplayOutcome):
                told[offered.kernel.key] = one
                continue
            for request in requests:
                cache.setdefault(request.place, one)
            told[offered.kernel.key] = ReplayOutcome("replayed")
        return told

    def _suited(self, function: Any) -> dict[str, OfferedKernel]:
        return _of_modules_of(function, self._offered.get(function.__name__, {}))

    def instead_of_compiling(self, function: Any, device: int, request: Request) -> Any | None:
        """Return the kernel that the JIT would compile, or find on disk, put into its cache; None
        where there is none.

        The JIT calls it in any thread, with what it would hand to its compiler.
        """
        kernels = self._suited(function)
        if not kernels or _always_compiles():
            return None
        cache, _, _, backend, _ = function.device_caches[device]
        with self._holder.lock:
            if vars(function).get(_FILLED, {}).get(device) != self._offers:
                self._fill(function, kernels, device, None)
        if request.place in cache:
            return cache[request.place]
        for source_hash in _hashes_of(function, kernels):
            offered = kernels.get(key_of(function, request, source_hash, backend) or "")
            if offered is not None:
                one = _loaded(function, (offered, [request]))
                if isinstance(one, ReplayOutcome):
                    return None
                return cache.setdefault(request.place, one)
        return None


def _hashes_of(function: Any, kernels: dict[str, OfferedKernel]) -> Iterator[str]:
    yield function.cache_key
    recorded = frozenset(filter(None, (offered.source_hash for offered in kernels.values())))
    yield from agreeing_hashes(function, recorded) - {function.cache_key}


def _proven(
    function: Any, offered: OfferedKernel, agreeing: frozenset[str], device: int
) -> list[Request] | ReplayOutcome:
    """Return the requests that lead to a kernel, or what to say of it."""
    kernel = offered.kernel
    if kernel.parts is None or kernel.facts_bytes is None:
        return ReplayOutcome(
            "later",
            "it came by pack, without launch facts; it is handed over at the first call that"
            " needs it",
        )
    if offered.source_hash not in agreeing:
        return ReplayOutcome("changed", difference(function, kernel.parts))
    try:
        facts = kernel.launch.require_facts()
        requests = Requests(function, facts, device)
        found = list(requests)
        source_hash = offered.source_hash or ""
        made = {key_of(function, request, source_hash, requests.backend) for request in found}
    except Exception as error:  # noqa: BLE001  # Triton's own code, on facts that come from anybody
        return ReplayOutcome(
            "skipped",
            f"its specialization cannot be made again ({type(error).__name__}: {error!s:.300})",
        )
    if made == {kernel.key}:
        return found
    if any(kind.tag == "tuple" for _, kind in facts.signature):
        return ReplayOutcome(
            "later",
            "the names in a tuple argument were not recorded; it is handed over at the first call"
            " that needs it",
        )
    return ReplayOutcome(
        "skipped",
        "its specialization does not lead to its key: it was changed, or is another toolchain's",
    )


def _loaded(function: Any, found: tuple[OfferedKernel, list[Request]]) -> Any:
    """Return Triton's kernel object, which loads nothing onto the device before its first launch;
    or why there is none.
    """
    offered, requests = found
    from triton.compiler.compiler import CompiledKernel

    from bundler.toolchain.recording.cache_manager import read_group

    kernel, request = offered.kernel, requests[0]
    try:
        filename = kernel.metadata.filename
        groups = (read_group(f"{root}/{kernel.key}", filename) for root in offered.roots)
        group = next(filter(None, groups), None)
        if group is None:
            raise NotFound(f"its files are not, or not all, in {' or '.join(offered.roots)}")
        hashed = _hashed_as(function, offered.source_hash)
        source = function.ASTSource(
            hashed, request.signature, request.constants, request.attributes
        )
        made = CompiledKernel(source, group, kernel_hash(kernel.key))
        is_other = made.metadata.hash != kernel_hash(kernel.key)
        if is_other or target_of(made.metadata.target) != kernel.target:
            raise ToolchainMismatch(f"the metadata in {group[filename]} is another kernel's")
    except BundlerError as error:
        return ReplayOutcome("skipped", error.message)
    except Exception as error:  # noqa: BLE001  # as in `_proven`: files may be anything by now
        return ReplayOutcome(
            "skipped", f"Triton cannot read its files ({type(error).__name__}: {error!s:.300})"
        )
    return made


def _hashed_as(function: Any, source_hash: str | None) -> Any:
    """Return a function with the recorded one of its two hashes, so that a recording which finds
    the kernel can prove its key.
    """
    if source_hash in (None, function.cache_key):
        return function
    alike = copy.copy(function)
    alike.hash = source_hash
    return alike


def _device_now() -> tuple[int, Any]:
    """Return the index of the device in use, and Triton's target of it."""
    try:
        from triton.runtime.driver import driver
    except ImportError as error:
        raise RecordingError(
            f"Triton cannot be imported ({error}), so there is nothing to replay into"
        ) from error
    try:
        return driver.active.get_current_device(), driver.active.get_current_target()
    except Exception as error:  # Triton's own, torch's or the driver's
        raise DriverUnavailable(
            f"Triton finds no GPU to replay for ({type(error).__name__}: {error!s:.200})"
        ) from error


def _always_compiles() -> bool:
    return bool(sys.modules["triton.knobs"].compilation.always_compile)


def _install_gate(caches: DeviceCaches) -> None:
    """Stand where the JIT would compile; once a process, and from then on."""
    kind: Any = instances.JIT_FUNCTION.find()
    original = getattr(kind, "_do_compile", None)
    if original is None or not hasattr(kind, "_pack_args") or not hasattr(kind, "_call_hook"):
        raise ToolchainMismatch(
            "this Triton's JIT does not compile by `_do_compile`, so nothing can be replayed"
            " into it"
        )
    if not hasattr(original, _FILLED):
        # the one place between the JIT and its compiler
        kind._do_compile = _gated(original, caches)  # noqa: SLF001
        # the one place that calls hooks
        kind._call_hook = _sparing(kind._call_hook)  # noqa: SLF001


def _gated(original: Callable[..., Any], caches: DeviceCaches) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_unless_offered(self: Any, *asked: Any, **named: Any) -> Any:
        try:
            place, signature, device, constants, options, attributes = asked[:6]
            request = Request(place, signature, constants, options, attributes)
            found = caches.instead_of_compiling(self, device, request)
        except Exception as error:  # noqa: BLE001  # the seam: whatever goes wrong here, Triton compiles as it would without us
            _LOG.warning(
                "a kernel of %s was not replayed (%s: %s)", self, type(error).__name__, error
            )
            found = None
        return original(self, *asked, **named) if found is None else found

    setattr(compile_unless_offered, _FILLED, True)
    return compile_unless_offered


def _sparing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_hook_unless_replayed(self: Any, hook: Any, key: str, *more: Any, **named: Any) -> Any:
        silent = vars(self).get(_SILENT)
        after_compile = sys.modules["triton.knobs"].runtime.jit_post_compile_hook
        if silent and key in silent and hook is after_compile and not _always_compiles():
            silent.discard(key)
            return None
        return original(self, hook, key, *more, **named)

    return call_hook_unless_replayed


device_caches = DeviceCaches()


# A launch holds such a lock while Triton hashes a function, which takes milliseconds.
_PATIENCE_S = 1.0


def agreeing_hashes(function: Any, wanted: frozenset[str]) -> frozenset[str]:
    """Return which of the recorded hashes are hashes of this function's source.

    Where the function was not hashed before, it keeps one of them, so that Triton asks for keys as
    the recorded process did. Safe while other threads launch.

    Raises:
        ToolchainMismatch: the function cannot be hashed, for instance while its module is being
            imported.
    """
    fresh = function.hash is None
    try:
        known = function.cache_key
    except Exception as error:  # Triton reads the function's source and globals: they are anybody's
        if fresh:
            function.hash = None  # Triton leaves a placeholder there, which would stand in keys
        raise ToolchainMismatch(
            f"Triton cannot hash it ({type(error).__name__}: {error!s:.200})"
        ) from error
    if wanted <= {known}:
        return wanted
    return wanted & {known, *_other_hashes(function, wanted, fresh=fresh)}


def _other_hashes(function: Any, wanted: frozenset[str], *, fresh: bool) -> list[str]:
    """Return the hashes with and without the functions that it calls hashed before."""
    functions = functions_of(function)
    found = []
    with _held(functions):
        before = [(one, one.hash, one.used_global_vals) for one in functions]
        agreed = None
        for helpers_first in (False, True):
            digest = hash_again(function, helpers_first=helpers_first)
            found.append(digest)
            if digest in wanted:
                agreed = (digest, function.used_global_vals)
        for one, digest, used in before:
            one.hash, one.used_global_vals = digest, used
        if fresh and agreed is not None and function.hash not in wanted:
            function.hash, function.used_global_vals = agreed
    return found


@contextlib.contextmanager
def _held(functions: list[Any]) -> Iterator[None]:
    """Keep other threads from reading hashes while the block changes them."""
    found = (getattr(one, "_hash_lock", None) for one in functions)
    locks = {id(lock): lock for lock in found if lock is not None}
    with contextlib.ExitStack() as stack:
        for lock in locks.values():
            # Not without end: a launch takes such locks in an order of its own.
            if not lock.acquire(timeout=_PATIENCE_S):
                raise ToolchainMismatch("another thread is hashing it")
            stack.callback(lock.release)
        yield


def difference(function: Any, parts: KeyParts) -> str:
    """Return which recorded part of a source differs from that of a function, in words."""
    recorded = dict(parts.parts)
    text = text_hash(function.src)
    place = f"{function.module}.{function.__qualname__}"
    if recorded.get("source.text", text) != text:
        return f"source.text: the code of {place} was edited"
    line = str(function.starting_line_number)
    if recorded.get("source.line", line) != line:
        return (
            f"source.line: {place} was at line {recorded['source.line']:.20} and is at line {line}"
        )
    return f"source.hash: a function or a global constant that {place} uses was changed"
