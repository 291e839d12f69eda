# SPDX-License-Identifier: Apache-2.0
"""Runs a Python program under capture, as `python` would run it, then compiles what was heard; the
command `capture` starts it.

::

    python -m bundler.compile.captured_program REQUEST script.py ARGS…      REQUEST: what to do, as JSON (`CaptureRequest`)

Standard output and error are the program's.  The bundle and the report go to files, which the
command reads.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import CodeType, ModuleType
from typing import Any, Literal

from bundler.compile.program_capture import Capture, capturing
from bundler.errors import BundlerError, NotFound
from bundler.format.summary import count

Kind = Literal["script", "module", "code"]
BUNDLE, REPORT = "captured.tbundle", "report.json"
MODULE = "bundler.compile.captured_program"


@dataclass(frozen=True)
class CaptureRequest:
    """What to capture.

    Attributes:
        kind, name: the program: a file, the name of a module, or code.
        target: what for.
        directory: where bundle and report go.
        properties: of the GPU.
        jobs: how many compile at a time; None for one a core.
        quiet: say nothing beside what the program says.
    """

    kind: Kind
    name: str
    target: str
    directory: str
    properties: dict[str, str | int]
    jobs: int | None
    quiet: bool = False

    def to_text(self) -> str:
        """Return it as one argument of a command."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> CaptureRequest:
        """Read what `to_text` wrote."""
        return CaptureRequest(**json.loads(text))


def capture_program(request: CaptureRequest, arguments: Sequence[str]) -> int:
    """Run a program under capture; write bundle and report; returns the program's exit status, 1
    when it crashed.

    Raises:
        BundlerError: what was captured cannot be compiled at all, or not be written.
    """
    capture = capturing(request.target, properties=request.properties)
    status = _run(capture, request, arguments)
    if not request.quiet:
        sys.stdout.flush()
        sys.stderr.write(
            f"compiling {count(capture.report.kernels, 'kernel')} for {request.target}\n"
        )
    bundle = capture.build(request.jobs)
    with bundle:
        if bundle.kernels:
            bundle.save(os.path.join(request.directory, BUNDLE))
    with open(os.path.join(request.directory, REPORT), "w", encoding="utf-8") as file:
        json.dump(asdict(capture.report), file)
    return status


def _run(capture: Capture, request: CaptureRequest, arguments: Sequence[str]) -> int:
    try:
        with capture:
            _program(request, arguments)()
    except SystemExit as end:
        return _status(end.code)
    except Exception as error:  # noqa: BLE001  # a program may raise anything; what it did before counts
        sys.stdout.flush()
        traceback.print_exception(type(error), error, _own_frames(error))
        return 1
    return 0


def _status(code: Any) -> int:
    """Return the exit status for what `sys.exit` was given, and say what it was where
    Python would.
    """
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def _own_frames(error: Exception) -> Any:
    """Return the traceback from the program's first frame on."""
    trace, own = error.__traceback__, vars(sys.modules["__main__"])
    while trace is not None and trace.tb_frame.f_globals is not own:
        trace = trace.tb_next
    return trace if trace is not None else error.__traceback__


def _program(request: CaptureRequest, arguments: Sequence[str]) -> Callable[[], None]:
    """Return what runs the program, with `__main__`, `sys.argv` and `sys.path` as Python
    sets them.
    """
    module = ModuleType("__main__")
    code, first, folder = _CODE_OF[request.kind](request.name, module)
    sys.argv[:] = [first, *arguments]
    sys.path[0] = folder
    # Not `runpy`, whose module is gone when the program ends: kernels in it are compiled after
    # that.
    sys.modules["__main__"] = module

    def run() -> None:
        exec(code, vars(module))  # noqa: S102  # it is the program that the user asked to run

    return run


def _script(path: str, module: ModuleType) -> tuple[CodeType, str, str]:
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise NotFound(f"cannot capture {path}: {error.strerror or error}", path=path) from error
    module.__file__ = os.path.abspath(path)
    return (
        compile(text, os.path.abspath(path), "exec"),
        path,
        os.path.dirname(os.path.realpath(path)),
    )


def _module(name: str, module: ModuleType) -> tuple[CodeType, str, str]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader: Any = None if spec is None else spec.loader
    code = None if spec is None or loader is None else loader.get_code(spec.name)
    if spec is None or code is None:
        raise NotFound(
            f"cannot capture -m {name}: no module of this name that can be run", name=name
        )
    module.__file__, module.__spec__, module.__package__ = spec.origin, spec, spec.parent
    return code, str(spec.origin), os.getcwd()


def _text(text: str, _module: ModuleType) -> tuple[CodeType, str, str]:
    return compile(text, "<string>", "exec"), "-c", ""


_CODE_OF: dict[Kind, Callable[[str, ModuleType], tuple[CodeType, str, str]]] = {
    "script": _script,
    "module": _module,
    "code": _text,
}


if __name__ == "__main__":
    try:
        sys.exit(capture_program(CaptureRequest.from_text(sys.argv[1]), sys.argv[2:]))
    except BundlerError as error:
        sys.exit(f"error: {error.message}")
