# SPDX-License-Identifier: Apache-2.0
"""`TorchMemory`: tensors of torch for programs that are replayed or run: allocation, views, and
operators called by name; `example_tensor`.

The generator's programs, and users of `load_program` whose programs call operators, make one.

`TorchGraphs`: CUDA graphs by torch: capture, replay, and who still has the memory of a result.
`runtime.program.graph_replay` has the rules by which a program uses it.  ROCm's graphs have the
same names in torch.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from bundler.errors import ConfigError, NotFound
from bundler.toolchain.torch_counters import counters_of
from bundler.toolchain.torch_functions import quick_function

_NOTHING: AbstractContextManager[Any] = nullcontext()
_BUILT_IN = frozenset({"aten", "prims"})
# Devices of a plan that are not the program's: the host, as `program_plan.HOST` names it, and
# torch's device without memory.
_OTHER_DEVICES = {"host": "cpu", "meta": "meta"}
# Tensors that torch's own gradients leave out, though the schema has them as needed.
_LEFT_OUT = {
    f"aten._scaled_dot_product_{kind}_attention_backward.default": set(names.split())
    for kind, names in (
        ("cudnn", "attn_bias cum_seq_q cum_seq_k"),
        ("efficient", "attn_bias"),
        ("flash", "cum_seq_q cum_seq_k"),
    )
}


class TorchMemory:
    """Allocates on one device.

    Args:
        device: as torch names it, `cpu` or `cuda:0`.

    Raises:
        ConfigError: torch is not installed.
    """

    def __init__(self, device: str = "cpu") -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise ConfigError(
                f"tensors of torch were asked for, and torch cannot be imported: {error}"
            ) from error
        self._device = self._torch.device(device)
        self._operators: dict[str, Any] = {}
        if self._device.type == "cuda" and self._device.index is None:
            self._device = self._torch.device("cuda", self._torch.cuda.current_device())
        # torch's own function first looks whether CUDA was begun.
        of_kind = getattr(getattr(self._torch, self._device.type, None), "current_device", None)
        self._current: Any = getattr(
            self._torch._C,  # noqa: SLF001
            f"_{self._device.type}_getDevice",
            of_kind,
        )
        # What the code of Inductor allocates and views by, at a third and half of the cost.
        inner = getattr(self._torch._C, "_dynamo", None)  # noqa: SLF001
        self._guards: Any = getattr(inner, "guards", None)

    @property
    def device(self) -> Any:
        """Where it allocates, as tensors of torch say."""
        return self._device

    def current_device(self) -> AbstractContextManager[Any]:
        """Return a context in which launches and allocations are on the memory's device, and
        operators compute what was traced: without autocast, without functions in place of torch's,
        and without gradients, which would follow through operators alone and not through kernels.
        """
        torch, kind, index = self._torch, self._device.type, self._device.index
        contexts: list[AbstractContextManager[Any]] = []
        if index is not None and self._current is not None and index != self._current():
            contexts.append(getattr(torch, kind).device(self._device))
        if torch.is_grad_enabled():
            contexts.append(torch.no_grad())
        if torch.is_autocast_enabled(kind):
            contexts.append(torch.autocast(kind, enabled=False))
        if torch._C._is_torch_function_mode_enabled():  # noqa: SLF001
            contexts.append(torch._C.DisableTorchFunction())  # noqa: SLF001
        return _within(contexts) if contexts else _NOTHING

    def placed(self, tensor: Any) -> Any:
        """Return a tensor on the memory's device: itself where it is there, else a copy."""
        return tensor.to(self._device)

    def allocate(self, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return a new tensor, whose elements may be anything."""
        return self._torch.empty_strided(
            sizes, strides, dtype=getattr(self._torch, dtype), device=self._device
        )

    def bound_allocate(
        self, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...]
    ) -> Callable[[], Any]:
        """Return what allocates such a tensor, where the memory's device is the current one."""
        make = getattr(self._guards, f"_empty_strided_{self._device.type}", None)
        if make is None or type(self).allocate is not TorchMemory.allocate:
            return partial(self.allocate, dtype, sizes, strides)
        return partial(make, sizes, strides, getattr(self._torch, dtype))

    def view(
        self, tensor: Any, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> Any:
        """Return a tensor's memory seen in another way; the offset counts from the tensor's first
        element.
        """
        return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)

    def bound_view(self) -> Callable[[Any, tuple[int, ...], tuple[int, ...], int], Any]:
        """Return what does as `view`, for memory that is known to be the tensor's: nothing is
        checked, and no gradient follows.
        """
        found: Callable[..., Any] = getattr(self._guards, "_reinterpret_tensor", self.view)
        return found if type(self).view is TorchMemory.view else self.view

    def copied(self, tensor: Any, sizes: Sequence[int], strides: Sequence[int]) -> Any:
        """Return a tensor's elements in new memory with these strides; elements that overlap are
        written more than once, each time the same.
        """
        new = self._torch.empty_strided(
            tuple(sizes), tuple(strides), dtype=tensor.dtype, device=tensor.device
        )
        # torch refuses to write to a tensor that repeats elements: along those one is enough.
        target, source = new, tensor
        for dim, stride in enumerate(strides):
            if stride == 0 and sizes[dim] > 1:
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        target.copy_(source)
        return new

    def graphs(self) -> TorchGraphs | None:
        """Return what captures graphs on the memory's device; None where torch has none."""
        found = TorchGraphs.is_possible(self._torch, self._device)
        return TorchGraphs(self._torch, self._device) if found else None

    def integers(self, numbers: Sequence[int]) -> Any:
        """Return a new int64 tensor that holds these numbers."""
        return self._torch.tensor(list(numbers), dtype=self._torch.int64, device=self._device)

    def counters(self, count: int) -> Any:
        """Return int32 counters for the programs of a launch on the current stream, 0 or as a
        barrier leaves them, which no launch beside it has.
        """
        if self._device.type == "cuda":
            return counters_of(self._torch, self._device)(count)
        return self._torch.zeros(count, dtype=self._torch.int32, device=self._device)

    def put_bytes(self, data: Any, dtype: str, sizes: tuple[int, ...]) -> Any:
        """Copy the bytes of a tensor that lies row by row, from a writable buffer."""
        made = self._torch.empty(sizes, dtype=getattr(self._torch, dtype), device=self._device)
        if made.numel():
            flat = made.reshape(-1).view(self._torch.uint8)
            flat.copy_(self._torch.frombuffer(data, dtype=self._torch.uint8))
        return made

    def seeds(self, count: int) -> Any:
        """Return seeds of random numbers from torch's default generator of the device, which
        `torch.manual_seed` sets.
        """
        limits = self._torch.iinfo(self._torch.int64)
        return self._torch.randint(
            limits.min, limits.max, (count,), dtype=self._torch.int64, device=self._device
        )

    def call(self, operator: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Call an operator by its name.

        Raises:
            As `operator`, and what the operator raises.
        """
        found = self.operator(operator)
        given = [self._decoded(item) for item in arguments]
        named = {name: self._decoded(item) for name, item in keywords.items()}
        return found(*given, **named)

    def bound_operator(self, name: str) -> tuple[Callable[..., Any], Callable[[Any], Any]] | None:
        """Return an operator, and what makes its arguments that are no tensors as it takes them,
        for who calls it again and again; None where a subclass has a `call` of its own.

        Raises:
            As `operator`.
        """
        if type(self).call is not TorchMemory.call:
            return None
        found = self.operator(name)
        quick = quick_function(self._torch, name, found)
        if quick is not None:
            return quick, self._decoded
        # What an operator's own call hands everything to; those of some libraries do more.
        plain = type(found) is self._torch._ops.OpOverload  # noqa: SLF001
        return found._op if plain else found, self._decoded  # noqa: SLF001

    def recognizer(self, tensors: Sequence[Any]) -> Callable[..., bool] | None:
        """Return what says whether other tensors have the types, dtypes, sizes, strides, devices
        and marks of these, no two of which may be one; None where torch has no quick way.
        """
        return _recognizer(self._torch, tensors)

    def lacking(
        self, operator: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> str | None:
        """Return which tensor an operator needs, on whose absence some crash, and is given None
        for; None where it has all.
        """
        if not any(_lacks(item) for item in (*arguments, *keywords.values())):
            return None
        # torch shows a schema nowhere else
        parameters = self.operator(operator)._schema.arguments  # noqa: SLF001
        for place, parameter in enumerate(parameters):
            given = place < len(arguments)
            value = arguments[place] if given else keywords.get(parameter.name, ...)
            needed = str(parameter.type) in {"Tensor", "List[Tensor]"}
            if needed and _lacks(value) and parameter.name not in _LEFT_OUT.get(operator, ()):
                return str(parameter.name)
        return None

    def operator(self, name: str) -> Any:
        """Return the operator of a name, `namespace.operator.overload`, of whichever library.

        Raises:
            NotFound: there is none of that name now.
        """
        found = self._operators.get(name)
        if found is None:
            found = self._operators[name] = self._registered(name)
        return found

    def _registered(self, name: str) -> Any:
        namespace, _, rest = name.partition(".")
        packet, _, overload = rest.rpartition(".")
        try:
            found = getattr(getattr(getattr(self._torch.ops, namespace), packet), overload)
        except AttributeError:
            found = None
        # torch.ops has functions of its own, and operators that take functions.
        overloads = self._torch._ops.OpOverload  # noqa: SLF001  # torch shows it nowhere else
        if not isinstance(found, overloads):
            fix = (
                "no library that is imported registers it: import the one that has"
                f" {namespace!r} first, as torchvision for torchvision.nms"
            )
            if namespace in _BUILT_IN:
                fix = (
                    f"the installed torch {self._torch.__version__} has none of that name; "
                    "generate the program anew with it"
                )
            raise NotFound(f"operator {name}: {fix}", name=name)
        return found

    def _decoded(self, item: Any) -> Any:
        """Return a value that only torch has for its name."""
        if isinstance(item, list):
            return [self._decoded(part) for part in item]
        if not isinstance(item, dict):
            return item
        ((kind, name),) = item.items()
        if kind == "device":
            other = _OTHER_DEVICES.get(name)
            return self._device if other is None else self._torch.device(other)
        if kind in {"dtype", "memory_format", "layout"}:
            return getattr(self._torch, name)
        raise NotFound(
            f"a call's argument {item!r:.80}: expected a dtype, a device or a memory format",
            name=kind,
        )


@contextmanager
def _within(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _lacks(item: Any) -> bool:
    return item is None or (type(item) is list and any(part is None for part in item))


def example_tensor(text: str) -> Any:
    """Return a tensor of zeros of a type and sizes, such as `float32[128,512]`, on the CPU.

    Raises:
        ConfigError: the text is no such description, or torch is not installed.
    """
    found = re.fullmatch(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]", text)
    torch: Any = TorchMemory()._torch  # noqa: SLF001  # of this module
    dtype = getattr(torch, found[1], None) if found else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"input {text!r}: expected a dtype of torch and sizes, such as float32[128,512]",
            got=text,
        )
    return torch.zeros([int(size) for size in found[2].split(",") if size], dtype=dtype)


def random_example(text: str) -> Any:
    """Return a tensor as `example_tensor` does, of random floats, or of zeros of whole numbers, on
    the GPU where there is one.
    """
    example = example_tensor(text)
    torch: Any = importlib.import_module("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = str(example.dtype).removeprefix("torch.")
    return random_tensor(dtype, example.shape, example.stride(), device=device)


def real_tensors() -> AbstractContextManager[Any]:
    """Return a context in which tensors have memory, also where torch is tracing a graph."""
    tensors = importlib.import_module("torch._subclasses.fake_tensor")
    found: AbstractContextManager[Any] = tensors.unset_fake_temporarily()
    return found


def random_tensor(dtype: str, sizes: Sequence[int], strides: Sequence[int], *, device: str) -> Any:
    """Return a tensor of random floats, or of zeros where the dtype is of whole numbers, since
    these may be indices.

    Raises:
        ConfigError: torch is not installed.
    """
    memory = TorchMemory(device)
    tensor = memory.allocate(dtype, tuple(sizes), tuple(strides))
    torch: Any = memory._torch  # noqa: SLF001  # of this module
    # 8-bit floats are not drawn, but converted; elements that a tensor repeats are written once.
    tensor = tensor.zero_()
    if not tensor.dtype.is_floating_point or 0 in strides:
        return tensor
    # Numbers of its own, so that a program which draws some draws the same as without.
    drawn = torch.Generator(memory.device).manual_seed(0)
    return tensor.copy_(torch.randn(tuple(sizes), device=device, generator=drawn))


def provide_scratch() -> None:
    """Have the launches of Triton itself in this context get the memory that tensor descriptors
    need from torch.
    """
    torch, triton = (importlib.import_module(name) for name in ("torch", "triton"))
    triton.set_allocator(
        lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device="cuda")
    )


def unusual_numbers(tensors: Sequence[Any]) -> str:
    """Return what is wrong with the numbers of tensors of torch: the first that has a NaN or an
    infinity; empty where none has.
    """
    for number, tensor in enumerate(tensors):
        if getattr(tensor, "is_floating_point", bool)():
            wide = tensor.float() if tensor.element_size() == 1 else tensor
            for kind in ("isnan", "isinf"):
                if bool(getattr(wide, kind)().any()):
                    return f"tensor {number} has {'a NaN' if kind == 'isnan' else 'an infinity'}"
    return ""


# Operators of torch that wait for the GPU, or decide by what is on the host, and are in programs.
# A failed capture leaves torch's allocator in doubt, so none of these is tried.
_WAITING = frozenset(
    [
        "_assert_scalar",
        "_ctc_loss",
        "_fused_moving_avg_obs_fq_helper",
        "_fused_moving_avg_obs_fq_helper_functional",
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "allclose",
        "bincount",
        "ctc_loss",
        "equal",
        "geqrf",
        "histc",
        "histogram",
        "is_nonzero",
        "item",
        "linalg_eig",
        "linalg_eigvals",
        "masked_select",
        "mode",
        "multinomial",
        "nonzero",
        "nonzero_numpy",
        "ormqr",
        "repeat_interleave",
        "segment_reduce",
        "tensor_split",
        "unique_consecutive",
        "unique_dim",
    ]
)
# Those of linear algebra read on the host whether they succeeded.
_WAITING_PREFIXES = ("_linalg", "linalg_", "cholesky", "lu_", "triangular_solve")
# With masks as indices these look for the places on the host.
_INDEXED = frozenset({"index", "_unsafe_index", "index_put", "_unsafe_index_put", "index_put_"})
_KNOWN = frozenset({"aten", "prims"})


class _SharedMemory:
    """Memory of the graphs that are launched on one stream.

    Attributes:
        pool: its handle.
        graphs: those that are there.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()


# By device and stream; of all programs.
_shared_memory: defaultdict[tuple[Any, int], _SharedMemory] = defaultdict(_SharedMemory)
# Graphs whose capture failed.
_failed: list[Any] = []


class TorchGraphs:
    """Graphs of one device.

    Args:
        torch: the module.
        device: which device, with its number.
    """

    #: Whether a launch may write over what graphs that were captured later keep.
    shares_memory = True

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self.device = torch, device
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # noqa: SLF001
        self._reinterpreted: Any = getattr(guards, "_reinterpret_tensor", None)
        self._use_count: Any = torch._C._storage_Use_Count  # noqa: SLF001
        # Called in every launch, so without what torch has around them.
        self._stream_of: Any = torch._C._cuda_getCurrentRawStream  # noqa: SLF001
        #: Whether somebody captures a graph on the current stream.
        self.is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing  # noqa: SLF001
        #: Whether torch follows gradients now.
        self.is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
        self._side = torch.cuda.Stream(device)

    @staticmethod
    def is_possible(torch: Any, device: Any) -> bool:
        """Whether this torch can capture on a device, and tell who has a result's memory."""
        named = hasattr(torch._C, "_storage_Use_Count")  # noqa: SLF001
        return device.type == "cuda" and named

    def why_not(self, operator: str, masks: bool) -> str:
        """Return why an operator cannot be part of a graph; empty where it can.

        Args:
            operator: its name, as `aten.mm.default`.
            masks: whether some argument is a mask, or a list that has one.
        """
        namespace, name, *_ = operator.split(".")
        if namespace not in _KNOWN:
            return f"{operator} is an operator of a library, which may do anything on the host"
        waits = name in _WAITING or name.startswith(_WAITING_PREFIXES)
        if waits or (masks and name in _INDEXED):
            return f"{operator} waits for the GPU"
        return ""

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor of torch."""
        return isinstance(value, self._torch.Tensor)

    @property
    def age(self) -> int:
        """A number that grows when graphs of before are no longer to be launched: they would draw
        random numbers from a state that torch's generator does not have any more.
        """
        return len(_failed)

    def stream(self) -> int:
        """Return the handle of the stream that launches go to now."""
        found: int = self._stream_of(self.device.index)
        return found

    @contextlib.contextmanager
    def as_usual(self) -> Iterator[None]:
        """Make tensors that may be used in every mode of torch, inference or not."""
        # Without inference mode, torch follows gradients again.
        with self._torch.inference_mode(mode=False), self._torch.no_grad():
            yield

    def captured(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what launches all that a function would, in one graph, and what the function
        returned: tensors whose numbers each launch writes anew.

        Raises:
            RuntimeError, or what the function raises: what it does cannot be captured.
        """
        cuda = self._torch.cuda
        shared = _shared_memory[self.device, self.stream()]
        # torch forgets a pool whose last graph is gone.
        if not shared.graphs:
            shared.pool = cuda.graph_pool_handle()
        graph, generator = cuda.CUDAGraph(), cuda.default_generators[self.device.index]
        state = generator.clone_state()
        cuda.synchronize(self.device)
        # While a graph is captured, torch gives no cached memory back to allocate more.
        cuda.empty_cache()
        try:
            with cuda.stream(self._side):
                # Other threads may go on with what a capture in their own would not allow.
                graph.capture_begin(pool=shared.pool, capture_error_mode="thread_local")
                try:
                    results = run()
                finally:
                    graph.capture_end()
        except BaseException:
            self._mend(graph, shared.pool, state)
            raise
        shared.graphs.add(graph)
        return graph.replay, results

    def _mend(self, graph: Any, pool: Any, state: Any) -> None:
        """Undo what torch leaves of a capture that failed: it would draw no random number any more,
        and still send allocations to the pool.
        """
        torch = self._torch
        torch.cuda.default_generators[self.device.index].graphsafe_set_state(state)
        with contextlib.suppress(RuntimeError):  # torch had not come so far
            torch._C._cuda_endAllocateToPool(self.device.index, pool)  # noqa: SLF001
        # torch's allocator may ask it whether it is captured.
        _failed.append(graph)
        self._side = torch.cuda.Stream(self.device)
        _shared_memory.pop((self.device, self.stream()), None)

    def wait(self) -> None:
        """Wait until the device is done, as before a graph is given up."""
        self._torch.cuda.synchronize(self.device)

    def is_on_host(self, tensor: Any) -> bool:
        """Whether a tensor lies on the host."""
        return bool(tensor.device.type == "cpu")

    def storage(self, tensor: Any) -> Any:
        """Return a tensor's memory."""
        return tensor.untyped_storage()

    def name_of(self, tensor: Any) -> int:
        """Return what names a tensor's memory."""
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # torch itself tells aliases so

    def users(self, storage: Any) -> int:
        """Return how many tensors and objects have a storage."""
        return int(self._use_count(storage._cdata))  # noqa: SLF001

    def same(self, tensor: Any) -> Callable[[], Any]:
        """Return what makes new tensors of a tensor's memory."""
        sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
        make = self._reinterpreted
        if _is_nowhere(tensor):
            found: Callable[[], Any] = tensor.clone
            return found
        if make is None or tensor.is_neg() or tensor.is_conj():
            return lambda: self._torch.ops.aten.alias.default(tensor)
        return lambda: make(tensor, sizes, strides, 0)

    def copies(self, tensors: Sequence[Any]) -> list[Any]:
        """Return copies of tensors; those that share memory do so again."""
        storages: dict[int, Any] = {}
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            name = storage._cdata  # noqa: SLF001
            if _is_nowhere(tensor):
                found.append(tensor.clone())
                continue
            if name not in storages:
                storages[name] = storage.clone()
            new = self._torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            new.set_(storages[name], tensor.storage_offset(), tensor.shape, tensor.stride())
            new = new.conj() if tensor.is_conj() else new
            found.append(self._torch._neg_view(new) if tensor.is_neg() else new)  # noqa: SLF001
        return found

    def copy(self, targets: list[Any], sources: list[Any]) -> None:
        """Copy tensors, in as few launches as can be."""
        pairs = list(map(_apart, targets, sources))
        try:
            self._torch._foreach_copy_([one for one, _ in pairs], [other for _, other in pairs])
        except NotImplementedError:  # of a dtype as complex32
            for target, source in pairs:
                target.copy_(source)

    def recognizer(self, tensors: Sequence[Any]) -> Callable[..., bool] | None:
        """Return what says whether other tensors have the types, dtypes, sizes, strides, devices
        and marks of these; None where torch has no quick way.
        """
        return _recognizer(self._torch, tensors)


def _recognizer(torch: Any, tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """Return what compares tensors with these by what guards the graphs of torch.compile; None for
    classes that others made, which these guards do not keep alive.
    """
    inner = getattr(torch._C, "_dynamo", None)  # noqa: SLF001
    guards: Any = getattr(getattr(inner, "guards", None), "TensorGuards", None)
    if guards is None or not {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, tensors)):
        return None
    made = guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    found: Callable[..., bool] = made.check
    return found


def _apart(target: Any, source: Any) -> tuple[Any, Any]:
    """Return both without what a tensor repeats, which torch refuses to write to."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    return target, source


def _is_nowhere(tensor: Any) -> bool:
    """Whether a tensor has no memory: one without elements, or of zeros that torch stores not."""
    return tensor.numel() == 0 or bool(tensor._is_zerotensor())  # noqa: SLF001
