# SPDX-License-Identifier: Apache-2.0
"""Calls of the kernels in launch_kernels.py, as data that needs neither Triton nor torch."""

from dataclasses import dataclass, field

ADDRESS = 0x7F00_0000_0000


ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "float64": 8,
    "float8_e5m2": 1,
    "bool": 1,
}


class DType:
    """An element type by its torch name, which is all that Triton and we look at."""

    def __init__(self, name):
        self.name, self.itemsize = name, ITEM_BYTES[name]

    def __str__(self):
        return f"torch.{self.name}"


DTYPES = {name: DType(name) for name in ITEM_BYTES}


@dataclass(frozen=True)
class Tensor:
    """What a tensor is to a launch: an address, an element type, a device and a size."""

    name: str = "float32"
    address: int = ADDRESS
    index: int = 0
    bytes: int = 1 << 20
    shape: tuple = (64, 64)

    @property
    def dtype(self):
        return DTYPES[self.name]

    def data_ptr(self):
        return self.address

    def get_device(self):
        return self.index

    def ptr_range(self):
        return self.bytes

    def stride(self):
        return (self.shape[-1], 1)


@dataclass(frozen=True)
class Descriptor:
    """A host tensor descriptor, with the fields of Triton's own."""

    base: Tensor
    shape: list
    strides: list
    block_shape: list
    padding: str = "zero"
    round_f32_to_tf32: bool = False


@dataclass(frozen=True)
class Dtype:
    """Stands for a Triton type in a constant."""

    name: str


@dataclass(frozen=True)
class Function:
    """Stands for a JIT function in a constant."""

    name: str


@dataclass(frozen=True)
class Call:
    """One launch; `only` names the one backend that it is made on."""

    kernel: str
    args: tuple
    keywords: dict = field(default_factory=dict)
    only: str | None = None


X, Y, OUT = Tensor(), Tensor(address=ADDRESS + 4096), Tensor(address=ADDRESS + 8192)
ODD = Tensor(address=ADDRESS + 4)
LONGS = Tensor("int64", ADDRESS + 8192)
HALF = Tensor("float16")
DOUBLES = Tensor("float64", ADDRESS + 8192)
HUGE = Tensor(bytes=1 << 32)

CALLS = (
    Call("add", (X, Y, OUT, 1024)),
    Call("add", (X, Y, OUT, 1000)),
    Call("add", (X, Y, OUT, 1)),
    Call("add", (X, Y, OUT, 1 << 40)),
    Call("add", (X, Y, OUT, 1 << 63)),
    Call("add", (ODD, Y, OUT, 1024)),
    Call("add", (HALF, HALF, HALF, 1024)),
    Call("add", (X, Y, OUT, 1024), {"BLOCK": 128}),
    Call("add", (X, Y, OUT, 1024), {"BLOCK": 128, "num_warps": 8}),
    Call("add", (X, Y, OUT, 1024), {"num_stages": 1}),
    Call("add", (X, Y), {"out": OUT, "n": 2048, "BLOCK": 64, "num_warps": 4}),
    Call("add", (HUGE, Y, OUT, 1024)),
    Call("add", (X, Y, OUT, 1024), {"launch_cooperative_grid": True}),
    Call("add", (X, Y, OUT, 1024), {"launch_pdl": True}, "cuda"),
    Call("add", (X, Y, OUT, 1024), {"num_ctas": 2}, "cuda"),
    Call("integers", (LONGS, -3, 300, 1 << 20, 1 << 40, 200, 60000, 1 << 31, 1 << 63, True)),
    Call("integers", (LONGS, 1, 1, 1, 1, 1, 1, 1, 1, False)),
    Call("integers", (LONGS, 16, 32, 48, 64, 80, 96, 112, 128, True)),
    Call("floats", (DOUBLES, 1.5, 2.5, 3.5, 4.5, 5.5)),
    Call("loose", (X, True, 2.5, 3)),
    Call("loose", (X, 5, 2, 1)),
    Call("optional", (X, None, OUT, None)),
    Call("optional", (X, Y, OUT), {"scale": 2.0}),
    Call("optional", (X, Y, OUT), {"scale": 3}),
    Call("nested", ((X, Y), (2, (3, 16)), OUT)),
    Call("nested", ((X, ODD), (1, (16, 16)), OUT)),
    Call("unspecialized", (X, OUT, 16, 16, 1, 1)),
    Call("unspecialized", (X, ODD, 1, 1, 16, 16)),
    Call("unspecialized", (X, OUT, 1 << 40, 17, 1 << 40, 3)),
    Call("read_only", (X, OUT)),
    Call("declared", (ADDRESS, OUT)),
    Call("declared", (ADDRESS + 4, OUT)),
    Call("declared", (X, OUT)),
    Call("eighths", (Tensor("float8_e5m2"), OUT)),
    Call("eighth", (X, 1.5)),
    Call("constants", (X, Dtype("int32"), "twice", (2, 3), Function("double"))),
    Call("constants", (X, Dtype("float32"), "once", (2, 3), Function("double"))),
    Call("nothing", ()),
    Call("host_descriptor", (Descriptor(HALF, [64, 48], [48, 1], [16, 16]), HALF)),
    Call("device_descriptor", (HALF, HALF, 64, 48)),
)


def without_triton(value):
    """Return how an argument is given where there is no Triton: types and JIT functions by their
    names.
    """
    if isinstance(value, tuple):
        return tuple(map(without_triton, value))
    if isinstance(value, Dtype):
        return {"float32": "fp32"}.get(value.name, value.name)
    if isinstance(value, Function):
        return f"launch_kernels:{value.name}"
    return value
