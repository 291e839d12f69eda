# SPDX-License-Identifier: Apache-2.0
"""`Branches`: which instructions and which ways of each conditional jump of a file's functions were
taken.

It counts what the interpreter does, instruction by instruction, so it also tells the two ways of an
`and`, an `or` and a conditional expression on one line.
"""

import dis
import sys
from types import CodeType


class Branches:
    """Records while it is entered, for the code of these files; `missing` says what was never
    taken.
    """

    def __init__(self, *modules):
        self._codes = {}
        for module in modules:
            path = module.__file__
            with open(path) as source:
                for code in _functions(compile(source.read(), path, "exec")):
                    self._codes[path, code.co_qualname, code.co_firstlineno] = code
        self._files = {module.__file__ for module in modules}
        self._seen, self._before = set(), {}

    def __enter__(self):
        self._outer = sys.gettrace()
        # From Python 3.12 on settrace() looks whether any frame wants instructions, and tells none
        # where no frame did.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error):
        sys.settrace(self._outer)

    def _enter(self, frame, event, argument):
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace = self._step  # before the next line, which Python 3.13 else passes over
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code
        # The first instruction, that of the line with `def`, is behind a call that is told.
        self._seen.add(((code.co_filename, code.co_qualname, code.co_firstlineno), frame.f_lasti))
        return self._step

    def _step(self, frame, event, argument):
        if event == "opcode":
            code = frame.f_code
            place = code.co_filename, code.co_qualname, code.co_firstlineno
            self._seen.add((place, frame.f_lasti))
            before = self._before.get(frame)
            if before is not None:
                self._seen.add((place, before, frame.f_lasti))
            self._before[frame] = frame.f_lasti
        elif event == "return":
            self._before.pop(frame, None)
        return self._step

    def missing(self):
        """Return a line for each line that was not reached, and for each way of a conditional that
        was not taken.
        """
        found = set()
        for place, code in self._codes.items():
            steps = list(dis.get_instructions(code))
            lines = {
                offset: line
                for start, end, line in code.co_lines()
                for offset in range(start, end, 2)
            }
            for step, following in zip(steps, [*steps[1:], None], strict=True):
                words = f"{place[1]}, line {lines.get(step.offset)}"
                conditional = (
                    "JUMP" in step.opname and "_IF" in step.opname
                ) or step.opname == "FOR_ITER"
                if not conditional or following is None:
                    continue
                after = {
                    seen[2]
                    for seen in self._seen
                    if len(seen) == 3 and seen[:2] == (place, step.offset)
                }
                if following.offset not in after:
                    found.add(f"{words}: never goes on after {step.opname}")
                if not after - {following.offset}:
                    found.add(f"{words}: never jumps at {step.opname}")
            reached = {
                lines.get(seen[1]) for seen in self._seen if len(seen) == 2 and seen[0] == place
            }
            found |= {
                f"{place[1]}, line {line}: never reached"
                for line in set(lines.values()) - reached - {None}
            }
        return sorted(found)


def _functions(code):
    """Return the code of every function; what runs at import is no branch of a driver."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            # CO_OPTIMIZED: a function's, not a class's.  Annotations are a function in Python 3.14.
            if constant.co_flags & 1 and constant.co_name != "__annotate__":
                yield constant
            yield from _functions(constant)
