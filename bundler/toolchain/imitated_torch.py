# SPDX-License-Identifier: Apache-2.0
"""`imitated_tensors`: every tensor that a program makes is fake, and tensors on the GPU work
without one, with autograd.

torch's `FakeTensorMode` computes shapes, types and strides of every operation and allocates
nothing.  Three things are added:

* **Autograd without a GPU.**  Its C++ part asks each tensor for its device and then that device's
  driver for a stream, which aborts where there is none.  Of a GPU's tensor it is told a "meta"
  device, for which torch has such a driver, of a number that nobody uses, so that it is known where
  it comes back; Python code is told the tensor's own device.
* **Addresses.**  `data_ptr` is what an allocator would give: a multiple of 512 for each storage,
  plus the view's offset.
* **Data.**  What depends on data gets the known value of small integer tensors (`KnownValues`),
  else a guess, and is told to a listener.

Guesses: true; 2; 1.0; `nonzero` and masks select everything; all elements are unique.

`imitated_cuda`: torch's `torch.cuda` as on a machine with the target's GPU; nothing of it touches a
driver.  Libraries look at it when they are imported, and programs before each launch.  What is
asked about the device comes from `target_devices.py`; streams, events, graphs and memory statistics
are objects that do nothing.  `imitated_autocast` is `torch.autocast("cuda")` for fake tensors,
which torch's C++ code does not take for tensors of a GPU.

Used by `program_imitation.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from bundler.format.entries import Target
from bundler.toolchain.declared_target import DeclaredDriver
from bundler.toolchain.program_imitation import KILOHERTZ, Heard, Replacements
from bundler.toolchain.target_devices import TargetDevice

# torch's allocator of CUDA memory gives each block an address that is a multiple of this.
ALIGNMENT_BYTES = 512
# Neither 1 nor a multiple of 16, which Triton makes kernels of their own for.
GUESSED_INTEGER = 2
GUESSED_FLOAT = 1.0
_GPU = torch.device("cuda", 0)
# What stands for the GPU in torch's C++ code.
_GPU_IN_C = torch.device("meta", 77)
_DEVICE_QUESTION = torch.ops.prim.device.default
# Storages lie at least this far apart in memory, so that addresses made from theirs differ.
_STORAGE_BYTES = 16

# Tensors of indices and offsets are this small; computing larger ones would take as long as the
# program itself.
LARGEST = 1 << 16
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


@dataclass
class KnownValue:
    """What a tensor holds.

    Attributes:
        real: the value, on the CPU.
        sampled: it came of random numbers, or a kernel that did not run may have written to the
            tensor: one value of many.
    """

    real: Any
    sampled: bool


class _Unknown(Exception):
    """An input is not known."""


class KnownValues:
    """What small integer tensors of a captured program hold, although its tensors have no memory.

    ::

        cu_seqlens = torch.tensor([0, 100, 256], device="cuda")     a fake tensor; its value is known
        lengths = cu_seqlens.diff().tolist()                        computed for real, on the CPU: [100, 156]

    Shapes of a program often follow from such tensors: offsets of sequences, indices of chunks.
    Each operation whose inputs are known is done for real beside the fake one, with views of the
    same memory, so that a write to one is seen by all.

    Guarantees: `real` is what the operations gave on the CPU.  Not thread-safe.
    """

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()

    def of(self, tensor: Any) -> KnownValue | None:
        """Return what a fake tensor holds; None when that is not known."""
        found: KnownValue | None = self._values.get(tensor)
        return found

    def may_be_written(self, tensor: Any) -> None:
        """Note that a kernel got a tensor, and may write to it."""
        known = self.of(tensor) if isinstance(tensor, FakeTensor) else None
        if known is not None:
            known.sampled = True

    def follow(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Do for real what was done with fake tensors, where its inputs are known and its result is
        small.
        """
        # torch's own description of an operation
        mutates = function._schema.is_mutable  # noqa: SLF001
        small = [item for item in _tensors(result) if _is_small(item)]
        if not small and not mutates:
            return
        computed = self.compute(function, args, kwargs)
        if computed is None:
            if mutates:
                self._forget(_tensors((args, kwargs)))
            return
        for fake, real in zip(_tensors(result), _tensors(computed.real), strict=False):
            if _is_small(fake):
                self._values[fake] = KnownValue(real, computed.sampled)

    def compute(self, function: Any, args: Any, kwargs: Any) -> KnownValue | None:
        """Return what an operation gives for real; None when an input is not known or the CPU
        cannot do it.
        """
        name = str(function)
        tensors = _tensors((args, kwargs))
        if not tensors and "empty" in name:
            return None
        sampled = torch.Tag.nondeterministic_seeded in function.tags

        def known(tensor: Any) -> Any:
            nonlocal sampled
            if not isinstance(tensor, FakeTensor):
                return tensor
            value = self.of(tensor)
            if value is None:
                raise _Unknown
            sampled = sampled or value.sampled
            return value.real

        with contextlib.suppress(_Unknown, *_FAILURES):
            real_args, real_kwargs = tree_map_only(torch.Tensor, known, (args, kwargs))
            cpu = torch.device("cpu")
            real_args, real_kwargs = tree_map_only(
                torch.device, lambda _: cpu, (real_args, real_kwargs)
            )
            with no_dispatch():
                return KnownValue(function(*real_args, **real_kwargs), sampled)
        return None

    def remember(self, tensor: Any, value: KnownValue) -> None:
        """Note what a tensor holds."""
        if _is_small(tensor):
            self._values[tensor] = value

    def _forget(self, tensors: list[Any]) -> None:
        """Forget every value that shares memory with one of these tensors, since one of them was
        written to.
        """
        known = [self.of(tensor) for tensor in tensors if isinstance(tensor, FakeTensor)]
        written = {value.real.untyped_storage().data_ptr() for value in known if value is not None}
        if not written:
            return
        for tensor, value in list(self._values.items()):
            if value.real.untyped_storage().data_ptr() in written:
                del self._values[tensor]


