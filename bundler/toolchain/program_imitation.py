# SPDX-License-Identifier: Apache-2.0
"""`ProgramImitation`: a program runs as on a machine with the target's GPU, and each compile that
it would ask for is heard.

::

    tensors        fake, with addresses and known small values     imitated_torch.py
    torch.cuda     answers for the target's device                 imitated_torch.py, target_devices.py
    Triton         an imitated driver; launches heard, not made    here

`bundler/compile/program_capture.py` enters one around the program, and compiles what it heard.

Unlike `DeclaredDriver`, which serves imports and single compiles, `ImitatedDriver` answers what a
running program asks: device properties, torch's device, streams, a benchmarker.  It is Triton's
active driver for all threads.

The JIT's own `run` binds and specializes each call, evaluates its grid and runs its hooks, all with
the program's (fake) tensors.  Where it would compile it is given a kernel that does nothing.  An
autotuner's own `run` prunes its configurations and "measures" each: one call, equal times.  What
both keep in memory is set aside meanwhile, so that a later real launch finds nothing of the
capture.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from bundler.errors import BundlerError, ConfigError, RecordingError
from bundler.format.entries import Target
from bundler.project import install
from bundler.toolchain import jit_specialization, targets
from bundler.toolchain.declared_target import DeclaredDriver, triton_target
from bundler.toolchain.jit_specialization import CompileRequest, Specialized
from bundler.toolchain.target_devices import TargetDevice, device_of
from bundler.toolchain.user_frames import Place, user_place

_ABSENT: Any = object()

# Told (what depended on data, or what a kernel that was not compiled was asked; what was answered).
Heard = Callable[[str, str], None]


class Replacements(contextlib.ExitStack):
    """Attributes of torch's and Triton's modules and classes that stand-ins take the place of; its
    end puts everything back, the last first.  Not thread-safe.
    """

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give an attribute another value; one that the owner itself lacks is removed again at the
        end.
        """
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, before)

    def put_all(self, owner: Any, values: Mapping[str, Any]) -> None:
        """Give several attributes other values."""
        for name, value in values.items():
            self.put(owner, name, value)


# What a benchmark of a kernel that does not run says, in milliseconds; equal for all, so that the
# first configuration counts as the best.
BENCHMARK_MS = 1.0
KILOHERTZ = 1_000_000


