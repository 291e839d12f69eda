# SPDX-License-Identifier: Apache-2.0
"""`GraphRunner`: a `ProgramRunner` whose repeated calls are one launch each, of a CUDA graph.

A graph writes its results into the same memory each time.  So a call is a graph's only where nobody
has a result of an earlier call that it would write over; every other call runs step by step:

* The first two calls with some sizes run step by step.  The third does too, and is captured after
  it, with all kernels loaded and tuned.
* An input that lay at one address in all calls so far is read where it lies, and each call checks
  that it is still there.  Others are copied into memory of the graph before each launch.  Those
  that come to rest, as what another program saves does once that is a graph, are read in place by a
  graph that is captured anew.
* Graphs share the memory of what they use in between, and a later capture may put its results
  there.  So before a launch, no result of this graph or of one captured later may be in use.  Where
  one is, the graph that it is of is captured anew, and from then on returns copies.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.errors import ConfigError
from bundler.package_loggers import logger
from bundler.runtime.program.bound_plan import BoundPlan, input_place
from bundler.runtime.program.program_inputs import InputRecognizer, Signature, strides_of
from bundler.runtime.program.program_plan import (
    HOST,
    NUMBER_MARK,
    Launch,
    OperatorStep,
    ProgramPlan,
    Seeds,
)
from bundler.runtime.program.run import ProgramRunner
from bundler.runtime.program.tensor_addresses import ALIGNED_BYTES

_log = logger("bundler.runtime")
# Calls with the same sizes before one is captured.
_CALLS_BEFORE = 2
# Launches of a graph after which an input that did not move in them is no longer copied.
_LAUNCHES_AT_REST = 3
# An input that was so often not where a graph reads it is copied from then on.
_MOST_MISSES = 2
# Captures of the same sizes; what changes more often runs step by step.
_MOST_CAPTURES = 8
# Sizes of one program that have a graph at a time; others run step by step.
_MOST_GRAPHS = 16
_MASKS = frozenset({"bool", "uint8"})


@dataclass
class GraphUse:
    """How calls ran.

    Attributes:
        replays: calls that were one launch.
        captures: graphs that were captured.
        refusal: why calls run step by step; of the program, or of its latest sizes; empty where
            they do not.
    """

    replays: int = 0
    captures: int = 0
    refusal: str = ""


class GraphRunner(ProgramRunner):
    """Runs a program as `ProgramRunner` does, its repeated calls by CUDA graphs.

    A call with a seed of its own runs step by step, as do calls on a stream other than the one of
    the capture, and all calls where the memory is not a GPU's.  Threads may share one.  Results are
    the caller's for as long as the caller, or a tensor made of them, has them; a kernel on another
    stream that still reads one has to be waited for before it is dropped.

    Args:
        as `ProgramRunner`.

    Raises:
        ConfigError: the memory cannot say whether it has graphs; torch's and `DeviceMemory` can.
    """

    def __init__(
        self, plan: ProgramPlan, launch: Any, memory: Any, *rest: Any, **named: Any
    ) -> None:
        super().__init__(plan, launch, memory, *rest, **named)
        made = getattr(memory, "graphs", None)
        if made is None:
            raise ConfigError(
                "CUDA graphs were asked for: expected a memory that has them, as DeviceMemory and"
                f" TorchMemory, got {type(memory).__name__}",
                got=type(memory).__name__,
            )
        #: How calls ran so far.
        self.graph_use = GraphUse()
        self._graphs: Any = made()
        self._latest: _Calls | None = None
        #: Calls that have a graph.
        self.with_graphs: weakref.WeakSet[_Calls] = weakref.WeakSet()
        if self._graphs is None:
            self.graph_use.refusal = "the program does not run on a GPU that torch has graphs for"
            return
        on_host = [name for name, held in self.constants.items() if self._graphs.is_on_host(held)]
        drawn = self.seeds == getattr(memory, "seeds", None)
        self.graph_use.refusal = (
            f"{on_host[0]} lies on the host"
            if on_host
            else _refusal(plan, self._graphs, drawn=drawn)
        )
        if self.graph_use.refusal:
            self._graphs = None

    @property
    def constants(self) -> Mapping[str, Any]:
        """The tensors that the program holds."""
        return self._environment.constants

    @property
    def looks_at_addresses(self) -> bool:
        """Whether every call's inputs have to be looked at whole."""
        return self._inputs.looks_at_addresses

    def moved(self, tensor: Any) -> Any:
        """Return a copy of an input, in memory of a graph."""
        return self._environment.memory.copied(tensor, tensor.shape, strides_of(tensor))

    def __call__(self, *inputs: Any, seed: int | None = None) -> tuple[Any, ...]:
        """Run the program, by a graph where that can be done; as `ProgramRunner`."""
        found = self._at_once(inputs) if seed is None else None
        return super().__call__(*inputs, seed=seed) if found is None else found

    def consume(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Run the program, by a graph where that can be done; as `ProgramRunner`."""
        found = self._at_once(inputs)
        if found is None:
            return super().consume(inputs)
        inputs.clear()
        return found

    def _at_once(self, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the results of a call like the latest that was a graph's; None of any other."""
        latest = self._latest
        if latest is None or self._graphs.is_grad_enabled() or not latest.recognizes(inputs):
            return None
        return latest.replayed(inputs)

    def _run(
        self, inputs: Sequence[Any], seed: int | None, *, consume: bool = False
    ) -> tuple[Any, ...]:
        if self._graphs is None or seed is not None:
            return super()._run(inputs, seed, consume=consume)
        taken, signature = self._inputs.taken(inputs)
        calls: _Calls | None = signature.graph
        if calls is None:
            calls = signature.graph = _Calls(self, signature)
        results = calls.replayed(taken)
        if results is None and calls.is_due(taken):
            results = calls.captured(taken)
        if results is None:
            return self._called(taken, signature, seed, inputs if consume else None)
        self._latest = calls
        if consume:
            inputs.clear()  # type: ignore[attr-defined]  # a list then
        return results


@dataclass(eq=False)
class _Results:
    """Memory of results that a graph writes.

    Attributes:
        number: of the capture, in the order of all.
        owner: the calls whose graph it is, or was.
        storages: each with how many have it where no caller does, and how many of these are the
            graph's own.
        graph: that writes it.
        handed: whether callers were given some of it, and may have it still.
    """

    number: int
    owner: weakref.ref[_Calls]
    storages: list[tuple[Any, int, int]]
    graph: weakref.ref[_Capture] | None = None
    handed: bool = False

    def is_in_use(self, graphs: Any) -> bool:
        """Whether a caller has some of it, or a tensor made of it."""
        gone = self.graph is None or self.graph() is None
        return any(
            graphs.users(storage) > (count - own if gone else count)
            for storage, count, own in self.storages
        )


class _Pool:
    """What graphs of one stream share: memory, and the knowledge who has results."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._count = 0
        self._results: list[_Results] = []

    def added(self, owner: _Calls, storages: list[tuple[Any, int, int]]) -> _Results:
        """Return what keeps watch over the results of a new capture."""
        self._count += 1
        found = _Results(self._count, weakref.ref(owner), storages)
        self._results = [one for one in self._results if one.handed or one.owner() is not None]
        self._results.append(found)
        return found

    def in_use(self, since: _Results, graphs: Any) -> list[_Results]:
        """Return the results of a capture and of later ones that somebody still has."""
        found = []
        for one in self._results:
            if one.handed and one.number >= since.number:
                one.handed = one.is_in_use(graphs)
                if one.handed:
                    found.append(one)
        return found


# By the graphs' device and the stream.
_pools: dict[tuple[str, int], _Pool] = {}
_pools_lock = threading.Lock()
# torch captures one graph at a time.
_capture_lock = threading.Lock()


def _pool(device: Any, stream: int) -> _Pool:
    with _pools_lock:
        return _pools.setdefault((str(device), stream), _Pool())


@dataclass(eq=False)
class _Capture:
    """A graph.

    Attributes:
        launch: launches it.
        age: of the graphs when it was captured.
        stream: that it is launched on.
        pool: of that stream.
        places, addresses: of the inputs that are read where they lie.
        copied: number of an input -> the memory that it is copied into.
        resting: number of an input that is copied, and did not move since the first launch -> its
            address.
        watched: launches in which these are still looked at.
        made: makes each result; None for those that are inputs, or made of inputs.
        results: the tensors that are written.
        held: keeps watch over them.
    """

    launch: Any
    age: int
    stream: int
    pool: _Pool
    places: list[int]
    addresses: list[int]
    copied: dict[int, Any]
    made: list[Any]
    results: list[Any]
    held: _Results
    resting: dict[int, int]
    watched: int = _LAUNCHES_AT_REST


class _Calls:
    """Calls whose inputs look alike, and their graph.

    Attributes:
        copies: return copies of results, since somebody kept some for longer.
    """

    def __init__(self, runner: GraphRunner, signature: Signature) -> None:
        # The runner has the signature, which has these calls.
        self._runner, self._with_graphs = weakref.proxy(runner), runner.with_graphs
        self._graphs: Any = runner._graphs  # noqa: SLF001
        self._plan, self._signature = runner.plan, signature
        self._tensors = [n for n, item in enumerate(self._plan.inputs) if item.spec is not None]
        self._recognizer: InputRecognizer | None = None
        self._seen, self._captures = 0, 0
        self._addresses: dict[int, int] = {}
        # Inputs that are copied, and how often one was not where a graph reads it.
        self._moving: set[int] = set()
        self._misses: Counter[int] = Counter()
        self._capture: _Capture | None = None
        self.copies = False
        self._refusal = "an input is lazily negative or conjugated" if signature.lazy else ""

    def recognizes(self, inputs: Sequence[Any]) -> bool:
        """Whether inputs are such as those of these calls, as far as can be seen quickly."""
        return self._recognizer is not None and self._recognizer.knows(inputs)

    def replayed(self, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the results of the graph; None where the call has to run step by step."""
        capture = self._capture
        if capture is None or capture.stream != self._graphs.stream():
            return None
        if self._graphs.is_capturing():
            return None
        with capture.pool.lock:
            if capture is not self._capture or not self._is_in_place(capture, inputs):
                return None
            in_use = capture.pool.in_use(capture.held, self._graphs)
            if in_use:
                self._make_way(in_use)
                return None
            if self._has_come_to_rest(capture, inputs):
                return None
            self._fill(capture, inputs)
            capture.launch()
            self._write_back(capture.copied, inputs)
            self._runner.graph_use.replays += 1
            return self._results(capture, inputs)

    def is_due(self, inputs: Sequence[Any]) -> bool:
        """Whether a call that cannot be replayed is to be captured; takes note of where its inputs
        lie.
        """
        if self._refusal or self._capture is not None or self._graphs.is_capturing():
            return False
        if not all(self._graphs.is_tensor(inputs[number]) for number in self._tensors):
            return False
        before, self._addresses = self._addresses, {n: inputs[n].data_ptr() for n in self._tensors}
        if self._seen <= _CALLS_BEFORE:
            self._moving |= {n for n in before if before[n] != self._addresses[n]}
        self._moving |= {n for n in self._tensors if self._is_odd(n)}
        self._seen += 1
        return self._seen > _CALLS_BEFORE and self._signature.bound is not None

    def _is_odd(self, number: int) -> bool:
        """Whether an input begins where kernels do not expect it to."""
        return self._plan.inputs[number].aligned and self._addresses[number] % ALIGNED_BYTES != 0

    def captured(self, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
        """Run a call step by step, with inputs where a graph will have them, capture it, and return
        the call's results; None where it cannot be captured, and did not run.
        """
        self._captures += 1
        if self._captures > _MOST_CAPTURES:
            self._refuse(f"it was captured {_MOST_CAPTURES} times, and its inputs still move")
        elif len(self._with_graphs) >= _MOST_GRAPHS:
            self._refuse(f"the program has graphs of {_MOST_GRAPHS} other sizes")
        if self._refusal:
            return None
        bound: BoundPlan = self._signature.bound
        stream = self._graphs.stream()
        shared = self._graphs.shares_memory
        pool = _pool(self._graphs.device, stream) if shared else _Pool()
        with pool.lock:
            with self._graphs.as_usual():
                copied = {number: self._runner.moved(inputs[number]) for number in self._moving}
            placed = [copied.get(number, value) for number, value in enumerate(inputs)]
            values = bound.run(list(placed), self._signature.sizes, self._runner.seeds)
            self._write_back(copied, inputs)
            for number in copied:
                values[input_place(number)] = inputs[number]
            results = bound.results(values)
            del values
            try:
                with _capture_lock, self._graphs.as_usual():
                    self._capture = self._made(bound, placed, copied, pool, stream)
                self._with_graphs.add(self)
            # What torch raises where something cannot be captured is of no one type.
            except Exception as error:  # noqa: BLE001
                _log.warning("a program is not captured: %s", error, exc_info=error)
                self._refuse(f"{type(error).__name__}: {error}".partition("\n")[0])
        return results

    def _made(
        self,
        bound: BoundPlan,
        placed: list[Any],
        copied: Mapping[int, Any],
        pool: _Pool,
        stream: int,
    ) -> _Capture:
        def run() -> tuple[Any, ...]:
            return bound.results(bound.run(list(placed), self._signature.sizes, self._runner.seeds))

        launch, returned = self._graphs.captured(run)
        given = _names_given(self._plan)
        name_of = self._graphs.name_of
        foreign = {name_of(placed[number]) for number in self._tensors}
        foreign |= {name_of(tensor) for tensor in self._runner.constants.values()}
        made: list[Any] = []
        results = []
        for output, result in zip(self._plan.outputs, returned, strict=True):
            if output.buffer is None or output.buffer in given:
                made.append(None)
                continue
            if name_of(result) in foreign:
                raise ConfigError("a result is a view of an input that an operator made")
            results.append(result)
            made.append(self._graphs.same(result))
        del returned
        own = Counter(map(name_of, results))
        storages = {name_of(result): self._graphs.storage(result) for result in results}
        watched = [(one, self._graphs.users(one), own[name]) for name, one in storages.items()]
        places = [number for number in self._tensors if number not in copied]
        addresses = [self._addresses[number] for number in places]
        held = pool.added(self, watched)
        self._runner.graph_use.captures += 1
        self._recognizer = None
        # Inputs that are all where they were are apart as they were.
        if not (copied and self._runner.looks_at_addresses):
            self._recognizer = InputRecognizer(self._plan.inputs, placed, self._graphs.recognizer)
        resting = {n: 0 for n in copied if self._misses[n] < _MOST_MISSES}
        found = _Capture(
            launch,
            self._graphs.age,
            stream,
            pool,
            places,
            addresses,
            dict(copied),
            made,
            results,
            held,
            resting,
        )
        held.graph = weakref.ref(found)
        return found

    def _is_in_place(self, capture: _Capture, inputs: Sequence[Any]) -> bool:
        """Whether a graph may be launched, and finds its inputs; it is given up where not."""
        addresses = [inputs[number].data_ptr() for number in capture.places]
        if addresses == capture.addresses and capture.age == self._graphs.age:
            return True
        moved = [
            number
            for number, one, other in zip(capture.places, addresses, capture.addresses, strict=True)
            if one != other
        ]
        self._misses.update(moved)
        self._moving |= {*moved}
        self._give_up()
        return False

    def _has_come_to_rest(self, capture: _Capture, inputs: Sequence[Any]) -> bool:
        """Whether inputs that are copied need not be, after some launches of a graph."""
        if not capture.watched:
            return False
        first = capture.watched == _LAUNCHES_AT_REST
        now = {number: inputs[number].data_ptr() for number in capture.resting}
        capture.resting = {n: at for n, at in now.items() if first or at == capture.resting[n]}
        capture.watched -= 1
        at_rest = {n for n, at in capture.resting.items() if at % ALIGNED_BYTES == 0}
        if capture.watched or not at_rest:
            return False
        self._moving -= at_rest
        self._give_up()
        return True

    def _make_way(self, in_use: Iterable[_Results]) -> None:
        """Have graphs captured anew, so that none writes to what somebody still has."""
        for one in in_use:
            owner = one.owner()
            if owner is not None and owner.is_written_by(one):
                owner.copies = True
                owner._give_up()  # noqa: SLF001
            else:
                # Nobody writes there any more but this graph, which was captured before.
                self._give_up()

    def is_written_by(self, results: _Results) -> bool:
        """Whether the graph of these calls writes some results."""
        return self._capture is not None and self._capture.held is results

    def _give_up(self) -> None:
        # The GPU may be running it.
        self._graphs.wait()
        self._capture = None
        self._with_graphs.discard(self)

    def _refuse(self, why: str) -> None:
        self._refusal = self._runner.graph_use.refusal = why

    def _fill(self, capture: _Capture, inputs: Sequence[Any]) -> None:
        if capture.copied:
            self._graphs.copy([*capture.copied.values()], [inputs[n] for n in capture.copied])

    def _write_back(self, copied: Mapping[int, Any], inputs: Sequence[Any]) -> None:
        for number, tensor in copied.items():
            if self._plan.inputs[number].changed:
                self._graphs.copy([inputs[number]], [tensor])

    def _results(self, capture: _Capture, inputs: Sequence[Any]) -> tuple[Any, ...]:
        bound: BoundPlan = self._signature.bound
        if self.copies:
            tensors = iter(self._graphs.copies(capture.results))
        else:
            capture.held.handed = bool(capture.results)
            tensors = (make() for make in capture.made if make is not None)
        if None not in capture.made:
            return tuple(tensors)
        values = bound.before(inputs)
        return tuple(
            [
                bound.result(number, values) if make is None else next(tensors)
                for number, make in enumerate(capture.made)
            ]
        )


def _refusal(plan: ProgramPlan, graphs: Any, *, drawn: bool) -> str:
    """Return why no call of a program can be captured; empty where it can.

    Args:
        plan: of the program.
        graphs: that it would be captured by.
        drawn: whether torch's generator draws its seeds, which knows of graphs.
    """
    if plan.overwritten:
        return "it writes over inputs, which a graph reads again in its next launch"
    specs = [item.spec for item in plan.inputs]
    specs += [output.spec for output in plan.outputs]
    dtypes = {item.name: item.spec.dtype for item in plan.inputs if item.spec is not None}
    for step in plan.every_step:
        if isinstance(step, Seeds) and not drawn:
            return "random numbers are drawn on the host"
        if isinstance(step, Launch) and any(
            str(one).startswith(NUMBER_MARK) for one in step.arguments
        ):
            return f"{step.kernel} is given a number that is read from a tensor of the host"
        if isinstance(step, OperatorStep):
            specs += step.results
            named = zip(step.outputs, step.results, strict=False)
            dtypes |= {name: spec.dtype for name, spec in named if name and spec is not None}
            masks = any(_is_mask(item, dtypes) for item in step.arguments)
            why = graphs.why_not(step.operator, masks)
            if why:
                return str(why)
        spec = getattr(step, "spec", None)
        if spec is not None:
            specs.append(spec)
            dtypes[step.name] = spec.dtype  # type: ignore[union-attr]
    if any(spec is not None and spec.device == HOST for spec in specs):
        return "some of its tensors lie on the host"
    if any(output.fresh for output in plan.outputs):
        return "a result is a fresh copy of a constant"
    return ""


def _is_mask(item: Any, dtypes: Mapping[str, str]) -> bool:
    if isinstance(item, list):
        return any(_is_mask(part, dtypes) for part in item)
    named = isinstance(item, dict) and "buffer" in item
    return named and dtypes.get(item["buffer"], "bool") in _MASKS


def _names_given(plan: ProgramPlan) -> set[str]:
    return {item.name for item in plan.inputs if item.spec is not None} | {*plan.constants}
