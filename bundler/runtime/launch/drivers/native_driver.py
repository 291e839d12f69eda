# SPDX-License-Identifier: Apache-2.0
"""`NativeDriver`: what the drivers of CUDA and HIP have in common.

That is the library and the modules loaded through it, their launchers, following torch's current
device and stream, and refusing to work after a fork.  `cuda.py` and `hip.py` inherit from it, say
what their library calls what both have (`Calls`), and fill in the rest.  `scratch_for` is memory
that a kernel writes its intermediate results to, for the time of one launch.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from bundler.errors import CannotLaunchStatically, DriverError, DriverUnavailable, ToolchainMismatch
from bundler.fork_safety import after_fork
from bundler.runtime.launch.drivers import launchers
from bundler.runtime.launch.drivers.cuda_api import NO_BINARY_FOR_GPU
from bundler.runtime.launch.drivers.driver import DeviceProperties, Launcher, Module, check_fits
from bundler.runtime.launch.drivers.launchers import Leave, Scratch
from bundler.runtime.launch.drivers.native_pool import CallTable, NativePool, PoolCalls
from bundler.runtime.launch.plan import GLOBAL_SCRATCH, PROFILE_SCRATCH, LaunchPlan

# The attribute of a function that says how many threads a block of it may have, in both libraries.
MAX_THREADS = 0
# Both allocators align to this; more is made by allocating more.
_ALIGNED_BYTES = 256
# Kinds of launchers that are kept track of.
_MOST_ALIKE = 256


class Library:
    """A driver's shared library: its functions as attributes, with their argument types."""

    def __init__(
        self, name: str, signatures: Mapping[str, tuple[object, ...]], backend: str
    ) -> None:
        self._found: dict[str, Any | None] = {}
        try:
            self._library = ctypes.CDLL(name)
            for function, types in signatures.items():
                getattr(self._library, function).argtypes = types
        except (OSError, AttributeError) as error:
            raise DriverUnavailable(
                f"{backend} kernels need the driver's library {name}, which cannot be used here:"
                f" {error}; install the GPU's driver, or run where there is one",
                backend=backend,
                library=name,
            ) from error

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        setattr(self, name, function)
        return function

    def find(self, name: str, types: tuple[object, ...] | None = None) -> Any | None:
        """Return a function that older libraries lack, None when this one does."""
        if name not in self._found:
            function = getattr(self._library, name, None)
            if function is not None:
                function.argtypes = types
            self._found[name] = function
        return self._found[name]


@dataclass(eq=False, slots=True, weakref_slot=True)
class NativeModule:
    """A loaded binary: `handle` is the module's, `function` the kernel's, `place` the context or
    device it lives in.
    """

    driver: NativeDriver
    plan: LaunchPlan
    device: int
    place: int
    handle: int
    function: int
    lost: str = ""
    made: list[weakref.ref[Any]] = field(default_factory=list)

    def unload(self) -> None:
        """Take the binary off the device; a second time does nothing."""
        with self.driver.lock:
            if self.lost:
                return
            self.lose("its module was unloaded")
        self.driver.unload(self)

    def refuse_launch(self, status: int) -> NoReturn:
        """Raise what a launch that did not happen means."""
        self.driver.refuse_launch(self, status)

    def lose(self, reason: str) -> None:
        """Let no launcher reach the driver any more."""
        self.lost = reason
        for launcher in [found for reference in self.made if (found := reference()) is not None]:
            launcher.close()


