# SPDX-License-Identifier: Apache-2.0
"""`located`, `refusals`, `check_call`: whatever goes wrong while kernels are generated is an
`UnsupportedOperator` that names operator and line.

What the generator refuses gets the line of the user's program.  Any other error is a fault of the
generator: it is told as an internal error, with its class and place, and its traceback is logged at
level debug.  `lower`, `program` and `torch_backend` use it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bundler.errors import BundlerError, ConfigError, UnsupportedOperator
from bundler.package_loggers import logger
from bundler.runtime.program.program_plan import OperatorStep, ProgramPlan

_log = logger("bundler.codegen")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*(?:\n +(?P<text>[^\n]+))?')
# Layers of torch that a user's line calls have frames of their own.
_TORCH = re.compile(r"[/\\]torch[/\\]")
_OWN = str(Path(__file__).absolute().parents[1]) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")


@contextlib.contextmanager
def located(node: Any) -> Iterator[None]:
    """Turn errors of the block into one about a node of an FX graph.

    Args:
        node: what the block lowers.

    Raises:
        UnsupportedOperator: of the operator, with the line of the user's program as `line`.
    """
    try:
        yield
    except UnsupportedOperator as error:
        place = user_line(node)
        if not place or "line" in error.facts:
            raise
        facts = {**error.facts, "line": place}
        raise UnsupportedOperator(f"{error.message}; at {place}", **facts) from error
    except Exception as error:
        raise _internal(error, str(node.target), user_line(node)) from error


@contextlib.contextmanager
def refusals(work: str) -> Iterator[None]:
    """Turn errors of the block that are none of this package into internal ones; `work` says what
    it does.
    """
    try:
        yield
    except BundlerError:
        raise
    except Exception as error:
        raise _internal(error, work, "") from error


def untraceable(error: Exception) -> UnsupportedOperator | None:
    """Return the refusal for what torch raised while it traced a function; None where the function
    itself raised it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    if isinstance(error, BundlerError) or not own or own[-1] is frames[-1]:
        return None
    operator, place = str(getattr(error, "func", "the function")), _place(own[-1])
    return UnsupportedOperator(
        f"{operator}: torch cannot trace it: {_described(error)}; at {place}",
        operator=operator,
        line=place,
    )


def check_call(function: Any, inputs: Sequence[Any]) -> None:
    """Raise where a function cannot be called with the example's inputs at all.

    Raises:
        ConfigError: it is a class or nothing that can be called, or takes more or fewer arguments.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, type):
        raise ConfigError(
            f"{name} is a class: expected a function or an instance; pass {name}(...)", got=name
        )
    called = getattr(function, "forward", function)
    if not callable(called):
        raise ConfigError(f"expected a function or a module, got {name}", got=name)
    try:
        signature = inspect.signature(called)
    except ValueError:  # a function of C, which says nothing of its arguments
        return
    try:
        signature.bind(*inputs)
    except TypeError as error:
        raise ConfigError(
            f"{name}{signature}: got {len(inputs)} example inputs: {error}", got=len(inputs)
        ) from error


def refuse_called(plan: ProgramPlan, fallbacks: Sequence[Any]) -> None:
    """Raise where a program calls operators of torch.

    Args:
        plan: of the program.
        fallbacks: `RefusedOperator`s of its graph, some of which nobody may need.

    Raises:
        UnsupportedOperator: with each of them, why, and where it is in the user's program;
            `operators` names them.
    """
    called = {step.operator for step in plan.steps if isinstance(step, OperatorStep)}
    if not called:
        return
    left = [one for one in fallbacks if one.operator in called]
    told = "; ".join(f"{one.reason}" + (f", at {one.line}" if one.line else "") for one in left)
    raise UnsupportedOperator(
        f"templates='all': the program would still call {', '.join(sorted(called))}: {told}; leave"
        " them out of the function, or generate with templates='none', which calls them",
        operator=left[0].operator,
        operators=tuple(sorted(called)),
        line=left[0].line,
    )


def raised_by_user(error: Exception) -> ConfigError:
    """Return what a user's function raised as one message, with the last line of it that is the
    user's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    at = f"; at {_place(own[-1])}" if own else ""
    return ConfigError(f"the function raised {_described(error)}{at}")


def user_line(node: Any) -> str:
    """Return where the user's program calls a node's operator, as `file:line: text`; empty where
    the graph does not say.
    """
    frames = list(_FRAME.finditer(str(node.meta.get("stack_trace") or "")))
    own = [frame for frame in frames if not _TORCH.search(frame["file"])] or frames
    if not own:
        return ""
    last = own[-1]
    return f"{last['file']}:{last['line']}" + (f": {last['text'].strip()}" if last["text"] else "")


def _internal(error: Exception, operator: str, place: str) -> UnsupportedOperator:
    _log.debug("internal error of the generator: %s", operator, exc_info=error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(last.filename)}:{last.lineno}"
    at = f"; at {place}" if place else ""
    return UnsupportedOperator(
        f"{operator}: internal error of the generator: {_described(error)} ({where}){at}; please"
        " report it",
        operator=operator,
        line=place,
        internal=True,
    )


def _described(error: Exception) -> str:
    """Return an error's class, and the first line of what it says."""
    said = str(error).strip().partition("\n")[0]
    return type(error).__name__ + (f": {said}" if said else "")


def _is_users(file: str) -> bool:
    if file.startswith((_OWN, "<")) or _TORCH.search(file):
        return False
    return not file.startswith(_STANDARD) or any(part in file for part in _INSTALLED)


def _place(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}" + (f": {frame.line}" if frame.line else "")
