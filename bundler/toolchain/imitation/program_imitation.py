# SPDX-License-Identifier: Apache-2.0
"""`ProgramImitation`: a program runs as on a machine with the target's GPU, and each compile that
it would ask for is heard.

::

    tensors        fake, with addresses and known small values     fake_tensors.py
    torch.cuda     answers for the target's device                 imitated_cuda.py, target_devices.py
    Triton         an imitated driver; launches heard, not made    imitated_triton.py

`bundler/compile/program_capture.py` enters one around the program, and compiles what it heard.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from bundler.errors import BundlerError, RecordingError
from bundler.format.entries import Target
from bundler.project import install
from bundler.toolchain import jit_specialization, targets
from bundler.toolchain.imitation.imitated_triton import (
    captured_launches,
    imitating_driver,
)
from bundler.toolchain.imitation.target_devices import TargetDevice, device_of
from bundler.toolchain.jit_specialization import CompileRequest, Specialized
from bundler.toolchain.user_frames import Place, user_place

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
        tensors: Any = _import("bundler.toolchain.imitation.fake_tensors", "torch")
        cuda: Any = _import("bundler.toolchain.imitation.imitated_cuda", "torch")
        values: Any = tensors.KnownValues()
        launches = captured_launches(
            self._requested, lambda *call: self._launched(values, *call), self._guessed
        )
        with contextlib.ExitStack() as stack:
            self._driver = stack.enter_context(imitating_driver(self.target, self.device))
            # Before torch.cuda is imitated: what the mode imports looks at functions of torch by
            # identity.
            stack.enter_context(tensors.imitated_tensors(values, self._guessed))
            stack.enter_context(cuda.imitated_cuda(self.target, self.device))
            stack.enter_context(cuda.imitated_autocast())
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
