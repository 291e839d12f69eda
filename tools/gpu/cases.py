# SPDX-License-Identifier: Apache-2.0
"""How each kernel of kernels.py is called: by Triton and by us alike, so this file knows
neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

SEED = 6


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor on the host, with what Triton's own has."""

    base: Any
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


@dataclass(frozen=True)
class Case:
    """One call: `arguments(make)` returns the values, of which the one at `output` is compared.

    `options` go to both launches: constants and compile options.  `where` says which stream or
    device it runs on.
    """

    row: str
    kernel: str
    grid: tuple[int, ...]
    arguments: Callable[[Maker], list[Any]]
    output: int
    options: dict[str, Any]
    where: str = ""


class Maker:
    """Makes the same tensors in every process.  `descriptor` is the class of host descriptors."""

    def __init__(self, torch: Any, device: int, descriptor: Any) -> None:
        self.torch, self.device, self._descriptor = torch, f"cuda:{device}", descriptor
        self._generator = torch.Generator().manual_seed(SEED)

    def random(self, *shape: int, dtype: str = "float32") -> Any:
        """Return normal numbers."""
        values = self.torch.randn(shape, generator=self._generator)
        return values.to(getattr(self.torch, dtype)).to(self.device)

    def integers(self, size: int, limit: int) -> Any:
        """Return whole numbers below a limit."""
        values = self.torch.randint(
            0, limit, (size,), generator=self._generator, dtype=self.torch.int32
        )
        return values.to(self.device)

    def empty(self, *shape: int, dtype: str = "float32") -> Any:
        """Return an output; nothing that a kernel writes is all ones."""
        return self.torch.full(shape, -1, dtype=getattr(self.torch, dtype), device=self.device)

    def zeros(self, *shape: int, dtype: str = "int32") -> Any:
        """Return an output that is added to."""
        return self.torch.zeros(shape, dtype=getattr(self.torch, dtype), device=self.device)

    def descriptor(self, tensor: Any, *block: int) -> Any:
        """Return a host descriptor of a tensor."""
        return self._descriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def cases(devices: int) -> Iterator[Case]:
    """Yield the cases; with one device, none for two."""

    def case(
        row: str, kernel: str, grid: tuple[int, ...], arguments: Any, output: int, **options: int
    ) -> Case:
        return Case(row, kernel, grid, arguments, output, options)

    tiles = {"BLOCK_M": 128, "BLOCK_N": 128}
    add = case("vector add", "add", (40,), _vectors(9999), 2, BLOCK=256)
    yield add
    yield case("fused softmax", "softmax", (64,), _softmax, 1, BLOCK=1024)
    wide, warps = "fp16 matmul, more than 48 kB of shared memory", {"num_warps": 8, "num_stages": 4}
    yield case(wide, "matmul", (2, 2), _matrices, 2, **tiles, BLOCK_K=64, **warps)
    yield case("layer norm, a float by value", "layer_norm", (32,), _layer_norm, 2, BLOCK=512)
    yield case("atomics", "histogram", (20,), _counted, 1, BLOCK=256)
    yield case("reduction", "row_sum", (32,), _row_sum, 1, BLOCK=512)
    yield case("integers of every width", "integers", (1,), _integers, 0)
    yield case("fp16, bf16, fp32, fp64 and bool by value", "floats", (1,), _floats, 0)
    yield case("fp8 pointers", "eighths", (4,), _eighths, 1, BLOCK=256)
    yield case("None, and an argument equal to 1", "optional", (4,), _optional(False), 2, BLOCK=256)
    yield case("the same with a tensor", "optional", (4,), _optional(True), 2, BLOCK=256)
    yield case("2-D grid", "places", (7, 5), _places(35), 0)
    yield case("3-D grid", "places", (7, 5, 3), _places(105), 0)
    for row, option in (
        ("cooperative launch", "launch_cooperative_grid"),
        ("programmatic dependent launch", "launch_pdl"),
    ):
        yield case(row, "add", (4,), _vectors(999), 2, BLOCK=256, **{option: True})
    clusters = "clusters of 2 blocks"
    yield case(f"{clusters}: vector add", "add", (10,), _vectors(9999), 2, BLOCK=1024, num_ctas=2)
    matmul = case(f"{clusters}: fp16 matmul", "matmul", (2, 2), _matrices, 2, **tiles, BLOCK_K=32)
    yield replace(matmul, options=matmul.options | {"num_ctas": 2})
    scratch = "global scratch (descriptors made on the device)"
    yield case(scratch, "device_descriptor", (4, 4), _square, 1, SIZE=64)
    yield case("host tensor descriptors", "host_descriptor", (4, 4), _descriptors, 1, SIZE=64)
    yield replace(add, row="another stream", where="stream")
    if devices > 1:
        yield replace(add, row="another device", where="device")


def _softmax(m: Maker) -> list[Any]:
    return [m.random(64, 1000), m.empty(64, 1000), 1000, 1000]


def _layer_norm(m: Maker) -> list[Any]:
    return [m.random(32, 500), m.random(500), m.empty(32, 500), 500, 500, 1e-5]


def _counted(m: Maker) -> list[Any]:
    return [m.integers(5000, 64), m.zeros(64), 5000]


def _row_sum(m: Maker) -> list[Any]:
    return [m.random(32, 500), m.empty(32), 500, 500]


def _integers(m: Maker) -> list[Any]:
    # Triton 3.6 itself refuses a negative i8.
    signed = (127, -32768, -(2**31), -(2**63))
    return [m.empty(8, dtype="int64"), *signed, 255, 65535, 2**32 - 1, 2**64 - 1]


def _floats(m: Maker) -> list[Any]:
    values = (1.2345678, 1.999, 3.3333333333, 2.2250738585072014e-300)
    return [m.empty(5, dtype="float64"), *values, True]


def _eighths(m: Maker) -> list[Any]:
    return [m.random(1000, dtype="float8_e4m3fn"), m.empty(1000), 1000]


def _optional(given: bool) -> Callable[[Maker], list[Any]]:
    return lambda m: [m.random(1024), m.random(1024) if given else None, m.empty(1024), 1]


def _places(count: int) -> Callable[[Maker], list[Any]]:
    return lambda m: [m.empty(count, dtype="int32"), 7, 5]


def _square(m: Maker) -> list[Any]:
    return [m.random(256, 256), m.empty(256, 256), 256, 256]


def _vectors(size: int) -> Callable[[Maker], list[Any]]:
    return lambda m: [m.random(size), m.random(size), m.empty(size), size]


def _matrices(m: Maker) -> list[Any]:
    left, right = m.random(256, 512, dtype="float16"), m.random(512, 256, dtype="float16")
    return [left, right, m.empty(256, 256, dtype="float16"), 256, 512]


def _descriptors(m: Maker) -> list[Any]:
    return [m.descriptor(m.random(256, 256), 64, 64), m.descriptor(m.empty(256, 256), 64, 64)]
