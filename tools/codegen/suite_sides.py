# SPDX-License-Identifier: Apache-2.0
"""What a worker of `suites` does: runs one case eagerly, in float64, and as a program, and judges
it.  Imports torch.

On the CPU kernels run in Triton's interpreter, which `suites` switches on before Triton is
imported.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import resource
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bundler.codegen.program import FallbackCall, GenerateOptions, Program, generate
from bundler.codegen.torch_backend import triton_bundler
from bundler.errors import BundlerError, ConfigError, UnsupportedOperator
from tools.codegen import suite_judge
from tools.codegen.drawn_candidates import draw_candidates
from tools.codegen.suite_cases import Call, Case, call_of, copied, differentiable, nudged
from tools.codegen.suite_exceptions import exception_of
from tools.codegen.suite_judge import Compared, Outcome
from tools.codegen.suite_ties import among_equals
from tools.codegen.worker_pool import SPENT

DEVICE = os.environ.get("CODEGEN_SUITES_DEVICE", "cpu")
TEMPLATES = os.environ.get("CODEGEN_SUITES_TEMPLATES", "none")
# A process that has come to so much memory is not asked again: torch keeps what it compiled.
_MOST_MEMORY_KIB = (4 if DEVICE == "cpu" else 6) * 2**20
# Eager runs with inputs off by their last bit, for a result that is further from float64 than the
# plain run allows.
_NUDGED = 3
# Calls around the one that is judged as a graph's, and the one of them whose results are kept.
_CALLS_BEFORE, _KEPT, _CALLS_AFTER = 6, 3, 3
Answer = dict[str, Any]


def judged(task: tuple[str, str, str, str, int]) -> Answer:
    """Return the verdict on a case: `right`, `wrong`, `raises`, `unchecked` where its numbers are
    random, `skipped` or `absent`, and why.
    """
    _prepare()
    case = Case(*task)
    try:
        answer = _verdict(case)
    except Exception as error:  # noqa: BLE001  # whatever is raised is the finding
        answer = _raised(error)
    finally:
        torch._dynamo.reset()  # noqa: SLF001
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if memory > _MOST_MEMORY_KIB:
        answer[SPENT] = True
    return answer


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _raised(error: Exception) -> Answer:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}bundler{os.sep}" in frame.filename] or frames
    place = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno}"
    kind = type(error).__name__
    words = " ".join(str(error).split())
    cause = error.__cause__ or getattr(error, "inner_exception", None)
    typed = isinstance(error, BundlerError) or isinstance(cause, BundlerError)
    return {"outcome": "raises", "why": f"{kind} ({place}): {words}"[:600], "typed": typed}


def _verdict(case: Case) -> Answer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = call_of(case, DEVICE)
        if call is None:
            return {"outcome": "absent", "why": ""}
        theirs = _eager(case, call)
        if isinstance(theirs, str):
            return {"outcome": "skipped", "why": theirs}
        notes: list[str] = []
        try:
            function = _function(case, call, notes)
        except UnsupportedOperator as error:
            if "operators" not in error.facts:
                raise
            return {"outcome": "skipped", "why": error.message}
        try:
            found = _difference(case, call, function, theirs, notes)
        except Exception:
            whose = _without_us(case, call)
            if whose:
                return {"outcome": "skipped", "why": whose}
            raise
        if not found and call.resized is not None:
            found = _at_other_sizes(case, call, function, notes)
    answer = {"outcome": "wrong" if found else "right", "why": found}
    if theirs.compared != "numbers" and not found:
        answer["outcome"] = "unchecked"
    return answer | ({"notes": notes} if notes else {})


@dataclass(frozen=True)
class _Eager:
    """What eager torch does in a call, what it does in float64, and what can be compared of
    that.
    """

    expected: Outcome
    exact: Outcome | None
    compared: Compared


def _eager(case: Case, call: Call) -> _Eager | str:
    """Return what eager torch does, or in words what it raises."""
    gradients = differentiable(case, DEVICE)
    try:
        compared = _compared(case, call)
        expected = _run(call.function, call, gradients=gradients)
    except Exception as error:  # noqa: BLE001  # not ours to judge
        return f"torch itself raises {_words(error)}"
    return _Eager(expected, _exact(call, gradients=gradients), compared)


def _difference(
    case: Case, call: Call, function: Callable[..., Any], theirs: _Eager, notes: list[str]
) -> str:
    """Return what a function does that eager torch does not."""
    gradients = differentiable(case, DEVICE)
    got = _run(function, call, gradients=gradients)
    named = among_equals(case.operator, theirs.expected, got)
    found = suite_judge.difference(
        theirs.expected, named, theirs.exact, call.tolerance, theirs.compared
    )
    if found and "RMSE" in found and _beside_nudged(call, theirs, named, gradients=gradients):
        notes.append("as far from float64 as eager mode with inputs off by their last bit")
        found = ""
    return found or _misplaced(case, call, theirs.expected, got, notes)


def _beside_nudged(call: Call, theirs: _Eager, got: Outcome, *, gradients: bool) -> bool:
    """Whether what was done is right beside eager torch with inputs that are off by their last bit.

    One run of eager mode does not show how far off it can be where terms cancel, and may be near
    the exact number by luck.
    """
    for seed in range(_NUDGED):
        one = replace(call, tensors=nudged(call.tensors, seed))
        beside = _run(call.function, one, gradients=gradients)
        if not suite_judge.difference(beside, got, theirs.exact, call.tolerance, theirs.compared):
            return True
    return False


def _at_other_sizes(case: Case, call: Call, function: Callable[..., Any], notes: list[str]) -> str:
    """Return what is wrong at sizes that a function was not made with; a program may refuse those
    that torch found to be fixed.
    """
    other = replace(call, tensors=call.resized or [])
    theirs = _eager(case, other)
    if isinstance(theirs, str):
        return ""
    try:
        found = _difference(case, other, function, theirs, notes)
    except ConfigError as error:
        notes.append("refuses other sizes: " + re.sub(r"\d+", "N", error.message))
        return ""
    notes.append("right at other sizes too" if not found else "wrong at other sizes")
    return found and f"at other sizes: {found}"


def _misplaced(case: Case, call: Call, expected: Outcome, got: Outcome, notes: list[str]) -> str:
    """Return which outputs have other strides than eager torch's, or alias in another way; what
    torch decides itself while it traces is only noted.
    """
    strides = suite_judge.strides(expected, got)
    # A lazy input is copied for kernels, and a called view of it shows the copy.
    lazy = case.mode.startswith("lazy")
    aliasing = "" if lazy else suite_judge.aliasing(expected, got)
    if strides and not suite_judge.strides(_traced(case, call), got):
        notes.append("strides as torch traces them")
        strides = ""
    if aliasing and _compiled(case) and not suite_judge.aliasing(_traced(case, call), got):
        notes.append("aliasing as torch.compile has it with any backend")
        aliasing = ""
    return strides or aliasing


def _traced(case: Case, call: Call) -> Outcome:
    """Return what torch makes of a call without us: torch.compile with no backend behind
    AOTAutograd, or fake tensors.
    """
    if _compiled(case):
        torch._dynamo.reset()  # noqa: SLF001
        plain = torch.compile(call.function, backend="aot_eager", dynamic="dynamic" in case.mode)
        return _run(plain, call, gradients=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [mode.from_tensor(tensor) for tensor in copied(call.tensors)]
        return Outcome(given, tree_leaves(call.function(*given)), [])


def _without_us(case: Case, call: Call) -> str:
    """Return what torch.compile raises with no backend behind AOTAutograd, where it does."""
    if not _compiled(case):
        return ""
    try:
        _traced(case, call)
    except Exception as error:  # noqa: BLE001  # not ours to judge
        return f"torch.compile itself raises {_words(error)}"
    return ""


def _compiled(case: Case) -> bool:
    return "compiled" in case.mode or case.mode == "inplace"


def _function(case: Case, call: Call, notes: list[str]) -> Callable[..., Any]:
    """Return what is judged: the program of a call, or what torch.compile makes of it."""
    if _compiled(case):
        programs: list[Program | FallbackCall] = []

        graphs = case.mode.endswith("graphs")

        def backend(module: Any, inputs: Any, **_: Any) -> Any:
            asked = {"programs": programs, "graphs": graphs}
            return triton_bundler(module, inputs, options=asked)

        compiled = torch.compile(call.function, backend=backend, dynamic="dynamic" in case.mode)

        def run(*tensors: Any) -> Any:
            result = _among_others(compiled, call, tensors) if graphs else compiled(*tensors)
            notes.extend(_graph_notes(programs) if graphs else ())
            whole = [one.reason for one in programs if isinstance(one, FallbackCall)]
            notes.extend(f"as torch has it: {reason}" for reason in whole)
            return result

        return run
    example = copied(call.tensors)
    program = generate(
        call.function,
        example,
        dynamic=case.mode == "dynamic",
        options=GenerateOptions(sources=os.path.join(_folder(), "sources"), templates=TEMPLATES),
    )
    return program.run


def _among_others(compiled: Callable[..., Any], call: Call, tensors: Sequence[Any]) -> Any:
    """Return the result of a call which comes so late that it is a graph's, among calls with other
    numbers that must not change it, nor it theirs.
    """
    kept = []
    for number in range(_CALLS_BEFORE):
        result = _with_gradients(compiled, call)
        if number == _KEPT:
            kept = [(one, one.detach().clone()) for one in _tensors_of(result)]
        del result
    result = compiled(*tensors)
    aliases = {one.untyped_storage().data_ptr() for one in tensors if _has_memory(one)}
    # What is an input's memory may change with it.
    kept += [
        (one, one.detach().clone())
        for one in _tensors_of(result)
        if one.untyped_storage().data_ptr() not in aliases
    ]
    for _ in range(_CALLS_AFTER):
        _with_gradients(compiled, call)
    for now, before in kept:
        if not torch.equal(_without_nan(now), _without_nan(before)):
            raise AssertionError("a later call wrote over a result")
    return result


def _without_nan(tensor: Any) -> Any:
    # torch has no `nan_to_num` of complex32.
    wide = tensor.to(torch.complex64) if tensor.dtype is torch.complex32 else tensor
    return wide.detach().nan_to_num()


def _with_gradients(compiled: Callable[..., Any], call: Call) -> Any:
    """Call with tensors whose elements are in another order, or as they are where that is refused;
    returns the result.
    """
    try:
        given = [_rolled(tensor) for tensor in copied(call.tensors)]
        call.function(*[tensor.detach().clone() for tensor in given])
    except Exception:  # noqa: BLE001  # torch does not take these numbers
        given = copied(call.tensors)
    result = compiled(*given)
    _gradients(tree_leaves(call.finished(result)), given)
    return result


def _rolled(tensor: Any) -> Any:
    if tensor.dim() and _has_memory(tensor):
        with torch.no_grad():
            tensor.copy_(tensor.clone().roll(1, -1))
    return tensor


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _tensors_of(result: Any) -> list[Any]:
    return [one for one in tree_leaves(result) if _has_memory(one)]


def _graph_notes(programs: list[Program | FallbackCall]) -> list[str]:
    """Return how the programs of a case were run."""
    uses = [one.graph_use for one in programs if isinstance(one, Program)]
    found = [f"no graph: {one.refusal}" for one in uses if one is not None and one.refusal]
    replayed = any(one is not None and one.replays for one in uses)
    return [*found, *(["replayed as graphs"] if replayed else [])]


def _run(
    function: Callable[..., Any], call: Call, *, gradients: bool, dtype: Any = None
) -> Outcome:
    """Return what a call does with tensors of its own."""
    torch.manual_seed(0)
    given = copied(call.tensors, dtype)
    result = function(*given)
    found = _gradients(tree_leaves(call.finished(result)), given) if gradients else []
    if DEVICE != "cpu":
        torch.cuda.synchronize()  # what a kernel raises is raised here, not in the next case
    return Outcome(given, tree_leaves(result), found)


def _gradients(outputs: list[Any], inputs: list[Any]) -> list[Any]:
    """Return the gradients of the inputs, for gradients of the outputs that are the same
    each time.
    """
    ends = [one for one in outputs if isinstance(one, torch.Tensor) and one.requires_grad]
    needing = [one for one in inputs if one.requires_grad]
    if not ends or not needing:
        return []
    with torch.no_grad():
        starts = [_start(number, end) for number, end in enumerate(ends)]
    return list(torch.autograd.grad(ends, needing, starts, allow_unused=True))


def _start(number: int, end: Any) -> Any:
    """Return a gradient of an output: multiples of an eighth, which all dtypes hold."""
    count = end.numel()
    steps = (torch.arange(count, device=end.device) * 5 + number) % 13 - 6
    return (steps / 8.0).reshape(end.shape).to(end.dtype)


def _exact(call: Call, *, gradients: bool) -> Outcome | None:
    """Return what a call does in float64; None where torch cannot do it."""
    try:
        return _run(call.function, call, gradients=gradients, dtype=torch.float64)
    except Exception:  # noqa: BLE001  # there is no reference then, which the verdict names
        return None


class _DrawMode(TorchDispatchMode):  # type: ignore[misc]  # torch is not read
    """Notes whether an operator draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        self.drew |= torch.Tag.nondeterministic_seeded in function.tags
        return function(*arguments, **(keywords or {}))