class NativeDriver(ABC):
    """A driver behind a shared library.

    Guarantees: every method from any thread; the current context is respected, and made only where
    there is none; the launchers that remain in a child process made by fork raise an error instead
    of reaching a driver that is not there.

    Args:
        library: the library, with its functions declared.
        compiled: whether launches go through our extension; None: if it was built.
    """

    backend: ClassVar[str]
    # What the library calls what both have, and the attributes of a device that are asked for:
    # threads a block, shared memory a block, threads a warp, multiprocessors, cooperative launches.
    calls: ClassVar[CallTable]
    asked: ClassVar[tuple[int, int, int, int, int]]
    pool_calls: ClassVar[PoolCalls]
    # Statuses of a launch whose stream or function belongs elsewhere.
    elsewhere: ClassVar[frozenset[int]] = frozenset()

    def __init__(self, library: Library, compiled: bool | None = None) -> None:
        self.lock = threading.RLock()
        self._library = library
        self._compiled = launchers.compiled_type() if compiled in {None, True} else None
        if compiled and self._compiled is None:
            raise DriverUnavailable(
                "the compiled launcher was not built here", backend=self.backend
            )
        self._lost = ""
        self._torch_c: Any | None = None
        self._properties: dict[int, DeviceProperties] = {}
        self._modules: weakref.WeakSet[NativeModule] = weakref.WeakSet()
        # By what a launcher depends on beside its function: the parameters, so that no others get
        # their number, and a launcher.
        self._made_alike: dict[tuple[Any, ...], tuple[Any, weakref.ref[Any]]] = {}
        self._start()
        after_fork(self.lose)

    @property
    def launch_path(self) -> str:
        """`compiled` or `ctypes`."""
        return "ctypes" if self._compiled is None else "compiled"

    def device(self) -> int:
        """Return the current device of this thread."""
        if (
            "torch" not in sys.modules and not self._lost
        ):  # each launch of a process without torch comes here
            return self._current_device()
        torch_c = self._torch()
        # torch's public functions cost ten times as much as these two.
        return self._current_device() if torch_c is None else torch_c._cuda_getDevice()  # noqa: SLF001

    def stream(self, device: int) -> int:
        """Return the handle of the current stream of a device."""
        if "torch" not in sys.modules and not self._lost:
            return 0
        torch_c = self._torch()
        return 0 if torch_c is None else torch_c._cuda_getCurrentRawStream(device)  # noqa: SLF001

    def properties(self, device: int) -> DeviceProperties:
        """Return what a device can do; asked once."""
        self.check_alive()
        found = self._properties.get(device)
        if found is None:
            found = self._properties[device] = self._read_properties(device)
        return found

    def device_count(self) -> int:
        """Return how many devices this process may use."""
        self.check_alive()
        found = ctypes.c_int()
        self._do(self.calls["device_count"][0], found)
        return found.value

    def load(self, plan: LaunchPlan, image: bytes, device: int) -> NativeModule:
        """Load verified bytes on a device."""
        found = self._properties.get(device)
        if found is None or self._lost:
            found = self.properties(device)
        check_fits(plan, found, device)
        place, handle, function = self._load_here(plan, image, device) or self._load_there(
            plan, image, device
        )
        module = NativeModule(self, plan, device, place, handle, function)
        self._modules.add(module)
        return module

    def _load_here(
        self, plan: LaunchPlan, image: bytes, device: int
    ) -> tuple[int, int, int] | None:
        """Load a binary where the thread is in the right place already; None where it is not, or
        there is no quick way.
        """
        return None

    def _load_there(self, plan: LaunchPlan, image: bytes, device: int) -> tuple[int, int, int]:
        """Load a binary from wherever the thread is; returns the place, and the handles of module
        and function.
        """
        handle, function = ctypes.c_void_p(), ctypes.c_void_p()
        place, leave = self._go_to(device)
        try:
            status = self._function("module_load")(handle, image)
            if status:
                self._refuse_image(plan, device, status)
            try:
                find = self._function("module_function")
                self.check(
                    find(function, handle, plan.entry.encode()),
                    f"looking for the entry {plan.entry!r}",
                    plan,
                )
                self._allow(
                    plan,
                    function.value or 0,
                    device,
                    self._ask_function(function, MAX_THREADS, plan),
                )
            except DriverError:
                self._function("module_unload")(handle)
                raise
        finally:
            leave()
        return place, handle.value or 0, function.value or 0

    def unload(self, module: NativeModule) -> None:
        """Unload a module's binary."""
        leave = self._enter(module.place)
        try:
            self._do(self.calls["module_unload"][0], module.handle, plan=module.plan)
        finally:
            leave()

    def launcher(self, module: Module) -> Launcher:
        """Return the function that launches a module's kernel."""
        assert isinstance(module, NativeModule)
        # Either kind has close(), which only we call.
        made: Any = (
            launchers.CtypesLauncher(self._bind(module))
            if self._compiled is None
            else self._compiled_launcher(module)
        )
        launcher: Launcher = made
        with self.lock:
            if module.made:
                module.made = [reference for reference in module.made if reference() is not None]
            module.made.append(weakref.ref(launcher))
            if module.lost:
                made.close()
        return launcher

    def _compiled_launcher(self, module: NativeModule) -> Any:
        """Return a launcher of the extension; kernels that take the same parameters have much of it
        in common.
        """
        plan = module.plan
        if plan.global_scratch_bytes or plan.profile_scratch_bytes:
            return launchers.compiled_launcher(self._compiled, self._bind(module))
        key = (
            id(plan.parameters),
            plan.buffer_bytes,
            plan.block_threads,
            plan.cluster,
            plan.shared_bytes,
            plan.cooperative,
            plan.pdl,
            module.place,
        )
        parameters, reference = self._made_alike.get(key, (None, None))
        alike = None if reference is None else reference()
        if alike is not None and parameters is plan.parameters:
            return alike.sibling(module.function, launchers.slow_packer(plan), module.refuse_launch)
        made = launchers.compiled_launcher(self._compiled, self._bind(module))
        if len(self._made_alike) >= _MOST_ALIKE:
            self._made_alike.clear()
        self._made_alike[key] = plan.parameters, weakref.ref(made)
        return made

    def check_alive(self) -> None:
        """Raise when this process cannot use the driver any more."""
        if self._lost:
            raise DriverUnavailable(self._lost, backend=self.backend)

    def check(self, status: int, call: str, plan: LaunchPlan | None = None) -> None:
        """Raise unless the status of a call is zero."""
        if status:
            self.refuse(status, call, plan)

    def refuse(self, status: int, call: str, plan: LaunchPlan | None = None) -> NoReturn:
        """Raise the error that a status of the driver means."""
        self.check_alive()
        words = self._words(status)
        self._forget()
        raise DriverError(
            f"{f'{plan.kernel}: ' if plan else ''}{call} failed: {words}",
            call=call,
            status=status,
            words=words,
            kernel=plan.kernel if plan else None,
            backend=self.backend,
        )

    def refuse_launch(self, module: NativeModule, status: int) -> NoReturn:
        """Raise what a launch that did not happen means."""
        plan = module.plan
        if status == launchers.CLOSED:
            self.check_alive()
            raise DriverError(
                f"{plan.kernel}: cannot be launched, since {module.lost}; load it again",
                kernel=plan.kernel,
                call="launch",
                status=status,
            )
        if status == launchers.BAD_GRID:
            raise CannotLaunchStatically(
                f"{plan.kernel}: a grid is three whole numbers from 0 to {launchers.MAX_GRID}, the"
                f" first of them times the blocks of a cluster ({plan.cluster}) as well",
                kernel=plan.kernel,
            )
        self.refuse(status, "the launch", plan)

    def lose(self) -> None:
        """In a forked child: give up every module, for neither CUDA nor HIP survives a fork."""
        self.lock = threading.RLock()  # another thread may have held it when the process was forked
        self._made_alike.clear()
        self._torch_c = None
        for name in ("device", "stream"):
            vars(self).pop(name, None)
        self._lost = (
            f"{self.backend} was in use before this process was forked, and does not survive that;"
            " start processes with multiprocessing's 'spawn' or 'forkserver', or open the driver"
            " only in the child"
        )
        for module in list(self._modules):
            module.lose("the process was forked")

    def _torch(self) -> Any | None:
        """Return torch's own module when torch is here and uses the GPU, without importing it."""
        if self._torch_c is not None:
            return self._torch_c
        self.check_alive()
        cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
        is_initialized = getattr(cuda, "is_initialized", None)
        if is_initialized is None or not is_initialized():
            return None
        torch: Any = sys.modules["torch"]
        if (torch.version.hip is not None) != (self.backend == "hip"):
            return None
        self._torch_c = torch._C  # noqa: SLF001  # where the two quick functions are
        launchers.tell_tensors_later(self._compiled)
        # They stand in for ours from now on: a method around each would cost more than the two of
        # them.
        vars(self).update(
            device=torch._C._cuda_getDevice,  # noqa: SLF001
            stream=torch._C._cuda_getCurrentRawStream,  # noqa: SLF001
        )
        return self._torch_c

    # ----------------------------------------------------- Memory that a kernel needs while it runs

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return the address of memory in the order of a stream; works while a graph is captured,
        too.
        """
        address = ctypes.c_uint64()
        status = self._function("allocate")(address, size_bytes, stream)
        self.check(status, f"allocating {size_bytes} bytes of scratch memory")
        return address.value

    def free(self, address: int, stream: int) -> None:
        """Give memory back once the stream has come this far."""
        self._do(self.calls["free"][0], address, stream)

    def pool(self, device: int) -> NativePool:
        """Return a new pool of a device's memory."""
        self.properties(device)  # refuses a number that no device has
        return NativePool(self, device, self.pool_calls, self._library.find)

    def on_device(self, device: int) -> launchers.Leave:
        """Make a device current in this thread; returns what goes back."""
        return self._go_to(device)[1]

    def _pool(self, device: int) -> NativeDriver | TorchPool:
        return self if self._torch() is None else TorchPool(device)

    # ---------------------------------------------------------------- What both libraries are asked

    def _function(self, call: str) -> Any:
        return getattr(self._library, self.calls[call][0])

    def _do(self, call: str, *arguments: Any, plan: LaunchPlan | None = None) -> None:
        """Call a function of the library; raises what its status means."""
        self.check(getattr(self._library, call)(*arguments), call, plan)

    def _ask_device(self, attribute: int, device: int) -> int:
        value = ctypes.c_int()
        status = self._function("device_attribute")(value, attribute, device)
        self.check(status, f"asking for properties of device {device}")
        return value.value

    def _ask_function(
        self, function: ctypes.c_void_p | int, attribute: int, plan: LaunchPlan
    ) -> int:
        value = ctypes.c_int()
        self._do(self.calls["function_attribute"][0], value, attribute, function, plan=plan)
        return value.value

    def _allow(self, plan: LaunchPlan, function: int, device: int, threads: int) -> None:
        """Let a kernel that was just loaded, and may have so many threads, have what it needs, or
        say that the device cannot run it.
        """
        if plan.block_threads > threads:
            raise DriverError(
                f"{plan.kernel}: needs {plan.block_threads} threads a block, and with its registers"
                f" device {device} runs at most {threads}",
                kernel=plan.kernel,
                needed=plan.block_threads,
                limit=threads,
                device=device,
            )

    def _refuse_image(self, plan: LaunchPlan, device: int, status: int) -> NoReturn:
        """Raise what the status of loading a binary means; that of a wrong architecture is the same
        number in both libraries.
        """
        if status == NO_BINARY_FOR_GPU:
            words = self._words(status)
            self._forget()
            raise ToolchainMismatch(
                f"{plan.kernel}: the binary holds no code for device {device} ({words}); compile it"
                f" for {self.backend}:{self.properties(device).arch}",
                kernel=plan.kernel,
                device=device,
                status=status,
            )
        self.refuse(status, "loading the binary", plan)

    def _forget(self) -> None:  # noqa: B027  # CUDA's driver keeps none, so there it does nothing
        """Let the library forget the error that its last call in this thread returned."""

    def _bind(self, module: NativeModule) -> launchers.Binding:
        plan = module.plan
        plain, extended, attributes = self._launching(plan)
        return launchers.Binding(
            plan=plan,
            function=module.function,
            place=module.place,
            attributes=attributes,
            plain=plain,
            extended=extended,
            ask_place=self._function("current_place"),
            current_place=self._current_place,
            fail=module.refuse_launch,
            enter=functools.partial(self._enter, module.place),
            scratch=scratch_for(plan, functools.partial(self._pool, module.device)),
            elsewhere=self.elsewhere,
            forget=self._forget,
        )

    def _read_properties(self, device: int) -> DeviceProperties:
        arch = self._arch(device)
        threads, shared, warp, multiprocessors, cooperative = (
            self._ask_device(attribute, device) for attribute in self.asked
        )
        return DeviceProperties(arch, threads, shared, warp, multiprocessors, bool(cooperative))

    # -------------------------------------------------------- What each of them does in its own way

    @abstractmethod
    def _start(self) -> None:
        """Initialise the driver in this process."""

    @abstractmethod
    def pointer_device(self, address: int) -> int | None:
        """Return the device that an address belongs to, None for memory that no device can read."""

    @abstractmethod
    def _go_to(self, device: int) -> tuple[int, launchers.Leave]:
        """Make the place where a device's binaries are loaded current: a context of CUDA, a device
        of HIP.

        Returns:
            The place, and what goes back.
        """

    @abstractmethod
    def _enter(self, place: int) -> launchers.Leave:
        """Make a place current in this thread; returns what goes back."""

    @abstractmethod
    def _current_device(self) -> int: ...

    @abstractmethod
    def _current_place(self) -> int: ...

    @abstractmethod
    def _arch(self, device: int) -> str:
        """Return a device's architecture, as in a `Target`."""

    @abstractmethod
    def _launching(self, plan: LaunchPlan) -> tuple[Any, Any | None, bytes]:
        """Return the library's function that launches, the one that launches with attributes (None
        where it has none), and the attributes, as the driver's structures.
        """

    @abstractmethod
    def _words(self, status: int) -> str:
        """Return what the driver calls a status."""


