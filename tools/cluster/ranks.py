# SPDX-License-Identifier: Apache-2.0
"""One process of simulated ranks: a thread for each, with a store and connections of its own.

    python -m tools.cluster.ranks       reads a job as one JSON line, says ready, starts at the next line, answers one JSON line

A cold rank looks its kernels up in groups, and asks for each that is missing with `compile_once`; a
compile is a delay, noted in the log of compiles before it begins.  A warm rank restores the tag.
Ranks of one host share a near directory where the job says so.
"""

from __future__ import annotations

import array
import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from tools.cluster.replay import Turn
from tools.shared import kernel_variants
from tools.shared.redis_server import CompileLog, admin_of

if TYPE_CHECKING:
    from bundler import Bundle, Store

TAG = "cluster/sim"
PHASES = ("cold", "warm", "reading")
STACK_BYTES = 512 * 1024
SHOWN_ERRORS = 5


@dataclass(frozen=True)
class Job:
    """What the ranks of one process do.

    Attributes:
        phase: `cold` or `warm`.
        ranks: their numbers.
        of: how many ranks there are in all processes.
        kernels: how many kernels.
        host_ranks: how many ranks make a host with a near directory; 0 for none, every rank asks
            the server.
        group: how many kernels a cold rank looks up together; with 1 it asks for each with
            `compile_once` alone.
        order: `spread`: each rank begins with another kernel; `same`: all go through them in one
            order.
        url, compile_log: the store, and the port of the log of compiles with its password.
        bundle: the file with the kernels; empty for one rank that compiles the first of
            `kernel_variants.variants`.
        folder: where near directories and cache directories go.
        samples: the file for the waits, as 4-byte floats.
        compile_s: what a compile takes on average.
        lease_s: for how long a holder counts as alive.
        record: the file for what is said to the server, as turns; empty for none.
    """

    phase: Literal["cold", "warm"]
    ranks: list[int]
    of: int
    kernels: int
    host_ranks: int
    group: int
    order: str
    url: str
    compile_log: str
    bundle: str
    folder: str
    samples: str
    compile_s: float
    lease_s: float
    record: str = ""


@dataclass
class Found:
    """What one rank met."""

    how: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    done_at_s: float = 0.0

    def once(
        self,
        store: Store,
        rank: int,
        key: str,
        compile_it: Callable[[int, str], Bundle],
        lease_s: float,
    ) -> None:
        """Ask for a kernel with `compile_once`."""
        import bundler

        began = time.monotonic()
        got = bundler.compile_once(store, key, partial(compile_it, rank, key), lease_s=lease_s)
        self.done_at_s = time.monotonic()
        self.how[got.how] += 1
        if not got.published:
            self.errors.append(f"rank {rank}: {key} was compiled without the store")
        if got.how in {"found", "waited"}:
            self.waits_s.append(self.done_at_s - began)


class Counted(socket.socket):
    """A socket that counts its round trips: each time that it sends after it received."""

    every: ClassVar[list[Counted]] = []
    records: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.port, self.trips, self.sends = 0, 0, False
        self.turns: list[Turn] = []
        Counted.every.append(self)

    def connect(self, address: Any) -> None:
        """Connect, and note where to."""
        self.port = address[1] if isinstance(address, tuple) else 0
        super().connect(address)

    def sendall(self, data: Any, *args: Any) -> None:
        """Send; the first time after an answer begins a round trip."""
        if not self.sends:
            self.trips += 1
            self.sends = True
            self.turns.append(Turn(b"", 0))
        if Counted.records:
            self.turns[-1].question += bytes(data)
        super().sendall(data, *args)

    def recv(self, *args: Any) -> bytes:
        """Receive."""
        data = super().recv(*args)
        self._received(len(data))
        return data

    def recv_into(self, *args: Any) -> int:
        """Receive."""
        count = super().recv_into(*args)
        self._received(count)
        return count

    def _received(self, count: int) -> None:
        self.sends = False
        if self.turns:
            self.turns[-1].answer_bytes += count


