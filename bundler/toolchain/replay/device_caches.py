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
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
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
from bundler.package_loggers import logger
from bundler.toolchain import instances
from bundler.toolchain.compile_frames import find_jit_call
from bundler.toolchain.events import kernel_hash, target_of
from bundler.toolchain.instances import when_imported
from bundler.toolchain.replay.recorded_requests import Request, Requests, key_of
from bundler.toolchain.replay.source_hashes import agreeing_hashes, difference

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
        request = Request(call.place, call.signature, call.constants, call.options, call.attributes)
        if self.instead_of_compiling(call.function, call.device, request) is not None:
            vars(call.function).setdefault(_SILENT, set()).add(call.place)

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
