# SPDX-License-Identifier: Apache-2.0
"""What a service and the workers of an engine (Dask, MPI, Ray) say to each other: one message and
one answer a try, of one job or of several short ones, in msgpack.

::

    message   [protocol, version, number, jobs, target, compiler, source, environment, path, timeout,
               memory, perform, preload, stores, client]
    job       [name, payload, key]
    answer    ["outcomes", worker, [outcome of each job]] | ["refused", worker, differences]
    outcome   ["done", result, bundle, seconds] | ["failed", error] | ["died", how, printed]

An engine pickles a reference to one public function, `engine_worker.run_job`, and these bytes;
nothing else travels.  The first two items are read before the rest: a worker of another release
cannot know what the rest means.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from bundler.compile.worker_messages import JobEnvironment
from bundler.format import wire
from bundler.format.entries import Target
from bundler.format.limits import DEFAULT_LIMITS
from bundler.project import VERSION
from bundler.toolchain.identity import installed_triton
from bundler.toolchain.ptxas import ptxas_version

PROTOCOL = 2
# What a message may have in one member.
Text = Annotated[str, msgspec.Meta(max_length=DEFAULT_LIMITS.string_bytes)]
Data = Annotated[bytes, msgspec.Meta(max_length=DEFAULT_LIMITS.manifest_bytes)]
# What `Compiler.differences` calls the parts of a compiler.
_PARTS = ("triton-bundler", "Python", "Triton", "Triton's library", "ptxas")
# What the name of a program's directory begins with.
CLIENT_DIRECTORY = "triton-bundler-client-"
# What begins so decides what Triton, LLVM, MLIR and ptxas make, so a worker has it as the program
# that sends the job has it.
_COMPILER_VARIABLES = (
    "AMDGCN_",
    "DISABLE_LLVM",
    "DISABLE_MMA",
    "DISABLE_PTXAS",
    "LLVM_",
    "MLIR_",
    "NVPTX_",
    "PTXAS_",
    "STORE_TMEM_",
    "SWAP_XOR_",
    "TRITON_",
    "USE_IR_LOC",
    "USE_TTGIR_LOC",
)
# Places and helpers on one machine say nothing about another one, and each machine has its own
# settings of ours.
_OF_THE_MACHINE = (
    "TRITON_BUNDLER_",
    "TRITON_CACHE_",
    "TRITON_HOME",
    "TRITON_DUMP_DIR",
    "TRITON_OVERRIDE_DIR",
    "TRITON_PTXAS_",
    "TRITON_CUOBJDUMP_",
    "TRITON_NVDISASM_",
    "TRITON_LIB",
    "TRITON_CUDART",
    "TRITON_CUDACRT",
    "TRITON_CUPTI",
    "TRITON_CUDA",
    "TRITON_REMOTE_",
    "TRITON_REDIS_",
)
_BOOT, _NAMESPACE = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"


def worker_name() -> str:
    """Return what this process is called in messages: its host and its number."""
    return f"{socket.gethostname()}:{os.getpid()}"


def host_of(worker: str) -> str:
    """Return the host in the name of a worker."""
    return worker.rpartition(":")[0]


class Compiler(Struct, array_like=True, frozen=True):
    """What decides about a kernel's key and bytes on a machine: our release, Python, Triton, its
    library and ptxas.
    """

    bundler: Text
    python: Text
    triton: Text
    library: Text
    ptxas: Text

    @staticmethod
    def here(target: Target) -> Compiler:
        """Return what this process has for a target."""
        installed = installed_triton()
        is_cuda = target.backend == "cuda" and target.arch.isdecimal()
        return Compiler(
            VERSION,
            f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}",
            (installed.release if installed is not None else None) or "none",
            (installed.binary if installed is not None else None) or "none",
            (ptxas_version(int(target.arch)) if is_cuda else None) or "none",
        )

    def differences(self, here: Compiler) -> list[str]:
        """Return what `here` has otherwise than this one asks for, each as `what got, expected
        expected`.
        """
        parts = zip(_PARTS, astuple(self), astuple(here), strict=True)
        return [f"{what} {got}, expected {wanted}" for what, wanted, got in parts if wanted != got]


class WaitingClient(Struct, array_like=True, frozen=True):
    """How a worker on the same machine sees that nobody waits any more: the program's process, and
    a directory of its own.

    The directory goes when the program has done with its service, and has a file for each job that
    was given up before.
    """

    boot: Text
    namespace: Text
    process: int
    directory: Data

    @staticmethod
    def of(directory: str) -> WaitingClient:
        """Return one for this process."""
        return WaitingClient(*_machine(), os.getpid(), os.fsencode(directory))

    def gave_up(self, number: str) -> bool:
        """Whether the program or the job is given up; False where that cannot be seen from here."""
        if (self.boot, self.namespace) != _machine() or not self.boot:
            return False
        if not os.path.exists(f"/proc/{self.process}"):
            # Nobody else removes it.  A name of ours alone: whoever sends jobs may be wrong about
            # the rest.
            if os.path.basename(self.directory).startswith(CLIENT_DIRECTORY.encode()):
                shutil.rmtree(self.directory, ignore_errors=True)
            return True
        return not os.path.isdir(self.directory) or os.path.exists(
            os.path.join(self.directory, os.fsencode(number))
        )


def _machine() -> tuple[str, str]:
    try:
        with open(_BOOT, encoding="ascii") as file:
            return file.read().strip(), os.readlink(_NAMESPACE)
    except OSError:  # not Linux: nothing is known of the other process
        return "", ""


class EngineJob(Struct, array_like=True, frozen=True):
    """A job in a message: the kernel's name, what `perform` gets, and the kernel's key, where that
    is known.
    """

    name: Text
    payload: Data
    key: Text


class EngineMessage(Struct, array_like=True, frozen=True, kw_only=True):
    """One try of one job, or of several of one kind, as a worker of an engine gets it.

    Attributes:
        protocol, version: of the sender.
        number: tells this try from every other one; engines take equal calls for one.
        jobs: what to do, one after the other.
        target: what they are for: backend, architecture, warp size.
        compiler: what the worker has to have.
        source: path and SHA-256 of the module's file, which the worker has to have under that path;
            empty where the jobs have their source.
        environment: what the worker has to set of the compiler's variables.
        path: the program's import path, for what the module imports.
        timeout_s: how long a job may take; 0 for ever.
        memory_bytes: private memory that its process may have; 0 for as much as a worker has by
            default.
        perform, preload: `module:function`, as for the service's own workers.
        stores: URLs of the store that it takes kernels from, or publishes them into; empty to send
            them back.
        client: how to see that nobody waits any more.
    """

    protocol: int = PROTOCOL
    version: Text = VERSION
    number: Text
    jobs: tuple[EngineJob, ...]
    target: tuple[Text, Text, int]
    compiler: Compiler
    source: tuple[Data, Text]
    environment: tuple[tuple[Data, Data], ...]
    path: tuple[Data, ...]
    timeout_s: float
    memory_bytes: int
    perform: Text
    preload: Text
    stores: tuple[Text, ...]
    client: WaitingClient

    @staticmethod
    def from_bytes(data: bytes) -> EngineMessage | str:
        """Decode a message; returns the release that wrote it where that is another one.

        Raises:
            FormatError: it is no message.
        """
        head = wire.decode(data, _HEADS, "message to an engine")
        if (head.protocol, head.version) != (PROTOCOL, VERSION):
            return f"{head.version} (messages of kind {head.protocol})"
        return wire.decode(data, _MESSAGES, "message to an engine", walked=True)

    def environment_here(self) -> JobEnvironment:
        """Return this process's environment and import path, with what the program has of the
        compiler's variables and modules.
        """
        own = {name: value for name, value in os.environb.items() if not _decides(name)}
        path = [os.fsencode(os.path.abspath(entry)) for entry in sys.path]
        more = [entry for entry in self.path if entry not in path]
        return JobEnvironment(
            tuple(sorted({**own, **dict(self.environment)}.items())), (*path, *more)
        )


def compiler_variables(
    environment: Sequence[tuple[bytes, bytes]] | Mapping[bytes, bytes],
) -> tuple[tuple[bytes, bytes], ...]:
    """Return those variables that decide what a compiler makes, on any machine."""
    pairs = environment.items() if isinstance(environment, Mapping) else environment
    return tuple((name, value) for name, value in pairs if _decides(name))


def _decides(name: bytes) -> bool:
    text = os.fsdecode(name)
    return text.startswith(_COMPILER_VARIABLES) and not text.startswith(_OF_THE_MACHINE)


class Done(Struct, array_like=True, frozen=True, tag="done"):
    """A job's kernel, what `perform` said of it and how long it took; the bundle may be empty, or
    hold the kernels of the outcomes after it too.
    """

    result: Data
    bundle: Data
    seconds: float


class Failed(Struct, array_like=True, frozen=True, tag="failed"):
    """The error of a job, as `encode_error` writes it."""

    error: list[Any]


class Died(Struct, array_like=True, frozen=True, tag="died"):
    """How the process ended that did a job, and what it printed last."""

    how: Data
    words: Data


class Outcomes(Struct, array_like=True, frozen=True, tag="outcomes"):
    """A worker's answer: the outcome of each job, in order."""

    worker: Text
    jobs: list[Done | Failed | Died]


class Refusal(Struct, array_like=True, frozen=True, tag="refused"):
    """A worker's answer: what it has otherwise than a job needs it."""

    worker: Text
    differences: list[Data]


class _Head(Struct, array_like=True):
    protocol: Any
    version: Any


_HEADS = msgspec.msgpack.Decoder(_Head)
_MESSAGES = msgspec.msgpack.Decoder(EngineMessage)
_ANSWERS: msgspec.msgpack.Decoder[Outcomes | Refusal] = msgspec.msgpack.Decoder(Outcomes | Refusal)


def read_answer(data: bytes) -> Outcomes | Refusal:
    """Decode what a worker answered; raises `FormatError` for anything else."""
    return wire.decode(data, _ANSWERS, "answer of an engine's worker")