def _is_small(tensor: Any) -> bool:
    return (
        not tensor.dtype.is_floating_point
        and not tensor.dtype.is_complex
        and tensor.numel() <= LARGEST
    )


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class ImitatedTensorMode(FakeTensorMode):  # type: ignore[misc]
    """torch's mode, in which data that an operation depends on is known or guessed."""

    # `torch.tensor` makes its tensor on the CPU, and a constant never moves to a device that is not
    # there.
    avoid_device_init = True

    def __init__(self, values: KnownValues, heard: Heard) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._values, self._heard = values, heard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation with fake tensors."""
        given = kwargs or {}
        if func is _DEVICE_QUESTION:
            return _seen_in_c(super().__torch_dispatch__(func, types, args, given))
        if given.get("device") == _GPU_IN_C:
            given = {**given, "device": _GPU}
        try:
            result = super().__torch_dispatch__(func, types, args, given)
        except (DataDependentOutputException, DynamicOutputShapeException):
            known = self._values.compute(func, args, given)
            if known is None:
                with self:
                    result = _guess(func, args)
                if result is None:
                    self._heard(_name(func), "nothing: the program cannot go on")
                    raise
                self._heard(_name(func), _described(result))
                return result
            if known.sampled:
                self._heard(_name(func), f"{_described(known.real)}, one of many")
            return self._as_fake(known, args)
        self._values.follow(func, args, given, result)
        return result

    def _as_fake(self, known: KnownValue, args: Any) -> Any:
        """Return a real result as fake tensors on the device of the operation's first tensor;
        numbers stay.
        """
        device = next(
            (item.device for item in args if isinstance(item, FakeTensor)), torch.device("cpu")
        )

        def fake(real: Any) -> Any:
            if not isinstance(real, torch.Tensor):
                return real
            with self:
                made = torch.empty_strided(
                    real.shape, real.stride(), dtype=real.dtype, device=device
                )
            self._values.remember(made, KnownValue(real, known.sampled))
            return made

        return (
            type(known.real)(map(fake, known.real))
            if isinstance(known.real, tuple)
            else fake(known.real)
        )


def _seen_in_c(device: Any) -> Any:
    return _GPU_IN_C if device.type == "cuda" else device


def _guess(func: Any, args: Any) -> Any:
    """Return what is taken for a result that depends on data; None when there is no guess for this
    operation.
    """
    name = getattr(func, "overloadpacket", func).__name__
    if name == "_local_scalar_dense":
        return _guessed_number(args[0].dtype)
    if name in {"equal", "allclose"}:
        return True
    if name == "nonzero":
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
    if name == "masked_select":
        return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
    if name in {"_unique", "_unique2", "unique_consecutive"}:
        tensor = args[0]
        others = [
            tensor.new_empty(tensor.shape, dtype=torch.int64),
            tensor.new_empty(tensor.numel(), dtype=torch.int64),
        ]
        count = 1 if name == "_unique" else 2
        return (tensor.new_empty(tensor.numel()), *others[:count])
    if name == "repeat_interleave":
        return args[0].new_empty(args[0].numel(), dtype=torch.int64)
    if name == "index":
        return _guessed_selection(*args)
    return None


def _guessed_number(dtype: Any) -> Any:
    if dtype == torch.bool:
        return True
    return GUESSED_FLOAT if dtype.is_floating_point or dtype.is_complex else GUESSED_INTEGER


def _guessed_selection(tensor: Any, indices: Any) -> Any:
    """Return a tensor selected by one mask of its first dimensions, all true; None for other
    indices.
    """
    mask, *others = indices
    if mask is None or mask.dtype != torch.bool or any(other is not None for other in others):
        return None
    return tensor.new_empty((mask.numel(), *tensor.shape[mask.dim() :]))


def _name(func: Any) -> str:
    names = {
        "_local_scalar_dense": "item",
        "_unique2": "unique",
        "_unique": "unique",
        "index": "indexing with a mask",
    }
    plain: str = getattr(func, "overloadpacket", func).__name__
    return names.get(plain, plain)


def _described(result: Any) -> str:
    if isinstance(result, tuple):
        return ", ".join(map(_described, result))
    if isinstance(result, torch.Tensor):
        return f"shape {list(result.shape)}"
    return repr(result)


# ----------------------------------------------------------------- What a fake tensor says and does


def _address(tensor: Any) -> int:
    """Return an address as an allocator gives them: the same for all views of a storage, but for
    their offset.
    """
    storage = tensor.untyped_storage()
    # tells storages apart
    base: int = storage._cdata // _STORAGE_BYTES * ALIGNMENT_BYTES  # noqa: SLF001
    offset: int = tensor.storage_offset() * tensor.element_size()
    return base + offset


def _moved(self: Any, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
    """`Tensor.to`, by the device that Python sees: C++ would copy each time, since it sees another
    one.
    """
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, torch.Tensor):
        device, dtype, layout = other.device, other.dtype, None
    else:
        # as `Module.to` does
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)  # noqa: SLF001
    chosen = {"dtype": dtype or self.dtype, "copy": copy}
    if device is not None and not _same_device(device, self.device):
        chosen["device"] = _GPU if device.type == "cuda" else device
    if layout is not None:
        chosen["memory_format"] = layout
    return _TO(self, **chosen)


_TO = torch.Tensor.to


def _same_device(asked: Any, device: Any) -> bool:
    return asked.type == device.type and asked.index in (None, device.index)


def _on_gpu(self: Any, *_: Any, **options: Any) -> Any:
    kept = {name: value for name, value in options.items() if name == "memory_format"}
    return _moved(self, _GPU, **kept)


def _on_cpu(self: Any, **options: Any) -> Any:
    return _moved(self, torch.device("cpu"), **options)


def _like(
    self: Any, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Any:
    return torch.tensor(
        data, dtype=dtype or self.dtype, device=device or self.device, requires_grad=requires_grad
    )


def _members(values: KnownValues, heard: Heard) -> dict[str, Any]:
    """Return what replaces members of a fake tensor."""

    def in_real(self: Any, what: str) -> Any:
        """Call a method of a real tensor that holds what is known of this one, or a guess."""
        known = values.of(self)
        with no_dispatch():
            if known is None:
                guess = _guessed_number(self.dtype)
                heard(what, f"{guess!r} everywhere")
                real = torch.full(tuple(self.shape), guess, dtype=self.dtype)
            else:
                real = known.real
                if known.sampled:
                    heard(what, f"one of many values, shape {list(self.shape)}")
            return getattr(real, what)()

    return {
        "is_cuda": property(lambda self: self.device.type == "cuda"),
        "is_cpu": property(lambda self: self.device.type == "cpu"),
        "is_meta": property(lambda self: self.device.type == "meta"),
        "get_device": lambda self: self.device.index if self.device.type == "cuda" else -1,
        "data_ptr": _address,
        "tolist": lambda self: in_real(self, "tolist"),
        "numpy": lambda self, **_: in_real(self, "numpy"),
        "__array__": lambda self, *args: in_real(self, "numpy").__array__(*args),
        "__format__": lambda self, text: (
            format(self.item(), text) if self.dim() == 0 else repr(self)
        ),
        "record_stream": lambda _self, _stream: None,
        "pin_memory": lambda self, *_: self,
        "is_pinned": lambda _self, *_: False,
    }


def _uncompiled(heard: Heard, model: Any = None, **_: Any) -> Any:
    """Stand in for `torch.compile`, which cannot trace tensors that are fake already."""
    heard("torch.compile", "the code as it is, so what torch would generate is not captured")
    return model if model is not None else lambda function: function


@contextlib.contextmanager
def imitated_tensors(values: KnownValues, heard: Heard) -> Iterator[ImitatedTensorMode]:
    """Make every tensor of this thread fake while the block runs, and of autograd's threads that
    work for it.

    Args:
        values: what small tensors hold.
        heard: told (what depended on data, what was taken for it).
    """
    mode = ImitatedTensorMode(values, heard)
    dispatch = FakeTensor.__torch_dispatch__.__func__
    swap = torch.utils.swap_tensors

    def fake_dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(cls, func, types, args, kwargs or {})
        return _seen_in_c(result) if func is _DEVICE_QUESTION else result

    @functools.wraps(swap)
    def swap_without_memo(first: Any, second: Any) -> None:
        # The mode's memory of converted tensors refers to both weakly, and torch swaps no tensor
        # that something refers to weakly.
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(first, second)

    with Replacements() as changes:
        changes.put(FakeTensor, "__torch_dispatch__", classmethod(fake_dispatch))
        changes.put_all(FakeTensor, _members(values, heard))
        changes.put_all(
            torch.Tensor, {"to": _moved, "cuda": _on_gpu, "cpu": _on_cpu, "new_tensor": _like}
        )
        changes.put(torch.utils, "swap_tensors", swap_without_memo)
        changes.put(torch, "compile", functools.partial(_uncompiled, heard))
        changes.put(torch.nn.Module, "compile", lambda _self, *_, **__: None)
        # It makes a real tensor on the GPU, so that autograd finds a stream.
        if hasattr(fake_tensor, "init_gpu_context"):
            changes.put(fake_tensor, "init_gpu_context", lambda _device: None)
        with mode:
            yield mode


# What an event says has passed since another, in milliseconds: no time passes where nothing runs.
ELAPSED_MS = 1.0
# The first generation with bfloat16 and TF32.
_AMPERE = 8
# torch's own lists, by the names of the functions: in the lower type, and in float32.
_LOWER_TEXT = """
    __matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul conv1d conv2d
    conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution einsum linear
    matmul mm mv prelu scaled_dot_product_attention
