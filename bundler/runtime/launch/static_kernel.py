# SPDX-License-Identifier: Apache-2.0
"""`StaticKernel`: a kernel as its caller sees it, which picks the recorded specialization that fits
a call, and launches it.

`load` makes one for each kernel name of a bundle, and the tuner one for each tuned kernel.

It remembers what is to be done for all calls that look alike (`BoundCall`): `_bind_call` finds that
out from a call, `_bind_like` from one of the same shape, whose kernel differs in constants alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from bundler.errors import NotFound, ToolchainMismatch
from bundler.format.launch_spec import Argument
from bundler.format.summary import count
from bundler.runtime import grids
from bundler.runtime.launch.call_key import (
    BY_VALUE,
    UNCACHEABLE,
    Reader,
    check_address,
    check_memory,
)
from bundler.runtime.launch.compiled_dispatch import Gridded, compiled_dispatcher
from bundler.runtime.launch.drivers.driver import Driver, Launcher
from bundler.runtime.launch.handle import Handle, LoadedPlan, PlanLoader, feed_of
from bundler.runtime.launch.launch_hooks import Hooks, launch_facts
from bundler.runtime.launch.specialization_choice import CallShape, Choices, Chosen
from bundler.runtime.launch.specialization_match import Specialization

_Sizes = tuple[int, int, int]
# A place is a byte for the compiled dispatcher.
_MOST_PLACES = 256
# By the grid as a caller gives it: grids repeat, and checking one costs as much as all the rest of
# a launch.
_Grids = dict[tuple[int, ...], _Sizes]
# What the compiled dispatcher keeps of a call, and what makes that for others of its shape, given
# their constants.
_DispatchEntry = tuple[Launcher, int | bytes, _Grids, "BoundCall", "_EntryForConstants | None"]
_EntryForConstants = Callable[..., _DispatchEntry | None]
# A program whose constants never repeat must not grow without end.
MAX_REMEMBERED = 4096


class Fallback(Protocol):
    """What launches the calls that no recorded specialization fits; whoever makes a `StaticKernel`
    may give it one.
    """

    def launch(self, grid: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Launch such a call; may `add` to the kernel what later calls like it need."""

    def launch_again(self, grid: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Launch a call like one that `launch` had before, and for which it added nothing that
        fits.
        """


class _KeyLayout(NamedTuple):
    """Calls that give so many arguments by position and these by name: where the constants are in
    their keys.

    Attributes:
        constants: indices into a key of what is compiled in.
        rest: all other indices; what is there is the shape of a call.
        by_position: the numbers of the parameters whose constants are given by position.
        by_name: the names of the others; together they are in the order of `constants`.
        shapes: the shapes met so far, each with a call that was bound.
    """

    constants: list[int]
    rest: list[int]
    by_position: list[int]
    by_name: list[str]
    shapes: dict[tuple[Any, ...], tuple[CallShape, BoundCall]]


class StaticKernel(Gridded):
    """One kernel of a bundle, in all its recorded specializations.

    `kernel[grid](*args, **keywords)` is called as Triton's own: keywords are parameters, or options
    such as `num_warps`.  The specialization that Triton would compile for the call is launched on
    the current stream of the current device; nothing is compiled.  Any thread may call.

    The grid is one integer, a tuple of one to three, or a function of the arguments, which gets
    them by name.  A grid with no program launches nothing.

    Each call raises:

    - NotFound: no recorded specialization fits; the message says which there are and what differs.
    - ToolchainMismatch: there is none for this device.
    - CannotLaunchStatically: an argument that cannot be passed, a tensor that is not on the device,
      a grid too large.
    - DigestMismatch: the kernel's binary is damaged.
    - DriverError: the driver refused.
    """

    def __init__(
        self,
        name: str,
        specializations: Sequence[Specialization],
        loader: PlanLoader,
        hooks: Hooks,
        *,
        fallback: Fallback | None = None,
        debug: bool = False,
    ) -> None:
        self.name = name
        self._loader, self._driver, self._hooks = loader, loader.driver, hooks
        self._fallback, self._debug = fallback, debug
        self._reader = Reader(self._driver.backend, self._driver.pointer_device)
        # By key; None stands for calls that Triton made, and that no kernel of ours fits.
        self._bound: dict[tuple[Any, ...], BoundCall | None] = {}
        self._key_layouts: dict[tuple[int, tuple[str, ...]], _KeyLayout] = {}
        # By the size of a cluster: what a grid may be depends on nothing else of a kernel.
        self._grids: dict[int, _Grids] = {}
        self._specializations: tuple[Specialization, ...] = ()
        self._by_value: Mapping[str, bool] = {}
        self._positions: tuple[bool, ...] = ()
        self.add(specializations)

    def __repr__(self) -> str:
        return (
            f"<static kernel {self.name!r}, {count(len(self._specializations), 'specialization')}>"
        )

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        """The recorded kernels, in the order of their keys."""
        return self._specializations

    def handle(self, *args: Any, **keywords: Any) -> Handle:
        """Return the specialization that a call like this one would launch, to launch it again and
        again without a look.

        Args:
            args, keywords: as for a call.

        Raises:
            as a call.
        """
        device = self._driver.device()
        chosen = self._choose(device, args, keywords)
        return self._handle(chosen.specialization, device)

    def handle_of(self, key: str) -> Handle:
        """Return the specialization with this kernel key; raises `NotFound`, and as a call."""
        for specialization in self._specializations:
            if specialization.key == key:
                return self._handle(specialization, self._driver.device())
        raise NotFound(
            f"{self.name}: no specialization has the key {key!r}", kernel=self.name, key=key
        )

    def repeated(
        self, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Callable[..., None], int | bytes, int] | None:
        """Return how calls like this one are launched, for who launches them again; None where each
        has to be looked at in full.

        Returns:
            the launcher; what it takes of the call's values, the first so many or those at these
            places; the blocks of a cluster.

        Raises:
            as a call.
        """
        device, key, values = self._driver.device(), list[Any](), list[Any]()
        self._reader.read(args, self._positions, device, key, values)
        if UNCACHEABLE in key or len(args) > len(self._positions):
            return None
        bound = self._bind(self._choose(device, args, keywords), device, args, keywords)
        entry = bound.dispatch_entry()
        if entry is None:
            return None
        launcher, taken, *_ = entry
        return launcher, taken, bound.loaded.plan.cluster

    def add(self, specializations: Sequence[Specialization]) -> None:
        """Let further specializations be chosen."""
        known = {s.key: s for s in (*self._specializations, *specializations)}
        self._specializations = tuple(known[key] for key in sorted(known))
        self._choices = Choices(self.name, self._specializations)
        # Most share the tuple of their arguments.
        groups = list({id(s.arguments): s.arguments for s in self._specializations}.values())
        # Two functions of one name may differ in what is constant; what is so in one is looked at
        # by value in all.
        flags: dict[str, bool] = {}
        for argument in (argument for group in groups for argument in group):
            flags[argument.name] = flags.get(argument.name, False) or argument.constexpr
        width = max(map(len, groups), default=0)
        self._by_value = flags
        self._positions = tuple(
            any(len(group) > index and group[index].constexpr for group in groups)
            for index in range(width)
        )
        self.forget()

    def forget(self) -> None:
        """Drop what was remembered of calls."""
        # New objects, since launches that run in other threads still read the old ones.
        self._bound, self._key_layouts, self._grids = {}, {}, {}
        launch = self._launcher(tells=False)
        self._launch = (
            compiled_dispatcher(
                self._driver,
                self._hooks,
                launch,
                self._launcher(tells=True),
                self._measure,
                self._positions,
                self._by_value,
                MAX_REMEMBERED,
            )
            or launch
        )

    # ------------------------------------------------------------------------------------- A launch

    def _launcher(self, *, tells: bool) -> Callable[..., Any]:
        """Return what launches; made anew when the specializations change, so that a call finds all
        it needs at hand.

        Args:
            tells: whether it returns what the compiled dispatcher needs to launch more calls like
                the one it had: see there.
        """
        driver, hooks, read = self._driver, self._hooks, self._reader.read
        positions, by_value = self._positions, self._by_value
        remembered, meet = self._bound, self._meet
        current_device, current_stream, most = driver.device, driver.stream, len(self._positions)

        def launch(grid: grids.Grid, /, *args: Any, **keywords: Any) -> Any:
            device = current_device()
            key: list[Any] = [device]
            values: list[Any] = []
            read(args, positions, device, key, values)
            if keywords:
                # A name that is no parameter is an option, and options count by their values.
                names = tuple(keywords)
                key.append(names)
                read(
                    keywords.values(),
                    [by_value.get(name, True) for name in names],
                    device,
                    key,
                    values,
                )
            call = tuple(key)
            # With too many arguments the key ends before them, and is that of a call that is right.
            bound = remembered.get(call) if len(args) <= most else None
            if bound is None:
                bound = meet(device, grid, args, keywords, call)
                if bound is None:
                    return False if tells else None
            if bound.addresses:
                self._check_addresses(bound, values, device)
            # Grids repeat, so what was found of one is kept: checking costs as much as all the
            # rest.
            sizes = bound.grids.get(grid) if type(grid) is tuple else None
            if sizes is None:
                sizes = self._measure(bound, args, keywords, grid)
            # The stream is asked for last: what was called so far may have changed it.
            x, y, z = sizes
            if hooks.present():
                self._with_hooks(bound, sizes, current_stream(device), values)
            elif x and y and z:
                bound.launcher(x, y, z, current_stream(device), *bound.passed(values))
            if not tells or UNCACHEABLE in call:
                return None
            return bound.dispatch_entry(self._again(device, call, len(args), tuple(keywords)))

        return launch

    def _check_addresses(self, bound: BoundCall, values: list[Any], device: int) -> None:
        # Unlike a tensor, a number says nothing of where its memory lies, and each call brings
        # another.
        for index, name in bound.addresses:
            check_address(self.name, name, values[index], device, self._driver.pointer_device)

    def _measure(
        self, bound: BoundCall, args: tuple[Any, ...], keywords: dict[str, Any], grid: grids.Grid
    ) -> tuple[int, int, int]:
        if callable(grid):
            grid = grid(
                {**bound.defaults, **dict(zip(bound.names, args, strict=False)), **keywords}
            )
        sizes = grids.checked(grid, self.name, self._driver.backend, bound.loaded.plan.cluster)
        # Other kinds of grids are rare, or have no hash.
        if type(grid) is tuple:
            if len(bound.grids) >= MAX_REMEMBERED:
                bound.grids.clear()
            bound.grids[grid] = sizes
        return sizes

    def _with_hooks(
        self, bound: BoundCall, grid: tuple[int, int, int], stream: int, values: list[Any]
    ) -> None:
        if 0 in grid:
            return
        loaded = bound.loaded
        facts = launch_facts(self.name, loaded.plan.key, grid, stream, loaded.device, loaded.module)
        self._hooks.around(facts, lambda: bound.launcher(*grid, stream, *bound.passed(values)))

    def _meet(
        self,
        device: int,
        grid: grids.Grid,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        key: tuple[Any, ...],
    ) -> BoundCall | None:
        """Prepare for a call not seen before; None when Triton made it."""
        # What no key stands for is compared in full each time; so is a call with too many
        # arguments, which is refused.
        if UNCACHEABLE in key or len(args) > len(self._positions):
            layout, bound = None, None
        else:
            layout = self._key_layout(len(args), tuple(keywords))
            bound = self._bind_by_shape(layout, device, key)
        if bound is None:
            try:
                chosen = self._choose(device, args, keywords)
            except (NotFound, ToolchainMismatch):
                if self._fallback is None:
                    raise
                self._launch_by_triton(self._fallback, grid, args, keywords, key)
                return None
            bound = self._bind(chosen, device, args, keywords)
            if layout is not None:
                self._remember_shape(layout, device, key, chosen, bound)
        if layout is not None:
            if len(self._bound) >= MAX_REMEMBERED:
                self.forget()
            self._bound[key] = bound
        return bound

    def _key_layout(self, count: int, names: tuple[str, ...]) -> _KeyLayout:
        """Return where in the key of a call its constants are; see `_launcher` for the order of a
        key.
        """
        found = self._key_layouts.get((count, names))
        if found is None:
            by_position = [
                index for index in range(count) if self._positions[index : index + 1] == (True,)
            ]
            by_name = [name for name in names if self._by_value.get(name, False)]
            # In front of the arguments stands the device, in front of the keywords their names.
            after = 1 + count + 1
            constants = [1 + index for index in by_position] + [
                after + names.index(name) for name in by_name
            ]
            rest = [
                index
                for index in range(after + len(names) if names else 1 + count)
                if index not in constants
            ]
            found = self._key_layouts[count, names] = _KeyLayout(
                constants, rest, by_position, by_name, {}
            )
        return found

    def _bind_by_shape(
        self, layout: _KeyLayout, device: int, key: tuple[Any, ...]
    ) -> BoundCall | None:
        """Bind a call that differs from an earlier one in constants alone, None when there was
        none.

        Whatever else is looked at in a call is in its key, so it holds for this one, too.
        """
        met = layout.shapes.get(tuple([key[index] for index in layout.rest]))
        if met is None:
            return None
        shape, like = met
        specialization = shape.find([key[index] for index in layout.constants])
        if specialization is None:
            return None
        loaded = self._loader.load(specialization.kernel, device, specialization.alike)
        return _bind_like(like, loaded, self._grids.setdefault(loaded.plan.cluster, {}))

    def _again(
        self, device: int, key: tuple[Any, ...], count: int, names: tuple[str, ...]
    ) -> _EntryForConstants | None:
        """Return what binds calls that differ from this one in constants alone; None when only full
        comparisons can tell.
        """
        layout = self._key_layouts.get((count, names))
        met = (
            None
            if layout is None
            else layout.shapes.get(tuple([key[index] for index in layout.rest]))
        )
        if met is None:
            return None
        shape, like = met
        load, constant, all_grids = self._loader.load, self._reader.constant, self._grids

        def again(*constants: Any) -> _DispatchEntry | None:
            specialization = shape.find(
                [
                    (kind, value) if (kind := type(value)) in BY_VALUE else constant(value)
                    for value in constants
                ]
            )
            if specialization is None:
                return None
            loaded = load(specialization.kernel, device, specialization.alike)
            bound = _bind_like(like, loaded, all_grids.setdefault(loaded.plan.cluster, {}))
            return None if bound is None else bound.dispatch_entry()

        return again

    def _remember_shape(
        self,
        layout: _KeyLayout,
        device: int,
        key: tuple[Any, ...],
        chosen: Chosen,
        bound: BoundCall,
    ) -> None:
        shape = self._choices.shape(
            self._target(device), chosen, layout.by_position, layout.by_name
        )
        if shape is not None:
            layout.shapes[tuple([key[index] for index in layout.rest])] = shape, bound

    def _launch_by_triton(
        self,
        fallback: Fallback,
        grid: grids.Grid,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        key: tuple[Any, ...],
    ) -> None:
        if (
            key in self._bound
        ):  # Triton has it in memory, and what it compiled cannot be launched without it
            fallback.launch_again(grid, args, keywords)
            return
        fallback.launch(grid, args, keywords)
        # A note that Triton had such a call; the next one is compared again all the same, since
        # this one may have added its kernel.
        if UNCACHEABLE not in key:
            self._bound[key] = None

    def _target(self, device: int) -> str:
        return f"{self._driver.backend}:{self._driver.properties(device).arch}"

    def _choose(self, device: int, args: tuple[Any, ...], keywords: dict[str, Any]) -> Chosen:
        return self._choices.choose(self._target(device), args, keywords)

    def _handle(self, specialization: Specialization, device: int) -> Handle:
        loaded = self._loader.load(specialization.kernel, device, specialization.alike)
        return Handle(loaded, self._driver, specialization.arguments, debug=self._debug)

    def _bind(
        self, chosen: Chosen, device: int, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> BoundCall:
        values, ask = chosen.call.values, self._driver.pointer_device
        declared = chosen.specialization.arguments
        names = tuple(argument.name for argument in declared)
        # A kernel that reads memory of the host, or of another device, fails long after its launch,
        # and without a name.
        for name, value in zip(names, values, strict=True):
            check_memory(self.name, name, value, device, ask)
        loaded = self._loader.load(
            chosen.specialization.kernel, device, chosen.specialization.alike
        )
        remembered = self._grids.setdefault(loaded.plan.cluster, {})
        return _bind_call(
            loaded, self._driver, remembered, declared, values, [*names[: len(args)], *keywords]
        )


class BoundCall(NamedTuple):
    """How calls that look alike are launched.

    Attributes:
        launcher: of the kernel that they need.
        passed: makes the launcher's values of what a call gave, in its order.
        taken: what is passed of the call's values, as they come: the first so many, or those at
            these places; None when they have to be taken apart, or defaults are among them.
        grids: the grids seen so far.
        addresses: parameters that got an address as a plain number: nothing but the driver knows
            where that lies.
        names: of all parameters.
        defaults: of the parameters that such calls leave out.
        loaded: the kernel on its device.
    """

    launcher: Launcher
    passed: Callable[[list[Any]], Sequence[Any]]
    taken: int | bytes | None
    grids: _Grids
    addresses: tuple[tuple[int, str], ...]
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    loaded: LoadedPlan

    def dispatch_entry(self, again: _EntryForConstants | None = None) -> _DispatchEntry | None:
        """Return what the compiled dispatcher needs to launch more such calls, None when it cannot.

        Args:
            again: tells the same of calls that differ in constants alone.
        """
        if self.addresses or self.taken is None:
            return None
        return self.launcher, self.taken, self.grids, self, again


def _bind_call(
    loaded: LoadedPlan,
    driver: Driver,
    grids: _Grids,
    declared: Sequence[Argument],
    call_values: Sequence[Any],
    given: Sequence[str],
) -> BoundCall:
    """Return how a call is launched.

    Args:
        loaded: the kernel for the call, on its device.
        driver: that loaded it.
        grids: where sizes of grids are remembered.
        declared: all parameters.
        call_values: of all parameters, defaults among them.
        given: the names of what the call gave, in its order.
    """
    names = tuple(argument.name for argument in declared)
    missing = {
        name: value for name, value in zip(names, call_values, strict=True) if name not in given
    }
    places = [
        given.index(name) if name in given else len(given) + list(missing).index(name)
        for name in names
    ]
    pointers = {
        piece.path for piece in loaded.plan.pieces if piece.kind == "pointer" and piece.rank is None
    }
    addresses = tuple(
        (places[index], name)
        for index, (name, value) in enumerate(zip(names, call_values, strict=True))
        if (index,) in pointers and isinstance(value, int) and name in given
    )
    passed, taken = _passing(loaded, driver, places, tuple(missing.values()), declared)
    return BoundCall(loaded.launcher, passed, taken, grids, addresses, names, missing, loaded)


def _bind_like(other: BoundCall, loaded: LoadedPlan, grids: _Grids) -> BoundCall | None:
    """Return how a call of the same shape is launched; None when its kernel takes its values in
    another way.
    """
    # Plans of one signature share their pieces.
    if other.taken is None or loaded.plan.pieces is not other.loaded.plan.pieces:
        return None
    _, passed, taken, _, addresses, names, defaults, _ = other
    # As `BoundCall(...)` does in one step more, which each first launch of a kernel would take.
    return tuple.__new__(
        BoundCall, (loaded.launcher, passed, taken, grids, addresses, names, defaults, loaded)
    )


def _passing(
    loaded: LoadedPlan,
    driver: Driver,
    places: list[int],
    defaults: tuple[Any, ...],
    declared: Sequence[Argument],
) -> tuple[Callable[[list[Any]], Sequence[Any]], int | bytes | None]:
    """Return what makes the launcher's values of what a call gave, in its order, and the defaults
    of the rest; and what they are as `taken`.
    """
    pieces = loaded.plan.pieces
    if all(len(piece.path) == 1 and piece.rank is None for piece in pieces):
        wanted = [places[piece.path[0]] for piece in pieces]
        if wanted == list(range(len(pieces))):
            return operator.itemgetter(slice(0, len(pieces))), len(pieces)
        given = len(places) - len(defaults)
        # A size of 1 is compiled in, so that there is a gap where it stands in the call.
        if len(wanted) > 1 and max(wanted) < min(given, _MOST_PLACES):
            return operator.itemgetter(*wanted), bytes(wanted)
    feed = feed_of(loaded, driver, declared)
    return lambda values: feed([(values + list(defaults))[place] for place in places]), None
