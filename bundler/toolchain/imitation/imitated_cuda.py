# SPDX-License-Identifier: Apache-2.0
"""`imitated_cuda`: torch's `torch.cuda` as on a machine with the target's GPU, for programs that are
captured; nothing of it touches a driver.

Libraries look at `torch.cuda` when they are imported, and programs before each launch.  What is
asked about the device comes from `target_devices.py`; streams, events, graphs and memory statistics
are objects that do nothing.  `imitated_autocast` is `torch.autocast("cuda")` for fake tensors,
which torch's C++ code does not take for tensors of a GPU.  Used by `program_imitation.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from bundler.format.entries import Target
from bundler.toolchain.declared_target import DeclaredDriver
from bundler.toolchain.imitation.replaced_attributes import Replacements
from bundler.toolchain.imitation.target_devices import TargetDevice, described

# What an event says has passed since another, in milliseconds: no time passes where nothing runs.
ELAPSED_MS = 1.0
_KILOHERTZ = 1_000_000
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
        **described(device),
        major=major,
        minor=minor,
        max_threads_per_block=1024,
        warp_size=target.warp_size,
        shared_memory_per_block=device.shared_memory_per_block,
        shared_memory_per_multiprocessor=device.shared_memory_per_multiprocessor,
        clock_rate=_KILOHERTZ,
        memory_clock_rate=_KILOHERTZ,
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

    torch casts in C++, above autograd, by the device that it sees (`fake_tensors.py` says why that
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
