# SPDX-License-Identifier: Apache-2.0
"""`captured_launches`: Triton's launches heard instead of made: what each would be compiled to, and
every candidate of an autotuner.

The JIT's own `run` binds and specializes each call, evaluates its grid and runs its hooks, all with
the program's (fake) tensors.  Where it would compile it is given a kernel that does nothing.  An
autotuner's own `run` prunes its configurations and "measures" each: one call, equal times.  What
both keep in memory is set aside meanwhile, so that a later real launch finds nothing of the
capture.

Used by `program_imitation.py`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from bundler.toolchain.imitation.imitated_driver import benchmark_once
from bundler.toolchain.imitation.replaced_attributes import Replacements
from bundler.toolchain.jit_specialization import CompileRequest

# Told (what a kernel that was not compiled was asked, what was answered).
Heard = Callable[[str, str], None]
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


class LaunchCapture:
    """Hears launches.

    Args:
        requested: told of each compile that a call would lead to, once for each kernel: (JIT
            function, its request).
        launched: told of each call: (JIT function, positional arguments, keyword arguments).
        heard: see above.
    """

    def __init__(
        self,
        requested: Callable[[Any, CompileRequest], None],
        launched: Callable[[Any, tuple[Any, ...], dict[str, Any]], None],
        heard: Heard,
    ) -> None:
        self._requested, self._launched, self._heard = requested, launched, heard
        self._changes = Replacements()
        self._set_aside: set[int] = set()
        self._tuned: set[tuple[Any, ...]] = set()

    def begin(self) -> None:
        """Hear launches from now on.  Triton has to be imported."""
        jit: Any = sys.modules["triton.runtime.jit"]
        tuner: Any = sys.modules["triton.runtime.autotuner"].Autotuner
        run, tune = jit.JITFunction.run, tuner.run

        def heard_run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            self._put_aside(function, "device_caches", defaultdict(function.create_binder))
            self._launched(function, args, kwargs)
            return run(function, *args, grid=grid, warmup=warmup, **kwargs)

        def heard_tuning(tuned: Any, *args: Any, **kwargs: Any) -> Any:
            self._put_aside(tuned, "cache", {})
            # A tuner's key may leave out what a kernel is specialized for; a winner of other calls
            # is any of its configurations.
            shape = (
                id(tuned),
                *map(_shape_of, args),
                *((name, _shape_of(value)) for name, value in kwargs.items()),
            )
            if shape not in self._tuned:
                self._tuned.add(shape)
                tuned.cache.clear()
            return tune(tuned, *args, **kwargs)

        def without_results(
            _tuned: Any, _key: Any, _configs: Any, measure: Callable[[], None]
        ) -> bool:
            measure()
            return False

        self._changes.put_all(
            jit.JITFunction, {"run": heard_run, "_do_compile": self._instead_of_compiling}
        )
        # A property, which also stands before the benchmarker that an autotuner keeps among its
        # attributes.
        once = property(lambda _tuned: benchmark_once)
        self._changes.put_all(
            tuner, {"run": heard_tuning, "do_bench": once, "check_disk_cache": without_results}
        )
        testing: Any = sys.modules.get("triton.testing")
        if testing is not None:
            self._changes.put_all(
                testing, {"do_bench": benchmark_once, "do_bench_cudagraph": benchmark_once}
            )

    def end(self) -> None:
        """Give Triton back what is Triton's."""
        self._changes.undo()
        self._set_aside.clear()
        self._tuned.clear()

    @property
    def _instead_of_compiling(self) -> Callable[..., CapturedKernel]:
        def instead(
            function: Any,
            key: Any,
            signature: Any,
            device: Any,
            constants: Any,
            options: Any,
            attributes: Any,
            _warmup: Any,
        ) -> CapturedKernel:
            kernels, _, _, backend, _ = function.device_caches[device]
            source = function.ASTSource(function, signature, constants, attributes)
            self._requested(function, CompileRequest(source, options, backend))
            kernels[key] = CapturedKernel(function.__name__, options, self._heard)
            made: CapturedKernel = kernels[key]
            return made

        return instead

    def _put_aside(self, owner: Any, name: str, instead: Any) -> None:
        """Give an object an empty memory for the time of the capture."""
        if id(owner) not in self._set_aside:
            # `_changes` holds the object, so that its number is not given to another one.
            self._set_aside.add(id(owner))
            self._changes.put(owner, name, instead)


def _shape_of(value: Any) -> Any:
    """Return what a kernel may be specialized for of an argument: a number or a text itself, of
    anything else its type and types of elements.
    """
    return (
        value
        if isinstance(value, (bool, int, str))
        else (type(value), str(getattr(value, "dtype", "")))
    )


@contextlib.contextmanager
def captured_launches(capture: LaunchCapture) -> Iterator[None]:
    """Hear launches while the block runs."""
    try:
        capture.begin()
        yield
    finally:
        capture.end()