def _compared(case: Case, call: Call) -> Compared:
    """Return what can be compared of a call's numbers: their range where it draws them."""
    if exception_of(case.name, ("uncompared",)) is not None:
        return "nothing"
    with _DrawMode() as mode, torch.no_grad():
        call.function(*(tensor.detach() for tensor in copied(call.tensors)))
    return "range" if mode.drew else "numbers"


@functools.cache
def _prepare() -> None:
    """Make this process one that runs cases: quiet, on one core, with a cache of its own."""
    torch.set_num_threads(1)  # there are as many processes as cores
    # Processes that compile equal text at one time would mix their files.
    os.environ["TRITON_CACHE_DIR"] = os.path.join(_folder(), f"triton-{os.getpid()}")
    logging.disable(logging.WARNING)
    draw_candidates()
    if DEVICE == "cpu":
        _round_to_bfloat16()


def _folder() -> str:
    """Return the folder that `suites` made for this run."""
    return os.environ["XDG_CACHE_HOME"]


def _round_to_bfloat16() -> None:
    """Let Triton's interpreter round float32 to bfloat16 as a GPU does, to the nearest; it cuts
    digits off, which is twice the error.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.cast_impl

    def cast(builder: Any, value: Any, dtype: Any) -> Any:
        if (value.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return original(builder, value, dtype)
        rounded = torch.from_numpy(value.data.copy()).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast
