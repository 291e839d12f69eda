# SPDX-License-Identifier: Apache-2.0
"""`Machine`: which kernels this machine surely cannot use, and which facts are not known here.

A `RestorePlan` makes one for each restore, since a process may come to see other GPUs.  `Questions`
asks ahead for what takes long: a restore reads kernels meanwhile, and `Store.restore` fetches the
manifest.
"""

from __future__ import annotations

import _thread
import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Generic, Self, TypeVar, cast

from bundler.format.cached_properties import cached_property
from bundler.format.entries import HelperLibrary, Kernel, Target, Toolchain
from bundler.format.lazy_kernel import any_parts_may_hold, parts_may_hold
from bundler.toolchain import identity, targets

if TYPE_CHECKING:
    from bundler.toolchain.ptxas import ProgramVersion

# Threads that one restore uses for calls that leave the interpreter to others.
MOST_THREADS = 4
T = TypeVar("T")
_REKEY = "rekey=True derives one with this machine's key, where nothing else differs"
_LEFT_TO_WHO_ASKS_S = 0.00005
_LEFT_AT_THE_START_S = 0.003
_LOCATION = identity.LOCATION_PART.encode()


class ThreadedCall(Generic[T]):
    """A call whose result is waited for later, or not at all."""

    def __init__(self, call: Callable[[], T]) -> None:
        # Here, since a restore that need not wait for anything makes none of these; and not in the
        # new thread, which Python would take for the main one.
        import threading

        self._call = call
        self._result: T | None = None
        self._problem: BaseException | None = None
        # An interrupt may arrive while the thread is being started: whether it runs is decided
        # under this lock.
        self._gate = threading.Lock()
        self._begun = self._abandoned = False
        self._ended = threading.Event()

    def start(self, *, apart: bool) -> None:
        """Begin; in this thread unless `apart`, or where no other can be had, and then it raises
        what the call raises.
        """
        if apart:
            with contextlib.suppress(RuntimeError):
                # `threading.Thread` would wait until the new one runs, which takes milliseconds on
                # a busy machine.
                _thread.start_new_thread(self._run, ())
                return
        self._run()
        if self._problem is not None:
            raise self._problem

    def result(self) -> T:
        """Wait for the result; raises what the call raised."""
        self._ended.wait()
        if self._problem is not None:
            raise self._problem
        return cast(T, self._result)

    def ended(self, within_s: float) -> bool:
        """Wait for so long at most, and leave the interpreter to the call meanwhile; returns
        whether it has ended.
        """
        return self._ended.wait(within_s)

    def abandon(self) -> None:
        """Return when the call has ended, or will never begin; calling it twice is fine."""
        with self._gate:
            self._abandoned = True
        if self._begun:
            self._ended.wait()

    def _run(self) -> None:
        with self._gate:
            if self._abandoned or self._begun:
                return
            self._begun = True
        try:
            self._result = self._call()
        except BaseException as problem:  # noqa: BLE001  # raised again in the thread that waits
            self._problem = problem
        finally:
            self._ended.set()