class TorchPool:
    """torch's caching allocator: shares its memory with torch, and follows it into the capture of a
    graph.
    """

    def __init__(self, device: int) -> None:
        torch: Any = sys.modules["torch"]
        self._device = device
        self._cuda: Any = torch.cuda
        # What torch's own function calls once it has made the device the current one, which takes
        # longer than all the rest.
        self._raw = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)  # noqa: SLF001
        self._current = torch._C._cuda_getDevice  # noqa: SLF001

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return the address of new memory; torch raises its own out-of-memory error."""
        address: int
        if self._raw is not None and self._current() == self._device:
            address = self._raw(size_bytes, stream)
        else:
            address = self._cuda.caching_allocator_alloc(size_bytes, self._device, stream)
        return address

    def free(self, address: int, stream: int) -> None:
        """Give memory back to torch."""
        self._cuda.caching_allocator_delete(address)


def scratch_for(plan: LaunchPlan, pool: Callable[[], NativeDriver | TorchPool]) -> Scratch | None:
    """Return what allocates a kernel's scratch for each launch, None when the kernel needs none.

    Args:
        plan: says how much, for each program of the grid and each block of a cluster.
        pool: where from, memory in the order of a stream; asked at each launch, since torch may come into the process later.
    """
    if not (plan.global_scratch_bytes or plan.profile_scratch_bytes):
        return None
    sizes = (
        (GLOBAL_SCRATCH, plan.global_scratch_bytes, plan.global_scratch_align),
        (PROFILE_SCRATCH, plan.profile_scratch_bytes, plan.profile_scratch_align),
    )
    wanted = [
        (place, kind, align, align if align > _ALIGNED_BYTES else 0)
        for place, (kind, size, align) in enumerate(sizes)
        if size
    ]

    def allocate(grid_x: int, grid_y: int, grid_z: int, stream: int) -> tuple[int, int, Leave]:
        source, programs, addresses = pool(), grid_x * grid_y * grid_z, [0, 0]
        taken: list[int] = []
        try:
            for place, kind, align, spare in wanted:
                address = source.allocate(plan.scratch_bytes(programs, kind) + spare, stream)
                taken.append(address)
                addresses[place] = address + (-address % align if spare else 0)
        except BaseException:
            _give_back(source, taken, stream)
            raise
        return addresses[0], addresses[1], functools.partial(_give_back, source, taken, stream)

    return allocate


def _give_back(source: NativeDriver | TorchPool, taken: list[int], stream: int) -> None:
    """Give back all that was taken, the last first, also where one of them raises."""
    try:
        if taken:
            source.free(taken.pop(), stream)
    finally:
        if taken:
            _give_back(source, taken, stream)