class Ranks:
    """The ranks of this process."""

    def __init__(self, job: Job) -> None:
        import bundler

        # Everything is imported before the start.
        _ = bundler.compile_once, bundler.restore
        bundler.open_store(job.url).close()
        self._job, self._begin = job, threading.Event()
        self.ready = threading.Barrier(len(job.ranks) + 1)
        self._load()
        self._compile_log = admin_of(job.compile_log, socket_timeout=60)
        self.found = {rank: Found() for rank in job.ranks}
        self._threads = [
            threading.Thread(target=self._be, args=(rank,), daemon=True) for rank in job.ranks
        ]

    def _load(self) -> None:
        import bundler

        threading.stack_size(STACK_BYTES)
        self._bundle: Bundle = bundler.Bundle.load(self._job.bundle)
        self._kernels = {kernel.key: kernel for kernel in self._bundle.kernels}

    def start(self) -> None:
        """Let all ranks come to the line."""
        for thread in self._threads:
            thread.start()
        self.ready.wait()

    def run(self) -> None:
        """Let them go, and wait until all are done."""
        self._begin.set()
        for thread in self._threads:
            thread.join()
        self._compile_log.close()

    def _be(self, rank: int) -> None:
        import bundler

        found = self.found[rank]
        self.ready.wait()
        self._begin.wait()
        try:
            with bundler.open_store(*self._urls(rank)) as store:
                go = self._cold if self._job.phase == "cold" else self._warm
                go(rank, store, found)
        except Exception as error:  # noqa: BLE001  # any exception is a rank that was failed
            found.errors.append(f"rank {rank}: {type(error).__name__}: {error}")

    def _cold(self, rank: int, store: Store, found: Found) -> None:
        keys = self._keys(rank)
        for start in range(0, len(keys), self._job.group):
            missing: Sequence[str] = keys[start : start + self._job.group]
            if self._job.group > 1:
                began = time.monotonic()
                together = store.kernel_records().look_up(missing, keep="launch")
                found.done_at_s = time.monotonic()
                found.how["found together"] += len(together.bundle.kernels)
                found.waits_s += [found.done_at_s - began] * len(together.bundle.kernels)
                missing = together.missing
            for key in missing:
                found.once(store, rank, key, self._compile, self._job.lease_s)

    def _warm(self, rank: int, store: Store, found: Found) -> None:
        shared = self._job.host_ranks
        cache = Path(
            self._job.folder, f"host{rank // shared}" if shared else f"rank{rank}", "cache"
        )
        began = time.monotonic()
        report = store.restore(TAG, cache_dir=cache, keep="launch", only="all")
        found.done_at_s = time.monotonic()
        found.waits_s.append(found.done_at_s - began)
        found.how.update(restored=len(report.restored), present=len(report.present))
        found.errors += [f"rank {rank}: {key}: {reason}" for key, reason in report.skipped]
        if not shared:
            shutil.rmtree(cache.parent)

    def _keys(self, rank: int) -> list[str]:
        keys = list(self._kernels)
        first = rank * len(keys) // self._job.of if self._job.order == "spread" else 0
        return keys[first:] + keys[:first]

    def _compile(self, rank: int, key: str) -> Bundle:
        from bundler.format.bundle import Bundle
        from bundler.format.manifest import Content, Observed

        note(self._compile_log, rank, key)
        # From half of it to one and a half, by the kernel.
        time.sleep(self._job.compile_s * (0.5 + zlib.crc32(key.encode()) / 2**32))
        return Bundle(Content.of([self._kernels[key]]), Observed({}), self._bundle.blobs)

    def _urls(self, rank: int) -> list[str]:
        if not self._job.host_ranks:
            return [self._job.url]
        near = Path(self._job.folder, f"host{rank // self._job.host_ranks}", "store")
        return [f"file://{near}", self._job.url]


class RealRank(Ranks):
    """A rank that compiles with Triton, for sm_90, what the store does not have."""

    def _load(self) -> None:
        os.environ["TRITON_CACHE_DIR"] = str(Path(self._job.folder, f"triton{self._job.ranks[0]}"))
        self._wanted = sources(self._job.kernels)

    def _keys(self, rank: int) -> list[str]:
        keys = list(self._wanted)
        # Two begin with the same kernel, and each pair meets the other half-way.
        first = rank // 2 * len(keys) * 2 // self._job.of
        return keys[first:] + keys[:first]

    def _compile(self, rank: int, key: str) -> Bundle:
        import triton
        from triton.backends.compiler import GPUTarget

        import bundler

        note(self._compile_log, rank, key)
        source, options = self._wanted[key]
        with bundler.recording() as recorded:
            triton.compile(source, target=GPUTarget(*kernel_variants.TARGET), options=options)
        return recorded.collect()


def sources(count: int) -> dict[str, tuple[Any, dict[str, int]]]:
    """Return kernel key -> source and options."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend, found = make_backend(GPUTarget(*kernel_variants.TARGET)), {}
    for name, types, constants, options in kernel_variants.variants(count):
        source = kernel_variants.source_of(name, types, constants)
        parsed = backend.parse_options({**options, **source.parse_options()})
        text = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
        directory = get_cache_manager(hashlib.sha256(text.encode()).hexdigest()).cache_dir
        found[Path(directory).name] = (source, options)
    return found


def note(compile_log: Any, rank: int, key: str) -> None:
    """Note in the log of compiles that a compile begins."""
    with compile_log.pipeline() as commands:
        commands.hincrby(CompileLog.COMPILES, key, 1).hset(CompileLog.RANKS, key, rank).execute()


def answer(job: Job, every: Sequence[Found]) -> str:
    """Leave the waits in the job's file and return the line that a process answers."""
    with open(job.samples, "wb") as file:
        array.array("f", [wait for found in every for wait in found.waits_s]).tofile(file)
    sockets = [one for one in Counted.every if one.port == urlsplit(job.url).port]
    if job.record:
        turns = [turn for one in sockets for turn in one.turns]
        said_bytes = [(turn.question.decode("latin-1"), turn.answer_bytes) for turn in turns]
        Path(job.record).write_text(json.dumps(said_bytes))
    errors = [error for found in every for error in found.errors]
    said = {
        "how": sum((found.how for found in every), Counter()),
        "error_count": len(errors),
        "errors": errors[:SHOWN_ERRORS],
        "done_at_s": max(found.done_at_s for found in every),
        "round_trips": sum(one.trips for one in sockets),
    }
    return json.dumps(said)


def main() -> int:
    """Do one job."""
    job = Job(**json.loads(sys.stdin.readline()))
    warnings.simplefilter("ignore")  # what is warned of is counted
    # before redis-py makes any
    socket.socket, Counted.records = Counted, bool(job.record)  # type: ignore[misc]
    ranks = Ranks(job) if job.bundle else RealRank(job)
    ranks.start()
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    ranks.run()
    print(answer(job, list(ranks.found.values())), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
