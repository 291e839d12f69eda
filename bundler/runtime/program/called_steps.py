# SPDX-License-Identifier: Apache-2.0
"""`step`: one step of a bound program, a call of a function with some of the program's values;
`run_steps` takes all steps of a call.

The compiled half of the launch room does both without a frame of Python for each step, and launches
kernels that were launched before without their own `run`: `tuned.again` has what launches them.
`PythonStep` does the same otherwise, but for the latter, which costs time alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bundler.runtime.launch.extension import EXTENSION
from bundler.runtime.program.tensor_addresses import ALIGNED_BYTES, is_apart

Values = list[Any]


class PythonStep:
    """Calls a function, and puts what it returns among the values.

    Args:
        function: what is called; None empties the places.
        places: of its arguments.
        names: of the last ones.
        result: the place of what it returns, which nobody keeps below 0.
        finish: given the values and what was returned, puts that at its place, and returns what
            recognizes a result that needs no such look, or None.
        apart: where what is recognized must not begin; None for one that may lie anywhere.
        tuned: of a kernel's launch, what has `again`; not used here.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        places: tuple[int, ...],
        names: tuple[str, ...] = (),
        result: int = -1,
        finish: Callable[[Values, Any], Any] | None = None,
        apart: tuple[int, ...] | None = None,
        tuned: Any = None,  # as the extension's
    ) -> None:
        self._function, self._places, self._names = function, places, names
        self._result, self._finish, self._apart = result, finish, apart
        self._plain = len(places) - len(names)
        self._recognizer: Callable[[Any], bool] | None = None

    def __call__(self, values: Values) -> None:
        """Take the step."""
        if self._function is None:
            for place in self._places:
                values[place] = None
            return
        given = [values[place] for place in self._places]
        named = dict(zip(self._names, given[self._plain :], strict=True))
        result = self._function(*given[: self._plain], **named)
        known = self._result >= 0 if self._finish is None else self._knows(values, result)
        if known:
            values[self._result] = result
        elif self._finish is not None:
            self._recognizer = self._finish(values, result) or self._recognizer

    def _knows(self, values: Values, result: Any) -> bool:
        if self._recognizer is None or not self._recognizer(result):
            return False
        return self._apart is None or is_apart(result, values, self._apart)


def _run_steps(steps: Sequence[Callable[[Values], Any]], values: Values) -> None:
    for one in steps:
        one(values)


step: Callable[..., Callable[[Values], Any]] = (
    PythonStep if EXTENSION is None else partial(EXTENSION.Step, ALIGNED_BYTES)
)
run_steps: Callable[[tuple[Callable[[Values], Any], ...], Values], None] = (
    _run_steps if EXTENSION is None else EXTENSION.run_steps
)
