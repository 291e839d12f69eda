# SPDX-License-Identifier: Apache-2.0
"""`Machine`: which kernels this machine surely cannot use, and which facts are not known here.

A `RestorePlan` makes one for each restore, since a process may come to see other GPUs.  `Store.restore` calls `asked_ahead` before it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from bundler.format.entries import HelperLibrary, Kernel, Target, Toolchain
from bundler.format.lazy_kernel import parts_may_hold
from bundler.lifecycle.threaded_call import ThreadedCall
from bundler.toolchain import identity, ptxas, targets

_REKEY = "rekey=True derives one with this machine's key, where nothing else differs"
_LOCATION = identity.LOCATION_PART.encode()


def asked_ahead(kernels: Sequence[Kernel]) -> ThreadedCall[str | None]:
    """Begin to ask for the ptxas of the first kernel, which `Machine` compares: the program takes milliseconds to answer, and is asked once."""
    target = kernels[0].target if kernels else None
    arch = target.arch if target is not None and target.backend == "cuda" else ""
    call = ThreadedCall(partial(ptxas.ptxas_version, int(arch)) if arch.isdecimal() else str)
    call.start(apart=True)
    return call


class Machine:
    """The facts of this machine, looked up once for a restore.

    A fact that is unknown, here or in the bundle, excludes nothing; it is named in `unchecked`.
    """

    def __init__(self) -> None:
        self.toolchain = identity.installed_triton()
        self.targets = targets.visible_targets()
        self.unchecked: set[str] = set()
        self._triton_dir = identity.triton_dir()
        self._ptxas = cache(ptxas.ptxas_version)
        # Thousands of kernels share few targets and toolchains.
        self._why_not_compiled = cache(self._why_not_compiled_so)

    def why_not(self, kernel: Kernel) -> str | None:
        """Return why the kernel cannot be used here, None when nothing known speaks against it."""
        reason = self._why_not_compiled(kernel.target, kernel.toolchain)
        return reason if reason is not None or self.toolchain is None else self._why_not_location(kernel)

    def why_not_helper(self, helper: HelperLibrary) -> str | None:
        """Return why a shared library cannot be loaded here."""
        suffix, machine = identity.extension_suffix(), identity.machine()
        if not helper.path.endswith(suffix) or helper.machine != machine:
            return f"built for another Python or platform; this one loads *{suffix} on {machine}"
        return None

    def other_build(self, kernel: Kernel) -> bool:
        """Whether the kernel was compiled by this Triton's release, but for another Python, or installed elsewhere."""
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
        return f"compiled for {target}; the GPUs here are {', '.join(map(str, self.targets))}"

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
        # Names are stored as they are, and of most kernels' keys the location is no part: those need not be decoded.
        if not parts_may_hold(kernel, _LOCATION):
            return None
        from bundler.toolchain import keytext  # hardly a kernel's key has that part

        here = self._triton_dir
        there = dict(kernel.parts.parts).get(identity.LOCATION_PART) if kernel.parts is not None else None
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
