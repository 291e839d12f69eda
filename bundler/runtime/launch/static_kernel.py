# SPDX-License-Identifier: Apache-2.0
"""`StaticKernel`: a kernel as its caller sees it, which picks the recorded specialization that fits a call, and launches it.

`load` makes one for each kernel name of a bundle, and the tuner one for each tuned kernel.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from bundler.errors import NotFound, ToolchainMismatch
from bundler.format.summary import count
from bundler.runtime import grids
from bundler.runtime.launch.argument_flattening import feed_of
from bundler.runtime.launch.call_key import UNCACHEABLE, Reader
from bundler.runtime.launch.compiled_dispatch import compiled_dispatcher
from bundler.runtime.launch.device_check import check_address, check_memory
from bundler.runtime.launch.handle import Handle
from bundler.runtime.launch.launch_hooks import Hooks
from bundler.runtime.launch.loaded_plans import Loaded, Loader
from bundler.runtime.launch.specialization_choice import Choices
from bundler.runtime.launch.specialization_match import Call, Specialization

# A program whose constants never repeat must not grow without end.
MAX_REMEMBERED = 4096


class Fallback(Protocol):
    """What launches the calls that no recorded specialization fits; whoever makes a `StaticKernel` may give it one."""

    def launch(self, grid: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Launch such a call; may `add` to the kernel what later calls like it need."""

    def launch_again(self, grid: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Launch a call like one that `launch` had before, and for which it added nothing that fits."""


class _Bound(NamedTuple):
    """What is to be done for all calls that look alike."""

    launcher: Callable[..., None]
    passed: Callable[[list[Any]], Sequence[Any]]
    # So many of the call's values, as they come, are what is passed; None when they have to be taken apart or put in order.
    taken: int | None
    grids: dict[tuple[int, ...], tuple[int, int, int]]
    # Parameters that got an address as a plain number: nothing but the driver knows where that lies.
    addresses: tuple[tuple[int, str], ...]
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    loaded: Loaded


class StaticKernel:
    """One kernel of a bundle, in all its recorded specializations.

    `kernel[grid](*args, **keywords)` is called as Triton's own: keywords are parameters, or options such as `num_warps`.  The
    specialization that Triton would compile for the call is launched on the current stream of the current device; nothing
    is compiled.  Any thread may call.

    The grid is one integer, a tuple of one to three, or a function of the arguments, which gets them by name.  A grid with no
    program launches nothing.

    Each call raises:

    - NotFound: no recorded specialization fits; the message says which there are and what differs.
    - ToolchainMismatch: there is none for this device.
    - CannotLaunchStatically: an argument that cannot be passed, a tensor that is not on the device, a grid too large.
    - DigestMismatch: the kernel's binary is damaged.
    - DriverError: the driver refused.
    """

    def __init__(
        self, name: str, specializations: Sequence[Specialization], loader: Loader, hooks: Hooks, *,
        fallback: Fallback | None = None, debug: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self._loader, self._driver, self._hooks = loader, loader.driver, hooks
        self._fallback, self._debug = fallback, debug
        self._reader = Reader(self._driver.backend, self._driver.pointer_device)
        self._bound: dict[tuple[Any, ...], _Bound | None] = {}
        self._specializations: tuple[Specialization, ...] = ()
        self._by_value: Mapping[str, bool] = {}
        self._positions: tuple[bool, ...] = ()
        self.add(specializations)

    def __repr__(self) -> str:
        return f"<static kernel {self.name!r}, {count(len(self._specializations), 'specialization')}>"

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        """The recorded kernels, in the order of their keys."""
        return self._specializations

    def __getitem__(self, grid: grids.Grid) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def handle(self, *args: Any, **keywords: Any) -> Handle:
        """Return the specialization that a call like this one would launch, to launch it again and again without a look.

        Args:
            args, keywords: as for a call.

        Raises:
            as a call.
        """
        device = self._driver.device()
        specialization, _ = self._choose(device, args, keywords)
        return self._handle(specialization, device)

    def handle_of(self, key: str) -> Handle:
        """Return the specialization with this kernel key; raises `NotFound`, and as a call."""
        for specialization in self._specializations:
            if specialization.key == key:
                return self._handle(specialization, self._driver.device())
        raise NotFound(f"{self.name}: no specialization has the key {key!r}", kernel=self.name, key=key)

    def add(self, specializations: Sequence[Specialization]) -> None:
        """Let further specializations be chosen."""
        known = {s.key: s for s in (*self._specializations, *specializations)}
        self._specializations = tuple(known[key] for key in sorted(known))
        self._choices = Choices(self.name, self._specializations)
        groups = [s.arguments for s in self._specializations]
        # Two functions of one name may differ in what is constant; what is so in one is looked at by value in all.
        flags: dict[str, bool] = {}
        for argument in (argument for group in groups for argument in group):
            flags[argument.name] = flags.get(argument.name, False) or argument.constexpr
        width = max(map(len, groups), default=0)
        self._by_value = flags
        self._positions = tuple(
            any(len(group) > index and group[index].constexpr for group in groups) for index in range(width)
        )
        self.forget()

    def forget(self) -> None:
        """Drop what was remembered of calls."""
        self._bound = {}
        launch = self._launcher()
        self._launch = compiled_dispatcher(self._driver, self._hooks, launch, self._learner(), self._measure,
                                           self._positions, self._by_value, MAX_REMEMBERED) or launch  # fmt: skip

    # A launch ----------------------------------------------------------------------------------------------------------

    def _launcher(self) -> Callable[..., None]:
        """Return what launches; made anew when the specializations change, so that a call finds all it needs at hand."""
        driver, hooks, read = self._driver, self._hooks, self._reader.read
        positions, by_value, remembered, meet = self._positions, self._by_value, self._bound, self._meet
        current_device, current_stream, most = driver.device, driver.stream, len(self._positions)

        def launch(grid: grids.Grid, /, *args: Any, **keywords: Any) -> None:
            device = current_device()
            key: list[Any] = [device]
            values: list[Any] = []
            read(args, positions, device, key, values)
            if keywords:
                names = tuple(keywords)
                key.append(names)
                read(keywords.values(), [by_value.get(name, True) for name in names], device, key, values)
            call = tuple(key)
            bound = remembered.get(call) if len(args) <= most else None
            if bound is None:
                bound = meet(device, grid, args, keywords, call)
                if bound is None:
                    return
            if bound.addresses:
                self._check_addresses(bound, values, device)
            # Grids repeat, so what was found of one is kept: checking costs as much as all the rest.
            sizes = bound.grids.get(grid) if type(grid) is tuple else None
            if sizes is None:
                sizes = self._measure(bound, args, keywords, grid)
            if hooks.present():
                self._with_hooks(bound, sizes, current_stream(device), values)
                return
            x, y, z = sizes
            if x and y and z:
                bound.launcher(x, y, z, current_stream(device), *bound.passed(values))

        return launch

    def _check_addresses(self, bound: _Bound, values: list[Any], device: int) -> None:
        for index, name in bound.addresses:
            check_address(self.name, name, values[index], device, self._driver.pointer_device)

    def _learner(self) -> Callable[[int, tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | Literal[False] | None]:
        """Return what tells the compiled dispatcher about calls that were launched from here, and how to launch more of them."""
        read, positions, by_value, remembered = self._reader.read, self._positions, self._by_value, self._bound

        def learn(
            device: int, args: tuple[Any, ...], keywords: dict[str, Any]
        ) -> tuple[Any, ...] | Literal[False] | None:
            key: list[Any] = [device]
            read(args, positions, device, key, [])
            if keywords:
                key.append(tuple(keywords))
                read(keywords.values(), [by_value.get(name, True) for name in keywords], device, key, [])
            found = tuple(key)
            if found not in remembered:  # forgotten since, or a call that no key stands for
                return False
            bound = remembered[found]
            if bound is None or bound.addresses or bound.taken is None:
                return None
            return bound.launcher, bound.taken, bound.grids, bound

        return learn

    def _measure(
        self, bound: _Bound, args: tuple[Any, ...], keywords: dict[str, Any], grid: grids.Grid
    ) -> tuple[int, int, int]:
        if callable(grid):
            grid = grid({**bound.defaults, **dict(zip(bound.names, args, strict=False)), **keywords})
        sizes = grids.checked(grid, self.name, self._driver.backend, bound.loaded.plan.cluster)
        if type(grid) is tuple:
            if len(bound.grids) >= MAX_REMEMBERED:
                bound.grids.clear()
            bound.grids[grid] = sizes
        return sizes

    def _with_hooks(self, bound: _Bound, grid: tuple[int, int, int], stream: int, values: list[Any]) -> None:
        if 0 in grid:
            return
        facts = {
            "name": self.name, "key": bound.loaded.plan.key, "grid": grid, "stream": stream,
            "device": bound.loaded.device, "function": getattr(bound.loaded.module, "function", 0),
        }  # fmt: skip
        self._hooks.around(facts, lambda: bound.launcher(*grid, stream, *bound.passed(values)))

    def _meet(
        self, device: int, grid: grids.Grid, args: tuple[Any, ...], keywords: dict[str, Any], key: tuple[Any, ...]
    ) -> _Bound | None:
        """Prepare for a call not seen before; None when Triton made it."""
        try:
            specialization, call = self._choose(device, args, keywords)
        except (NotFound, ToolchainMismatch):
            if self._fallback is None:
                raise
            self._launch_by_triton(self._fallback, grid, args, keywords, key)
            return None
        bound = self._bind(specialization, call, device, args, keywords)
        if UNCACHEABLE not in key:
            if len(self._bound) >= MAX_REMEMBERED:
                self.forget()
            self._bound[key] = bound
        return bound

    def _launch_by_triton(
        self,
        fallback: Fallback,
        grid: grids.Grid,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        key: tuple[Any, ...],
    ) -> None:
        if key in self._bound:  # Triton has it in memory, and what it compiled cannot be launched without it
            fallback.launch_again(grid, args, keywords)
            return
        fallback.launch(grid, args, keywords)
        if UNCACHEABLE not in key:
            self._bound[key] = None

    def _choose(self, device: int, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Specialization, Call]:
        arch = self._driver.properties(device).arch
        return self._choices.choose(f"{self._driver.backend}:{arch}", args, keywords)

    def _handle(self, specialization: Specialization, device: int) -> Handle:
        loaded = self._loader.load(specialization.kernel, device)
        return Handle(loaded, self._driver, specialization.arguments, debug=self._debug)

    def _bind(
        self, specialization: Specialization, call: Call, device: int, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> _Bound:
        arguments, ask = specialization.arguments, self._driver.pointer_device
        for argument, value in zip(arguments, call.values, strict=True):
            check_memory(self.name, argument.name, value, device, ask)
        loaded = self._loader.load(specialization.kernel, device)
        names = tuple(argument.name for argument in arguments)
        given = [*names[: len(args)], *keywords]
        missing = {name: value for name, value in zip(names, call.values, strict=True) if name not in given}
        places = [given.index(name) if name in given else len(given) + list(missing).index(name) for name in names]
        pointers = {piece.path for piece in loaded.plan.pieces if piece.kind == "pointer" and piece.rank is None}
        addresses = tuple(
            (places[index], name)
            for index, (name, value) in enumerate(zip(names, call.values, strict=True))
            if (index,) in pointers and isinstance(value, int) and name in given
        )
        passed, taken = self._passing(loaded, places, tuple(missing.values()))
        return _Bound(loaded.launcher, passed, taken, {}, addresses, names, missing, loaded)

    def _passing(
        self, loaded: Loaded, places: list[int], defaults: tuple[Any, ...]
    ) -> tuple[Callable[[list[Any]], Sequence[Any]], int | None]:
        """Return what makes the launcher's values of what a call gave, in its order, and the defaults of the rest.

        And how many of the values these are, when they are the first ones as they come.
        """
        pieces = loaded.plan.pieces
        simple = all(len(piece.path) == 1 and piece.rank is None for piece in pieces)
        if simple and [places[piece.path[0]] for piece in pieces] == list(range(len(pieces))):
            return operator.itemgetter(slice(0, len(pieces))), len(pieces)
        feed = feed_of(loaded.plan, self._driver)
        return lambda values: feed([(values + list(defaults))[place] for place in places]), None