"""
_LOWER = frozenset(_LOWER_TEXT.split())
_SINGLE_TEXT = """
    __pow__ __rdiv__ __rpow__ acos asin binary_cross_entropy_with_logits cdist cosh
    cosine_embedding_loss cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1
    group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log log10 log1p log2
    log_softmax logsumexp margin_ranking_loss mse_loss nll_loss norm pdist poisson_nll_loss pow
    prod reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum
    tan triplet_margin_loss
"""
_SINGLE = frozenset(_SINGLE_TEXT.split())


class ImitatedStream:
    """A stream on which nothing runs."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.device_index, self.device_type = torch.device("cuda", 0), 0, 1
        self.stream_id = self.cuda_stream = 0
        self.priority = priority

    def query(self) -> bool:
        """Whether all work is done: there is none."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has happened."""
        return event if event is not None else ImitatedEvent()

    def synchronize(self, *_: Any) -> None:
        """Wait for nothing."""

    wait_event = wait_stream = synchronize

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the stream."""


class ImitatedEvent:
    """An event that has always happened."""

    def __init__(self, *_: Any, **_options: Any) -> None:
        self.cuda_event = 0

    def query(self) -> bool:
        """Whether it happened."""
        return True

    def elapsed_time(self, _end: Any) -> float:
        """Return the milliseconds that every kernel is said to take."""
        return ELAPSED_MS

    def record(self, *_: Any) -> None:
        """Do nothing."""

    synchronize = wait = record


class ImitatedGraph:
    """A graph of launches; the launches are captured when the program makes the graph."""

    def __init__(self, *_: Any, **_options: Any) -> None:
        """Make an empty graph."""

    def replay(self, *_: Any, **_options: Any) -> None:
        """Do nothing."""

    capture_begin = capture_end = reset = replay

    def pool(self) -> tuple[int, int]:
        """Return a memory pool's name."""
        return 0, 0


