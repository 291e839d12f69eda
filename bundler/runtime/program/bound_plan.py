# SPDX-License-Identifier: Apache-2.0
"""`BoundPlan`: a plan's steps as functions of this process, for one set of sizes.

Kernels and operators are looked up, and sizes, strides and grids worked out, once; what is left of
a step is to pass tensors on.  They lie in one list, a call's `Values`: first what draws seeds, then
the inputs, then all else that steps make or are given, each at a place that is known.  Nothing of a
plan is executed: its steps become functions that exist.  `ProgramRunner` binds a plan whenever it
meets new sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter, methodcaller
from typing import Any

from bundler.errors import OperatorFailed, UnsupportedOperator
from bundler.runtime.heuristics.launch_expressions import evaluate
from bundler.runtime.program.called_steps import Values, run_steps, step
from bundler.runtime.program.device_tensors import host_number, span
from bundler.runtime.program.program_inputs import (
    dtype_of,
    is_lazy,
    read_by_kernels,
    same_strides,
    strides_of,
)
from bundler.runtime.program.program_plan import (
    BUFFER_MARK,
    HOST,
    NUMBER_MARK,
    Allocate,
    Cooperation,
    GridCounters,
    Launch,
    OperatorStep,
    Output,
    Overwrite,
    ProgramPlan,
    Release,
    Seeds,
    Size,
    Step,
    TensorSpec,
)
from bundler.runtime.program.tensor_addresses import is_apart
from bundler.runtime.program.workspace import Workspace

# Where what draws seeds of random numbers lies.
_SEEDS = 0
_Function = Callable[[Values], Any]
# Sizes and strides.
_Shape = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Environment:
    """What a plan is bound to.

    Attributes:
        plan: what to do.
        memory: a `ProgramMemory`.
        constants: tensors that the plan holds, by name.
        launcher: of a kernel's name and the sizes of its grid, what launches it, given its
            arguments by position.
        copied: returns a tensor's elements in new memory, with these sizes and strides.
        may_be_anywhere: whether a tensor of a name, dtype and sizes may lie on another device than
            traced.
        choose: of a computation in two forms, and what runs each, what runs one of them; None where
            the programs of a launch cannot wait for each other.
    """

    plan: ProgramPlan
    memory: Any
    constants: Mapping[str, Any]
    launcher: Callable[[str, Mapping[str, int]], Callable[..., None]]
    copied: Callable[[Any, Sequence[int], Sequence[int]], Any]
    may_be_anywhere: Callable[[str, str, Sequence[int]], bool]
    choose: Callable[[Cooperation, _Function, _Function], _Function] | None = None


class BoundPlan:
    """Runs a plan for the sizes that it was bound for; threads may share one.

    Args:
        environment: what it runs on.
        sizes: of the calls, and the plan's values; floats may be others in each call.
    """

    def __init__(self, environment: Environment, sizes: Mapping[str, Any]) -> None:
        binder = _StepBinder(environment, sizes)
        plan = environment.plan
        functions: list[_Function] = []
        # What nothing reads any more when a function was called; an input's place -> its last one.
        released: list[list[int]] = []
        last: dict[int, int] = {}
        # What copies an input that is to be overwritten, by its number; the inputs' places.
        copying: set[int] = set()
        overwritten: set[int] = set()
        for planned in filter(binder.is_work, plan.steps):
            if isinstance(planned, Release) and released:
                released[-1].append(binder.released(planned))
            else:
                if isinstance(planned, Overwrite):
                    copying.add(len(functions))
                    overwritten.add(binder.released(planned))
                made = binder.steps(planned)
                functions += made
                released += [[] for _ in made]
            last |= dict.fromkeys(binder.inputs_read(), len(functions) - 1)
        self._results = [binder.result(output) for output in plan.outputs]
        self._start, self._floats = binder.start, tuple(binder.floats.items())
        self._workspace, self._work_places = binder.workspace, binder.work_places()
        for place in overwritten:
            released[last.pop(place)].append(place)
        self._steps = _clearing_after(functions, released)
        returned = binder.inputs_read()
        for place, number in last.items():
            if place not in returned:
                released[number].append(place)
        kept = [None if n in copying else function for n, function in enumerate(functions)]
        self._consuming = _clearing_after(kept, released)

    def run(
        self, inputs: list[Any], sizes: Mapping[str, Any], seeds: Any, *, consume: bool = False
    ) -> Values:
        """Run all steps, and return what `results` takes.

        Args:
            inputs: all of the plan's, checked.
            sizes: of this call.
            seeds: a `SeedSource` of this call.
            consume: empty the list, and forget each input as soon as nothing reads it any more.

        Raises:
            UnsupportedOperator: an operator returned other sizes, another dtype or another device
                than torch traced.
            OperatorFailed: an operator returned what the plan cannot take, or a `CheckedMemory`
                refused a call.
        """
        values = [seeds, *inputs, *self._start]
        for name, place in self._floats:
            values[place] = sizes[name]
        # It goes when the call is over: what comes next on the stream may have its memory.
        held = None
        if self._workspace is not None:
            held, buffers = self._workspace.taken()
            for place, buffer in zip(self._work_places, buffers, strict=True):
                values[place] = buffer
        if consume:
            inputs.clear()
        run_steps(self._consuming if consume else self._steps, values)
        del held
        return values

    def results(self, values: Values) -> tuple[Any, ...]:
        """Return the plan's results."""
        return tuple([result(values) for result in self._results])

    def before(self, inputs: Sequence[Any]) -> Values:
        """Return the values with which a call begins, for `result` of one that is an input, or a
        constant.
        """
        return [None, *inputs, *self._start]

    def result(self, number: int, values: Values) -> Any:
        """Return one of the plan's results."""
        return self._results[number](values)


