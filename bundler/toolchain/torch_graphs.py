# SPDX-License-Identifier: Apache-2.0
"""`TorchGraphs`: CUDA graphs by torch: capture, replay, and who still has the memory of a result.

`TorchMemory.graphs` makes one; `runtime.program.graph_replay` has the rules by which a program uses
it.  ROCm's graphs have the same names in torch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self.device = torch, device
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # noqa: SLF001
        self._guards: Any = getattr(guards, "TensorGuards", None)
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
        try:
            self._torch._foreach_copy_(targets, sources)
        except NotImplementedError:  # of a dtype as complex32
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

    def recognizer(self, tensors: Sequence[Any]) -> Callable[..., bool] | None:
        """Return what says whether other tensors have the types, dtypes, sizes, strides, devices
        and marks of these; None where torch has no quick way.
        """
        if self._guards is None:
            return None
        made = self._guards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
        found: Callable[..., bool] = made.check
        return found


def _is_nowhere(tensor: Any) -> bool:
    """Whether a tensor has no memory: one without elements, or of zeros that torch stores not."""
    return tensor.numel() == 0 or bool(tensor._is_zerotensor())  # noqa: SLF001