class Questions:
    """What takes long to find out about this machine, asked in threads and processes of their own,
    while the caller reads kernels.

    The toolchain room keeps the answers for the process, so a `Machine` that is made meanwhile has
    them at once when all are answered. Used as a context: at its end nothing is being asked any
    more, and what was asked is taken down.
    """

    def __init__(self) -> None:
        self._calls: list[ThreadedCall[object]] = []
        self._programs: list[ProgramVersion] = []
        self._targets: set[Target] = set()

    def ask_for_gpus(self) -> None:
        """Begin to ask which GPUs are visible: NVML takes tens of milliseconds to answer."""
        if targets.asking_takes_long():
            self._begin(targets.listed_targets)
            # It imports and opens libraries first.  What the caller does meanwhile is done long
            # before the answer, so it can wait for that.
            self.answered(_LEFT_AT_THE_START_S)

    def ask_for_triton(self) -> None:
        """Begin to ask who compiles here, unless who asks for ptxas does: a few files are read,
        which is worth it only where the caller waits for a server.
        """
        if not self._targets:
            self._begin(identity.installed_triton)

    def ask_for_ptxas(self, kernels: Sequence[Kernel]) -> None:
        """Begin to ask for the ptxas of the first kernel: the program takes milliseconds to
        answer.
        """
        if kernels:
            self.ask_for_ptxas_of(kernels[0].target)

    def ask_for_ptxas_of(self, target: Target) -> None:
        """Begin to ask for the ptxas of a target, unless that was done."""
        if target.backend == "cuda" and target.arch.isdecimal() and target not in self._targets:
            self._targets.add(target)
            self._begin(partial(self._ask_ptxas, int(target.arch)))

    def answered(self, within_s: float) -> bool:
        """Wait for so long at most; returns whether all is answered."""
        # Threads first: they start programs.
        return all(one.ended(within_s) for some in (self._calls, self._programs) for one in some)

    def give_way(self) -> bool:
        """Leave the interpreter for a moment to who asks, which else waits 5 ms for it after each
        of its calls; returns as `answered`.
        """
        return self.answered(_LEFT_TO_WHO_ASKS_S)

    def close(self) -> None:
        """Wait until all is answered; calling it twice is fine."""
        for call in self._calls:
            call.abandon()  # returns when it has ended
        for program in self._programs:
            program.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        targets.wait_for_drivers()

    def _begin(self, call: Callable[[], object]) -> None:
        self._calls.append(ThreadedCall(call))
        self._calls[-1].start(apart=True)

    def _ask_ptxas(self, arch: int) -> None:
        from bundler.toolchain.ptxas import (
            begin_asking,  # kernels that came by pack do not say which ptxas made them
        )

        # The thread ends here: one that waited for the answer would take the interpreter from the
        # caller once more, who waits for it then.
        program = begin_asking(arch)
        if program is not None:
            self._programs.append(program)
        # while the program runs; a thread of its own would take as long to begin
        identity.installed_triton()


class Machine:
    """The facts of this machine, looked up once for a restore.

    A fact that is unknown, here or in the bundle, excludes nothing; it is named in `unchecked`.

    Args:
        chosen: targets that a user chose, as a tree's fingerprint has them, in place of those of
            the GPUs here: `cuda:80`, or several with commas.

    Raises:
        ConfigError: one of these is no target.
    """

    def __init__(self, chosen: str | None = None) -> None:
        self._chosen = (
            None
            if chosen is None
            else tuple(Target.parse(one.strip()) for one in chosen.split(","))
        )
        self.toolchain = identity.installed_triton()
        self.triton_dir = identity.triton_dir()
        self.unchecked: set[str] = set()
        self._ptxas = cache(_ptxas_version)
        # Thousands of kernels share few targets and toolchains.
        self._why_not_compiled = cache(self._why_not_compiled_so)

    @cached_property
    def targets(self) -> tuple[Target, ...] | None:
        """Those that were chosen, or of the GPUs that are visible; None when unknown, or when there
        is none.
        """
        return targets.listed_targets() if self._chosen is None else self._chosen

    def why_not(self, kernel: Kernel) -> str | None:
        """Return why the kernel cannot be used here, None when nothing known speaks against it."""
        reason = self._why_not_compiled(kernel.target, kernel.toolchain)
        return (
            reason
            if reason is not None or self.toolchain is None
            else self._why_not_location(kernel)
        )

    def judging(self, kernels: Iterable[Kernel]) -> Callable[[Kernel], str | None]:
        """Return what answers as `why_not` for each of these kernels, and asks once for all what
        none of them has in its key.
        """
        if self.toolchain is not None and any_parts_may_hold(kernels, _LOCATION):
            return self.why_not
        return self._judging_compiled()

    def _judging_compiled(self) -> Callable[[Kernel], str | None]:
        # By identity: equal ones are mostly the same object, and to compare two would take as long
        # as all else here.
        known: dict[tuple[int, int], tuple[str | None, Target, Toolchain]] = {}

        def why_not(kernel: Kernel) -> str | None:
            target, toolchain = kernel.target, kernel.toolchain
            found = known.get((id(target), id(toolchain)))
            if found is None:
                # Both are kept: the number of one that is gone may become that of another.
                found = known[id(target), id(toolchain)] = (
                    self._why_not_compiled(target, toolchain),
                    target,
                    toolchain,
                )
            return found[0]

        return why_not

    def other_build(self, kernel: Kernel) -> bool:
        """Whether the kernel was compiled by this Triton's release, but for another Python, or
        installed elsewhere.
        """
        theirs, ours = kernel.toolchain, self.toolchain
        if ours is None or ours.release is None or theirs.release != ours.release:
            return False
        other_binary = None not in {theirs.binary, ours.binary} and theirs.binary != ours.binary
        return other_binary or self._why_not_location(kernel) is not None

    def _why_not_compiled_so(self, target: Target, toolchain: Toolchain) -> str | None:
        return self._why_not_target(target) or self._why_not_toolchain(target, toolchain)

    def _why_not_target(self, target: Target) -> str | None:
        if self.targets is None:
            self.unchecked.add("target: no GPU is visible here")
            return None
        if target in self.targets:
            return None
        ours = "the GPUs here are" if self._chosen is None else "chosen by the fact target:"
        return f"compiled for {target}; {ours} {', '.join(map(str, self.targets))}"

    def _why_not_toolchain(self, target: Target, theirs: Toolchain) -> str | None:
        ours = self.toolchain
        if ours is None:
            self.unchecked.add("toolchain: Triton is not installed here")
            return None
        if theirs.release is None:
            self.unchecked.add("Triton release: the bundle does not say")
        elif ours.release is not None and theirs.release != ours.release:
            return f"compiled by Triton {theirs.release}; this machine has {ours.release}"
        if theirs.binary is None:
            self.unchecked.add("Triton binary: the bundle does not say (kernels that came by pack)")
        elif ours.binary is None:
            self.unchecked.add("Triton binary: not known here")
        elif theirs.binary != ours.binary:
            return (
                f"compiled by another build of Triton {theirs.release} "
                f"(binary {theirs.binary[:12]}…; this machine has {ours.binary[:12]}…); {_REKEY}"
            )
        return self._why_not_ptxas(target, theirs)

    def _why_not_location(self, kernel: Kernel) -> str | None:
        # Names are stored as they are, and of most kernels' keys the location is no part: those
        # need not be decoded.
        if not parts_may_hold(kernel, _LOCATION):
            return None
        from bundler.toolchain import keytext  # hardly a kernel's key has that part

        here = self.triton_dir
        there = (
            dict(kernel.parts.parts).get(identity.LOCATION_PART)
            if kernel.parts is not None
            else None
        )
        if there is None or here is None or there == keytext.location_text(here):
            return None
        return f"its key holds the path where Triton was installed; here that is {here}; {_REKEY}"

    def _why_not_ptxas(self, target: Target, theirs: Toolchain) -> str | None:
        if target.backend != "cuda" or theirs.ptxas is None or not target.arch.isdecimal():
            return None
        ours = self._ptxas(int(target.arch))
        if ours is None:
            self.unchecked.add("ptxas: not found here")
        elif ours != theirs.ptxas:
            return f"assembled by ptxas {theirs.ptxas}; this machine has {ours}"
        return None


def why_not_helper(helper: HelperLibrary) -> str | None:
    """Return why a shared library cannot be loaded here."""
    suffix, machine = identity.extension_suffix(), identity.machine()
    if not helper.path.endswith(suffix) or helper.machine != machine:
        return f"built for another Python or platform; this one loads *{suffix} on {machine}"
    return None


def _ptxas_version(arch: int) -> str | None:
    from bundler.toolchain.ptxas import ptxas_version

    return ptxas_version(arch)
