# SPDX-License-Identifier: Apache-2.0
"""`AutogradResult`: what AOTAutograd made of a graph of Dynamo's, kept for the next process, which
traces, differentiates and partitions nothing then.  Imports torch.

::

    <cache>/triton-bundler/autograd/<digest, of `autograd_key`>
        sha256 of the rest, in hex, and a newline
        torch's `BundledAOTAutogradResult`, pickled: what stands around the graphs of ATen operators,
        and a name in place of what runs each of them
    <cache>/triton-bundler/autograd-programs/<name>
        the digest under which `kept_programs` has the program of a graph

A name is written once its program ran: what a second start runs did run, with inputs of these sizes.
What torch needs is a pickle, so both directories are this user's: one that others may write to is
not read, and no bundle, store or other machine brings anything there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._functorch import aot_autograd, config
from torch._functorch._aot_autograd import autograd_cache, graph_compile
from torch._functorch._aot_autograd.schemas import AOTAutogradCacheInfo
from torch._guards import TracingContext, tracing
from torch._inductor.output_code import OutputCode
from torch.utils._python_dispatch import _disable_current_modes

from bundler.codegen.donated_inputs import results_alone
from bundler.codegen.kept_programs import kept_program, tell_of
from bundler.codegen.program import GenerateOptions, Program, as_kept
from bundler.compile.source_modules import errors_of, read_trusted, user_directory, write_whole
from bundler.errors import BundlerError
from bundler.package_loggers import logger

_log = logger("bundler.codegen")
_RESULTS, _PROGRAMS = "autograd", "autograd-programs"
# So many files stay in a directory; those that nobody read for longest go.  A larger result, of a
# graph that holds large tensors, is not kept.
MOST_FILES, MOST_BYTES = 1024, 64 << 20
_NAME = re.compile("[0-9a-f]{32}")
_DIGEST = re.compile("[0-9a-f]{64}")
_NAME_BYTES, _DIGEST_BYTES = 16, 64
# What of torch's settings lets it keep results, all of one at once, with what runs in it.
_SETTINGS = {
    "force_autograd_cache": True,
    "bundled_autograd_cache": True,
    "strict_autograd_cache": False,
    "force_non_lazy_backward_lowering": True,
}
# torch's modules that look for its cache by this name.
_CACHE = "AOTAutogradCache"
_USERS = (aot_autograd, graph_compile)
_Run = Callable[[list[Any]], Any]
# What runs a program for the first time, and from then on.
Runs = tuple[_Run, _Run]


class KeptCode(OutputCode):  # type: ignore[misc]  # torch has no types for it
    """What runs one graph; in a file only its name is kept.

    Args:
        name: of a file that says which program it is.
        run: takes a list of inputs, and empties it.
    """

    def __init__(self, name: str, run: _Run | None = None) -> None:
        self.name, self.run = name, run
        self._boxed_call = True

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the graph."""
        return self.run(inputs)  # type: ignore[misc]  # `AutogradResult` sets it before a call

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the name, as what is pickled."""
        return KeptCode, (self.name,)

    def prepare_for_serialization(self) -> None:
        """Do nothing: a name is ready."""

    def post_compile(self, *_: Any) -> None:
        """Do nothing: what was found runs as it is."""


class Unusable(Exception):
    """torch does not take a result that was found."""


class AutogradResult:
    """In place of torch's cache while one graph is compiled.

    Trouble with the files is a miss, which the log tells at level debug: torch traces the graph.

    Args:
        digest: of the graph, by `autograd_key`.
        options: by which its programs are generated.
        runs: returns what runs a program that was found, or None where it cannot run here.

    Attributes:
        programs: those that were found; empty where torch has to trace.
    """

    def __init__(
        self, digest: str, options: GenerateOptions, runs: Callable[[Program], Runs | None]
    ) -> None:
        self._path = os.path.join(user_directory(_RESULTS), digest)
        self._options, self._runs = options, runs
        # Those of a result whose programs are not there any more, forward first.
        self._names: list[str] = []
        self._entry: Any = None
        self.programs: list[Program] = []

    def look(self) -> bool:
        """Return whether there is a result whose programs run here: then torch needs nothing to
        trace with, and who calls it has to expect `Unusable`.
        """
        entry = _read_entry(self._path)
        if entry is None:
            return False
        codes = [one.result for one in (entry.compiled_fw, entry.compiled_bw) if one is not None]
        self._names = [code.name for code in codes]
        programs = [_program(code.name, self._options) for code in codes]
        runs = [None if one is None else self._runs(one) for one in programs]
        for code, run in zip(codes, runs, strict=True):
            if run is None:
                return False
            code.run = partial(_first_call, code, *run)
        found = [one for one in programs if one is not None]
        if not _is_donated(found, entry.runtime_metadata):
            return False
        self._entry, self.programs = entry, found
        return True

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let torch look for its results here."""
        theirs = [getattr(module, _CACHE) for module in _USERS]
        try:
            for module in _USERS:
                setattr(module, _CACHE, self)
            with config.patch(_SETTINGS):
                yield
        finally:
            for module, one in zip(_USERS, theirs, strict=True):
                setattr(module, _CACHE, one)

    # ------------------------------------------------------------------------ What torch calls

    make_entry = staticmethod(autograd_cache.AOTAutogradCache.make_entry)

    def try_load(self, _module: Any, args: Sequence[Any], settings: Any, *_: Any, **__: Any) -> Any:
        """Return what calls the graph, or None; and the settings, where torch's does."""
        found = kept = None
        if self._entry is None:
            kept = AOTAutogradCacheInfo(self._path, time.time_ns(), forward_symints=[])
        else:
            try:
                found = self._entry.wrap_post_compile(args, settings, {})
            # torch raises whatever it likes where a result is not what it takes.
            except Exception as error:
                raise Unusable from error
        if _with_settings():
            return found, dataclasses.replace(settings, cache_info=kept)
        settings.cache_info = kept
        return found

    def generate_guards_expression(self, _: Any) -> None:
        """Return none: no size changes."""

    def save(self, path: str, entry: Any, **_: Any) -> None:
        """Keep a result; torch makes a directory of it once it was compiled."""
        # torch prints them while it loads a result.
        entry.aot_joint_graph_str = entry.aot_forward_graph_str = None
        entry.aot_backward_graph_str = None
        try:
            with _disable_current_modes():
                data = pickle.dumps(entry)
            if len(data) <= MOST_BYTES:
                _put(path, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        # Parts of torch's raise whatever they like where they are no pickles; the graph runs.
        except Exception as error:  # noqa: BLE001
            _log.debug("not kept: what AOTAutograd made of a graph", exc_info=error)

    # --------------------------------------------------------------------------------- A miss

    def forward(
        self, compiler: Callable[..., _Run], module: fx.GraphModule, inputs: Sequence[Any]
    ) -> KeptCode:
        """Compile a graph of inference, or a forward one."""
        if self._entry is not None:
            raise Unusable
        name = self._name(0)
        return KeptCode(name, compiler(module, inputs, ran=partial(_keep_name, name)))

    def backward(
        self, compiler: Callable[..., _Run], module: fx.GraphModule, inputs: Sequence[Any]
    ) -> KeptCode:
        """Compile a backward graph when it is first called: it may never be."""
        code, context = KeptCode(self._name(1)), TracingContext.try_get()

        def first(given: list[Any]) -> Any:
            with tracing(context), torch.no_grad():
                code.run = compiler(module, inputs, ran=partial(_keep_name, code.name))
            return code.run(given)

        code.run = first
        return code

    def _name(self, number: int) -> str:
        known = self._names[number : number + 1]
        return known[0] if known else os.urandom(_NAME_BYTES).hex()


def _read_entry(path: str) -> Any:
    """Return torch's result; None for a miss."""
    data = _read(path, 2 * MOST_BYTES)
    digest, _, text = (data or b"").partition(b"\n")
    if not text or hashlib.sha256(text).hexdigest().encode() != digest:
        return None
    try:
        # Of this user's alone: no bundle and no store brings it.
        found = pickle.loads(text)  # noqa: S301
        return found if all(map(_is_named, (found.compiled_fw, found.compiled_bw))) else None
    # A pickle of other classes may raise whatever it likes.
    except Exception as error:  # noqa: BLE001
        _log.debug("what AOTAutograd made of a graph cannot be read", exc_info=error)
        return None


def _with_settings() -> bool:
    """Whether torch's `try_load` returns settings, too, as from 2.12."""
    theirs = inspect.signature(autograd_cache.AOTAutogradCache.try_load)
    return str(theirs.return_annotation).startswith("tuple")


def _is_named(part: Any) -> bool:
    if part is None:
        return True
    return type(part.result) is KeptCode and _NAME.fullmatch(part.result.name) is not None


def _first_call(code: KeptCode, first: _Run, later: _Run, inputs: list[Any]) -> Any:
    """Run a program that was found; what fails is looked for no more, so that the next process has
    torch trace the graph, which it can run then.
    """
    try:
        results = first(inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        with contextlib.suppress(OSError):
            os.unlink(_program_path(code.name))
        raise
    code.run = later
    return results


def _program(name: str, options: GenerateOptions) -> Program | None:
    """Return the program of a name; None where it never ran, or is gone."""
    data = _read(_program_path(name), _DIGEST_BYTES)
    digest = (data or b"").decode("ascii", "replace")
    kept = kept_program(digest) if _DIGEST.fullmatch(digest) else None
    # The tensors that a graph holds are not known here, nor sizes that guards are taken on.
    if kept is None or kept.constants or kept.guards:
        return None
    tell_of(digest)
    return as_kept(kept, {}, options, digest=digest)


def _is_donated(programs: Sequence[Program], known: Any) -> bool:
    """Whether what a backward graph's program writes over is alone in memory as the forward graph's
    fills it: another process than the one that kept the one may have kept the other.
    """
    if len(programs) == 1 or not programs[1].plan.overwritten:
        return True
    forward, backward = (one.plan for one in programs)
    places = {n for n, item in enumerate(backward.inputs) if item.name in backward.overwritten}
    saved = {known.num_forward + place for place in places}
    return known.num_symints_saved_for_bw == 0 and saved <= results_alone(forward)


def _program_path(name: str) -> str:
    return os.path.join(user_directory(_PROGRAMS), name)


def _keep_name(name: str, program: Program) -> None:
    """Keep which program a name has, once it ran."""
    if program.kept_as is not None:
        with contextlib.suppress(BundlerError):
            _put(_program_path(name), program.kept_as.encode())


def _read(path: str, most: int) -> bytes | None:
    try:
        return read_trusted(path, most, "the directory of what AOTAutograd made")
    except BundlerError as error:
        _log.debug("a file cannot be read: %s", path, exc_info=error)
        return None


def _put(path: str, data: bytes) -> None:
    with errors_of("the directory of what AOTAutograd made"):
        write_whole(path, data)
        with os.scandir(os.path.dirname(path)) as entries:
            found = [(one.stat().st_mtime, one.path) for one in entries]
        for _, old in sorted(found)[:-MOST_FILES]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(old)