class ImitatedDriver(DeclaredDriver):
    """Answers as the driver of a machine with the target's GPU would, as far as no kernel runs."""

    def __init__(self, target: Target, device: TargetDevice) -> None:
        super().__init__(target)
        properties: dict[str, Any] = {
            "max_shared_mem": device.shared_memory_per_block_optin,
            "max_num_regs": device.regs_per_multiprocessor,
            "multiprocessor_count": device.multi_processor_count,
            "warpSize": target.warp_size,
            "sm_clock_rate": KILOHERTZ,
            "mem_clock_rate": KILOHERTZ,
            "mem_bus_width": 1024,
        }
        if target.backend == "hip":
            properties["arch"] = target.arch
        # What Triton's driver keeps in its helper library, as far as programs ask for it.
        self.utils = SimpleNamespace(get_device_properties=lambda _device=0: dict(properties))

    def set_current_device(self, _device: int) -> None:
        """Accept any device: all are alike."""

    def get_device_interface(self) -> Any:
        """Return torch's module for the device."""
        import torch

        return torch.cuda

    def get_active_torch_device(self) -> Any:
        """Return torch's name for the device."""
        import torch

        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a function that calls what it should measure once, and says the same time for
        everything.
        """
        return benchmark_once

    def get_empty_cache_for_benchmark(self) -> Any:
        """Return a buffer that nobody reads."""
        import torch

        return torch.empty(1, dtype=torch.int, device="cuda")

    def clear_cache(self, _cache: Any) -> None:
        """Do nothing: there is no cache."""


def benchmark_once(
    call: Callable[[], Any], *_: Any, quantiles: Sequence[float] | None = None, **_options: Any
) -> Any:
    """Call what should be measured once, and return a time that is the same for everything."""
    call()
    return BENCHMARK_MS if quantiles is None else [BENCHMARK_MS] * len(quantiles)


@contextlib.contextmanager
def imitating_driver(target: Target, device: TargetDevice) -> Iterator[ImitatedDriver]:
    """Make Triton ask an imitated driver, in every thread, while the block runs.

    Raises:
        RecordingError: Triton is not installed.
        ConfigError: an imitated driver is active already.
    """
    triton_target(target)
    config: Any = sys.modules["triton.runtime.driver"].driver
    before = config._active  # noqa: SLF001  # reading `active` would look for a GPU
    if isinstance(before, ImitatedDriver):
        raise ConfigError(
            f"this process captures for {before.get_current_target()} already; end that block first"
        )
    driver = ImitatedDriver(target, device)
    config.set_active(driver)
    try:
        yield driver
    finally:
        config._active = before  # noqa: SLF001  # as above; None stands for "not looked for yet"


# What a kernel that was not compiled says of itself, to programs that compute a grid from it.
_GUESSED = {"n_regs": 64, "n_spills": 0, "n_max_threads": 1024}


class CapturedKernel:
    """Stands where a compiled kernel stands; a launch of it does nothing."""

    function = packed_metadata = None

    def __init__(self, name: str, options: Any, heard: Heard) -> None:
        self.name = name
        self._options, self._heard = options, heard

    def launch_metadata(self, *_: Any) -> None:
        """Say nothing to hooks: there is no launch."""

    def run(self, *_: Any) -> None:
        """Launch nothing."""

    _init_handles = launch_metadata

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return self.run

    @property
    def metadata(self) -> Any:
        """The options that it would be compiled with, and a guess of its shared memory."""
        self._heard(f"metadata of {self.name}", "no shared memory")
        return SimpleNamespace(**{**vars(self._options), "name": self.name, "shared": 0})

    @property
    def asm(self) -> dict[str, str]:
        """Nothing: it was not compiled yet."""
        self._heard(f"asm of {self.name}", "nothing")
        return {}

    def __getattr__(self, name: str) -> Any:
        if name in _GUESSED:
            self._heard(f"{name} of {self.__dict__.get('name')}", str(_GUESSED[name]))
            return _GUESSED[name]
        raise AttributeError(f"{name}: not known of a kernel that is captured and not compiled")


@contextlib.contextmanager
def captured_launches(
    requested: Callable[[Any, CompileRequest], None],
    launched: Callable[[Any, tuple[Any, ...], dict[str, Any]], None],
    heard: Heard,
) -> Iterator[None]:
    """Hear launches while the block runs.  Triton has to be imported.

    Args:
        requested: told of each compile that a call would lead to, once for each kernel: (JIT
            function, its request).
        launched: told of each call: (JIT function, positional arguments, keyword arguments).
        heard: see above.
    """
    jit: Any = sys.modules["triton.runtime.jit"]
    tuner: Any = sys.modules["triton.runtime.autotuner"].Autotuner
    run, tune = jit.JITFunction.run, tuner.run
    # `changes` holds each object of these, so that its number is not given to another one.
    emptied, tuned_shapes = set[int](), set[tuple[Any, ...]]()

    def give_empty(owner: Any, name: str, memory: Any) -> None:
        """Give an object an empty memory for the time of the capture."""
        if id(owner) not in emptied:
            emptied.add(id(owner))
            changes.put(owner, name, memory)

    def heard_run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        give_empty(function, "device_caches", defaultdict(function.create_binder))
        launched(function, args, kwargs)
        return run(function, *args, grid=grid, warmup=warmup, **kwargs)

    def instead_of_compiling(
        function: Any,
        key: Any,
        signature: Any,
        device: Any,
        constants: Any,
        options: Any,
        *more: Any,
    ) -> CapturedKernel:
        kernels, _, _, backend, _ = function.device_caches[device]
        source = function.ASTSource(function, signature, constants, more[0])
        requested(function, CompileRequest(source, options, backend))
        made = kernels[key] = CapturedKernel(function.__name__, options, heard)
        return made

    def heard_tuning(tuned: Any, *args: Any, **kwargs: Any) -> Any:
        give_empty(tuned, "cache", {})
        # A tuner's key may leave out what a kernel is specialized for; a winner of other calls is
        # any of its configurations.
        named = ((name, _shape_of(value)) for name, value in kwargs.items())
        shape = (id(tuned), *map(_shape_of, args), *named)
        if shape not in tuned_shapes:
            tuned_shapes.add(shape)
            tuned.cache.clear()
        return tune(tuned, *args, **kwargs)

    def without_results(_tuned: Any, _key: Any, _configs: Any, measure: Callable[[], None]) -> bool:
        measure()
        return False

    # A property, which also stands before the benchmarker that an autotuner keeps among its
    # attributes.
    once = property(lambda _tuned: benchmark_once)
    with Replacements() as changes:
        changes.put_all(jit.JITFunction, {"run": heard_run, "_do_compile": instead_of_compiling})
        changes.put_all(
            tuner, {"run": heard_tuning, "do_bench": once, "check_disk_cache": without_results}
        )
        testing: Any = sys.modules.get("triton.testing")
        if testing is not None:
            measured = dict.fromkeys(("do_bench", "do_bench_cudagraph"), benchmark_once)
            changes.put_all(testing, measured)
        yield


def _shape_of(value: Any) -> Any:
    """Return what a kernel may be specialized for of an argument: a number or a text itself, of
    anything else its type and types of elements.
    """
    if isinstance(value, (bool, int, str)):
        return value
    return type(value), str(getattr(value, "dtype", ""))


# Told (JIT function, its request, the same as data) for each kernel, and (function, why) for one
# whose call cannot be described.
OnKernel = Callable[[Any, CompileRequest, Specialized], None]
OnRefused = Callable[[Any, str], None]


class ProgramImitation:
    """The stand-ins for one target, entered once.

    Attributes:
        device: the imitated GPU.
        assumed: what was assumed about it; None for nothing.
        launches: how many launches were heard.
        guesses: (line, what depended on data, what was taken for it) -> how often.

    Raises:
        RecordingError: at the start, when torch or Triton is not installed.
        ConfigError: a property has no such name or type; at the start, when another program is
            captured in this process.
    """

    def __init__(
        self,
        target: Target,
        properties: Mapping[str, Any] | None,
        on_kernel: OnKernel,
        on_refused: OnRefused,
    ) -> None:
        self.target = target
        self.device: TargetDevice
        self.device, self.assumed = device_of(target, properties)
        self.launches = 0
        self.guesses: dict[tuple[Place, str, str], int] = {}
        self._on_kernel, self._on_refused = on_kernel, on_refused
        self._stack = contextlib.ExitStack()
        self._driver: Any = None

    @property
    def asked_in_vain(self) -> tuple[str, ...]:
        """What the program asked Triton's driver for and got no answer."""
        return tuple(self._driver.refused) if self._driver is not None else ()

    def __enter__(self) -> Self:
        _import("triton.testing", "triton")
        torchs: Any = _import("bundler.toolchain.imitated_torch", "torch")
        values: Any = torchs.KnownValues()
        launches = captured_launches(
            self._requested, lambda *call: self._launched(values, *call), self._guessed
        )
        with contextlib.ExitStack() as stack:
            self._driver = stack.enter_context(imitating_driver(self.target, self.device))
            # Before torch.cuda is imitated: what the mode imports looks at functions of torch by
            # identity.
            stack.enter_context(torchs.imitated_tensors(values, self._guessed))
            stack.enter_context(torchs.imitated_cuda(self.target, self.device))
            stack.enter_context(torchs.imitated_autocast())
            stack.enter_context(launches)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._stack.__exit__(kind, error, trace)
        finally:
            targets.forget_targets()

    def _requested(self, function: Any, request: CompileRequest) -> None:
        try:
            found = jit_specialization.as_data(request, portable=False)
        except BundlerError as error:
            self._on_refused(function, error.message)
        else:
            self._on_kernel(function, request, found)

    def _launched(
        self, values: Any, _function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.launches += 1
        for argument in (*args, *kwargs.values()):
            values.may_be_written(argument)

    def _guessed(self, what: str, guess: str) -> None:
        found = (user_place(), what, guess)
        self.guesses[found] = self.guesses.get(found, 0) + 1


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RecordingError(
            f"a program is captured with its own {extra}, which cannot be imported ({error});"
            f" {install(extra)}"
        ) from error