class _ImitatedGraphBlock(contextlib.nullcontext[None]):
    """`torch.cuda.graph(graph)`: the block runs as it would without a graph."""

    def __init__(self, *_: Any, **_options: Any) -> None:
        super().__init__()


@contextlib.contextmanager
def imitated_cuda(target: Target, device: TargetDevice) -> Iterator[None]:
    """Imitate the target's GPU to torch while the block runs."""
    with Replacements() as changes:
        changes.put_all(torch.cuda, {**_facts(target, device), **_idle(device), **_OBJECTS})
        # Torch's own code asks the module that defines a function, and programs the package.
        changes.put_all(torch.cuda.streams, {"Stream": ImitatedStream, "Event": ImitatedEvent})
        if target.backend == "hip":
            changes.put_all(torch.version, {"hip": "6.4", "cuda": None})
        elif torch.version.cuda is None:
            changes.put(torch.version, "cuda", "12.8")
        yield


def _facts(target: Target, device: TargetDevice) -> dict[str, Any]:
    major, minor = DeclaredDriver(target).get_device_capability()
    properties = SimpleNamespace(
        **asdict(device),
        major=major,
        minor=minor,
        max_threads_per_block=1024,
        warp_size=target.warp_size,
        shared_memory_per_block=device.shared_memory_per_block,
        shared_memory_per_multiprocessor=device.shared_memory_per_multiprocessor,
        clock_rate=KILOHERTZ,
        memory_clock_rate=KILOHERTZ,
        memory_bus_width=1024,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName=target.arch if target.backend == "hip" else device.name,
        uuid="00000000-0000-0000-0000-000000000000",
    )
    return {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: target.backend == "hip" or major >= _AMPERE,
        "is_tf32_supported": lambda: target.backend == "cuda" and major >= _AMPERE,
        "device_count": lambda: 1,
        "get_device_name": lambda _device=None: device.name,
        "get_device_capability": lambda _device=None: (major, minor),
        "get_device_properties": lambda _device=None: properties,
        "get_arch_list": lambda: [target.arch if target.backend == "hip" else f"sm_{target.arch}"],
        "can_device_access_peer": lambda *_: False,
    }