def input_place(number: int) -> int:
    """Return where an input lies among a call's values."""
    return _SEEDS + 1 + number


def _clearing_after(
    functions: Sequence[_Function | None], released: Sequence[Sequence[int]]
) -> tuple[_Function, ...]:
    """Return functions, each followed by what forgets what it was the last to read."""
    found = []
    for function, places in zip(functions, released, strict=True):
        if function is not None:
            found.append(function)
        if places:
            found.append(step(None, tuple(places)))
    return tuple(found)


class _StepBinder:
    """Makes functions of steps.

    Attributes:
        start: what lies behind the inputs when a call begins.
        floats: name -> place of a number that each call has anew.
    """

    def __init__(self, environment: Environment, sizes: Mapping[str, Any]) -> None:
        self._environment, self._sizes = environment, sizes
        self._memory, self._inputs = environment.memory, environment.plan.inputs
        self._read_by_kernels = frozenset(read_by_kernels(environment.plan))
        self.start: Values = []
        self.floats: dict[str, int] = {}
        self._constants: dict[str, int] = {}
        self._read: set[int] = set()
        # Buffer -> its place, and how many elements it spans, where that is known.
        self._places: dict[str, int] = {}
        self._spans: dict[str, int] = {}
        for number, item in enumerate(self._inputs):
            if item.spec is not None:
                self._places[item.name] = input_place(number)
                self._hold(item.name, self._shape(item.spec))
        for name, tensor in environment.constants.items():
            self._places[name] = self._new(tensor)
        self.workspace: Workspace | None = None
        if getattr(self._memory, "workspaces", None) is not None:
            found = Workspace(environment.plan, self._memory, self._shape)
            self.workspace = found if found.buffers else None
        self._work = frozenset(() if self.workspace is None else self.workspace.buffers)
        self._alone = in_one_result(environment.plan, environment.constants)
        # Buffer -> the layout in which operators are given it; those that are made in that one.
        self._given, self._made_as_given = _given_alike(environment.plan), set[str]()

    def is_work(self, planned: Step) -> bool:
        """Whether anything is left to do in a step, beside a buffer of the workspace."""
        return not (isinstance(planned, (Allocate, Release)) and planned.name in self._work)

    def work_places(self) -> list[int]:
        """Return the places of the workspace's buffers."""
        return [self._place(name) for name in (self.workspace.buffers if self.workspace else ())]

    def steps(self, planned: Step) -> list[_Function]:
        """Return what does a step, one after the other."""
        match planned:
            case Launch():
                return [self._launch(planned)]
            case Seeds(name, count):
                draw = methodcaller("__call__", count)
                return [step(draw, (_SEEDS,), result=self._place(name))]
            case Allocate(name, spec):
                shape = self._made_shape(name, spec)
                self._hold(name, shape)
                bound = getattr(self._memory, "bound_allocate", None)
                allocate = (
                    partial(self._memory.allocate, spec.dtype, *shape)
                    if bound is None
                    else bound(spec.dtype, *shape)
                )
                return [step(allocate, (), result=self._place(name))]
            case Overwrite(name):
                place = self._place(name)
                return [step(self._copy, (place,), result=place)]
            case OperatorStep():
                return self._call(planned)
            case Release():
                return [step(None, (self.released(planned),))]
            case GridCounters(name, count):
                counters = partial(self._memory.counters, count)
                return [step(counters, (), result=self._place(name))]
            case Cooperation():
                return [self._cooperation(planned)]

    def released(self, planned: Release | Overwrite) -> int:
        """Return the place of what a step releases, or overwrites."""
        return self._place(planned.name)

    def _copy(self, value: Any) -> Any:
        # The runner's, which refuses where the memory has none, counts what lay elsewhere than traced.
        copied = getattr(self._memory, "copied", None) or self._environment.copied
        return copied(value, value.shape, strides_of(value))

    def _cooperation(self, planned: Cooperation) -> _Function:
        """Return what runs the form that the launcher chooses."""
        apart = self._in_turn(planned.apart)
        choose = self._environment.choose
        # An allocator of the user's may not know how to make counters ready.
        if choose is None or getattr(self._memory, "counters", None) is None:
            return apart
        return choose(planned, self._in_turn(planned.together), apart)

    def _in_turn(self, planned: Iterable[Step]) -> _Function:
        return partial(run_steps, tuple(made for one in planned for made in self.steps(one)))

    def inputs_read(self) -> set[int]:
        """Return the places of the inputs that were read by what was made since the last call."""
        found, self._read = self._read, set()
        return {place for place in found if place < input_place(len(self._inputs))}

    def result(self, output: Output) -> _Function:
        """Return what takes a result of the plan out of the values."""
        if output.buffer is None:
            return itemgetter(self._new() if output.size is None else self._number(output.size))
        place = self._place(output.buffer)
        if output.spec is None:
            return itemgetter(place)
        sizes, strides = self._shape(output.spec)
        if output.fresh:
            copied = self._environment.copied
            return lambda values: copied(values[place], sizes, strides)
        offset = self._size(output.spec.offset)
        # What is written to one of several results is known to have changed the others.
        view = self._memory.view
        if output.buffer in self._alone:
            view = self._view(output.buffer, sizes, strides, offset)
        return lambda values: view(values[place], sizes, strides, offset)

    # -------------------------------------------------------------------------------- Places, sizes

    def _new(self, value: Any = None) -> int:
        self.start.append(value)
        return input_place(len(self._inputs)) + len(self.start) - 1

    def _constant(self, value: Any) -> int:
        """Return the place of a value that no step changes: a call has each of them once, however
        many steps are given it.
        """
        # Numbers that are equal may differ in type or sign, which their text tells.
        text = repr(value)
        if text not in self._constants:
            self._constants[text] = self._new(value)
        return self._constants[text]

    def _place(self, buffer: str) -> int:
        found = self._places.get(buffer)
        if found is None:
            found = self._places[buffer] = self._new()
        self._read.add(found)
        return found

    def _size(self, size: Size) -> int:
        return evaluate(size, self._sizes)

    def _number(self, size: Size) -> int:
        """Return the place of a size, or of one of the plan's values, which may be a float."""
        if isinstance(size, str) and type(self._sizes.get(size)) is float:
            if size not in self.floats:
                self.floats[size] = self._new()
            return self.floats[size]
        return self._constant(self._known(size))

    def _known(self, size: Size) -> Any:
        """Return a size, or one of the plan's values that is no float."""
        if isinstance(size, str) and size in self._sizes:
            return self._sizes[size]
        return self._size(size)

    def _shape(self, spec: TensorSpec) -> _Shape:
        return tuple(map(self._size, spec.sizes)), tuple(map(self._size, spec.strides))

    def _made_shape(self, name: str, spec: TensorSpec) -> _Shape:
        """Return sizes and strides of a buffer where it is made: as operators are given it, if all
        are given the same, so that no call shows it in another way.  Kernels are told none.
        """
        planned, given = self._shape(spec), self._given.get(name)
        if given is None or given.get("dtype") != spec.dtype or self._size(given["offset"]) != 0:
            return planned
        sizes, strides = (tuple(map(self._size, given[n])) for n in ("sizes", "strides"))
        if span(sizes, strides) != span(*planned):
            return planned
        self._made_as_given.add(name)
        return sizes, strides

    def _hold(self, buffer: str, shape: _Shape) -> None:
        self._spans[buffer] = span(*shape)

    def _view(
        self, buffer: str, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> Callable[..., Any]:
        """Return what shows a buffer in another way: the tensor, sizes, strides, offset."""
        bound = getattr(self._memory, "bound_view", None)
        inside = offset >= 0 and min((*sizes, *strides), default=0) >= 0
        # Others are left to torch, which knows how much memory is behind a tensor.
        reach = offset + span(sizes, strides)
        if bound is not None and inside and reach <= self._spans.get(buffer, 0):
            found: Callable[..., Any] = bound()
            return found
        view: Callable[..., Any] = self._memory.view
        return view

    # ------------------------------------------------------------------------------------- Launches

    def _launch(self, planned: Launch) -> _Function:
        sizes = {name: self._size(size) for name, size in planned.sizes.items()}
        kernel, arguments = self._fitting(planned)
        launch = self._environment.launcher(kernel, sizes)
        places, on_host = [], []
        for position, item in enumerate(arguments):
            if isinstance(item, str) and item[:1] in {BUFFER_MARK, NUMBER_MARK}:
                places.append(self._place(item[1:]))
                if item[0] == NUMBER_MARK:
                    on_host.append(position)
            else:
                places.append(self._number(item))
        if not on_host:
            takes_all = len(places) == len(getattr(launch, "arguments", ()))
            tuned = getattr(launch, "tuned", None) if takes_all else None
            return step(launch, tuple(places), tuned=tuned)

        def with_numbers(values: Values) -> None:
            arguments = [values[place] for place in places]
            for position in on_host:
                number = host_number(arguments[position])
                arguments[position] = int(number) if isinstance(number, bool) else number
            launch(*arguments)

        return with_numbers

    def _fitting(self, planned: Launch) -> tuple[str, Sequence[Size]]:
        """Return the kernel that takes the numbers of a launch, and its arguments."""
        entry = self._environment.plan.kernels.get(planned.kernel)
        if entry is None or not entry.most:
            return planned.kernel, planned.arguments
        given = dict(zip(entry.parameters, planned.arguments, strict=True))
        if all(self._size(given[name]) <= most for name, most in entry.most.items()):
            return planned.kernel, planned.arguments
        ((beyond, places),) = entry.beyond.items()
        return beyond, [planned.arguments[place] for place in places]

    # ------------------------------------------------------------------------------------ Operators

    def _call(self, planned: OperatorStep) -> list[_Function]:
        given = _Arguments(self._memory, planned.operator, self._failure(planned))
        arguments = [*planned.arguments, *planned.keywords.values()]
        places = tuple([self._argument(item, given) for item in arguments])
        # A view may be lazily negative, which only torch's own views of it keep.
        for name, spec in zip(planned.outputs, planned.results, strict=True):
            if name is not None and spec is not None and not planned.view:
                self._hold(name, self._shape(spec))
        called = partial(step, given.function, places, tuple(planned.keywords))
        apart = None if planned.view else tuple(dict.fromkeys(given.tensors))
        found = [*given.made, *self._results_of(planned, called, apart)]
        # What was made for this call alone holds memory that may be released next.
        return [*found, step(None, tuple(given.made_places))] if given.made else found

    def _failure(self, planned: OperatorStep) -> Callable[[str], OperatorFailed]:
        return partial(_failed, self._environment.plan, planned)

    def _argument(self, item: Any, given: _Arguments) -> int:
        """Return the place of an operator's argument; what has to be made of tensors before each
        call is added to `given`.
        """
        if isinstance(item, dict) and "buffer" in item:
            buffer, spec = item["buffer"], item["spec"]
            place = self._place(buffer)
            if spec is not None and buffer not in self._made_as_given:
                sizes, strides = (tuple(map(self._size, spec[n])) for n in ("sizes", "strides"))
                offset = self._size(spec["offset"])
                view = given.guarded(self._view(buffer, sizes, strides, offset))
                shown = (place, *map(self._constant, (sizes, strides, offset)))
                place = given.make(view, shown, self._new())
            given.tensors.append(place)
            return place
        if isinstance(item, dict) and "size" in item:
            return self._number(item["size"])
        if isinstance(item, list) and self._varies(item):
            parts = tuple([self._argument(part, given) for part in item])
            return given.make(_listed, parts, self._new())
        return self._constant(given.decoded(self._plain(item)))

    def _varies(self, item: Any) -> bool:
        """Whether an argument has tensors, or numbers that each call has anew."""
        if isinstance(item, list):
            return any(map(self._varies, item))
        if not isinstance(item, dict):
            return False
        return "buffer" in item or type(self._sizes.get(item.get("size", ""))) is float

    def _plain(self, item: Any) -> Any:
        """Return an argument that does not vary, with numbers in place of sizes."""
        if isinstance(item, list):
            return [self._plain(part) for part in item]
        if isinstance(item, dict) and "size" in item:
            return self._known(item["size"])
        return item

    def _results_of(
        self,
        planned: OperatorStep,
        called: Callable[..., _Function],
        apart: tuple[int, ...] | None,
    ) -> list[_Function]:
        """Return what calls an operator, checks its results, and puts them at their places.

        Args:
            planned: the call.
            called: makes a step of it.
            apart: places of its arguments, none of whose addresses a new tensor may have.
        """
        failure, count = self._failure(planned), len(planned.outputs)
        if len(planned.results) != count:
            raise failure(f"expected {count} layouts, got {len(planned.results)}")
        checked = [
            (number, self._checked(planned, name, spec, apart))
            for number, (name, spec) in enumerate(
                zip(planned.outputs, planned.results, strict=True)
            )
            if name is not None and spec is not None
        ]
        if planned.single and count == 1 and checked:
            return [called(**checked[0][1])]
        several = self._new()

        def look(values: Values, result: Any) -> None:
            results = (result,) if planned.single else result
            if not isinstance(results, (list, tuple)):
                raise failure(f"expected a tuple of results, got {type(result).__name__}")
            if len(results) != count:
                raise failure(f"expected {count} results, got {len(results)}")
            values[several] = results

        return [
            called(finish=look),
            *(step(itemgetter(number), (several,), **check) for number, check in checked),
            step(None, (several,)),
        ]

    def _checked(
        self, planned: OperatorStep, name: str, spec: TensorSpec, apart: tuple[int, ...] | None
    ) -> Mapping[str, Any]:
        """Return how a step puts a result at its place in the layout that torch traced, in which
        the program reads it.
        """
        place = self._place(name)
        look = self._looking(planned, name, spec, apart or ())
        recognizer_of = getattr(self._memory, "recognizer", None)

        def finish(values: Values, value: Any) -> Callable[..., bool] | None:
            found = values[place] = look(values, value)
            if found is not value or recognizer_of is None:
                return None
            # What tells a result like one that was right: most are.
            recognizes: Callable[..., bool] | None = recognizer_of([value])
            return recognizes

        return {"result": place, "finish": finish, "apart": apart}

    def _looking(
        self, planned: OperatorStep, name: str, spec: TensorSpec, given: tuple[int, ...]
    ) -> Callable[[Values, Any], Any]:
        """Return what compares a result with what torch traced, and returns it, or a copy where it
        cannot be read as it lies.
        """
        operator, failure = planned.operator, self._failure(planned)
        shape, strides = self._shape(spec)
        copied, may_be_anywhere = self._environment.copied, self._environment.may_be_anywhere
        expected = None if spec.device == HOST else getattr(self._memory, "device", None)
        may_be_lazy = planned.view and name not in self._read_by_kernels

        def look(values: Values, value: Any) -> Any:
            if not hasattr(value, "shape"):
                raise failure(f"expected a tensor for {name}, got {type(value).__name__}")
            got = None if expected is None else getattr(value, "device", None)
            away = got is not None and got != expected
            if away and not may_be_anywhere(name, spec.dtype, value.shape):
                raise _wrong_device(operator, expected, got)
            if tuple(value.shape) != shape or dtype_of(value) != spec.dtype:
                raise _wrong_result(operator, spec.dtype, shape, value)
            fits = same_strides(shape, strides, strides_of(value))
            readable = fits and (may_be_lazy or not is_lazy(value))
            if readable and (planned.view or is_apart(value, values, given)):
                return value
            return copied(value, shape, strides)

        return look


class _Arguments:
    """The arguments of an operator's call, as they are bound.

    Args:
        memory: whose operator it is.
        operator: its name.
        failure: makes the error of a call that the memory refuses.

    Attributes:
        function: what is called.
        tensors: their places.
        made: steps that make views and lists before the call.
        made_places: where these are put.
    """

    def __init__(
        self, memory: Any, operator: str, failure: Callable[[str], OperatorFailed]
    ) -> None:
        find = getattr(memory, "bound_operator", None)
        self._found = None if find is None else find(operator)
        self._failure = failure
        self.function: Callable[..., Any] = (
            self.guarded(partial(_called, memory, operator))
            if self._found is None
            else self._found[0]
        )
        self.tensors: list[int] = []
        self.made: list[_Function] = []
        self.made_places: list[int] = []

    def decoded(self, item: Any) -> Any:
        """Return an argument as the function takes it."""
        return item if self._found is None else self._found[1](item)

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the memory's, whose refusals say at which step they came; torch's
        own refuse nothing so.
        """
        if self._found is not None:
            return function
        return partial(_guarded, function, self._failure)

    def make(self, function: Callable[..., Any], places: tuple[int, ...], place: int) -> int:
        """Add what is made before the call, and return its place."""
        self.made.append(step(function, places, result=place))
        self.made_places.append(place)
        return place


def in_one_result(plan: ProgramPlan, constants: Collection[str]) -> frozenset[str]:
    """Return the buffers of which one result is made, and nothing else that a caller has."""
    if any(isinstance(step, OperatorStep) and step.view for step in plan.every_step):
        return frozenset()
    results = Counter(output.buffer for output in plan.outputs if output.buffer is not None)
    given = {*constants, *(item.name for item in plan.inputs)}
    return frozenset(name for name, count in results.items() if count == 1 and name not in given)


def _given_alike(plan: ProgramPlan) -> Mapping[str, Mapping[str, Any]]:
    """Return the layouts of buffers that no result is made of, and that all operators are given in
    the same one.
    """
    found: dict[str, list[Any]] = {}
    for planned in plan.every_step:
        if isinstance(planned, OperatorStep):
            for item in _buffers_in([*planned.arguments, *planned.keywords.values()]):
                found.setdefault(item["buffer"], []).append(item["spec"])
    for output in plan.outputs:
        found.pop(output.buffer or "", None)
    return {
        name: one for name, (one, *more) in found.items() if one and all(one == o for o in more)
    }


def _buffers_in(item: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(item, list):
        for part in item:
            yield from _buffers_in(part)
    elif isinstance(item, dict) and "buffer" in item:
        yield item


def _called(memory: Any, operator: str, *arguments: Any, **keywords: Any) -> Any:
    return memory.call(operator, list(arguments), keywords)


def _guarded(
    function: Callable[..., Any],
    failure: Callable[[str], OperatorFailed],
    *arguments: Any,
    **keywords: Any,
) -> Any:
    try:
        return function(*arguments, **keywords)
    except OperatorFailed as error:
        raise failure(error.message) from error.__cause__


def _listed(*items: Any) -> list[Any]:
    return list(items)


def _wrong_device(operator: str, expected: Any, got: Any) -> UnsupportedOperator:
    return UnsupportedOperator(
        f"{operator}: torch traced that its result is on {expected}, and it is on {got}; its rule"
        " for fake tensors is wrong",
        operator=operator,
        expected=str(expected),
        got=str(got),
    )


def _wrong_result(
    operator: str, dtype: str, shape: tuple[int, ...], value: Any
) -> UnsupportedOperator:
    return UnsupportedOperator(
        f"{operator}: torch traced that it returns {dtype}{list(shape)}, and it returned"
        f" {dtype_of(value)}{list(value.shape)}; its rule for fake tensors is wrong",
        operator=operator,
        expected=shape,
        got=tuple(value.shape),
    )


def _failed(plan: ProgramPlan, planned: OperatorStep, reason: str) -> OperatorFailed:
    number = next(place for place, other in enumerate(plan.steps) if other is planned)
    return OperatorFailed(
        f"step {number} of the program, {planned.operator}: {reason}",
        operator=planned.operator,
        step=number,
    )
