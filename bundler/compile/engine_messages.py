# SPDX-License-Identifier: Apache-2.0
"""What a service and the workers of an engine (Dask, MPI, Ray) say to each other: one message and
one answer a try, in msgpack.

::

    message   [protocol, version, name, payload, compiler, source, environment, path, limits, setup, stores, client]
    answers   ["done", worker, result, bundle, seconds] | ["failed", worker, error] | ["died", worker, how, printed]
              | ["refused", worker, differences]

An engine pickles a reference to one public function, `engine_worker.run_job`, and these bytes;
nothing else travels.  The first two items are read before the rest: a worker of another release
cannot know what the rest means.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.compile.worker_messages import JobEnvironment
from bundler.format import wire
from bundler.format.entries import Target
from bundler.project import VERSION
from bundler.toolchain.identity import installed_triton
from bundler.toolchain.ptxas import ptxas_version

PROTOCOL = 1
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


@dataclass(frozen=True)
class Compiler:
    """What decides about a kernel's key and bytes on a machine: our release, Python, Triton, its
    library and ptxas.
    """

    bundler: str
    python: str
    triton: str
    library: str
    ptxas: str

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
        pairs = (
            ("triton-bundler", self.bundler, here.bundler),
            ("Python", self.python, here.python),
            ("Triton", self.triton, here.triton),
            ("Triton's library", self.library, here.library),
            ("ptxas", self.ptxas, here.ptxas),
        )
        return [
            f"{what} {got}, expected {expected}" for what, expected, got in pairs if expected != got
        ]


@dataclass(frozen=True)
class WaitingClient:
    """How a worker on the same machine sees that nobody waits any more: the program's process, and
    a directory of its own.

    The directory goes when the program has done with its service, and has a file for each job that
    was given up before.
    """

    boot: str
    namespace: str
    process: int
    directory: str

    @staticmethod
    def of(directory: str) -> WaitingClient:
        """Return one for this process."""
        return WaitingClient(*_machine(), os.getpid(), directory)

    def gave_up(self, number: str) -> bool:
        """Whether the program or the job is given up; False where that cannot be seen from here."""
        if (self.boot, self.namespace) != _machine() or not self.boot:
            return False
        if not os.path.exists(f"/proc/{self.process}"):
            # Nobody else removes it.  A name of ours alone: whoever sends jobs may be wrong about
            # the rest.
            if os.path.basename(self.directory).startswith(CLIENT_DIRECTORY):
                shutil.rmtree(self.directory, ignore_errors=True)
            return True
        return not os.path.isdir(self.directory) or os.path.exists(
            os.path.join(self.directory, number)
        )


def _machine() -> tuple[str, str]:
    try:
        with open(_BOOT, encoding="ascii") as file:
            return file.read().strip(), os.readlink(_NAMESPACE)
    except OSError:  # not Linux: nothing is known of the other process
        return "", ""


@dataclass(frozen=True)
class EngineJob:
    """One try of one job, as a worker of an engine gets it.

    Attributes:
        name: the kernel's.
        number: tells this try from every other one; engines take equal calls for one.
        payload: for `perform`.
        target: what it is for.
        compiler: what the worker has to have.
        source: path and SHA-256 of the module's file, which the worker has to have under that path;
            empty where the job has its source.
        environment: what the worker has to set of the compiler's variables.
        path: the program's import path, for what the module imports.
        timeout_s: how long it may take; 0 for ever.
        memory_bytes: private memory that its process may have; 0 for as much as a worker has by
            default.
        perform, preload: `module:function`, as for the service's own workers.
        stores: URLs of the store that it takes the kernel from, or publishes it into; empty to send
            it back.
        key: the kernel's key, where that is known.
        client: how to see that nobody waits any more.
    """

    name: str
    number: str
    payload: bytes
    target: Target
    compiler: Compiler
    source: tuple[str, str]
    environment: tuple[tuple[bytes, bytes], ...]
    path: tuple[bytes, ...]
    timeout_s: float
    memory_bytes: int
    perform: str
    preload: str
    stores: tuple[str, ...]
    key: str
    client: WaitingClient

    def to_bytes(self) -> bytes:
        """Return the message."""
        seen, target, client = self.compiler, self.target, self.client
        return wire.pack(
            [
                PROTOCOL,
                VERSION,
                self.name,
                self.number,
                self.payload,
                [target.backend, target.arch, target.warp_size],
                [seen.bundler, seen.python, seen.triton, seen.library, seen.ptxas],
                [os.fsencode(self.source[0]), self.source[1]],
                [list(pair) for pair in self.environment],
                list(self.path),
                float(self.timeout_s),
                self.memory_bytes,
                [self.perform, self.preload],
                list(self.stores),
                self.key,
                [client.boot, client.namespace, client.process, os.fsencode(client.directory)],
            ]
        )

    @staticmethod
    def from_bytes(data: bytes) -> EngineJob | str:
        """Decode a message; returns the release that wrote it where that is another one.

        Raises:
            FormatError: it is no message.
        """
        protocol, version, *rest = wire.unpack(data, "job of an engine")
        if (protocol, version) != (PROTOCOL, VERSION):
            return f"{version} (messages of kind {protocol})"
        (
            name,
            number,
            payload,
            target,
            compiler,
            source,
            environment,
            path,
            timeout_s,
            memory_bytes,
            functions,
            stores,
            key,
            client,
        ) = wire.fields(
            rest,
            "job of an engine",
            str,
            str,
            bytes,
            list,
            list,
            list,
            list,
            list,
            float,
            int,
            list,
            list,
            str,
            list,
        )
        file, digest = wire.fields(source, "source", bytes, str)
        pairs: Any = tuple(
            tuple(wire.fields(pair, "variable", bytes, bytes)) for pair in environment
        )
        boot, namespace, process, directory = wire.fields(client, "client", str, str, int, bytes)
        perform, preload = wire.fields(functions, "functions", str, str)
        return EngineJob(
            name,
            number,
            payload,
            Target(*wire.fields(target, "target", str, str, int)),
            Compiler(*wire.fields(compiler, "compiler", str, str, str, str, str)),
            (os.fsdecode(file), digest),
            pairs,
            tuple(wire.expect(entry, bytes, "path") for entry in path),
            timeout_s,
            memory_bytes,
            perform,
            preload,
            tuple(wire.expect(url, str, "store") for url in stores),
            key,
            WaitingClient(boot, namespace, process, os.fsdecode(directory)),
        )

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


def new_number() -> str:
    """Return a number for a try."""
    return secrets.token_hex(12)
