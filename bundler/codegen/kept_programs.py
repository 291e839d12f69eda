# SPDX-License-Identifier: Apache-2.0
"""`ProgramFile`: the program of a graph in the user's cache directory, where the next process finds
it: nothing is lowered, scheduled or written there.

::

    <cache>/triton-bundler/programs/<digest of the graph's key>.json
        sha256 of the rest, in hex, and a newline
        JSON: schema, kernels, plan, fallbacks, constants, host_constants, device, result_strides,
        callers_results, guards

The text of kernels is run, as that of generated modules is, so only a directory that others cannot
write to is read.  A bundle brings such files where its code is trusted, as the family
`generated_programs`, and a session finds them in a store whose code is trusted.  A file is written
whole; what is damaged, or of another schema, is a miss.  The files that nobody read for longest go
when all together are larger than `MOST_BYTES`.

`program_of_graph` makes one for each graph of torch.compile.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.backends import file_steps
from bundler.compile.source_modules import errors_of, read_trusted, user_directory, write_whole
from bundler.errors import BundlerError, FormatError
from bundler.format.limits import DEFAULT_LIMITS
from bundler.lifecycle.listeners import program_listeners
from bundler.package_loggers import logger
from bundler.runtime.program.program_plan import ProgramPlan, read_plan
from bundler.toolchain.tuner_toolchain import delegates

_log = logger("bundler.codegen")
SCHEMA = 1
MOST_BYTES = 256 << 20
# So much stays when files go, so that not every write has to look for some.
_LEFT = 0.75
_SUFFIX = ".json"
# What a writer that was killed left behind is older than this.
_STALE_S = 24 * 3600.0


@dataclass(frozen=True)
class KeptProgram:
    """A program without what only the process that runs it has.

    Attributes:
        kernels: name -> text of the module, in the order in which they are first launched.
        plan: what it does.
        fallbacks: (operator, reason) of those that are called as they are.
        constants: buffer -> where the graph's module has the tensor.
        host_constants: those that stay on the host.
        device: where its tensors lie.
        result_strides: as `Program` has them.
        callers_results: as `LoweredGraph` has it.
        guards: on sizes, which have to be taken again, as `GraphKey.packed` has them.
    """

    kernels: Mapping[str, str]
    plan: ProgramPlan
    fallbacks: Sequence[tuple[str, str]]
    constants: Mapping[str, str]
    host_constants: frozenset[str]
    device: str
    result_strides: Sequence[tuple[int, ...] | None]
    callers_results: int | None
    guards: Sequence[Any] = ()

    def to_bytes(self) -> bytes:
        """Return what a file holds."""
        data = {
            "schema": SCHEMA,
            "kernels": list(self.kernels.items()),
            "plan": self.plan.to_json().decode(),
            "fallbacks": self.fallbacks,
            "constants": dict(self.constants),
            "host_constants": sorted(self.host_constants),
            "device": self.device,
            "result_strides": self.result_strides,
            "callers_results": self.callers_results,
            "guards": self.guards,
        }
        text = json.dumps(data, separators=(",", ":")).encode()
        return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def read_program(data: bytes) -> KeptProgram:
    """Return what `KeptProgram.to_bytes` wrote.

    Raises:
        FormatError: it is anything else, or damaged.
    """
    digest, _, text = data.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise FormatError("a kept program: its text is not what was written; remove it")
    try:
        found = json.loads(text)
        if found["schema"] != SCHEMA:
            raise FormatError(
                f"a kept program: expected schema {SCHEMA}, got {found['schema']!r:.80}"
            )
        return KeptProgram(
            {str(name): str(source) for name, source in found["kernels"]},
            read_plan(found["plan"].encode()),
            tuple((str(name), str(reason)) for name, reason in found["fallbacks"]),
            {str(name): str(place) for name, place in found["constants"].items()},
            frozenset(map(str, found["host_constants"])),
            str(found["device"]),
            tuple(None if one is None else tuple(map(int, one)) for one in found["result_strides"]),
            None if found["callers_results"] is None else int(found["callers_results"]),
            list(found["guards"]),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"a kept program: {type(error).__name__}: {error}") from error


def kept_program(digest: str) -> KeptProgram | None:
    """Return the program that is kept here of a graph, by the digest of its key; what cannot be used
    is told and counts as nothing.
    """
    path = _path(digest)
    try:
        data = read_trusted(path, DEFAULT_LIMITS.file_bytes, "the directory of kept programs")
        return None if data is None else read_program(data)
    except BundlerError as error:
        _log.debug("a kept program cannot be used: %s", path, exc_info=error)
        return None


def tell_of(digest: str) -> None:
    """Tell recordings that a program which is kept here is used."""
    program_listeners.tell(_path(digest))


def _path(digest: str) -> str:
    return os.path.join(user_directory("programs"), digest + _SUFFIX)


class ProgramFile:
    """Where the program of one graph is kept.

    Any number of threads and processes may read and write it at once: it appears whole, and who
    writes last wins with the same program.  Trouble with it is a miss, which the log tells at level
    debug: the program is generated.

    Args:
        module: the graph.
        options: `GenerateOptions`, by which its program is generated.

    Attributes:
        digest: of the graph's key; None for a graph that has none.
    """

    def __init__(self, module: Any, options: Any) -> None:
        keys = importlib.import_module("bundler.codegen.graph_key")
        self._key, self._unkeyed = None, keys.Unkeyed
        try:
            self._key = keys.graph_key(module, options)
        # torch raises whatever it likes where a value has no strides, say; `lower` refuses it then.
        except Exception as error:  # noqa: BLE001
            _log.debug("a graph has no key", exc_info=error)
        self._before = 0 if self._key is None else self._key.guards
        self.digest = None if self._key is None else self._key.digest

    def read(self) -> tuple[KeptProgram, Mapping[str, Any]] | None:
        """Return the program, and the tensors that the graph holds for it; None where there is
        none.  torch has its guards then.
        """
        if self._key is None or self.digest is None:
            return None
        path = _path(self.digest)
        try:
            found = kept_program(self.digest) or self._in_stores(path)
            if found is None:
                return None
            constants = {name: self._key.attribute(at) for name, at in found.constants.items()}
            taken = all(map(self._key.is_guarded, found.guards))
        except (BundlerError, AttributeError) as error:
            _log.debug("a kept program cannot be used: %s", path, exc_info=error)
            return None
        # Those guards that were taken stay: they are true, and the program is generated now.
        if not taken:
            return None
        program_listeners.tell(path)
        return found, constants

    def _in_stores(self, path: str) -> KeptProgram | None:
        """Return what another machine published, and keep it here."""
        for delegate in delegates():
            data = delegate.fetch_program(_known_by(path))
            if data is not None:
                found = read_program(data)
                self._put(path, data)
                return found
        return None

    def _put(self, path: str, data: bytes) -> None:
        with errors_of("the directory of kept programs"):
            write_whole(path, data)
            make_room(os.path.dirname(path))

    def write(self, program: KeptProgram, asked: Sequence[Any]) -> bool:
        """Keep a program, unless it cannot be found again as it is; returns whether it is kept.

        Args:
            program: that was generated from the graph.
            asked: the guards on sizes that it was generated by.
        """
        if self._key is None or self.digest is None:
            return False
        path = _path(self.digest)
        # A guard that something else took meanwhile would not be taken again.
        if self._key.guards != self._before + sum(guard.added for guard in asked):
            _log.debug("not kept: torch took other guards while a program was generated")
            return False
        try:
            guards = [self._key.packed(guard) for guard in asked]
            data = KeptProgram(**{**vars(program), "guards": guards}).to_bytes()
            again = read_program(data)
            if again.to_bytes() != data or len(data) > DEFAULT_LIMITS.file_bytes:
                raise FormatError("a program is not what is read of it")
            for delegate in delegates():
                delegate.made_record(_known_by(path), os.path.basename(path), data)
            self._put(path, data)
            program_listeners.tell(path)
        # A plan may hold what JSON does not.
        except (BundlerError, self._unkeyed, TypeError, ValueError) as error:
            _log.debug("not kept: a program", exc_info=error)
            return False
        return True


def _known_by(path: str) -> str:
    """Return what a program is known by in a store."""
    return f"program {os.path.basename(path).removesuffix(_SUFFIX)}"


def make_room(folder: str) -> None:
    """Remove the files of a directory that nobody read for longest, where all together are larger
    than `MOST_BYTES`, and what killed writers left.
    """
    found, now = [], time.time()
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                about = entry.stat(follow_symlinks=False)
                if not file_steps.is_temporary_name(entry.name):
                    found.append((about.st_mtime, about.st_size, entry.path))
                elif now - about.st_mtime > _STALE_S:
                    os.unlink(entry.path)
    total = sum(size for _, size, _ in found)
    if total <= MOST_BYTES:
        return
    for _, size, path in sorted(found):
        if total <= MOST_BYTES * _LEFT:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
