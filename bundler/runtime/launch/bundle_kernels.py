# SPDX-License-Identifier: Apache-2.0
"""`load`: from a bundle to `Kernels`, its kernels by name, ready to be launched; the public way
into the launch room.

Users call it as `bundler.runtime.load`.  The tuner, which has kernels before there is a bundle,
makes its `StaticKernel`s itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from bundler.errors import NotFound
from bundler.format.bundle import Bundle
from bundler.format.bundle_union import merge
from bundler.format.entries import Kernel
from bundler.format.summary import count
from bundler.runtime.launch.compile_fallback import JitFallback
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.launch.drivers.driver_opening import open_first_driver
from bundler.runtime.launch.handle import PlanLoader
from bundler.runtime.launch.launch_hooks import Hooks
from bundler.runtime.launch.plan_builder import BACKENDS
from bundler.runtime.launch.specialization_match import Specialization
from bundler.runtime.launch.static_kernel import StaticKernel
from bundler.trust.admission import admit

_UNKNOWN = "its argument types are not known, since it came by pack; record the compile instead"


def load(
    bundle: Bundle | str | os.PathLike[str],
    *,
    driver: Driver | None = None,
    fallback: Mapping[str, Any] | None = None,
    debug: bool = False,
) -> Kernels:
    """Return the kernels of a bundle, ready to be launched without Triton.

    Nothing goes to a device here: each kernel is read, verified against its digest, and loaded at
    its first launch on a device.

    Args:
        bundle: a bundle, which has to stay open, or the path of one.
        driver: which GPUs to use; None opens CUDA's or HIP's, whichever the bundle has kernels for
            and the machine a device.
        fallback: JIT functions by kernel name, for calls that no recorded specialization fits:
            Triton compiles and launches those, and what it compiled is recorded, launched without
            Triton from then on, and found in `Kernels.compiled`.
        debug: let handles check every call.

    Raises:
        DriverUnavailable: no driver or no device for any kernel of the bundle.
        NotFound: the bundle has no kernel, or a fallback is for none of its kernels.
        FormatError, DigestMismatch: what is at the path is not a bundle, or a damaged one.
        Untrusted: the environment requires a signature, and no trusted key vouches for the bundle.
    """
    # Only what was opened here is closed here: a bundle that was given may serve others.
    owned = None
    if not isinstance(bundle, Bundle):
        bundle = owned = Bundle.load(bundle)
    try:
        admit(bundle)
        return Kernels(
            bundle, driver or _open_for(bundle), fallback or {}, owned=owned, debug=debug
        )
    except BaseException:
        if owned is not None:
            owned.close()
        raise


class Kernels(Mapping[str, StaticKernel]):
    """The kernels of a bundle by name, for the driver's kind of GPU.

    `kernels[name]` raises NotFound where there is none, and FormatError where what was recorded of
    one cannot be read.

    A context manager: closing unloads what was loaded, and closes the bundle if `load` opened it.
    Any thread may use it, also several at once; after a fork, load again.
    """

    def __init__(
        self,
        bundle: Bundle,
        driver: Driver,
        fallback: Mapping[str, Any],
        *,
        owned: Bundle | None,
        debug: bool,
    ) -> None:
        self._driver, self._owned, self._bundle = driver, owned, bundle
        self._loader, self._hooks = PlanLoader(driver), Hooks()
        self._compiled: list[Bundle] = []
        # By kernel key: its name and the reason, for who asks for that name.
        self._refused: dict[str, tuple[str, str]] = {}
        self._fallback, self._debug, self._lock = fallback, debug, threading.Lock()
        self._loader.add_source(bundle)
        # Names of fallbacks alone are there, too: Triton compiles their first kernel.
        found = self._specializations(bundle)
        self._found = {name: found.get(name, []) for name in sorted(found.keys() | fallback.keys())}
        # Made when first asked for, since that decodes what was recorded of a kernel's
        # specializations: a process uses few.
        self._kernels: dict[str, StaticKernel] = {}

    def __getitem__(self, name: str) -> StaticKernel:
        kernel = self._kernels.get(name)
        if kernel is not None:
            return kernel
        if name in self._found:
            return self._make(name)
        refused = [
            f"{key}: {reason}" for key, (other, reason) in self._refused.items() if other == name
        ]
        if refused:
            raise NotFound(
                f"no kernel {name!r} can be launched: {'; '.join(refused[:8])}", name=name
            )
        targets = sorted({str(kernel.target) for kernel in self._bundle.kernels})
        raise NotFound(
            f"no kernel {name!r} for {self._driver.backend}; there are"
            f" {', '.join(self._found) or 'none'} (the bundle is for"
            f" {', '.join(targets) or 'nothing'})",
            name=name,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Kernels {count(len(self), 'name')} on {self._driver.backend}"
            f" ({self._driver.launch_path})>"
        )

    @property
    def driver(self) -> Driver:
        """The driver that launches."""
        return self._driver

    @property
    def hooks(self) -> Hooks:
        """What is called around each launch, but for those by handle."""
        return self._hooks

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """Kernel keys whose facts are not known well enough to choose them for a call, each with
        the reason.
        """
        return tuple((key, reason) for key, (_, reason) in sorted(self._refused.items()))

    @property
    def compiled(self) -> Bundle | None:
        """What fallbacks compiled so far, None when nothing; push or save it, so that the next
        process has it.
        """
        return merge(self._compiled) if self._compiled else None

    def leave_out(self, unwanted: Callable[[Kernel], bool]) -> None:
        """Never launch some specializations; before the first kernel is asked for.

        Args:
            unwanted: tells them.
        """
        self._found = {
            name: [one for one in found if not unwanted(one.kernel)]
            for name, found in self._found.items()
        }

    def unload(self) -> None:
        """Take all kernels off their devices, after the launches that use them ended; the next
        launch loads again.
        """
        # What was remembered goes first, so that no call finds a kernel that is no longer on its
        # device.
        with self._lock:
            made = list(self._kernels.values())
        for kernel in made:
            kernel.forget()
        self._loader.unload()

    def close(self) -> None:
        """Unload, and close the bundle if it was opened by path."""
        self.unload()
        if self._owned is not None:
            self._owned.close()

    def _make(self, name: str) -> StaticKernel:
        function = self._fallback.get(name)
        with self._lock:
            kernel = self._kernels.get(name)
            if kernel is None:
                kernel = self._kernels[name] = StaticKernel(
                    name,
                    self._found[name],
                    self._loader,
                    self._hooks,
                    debug=self._debug,
                    fallback=None if function is None else JitFallback(function, self._adopt),
                )
            return kernel

    def _adopt(self, bundle: Bundle) -> None:
        # The bundle stays open as long as this object: its kernels are read when a call needs them.
        self._compiled.append(bundle)
        self._loader.add_source(bundle)
        for name, found in self._specializations(bundle).items():
            if name in self._found:
                self[name].add(found)

    def _specializations(self, bundle: Bundle) -> dict[str, list[Specialization]]:
        by_name: dict[str, list[Specialization]] = {}
        for kernel in bundle.kernels:
            # Architectures are told apart at a call, which knows its device.
            if kernel.target.backend != self._driver.backend:
                continue
            if kernel.has_facts:
                by_name.setdefault(kernel.name, []).append(Specialization(kernel))
            else:
                self._refused[kernel.key] = (kernel.name, _UNKNOWN)
        return by_name


def _open_for(bundle: Bundle) -> Driver:
    backends = [
        backend for backend in BACKENDS if any(k.target.backend == backend for k in bundle.kernels)
    ]
    if not backends:
        raise NotFound("the bundle has no kernel for CUDA or HIP")
    return open_first_driver(backends)