# What does nothing, and what answers 0: there is one device, on which nothing runs.
_NOTHING_TEXT = """
    init _lazy_init _lazy_call set_device synchronize ipc_collect set_stream manual_seed
    manual_seed_all seed seed_all set_rng_state set_rng_state_all reset_peak_memory_stats
    reset_accumulated_memory_stats reset_max_memory_allocated empty_cache
"""
_NOTHING = frozenset(_NOTHING_TEXT.split())
_ZERO_TEXT = """
    current_device _exchange_device _maybe_exchange_device initial_seed memory_allocated
    max_memory_allocated memory_reserved max_memory_reserved
"""
_ZERO = frozenset(_ZERO_TEXT.split())
_OBJECTS = {
    "Stream": ImitatedStream,
    "Event": ImitatedEvent,
    "ExternalStream": ImitatedStream,
    "CUDAGraph": ImitatedGraph,
    "graph": _ImitatedGraphBlock,
    "graph_pool_handle": lambda: (0, 0),
}


def _idle(device: TargetDevice) -> dict[str, Any]:
    """Return functions for the state of a device that does nothing."""
    return {
        **dict.fromkeys(_NOTHING, lambda *_, **__: None),
        **dict.fromkeys(_ZERO, lambda *_, **__: 0),
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "current_stream": lambda _device=None: ImitatedStream(),
        "default_stream": lambda _device=None: ImitatedStream(),
        "stream": lambda _stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "mem_get_info": lambda _device=None: (device.total_memory, device.total_memory),
        "memory_stats": lambda _device=None: {},
    }


class _Autocast(TorchFunctionMode):  # type: ignore[misc]
    """Casts arguments as autocast does, while torch says that it is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if (name in _LOWER or name in _SINGLE) and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda") if name in _LOWER else torch.float32
            # Without autocast, as in torch: what the function calls is not cast again.
            args, given = _cast(args, dtype), _cast(given, dtype)
        return func(*args, **given)


def _cast(tree: Any, dtype: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        counts = (
            tree.is_cuda and tree.is_floating_point() and tree.dtype not in {torch.float64, dtype}
        )
        return tree.to(dtype) if counts else tree
    if isinstance(tree, (list, tuple)) and type(tree) in {list, tuple}:
        return type(tree)(_cast(item, dtype) for item in tree)
    if isinstance(tree, dict):
        return {name: _cast(item, dtype) for name, item in tree.items()}
    return tree


@contextlib.contextmanager
def imitated_autocast() -> Iterator[None]:
    """Let `torch.autocast` cast fake tensors of a GPU while the block runs.

    torch casts in C++, above autograd, by the device that it sees (`imitated_tensors` says why that
    is another one).  While autocast is on, a function mode casts the arguments of the same
    functions here, also above autograd, so that gradients have the types that they would have.
    """
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    modes: list[_Autocast] = []

    def entering(autocast: Any) -> Any:
        result = enter(autocast)
        if autocast.device == "cuda":
            modes.append(_Autocast())
            modes[-1].__enter__()
        return result

    def leaving(autocast: Any, *error: Any) -> Any:
        if autocast.device == "cuda":
            modes.pop().__exit__(*error)
        return leave(autocast, *error)

    with Replacements() as changes:
        changes.put_all(torch.autocast, {"__enter__": entering, "__exit__": leaving})
        yield
