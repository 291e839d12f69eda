# SPDX-License-Identifier: Apache-2.0
"""Whether the key of a graph says all that decides its program: graphs of torch's own lists, of
models and of `counts`, and changes of each, with equal keys have equal plans and texts.

    python -m tools.codegen graph-keys --seconds 300
    python -m tools.codegen graph-keys --only 'op_db/add/*' --changes 20
    python -m tools.codegen graph-keys --only BertForMaskedLM

A change is drawn: a number, a dtype, an operator, the order of arguments or results, what torch
knows of a value (dtype, sizes, strides, offset), the number that a constant is, the value or the
bounds that a size has in the example, a setting of torch's or of ours.  Nothing runs on a device.
Exit status 1 when two programs with one key differ; different keys of one program are counted: each
is a program that is generated once more.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import operator
import random
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, cast
from unittest import mock

import sympy
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.value_ranges import ValueRanges

from bundler.codegen import torch_backend
from bundler.codegen.graph_key import graph_key
from bundler.codegen.host_constants import on_device
from bundler.codegen.program import GenerateOptions, program_of_graph
from bundler.codegen.trace import EXPORTED, RETURNED_INPUTS, trace
from bundler.errors import BundlerError, UnsupportedOperator
from tools.codegen.command_line import parser
from tools.codegen.compared_graphs import GRAPHS

_OPTIONS = GenerateOptions()
# Modes of a case that are traced without Dynamo, which takes most of the time.
_TRACED = frozenset({"plain", "sliced", "transposed", "dynamic"})
# Operators of a graph that larger ones are not changed by: each change generates all of it.
_MOST_NODES = 400
_MODELS = ("BertForMaskedLM", "GPT2ForSequenceClassification", "T5Small", "Llama-3.2-1B")


def main() -> int:
    """Draw changes of graphs until time is up; 1 when a key says too little."""
    line = parser(__doc__, "seconds first", seconds=300.0)
    line.add_argument("--changes", type=int, default=6, help="of each graph")
    line.add_argument("--only", default="*", help="pattern of names of cases, graphs and models")
    line.add_argument("--models", action="store_true", help="models too; needs transformers")
    options = line.parse_args()
    warnings.simplefilter("ignore")
    found = Found(random.Random(options.first), options.changes)
    _run(found, options)
    for one in found.faults:
        print(f"WRONG: {one}")
    print(json.dumps(found.told(), indent=1))
    return 1 if found.faults else 0


def _run(found: Found, options: argparse.Namespace) -> None:
    ends = time.monotonic() + options.seconds
    for name, run in _sources(found, options):
        if time.monotonic() > ends:
            return
        found.name = name
        try:
            run()
        except Exception as error:  # noqa: BLE001  # what torch itself cannot trace
            found.counts[f"not traced: {type(error).__name__}"] += 1
        torch._dynamo.reset()  # noqa: SLF001
        counters.clear()


@dataclass
class Found:
    """What was found so far.

    Attributes:
        draw: draws changes.
        changes: of each graph.
        programs: key -> the program that it stands for, and where it was met first.
        keys: program -> its keys.
        faults: two programs of one key.
    """

    draw: random.Random
    changes: int
    name: str = ""
    programs: dict[str, tuple[str, str]] = field(default_factory=dict)
    keys: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def judge(self, module: fx.GraphModule) -> None:
        """Judge the key of a graph, and those of graphs that differ from it in one thing."""
        module.meta.pop(EXPORTED, None)
        module.meta.pop(RETURNED_INPUTS, None)
        self.counts["graphs"] += 1
        before = self._noted(self.name, module, _OPTIONS)
        if len(module.graph.nodes) > _MOST_NODES:
            return
        for _ in range(self.changes):
            try:
                what, changed, options, state = changed_graph(module, self.draw)
                with state:
                    after = self._noted(f"{self.name}, {what}", changed, options)
            except Exception as error:  # noqa: BLE001  # a change that torch itself refuses
                self.counts[f"refused by torch: {type(error).__name__}"] += 1
                continue
            self.counts["changes"] += 1
            self.counts["changes that decide the program"] += after != before

    def _noted(self, name: str, module: fx.GraphModule, options: GenerateOptions) -> str:
        key = graph_key(on_device(module, constants=True), options)
        program = outcome(module, options)
        if key is None:
            self.counts["without a key"] += 1
            return program
        known, where = self.programs.setdefault(key.digest, (program, name))
        if known != program:
            self.faults.append(f"{name} and {where} have one key and two programs")
        elif where != name:
            self.counts["met again"] += 1
        if not program.startswith("refused"):
            self.keys[program].add(key.digest)
        return program

    def told(self) -> dict[str, Any]:
        """Return the figures."""
        several = [keys for keys in self.keys.values() if len(keys) > 1]
        return {
            **self.counts,
            "keys": len(self.programs),
            "programs": len(self.keys),
            "keys beyond one a program": sum(len(keys) - 1 for keys in several),
            "faults": len(self.faults),
        }


def outcome(module: fx.GraphModule, options: GenerateOptions) -> str:
    """Return a digest of all that a program is but for tensors, or why there is none."""
    try:
        program = program_of_graph(module, options, guarded=True)
    except BundlerError as error:
        return f"refused: {type(error).__name__}"
    parts = [
        repr(program.plan),  # JSON has no complex numbers
        [*program.sources.items()],
        [(one.operator, one.reason) for one in program.fallbacks],
        sorted(program.host_constants),
        program.device,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# ------------------------------------------------------------------------------------------ Changes

_State = contextlib.AbstractContextManager[Any]
_Change = Callable[[fx.Node, random.Random], str]
Changed = tuple[str, fx.GraphModule, GenerateOptions, _State]


def changed_graph(module: fx.GraphModule, draw: random.Random) -> Changed:
    """Return a graph that differs in one thing, which is said, and under which options and settings
    of torch it is to be read.
    """
    copied = _copied(module)
    nodes = list(copied.graph.nodes)
    environments = {one.node.shape_env for one in _symbols(copied)}
    changes = [_number, _dtype, _operator, _order, _result, _value, _origin, _constant]
    kinds: list[_Change | Literal["setting", "size"]] = [*changes, "setting"]
    kinds += ["size"] if environments else []
    # Few graphs have some of these, so others are drawn until one fits.
    for _ in range(40):
        kind = draw.choice(kinds)
        if kind == "setting":
            break
        if kind == "size":
            what, state = _size(draw.choice([*environments]), draw)
            return what, copied, _OPTIONS, state
        if what := kind(draw.choice(nodes), draw):
            return what, copied, _OPTIONS, contextlib.nullcontext()
    return _setting(copied, draw)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    for node in graph.nodes:
        node.meta = dict(node.meta)
    return made


def _symbols(module: fx.GraphModule) -> Iterator[Any]:
    for node in module.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            known = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
            yield from (one for one in known if isinstance(one, torch.SymInt))


def _replaced(
    node: fx.Node, fits: Callable[[Any], bool], new: Callable[[Any], Any], at: int
) -> Any:
    """Replace one of the arguments of a node; returns what stood there."""
    places = [one for one in tree_leaves((node.args, node.kwargs)) if fits(one)]
    if not places:
        return None
    chosen, seen = at % len(places), -1

    def swapped(item: Any) -> Any:
        nonlocal seen
        seen += fits(item)
        return new(item) if fits(item) and seen == chosen else item

    args, kwargs = tree_map(swapped, (tuple(node.args), dict(node.kwargs)))
    node.args, node.kwargs = args, kwargs
    return places[chosen]


def _number(node: fx.Node, draw: random.Random) -> str:
    def new(item: Any) -> Any:
        if isinstance(item, bool):
            return not item
        return item + draw.choice((1, -1)) if isinstance(item, int) else -item + 0.25

    def fits(item: Any) -> bool:
        return type(item) in {int, float, bool}

    found = _replaced(node, fits, new, draw.randrange(99))
    return "" if found is None else f"another number than {found} of {node}"


def _dtype(node: fx.Node, draw: random.Random) -> str:
    other = draw.choice((torch.float32, torch.float64, torch.int64, torch.float16, torch.bool))
    found = _replaced(node, lambda one: isinstance(one, torch.dtype), lambda _: other, 0)
    return "" if found in {None, other} else f"{other} in place of {found} of {node}"


def _operator(node: fx.Node, draw: random.Random) -> str:
    others = [
        one.target
        for one in node.graph.nodes
        if isinstance(one.target, OpOverload) and len(one.args) == len(node.args)
    ]
    aten = torch.ops.aten
    others += [aten.add.Tensor, aten.mul.Tensor, aten.exp.default, aten.relu.default]
    if not isinstance(node.target, OpOverload):
        return ""
    before, node.target = node.target, draw.choice(others)
    return f"{node.target} in place of {before}"


def _order(node: fx.Node, _: random.Random) -> str:
    if len(node.args) < 2 or not all(isinstance(one, fx.Node) for one in node.args[:2]):
        return ""
    node.args = (node.args[1], node.args[0], *node.args[2:])
    return f"arguments of {node} swapped"


def _result(node: fx.Node, draw: random.Random) -> str:
    output = node.graph.output_node()
    results = output.args[0]
    if not isinstance(results, (list, tuple)) or node.op in {"output", "get_attr"}:
        return ""
    kept = [*results]
    kept.insert(draw.randrange(len(kept) + 1), node)
    output.args = (tuple(kept),)
    return f"{node} is a result too"


def _value(node: fx.Node, draw: random.Random) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not hasattr(value, "fake_mode"):
        return ""
    kind = draw.choice(("dtype", "sizes", "strides", "offset", "lost"))
    sizes, strides, offset, dtype = [*value.shape], [*value.stride()], 0, value.dtype
    if kind == "lost":
        del node.meta["val"]
        return f"nothing is known of {node}"
    if kind == "dtype":
        dtype = draw.choice((torch.float64, torch.bfloat16, torch.int32, torch.bool))
    elif kind == "offset":
        offset = draw.choice((1, 4))
    elif not sizes:
        return ""
    elif kind == "sizes":
        sizes[draw.randrange(len(sizes))] += 1
    elif draw.random() < 0.5:
        strides[draw.randrange(len(strides))] += 1
    else:
        strides.reverse()
    with value.fake_mode:
        reach = 1 + offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        memory = torch.empty(reach, dtype=dtype, device=value.device)
        node.meta["val"] = memory.as_strided(sizes, strides, offset)
    return f"other {kind} of {node}"


def _origin(node: fx.Node, _: random.Random) -> str:
    if node.op != "call_function":
        return ""
    node.meta["original_aten"] = torch.ops.aten.cosh.default
    return f"another origin of {node}"


def _constant(node: fx.Node, _: random.Random) -> str:
    if node.op != "get_attr":
        return ""
    module = node.graph.owning_module
    value = operator.attrgetter(str(node.target))(module)
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bool:
        return ""
    with torch._subclasses.fake_tensor.unset_fake_temporarily():  # noqa: SLF001
        setattr(module, "_changed", value.detach() + 1)  # noqa: B010  # fx shows no other way
    node.target = "_changed"
    return f"another number of {node}"


def _size(environment: Any, draw: random.Random) -> tuple[str, _State]:
    """Return what sets the value of a size in the example, or its bounds."""
    known = environment.backed_var_to_val
    symbol = draw.choice([*known])
    if draw.random() < 0.5:
        new = known[symbol] + draw.choice((1, 7, 4096, 1 << 20))
        return f"{symbol} is {new} in the example", _set(known, symbol, new)
    ranges = environment.var_to_range
    new = ValueRanges(sympy.Integer(draw.choice((-5, 0, 1, 3))), ranges[symbol].upper)
    return f"{symbol} is in {new}", _set(ranges, symbol, new)


@contextlib.contextmanager
def _set(known: Any, name: Any, value: Any) -> Iterator[None]:
    before, known[name] = known[name], value
    try:
        yield
    finally:
        known[name] = before


def _setting(module: fx.GraphModule, draw: random.Random) -> Changed:
    kind = draw.choice(("deterministic", "dtype", "wide", "asserts", "harness"))
    options, state = _OPTIONS, cast("_State", contextlib.nullcontext())
    if kind == "wide":
        options = replace(options, wide_indices=True)
    elif kind == "asserts":
        options = replace(options, assert_indices=False)
    elif kind == "harness":
        options = replace(options, benchmark_harness=True)
    else:
        state = _deterministic() if kind == "deterministic" else _wide_default()
    return f"another setting: {kind}", module, options, state


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _wide_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------------------- Graphs


def _sources(found: Found, options: argparse.Namespace) -> Sequence[tuple[str, Callable[[], None]]]:
    """Return what makes graphs, by name, in an order of their own."""
    from tools.codegen import suite_cases  # torch's lists take seconds to import

    made = [(name, partial(_of_graph, found, name)) for name in GRAPHS]
    made += [(case.name, partial(_of_case, found, case)) for case in suite_cases.listed("cpu")[0]]
    chosen = [(name, run) for name, run in made if fnmatchcase(name, options.only)]
    found.draw.shuffle(chosen)
    for name in _MODELS if options.models else ():
        for training in (False, True):
            run = partial(_of_model, found, name, training=training)
            chosen.insert(0, (f"{name}{' training' if training else ''}", run))
    return chosen


def _of_graph(found: Found, name: str) -> None:
    function, make = GRAPHS[name]
    found.judge(trace(function, make(), dynamic=found.draw.random() < 0.5))


def _of_case(found: Found, case: Any) -> None:
    from tools.codegen import suite_cases

    call = suite_cases.call_of(case, "cpu")
    if call is None:
        return
    tensors = suite_cases.copied(call.tensors)
    if case.mode in _TRACED:
        found.judge(trace(call.function, tensors, dynamic=case.mode == "dynamic"))
        return
    with _listening(found):
        compiled = torch.compile(
            call.function, backend=torch_backend.triton_bundler, dynamic="dynamic" in case.mode
        )
        _differentiated(call.finished(compiled(*tensors)))


def _of_model(found: Found, name: str, *, training: bool) -> None:
    from tools.codegen import transformers_models as models
    from tools.codegen.model_process import Subject

    subject = Subject(models, name, "training" if training else "inference", "cpu")
    with _listening(found):
        called = torch.compile(subject.model, backend=torch_backend.triton_bundler)
        for example in subject.examples:
            subject.ran(subject.model, called, example)


@contextlib.contextmanager
def _listening(found: Found) -> Iterator[None]:
    """Judge each graph of the backend, which torch runs itself then."""

    def judged(module: Any, *_: Any, **__: Any) -> Any:
        found.judge(module)
        raise UnsupportedOperator("judged alone", operator="")

    with mock.patch.object(torch_backend, "program_of_graph", judged):
        yield


def _differentiated(results: Any) -> None:
    ends = [
        one for one in tree_leaves(results) if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(one) for one in ends])
