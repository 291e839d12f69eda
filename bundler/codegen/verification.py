# SPDX-License-Identifier: Apache-2.0
"""`Verifier`: compares the first call of a program with eager torch, for
`GenerateOptions(verify=True)`.

`program` makes one for each program.  What eager torch computes, and how far results may be apart,
is `bundler/toolchain/reference_graph.py`, which alone imports torch.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bundler.codegen.graph_errors import user_line
from bundler.errors import WrongResult
from bundler.package_loggers import logger
from bundler.runtime.program.program_plan import (
    BUFFER_MARK,
    Launch,
    OperatorStep,
    ProgramPlan,
)

_log = logger("bundler.codegen")
_WRITTEN = ("out_ptr", "in_out_ptr")


@dataclass(frozen=True)
class Verification:
    """What a program's first call was found to be.

    Attributes:
        checked: results, and inputs that were changed, that are eager torch's.
        unchecked: those whose numbers were not compared -> why.
        float64: whether the graph could be run in float64, beside which eager's own error is known.
    """

    checked: tuple[str, ...]
    unchecked: Mapping[str, str]
    float64: bool


@dataclass(eq=False)
class Verifier:
    """Compares the first call of a program that has right results; later ones run alone.

    Threads that call it meanwhile wait.

    Args:
        module: the FX graph that the program was generated from.
        plan: of the program.
        callers_results: how many results have eager's strides, None for all; backward is told those
            of the others.
    """

    module: Any = field(repr=False)
    plan: ProgramPlan = field(repr=False)
    callers_results: int | None = None
    verification: Verification | None = None
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def __call__(
        self, inputs: Sequence[Any], run: Callable[[], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """Run a program, and compare it with eager torch where that has not been done.

        Args:
            inputs: of the call.
            run: runs the program.

        Raises:
            WrongResult: of a result that is not eager's, or a changed input.
        """
        if self.verification is not None:
            return run()
        with self._lock:
            if self.verification is None:
                return self._compared(inputs, run)
        return run()

    def _compared(
        self, inputs: Sequence[Any], run: Callable[[], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        torchs = importlib.import_module("bundler.toolchain.reference_graph")
        calls = {step.operator for step in self.plan.steps if isinstance(step, OperatorStep)}
        graph = torchs.ReferenceGraph(self.module, calls)
        try:
            # Before the program, which may change its inputs.
            expected = graph.run(inputs)
        except Exception as error:
            # If the program refuses these inputs too, its own message is the better one.
            run()
            raise WrongResult(
                "eager torch refuses what the program returned results for:"
                f" {type(error).__name__}: {error}",
                expected=str(error),
            ) from error
        results = run()
        checked, unchecked = [], {}
        for name, place, got, eager, wide, reason in self._pairs(graph, expected, inputs, results):
            node = graph.nodes.get(name)
            called = self._called(name, place, node)
            traced = None if node is None or place is None else node.meta.get("val")
            seen = place is None or self.callers_results is None or place < self.callers_results
            found = torchs.difference(got, eager, wide, traced, numbers=not reason, placement=seen)
            if found is not None:
                raise self._wrong(called, place, name, node, found)
            if reason:
                unchecked[called] = reason
            else:
                checked.append(called)
        if unchecked:
            told = "; ".join(f"{name}: {reason}" for name, reason in unchecked.items())
            _log.warning("verify: numbers that were not compared with eager torch's: %s", told)
        self.verification = Verification(tuple(checked), unchecked, expected.wide is not None)
        return results

    def _pairs(
        self,
        graph: Any,
        expected: Any,
        inputs: Sequence[Any],
        results: Sequence[Any],
    ) -> list[tuple[Any, ...]]:
        """Return what is compared: node, place of a result, ours, eager's, float64's, why the
        numbers are not compared.
        """
        if len(results) != len(expected.outputs):
            raise WrongResult(
                f"the program returned {len(results)} results, eager torch {len(expected.outputs)}",
                expected=len(expected.outputs),
                got=len(results),
            )
        given = dict(zip(graph.placeholders(), inputs, strict=True))
        pairs: list[tuple[Any, ...]] = []
        for name in graph.changed:
            got = given[name] if name in given else graph.constant(name)
            wide = expected.wide_changed and expected.wide_changed[name]
            open_change = graph.open_changes.get(name, "")
            pairs.append((name, None, got, expected.changed[name], wide, open_change))
        for place, (name, got, eager) in enumerate(
            zip(graph.results, results, expected.outputs, strict=True)
        ):
            wide = None if expected.wide is None else expected.wide[place]
            pairs.append((name, place, got, eager, wide, graph.unchecked.get(place, "")))
        return pairs

    def _called(self, name: str | None, place: int | None, node: Any) -> str:
        if place is None:
            return f"changed input {name}"
        return f"output {place}" + ("" if node is None else f" ({name})")

    def _wrong(
        self, called: str, place: int | None, name: str, node: Any, found: Any
    ) -> WrongResult:
        line = "" if node is None else user_line(node)
        made = self._made_by(place)
        facts = {"fact": found.fact, "expected": found.expected, "got": found.got}
        return WrongResult(
            f"{called} of the program: {found}"
            + (f"; computed by {made}" if made else "")
            + (f"; at {line}" if line else "")
            + "; run the function without the generator, and report it",
            output=called,
            kernel=made,
            line=line,
            largest=found.largest,
            **facts,
        )

    def _made_by(self, place: int | None) -> str:
        """Return the last kernel, or called operator, that writes the memory of a result; empty
        where that is not known.
        """
        if place is None or (buffer := self.plan.outputs[place].buffer) is None:
            return ""
        for step in reversed([*self.plan.every_step]):
            if isinstance(step, OperatorStep) and buffer in step.outputs:
                return step.operator
            if isinstance(step, Launch):
                names = self.plan.kernels[step.kernel].parameters
                written = zip(names, step.arguments, strict=False)
                if any(
                    argument == f"{BUFFER_MARK}{buffer}" and parameter.startswith(_WRITTEN)
                    for parameter, argument in written
                ):
                    return step.kernel
        return ""
