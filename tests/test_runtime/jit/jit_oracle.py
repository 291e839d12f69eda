# SPDX-License-Identifier: Apache-2.0
"""A program: launches through Triton's own CudaDriver code over a library that stands in for
libcuda, and prints what reached it.

    LD_LIBRARY_PATH=FOLDER python jit_oracle.py triton|bundler FAKE

`triton` lets Triton build its helpers with the C compiler, `bundler` gives it ours.  What is
printed is JSON: calls of the driver, the configuration and the parameter bytes of each launch,
errors by type and words, and what became of the modules.
"""

import ctypes
import importlib.util
import json
import struct
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# At the end: where the wheel is installed, that is what is tested, with its extensions.
sys.path.append(str(ROOT))
# Grid, block and shared memory; stream, attributes, how many.
CONFIG = struct.Struct("=7I4xQQI4x")
ATTRIBUTE_BYTES = 72


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Witness:
    """What the library was asked."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.images, self.launches, self.sizes = {}, [], None
        self._keep = (
            ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_void_p)(self._loaded),
            ctypes.CFUNCTYPE(
                None, ctypes.c_void_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p)
            )(self._launched),
        )
        for name, function in zip(("fake_loaded", "fake_launched"), self._keep, strict=True):
            ctypes.c_void_p.in_dll(self.library, name).value = ctypes.cast(
                function, ctypes.c_void_p
            ).value

    def _loaded(self, module, image):
        header = ctypes.string_at(image, 64)
        programs, sections = struct.unpack_from("<QQ", header, 32)
        counts = struct.unpack_from("<HHHH", header, 54)
        size = max(programs + counts[0] * counts[1], sections + counts[2] * counts[3])
        self.images[module + 1] = ctypes.string_at(image, size)

    def _launched(self, config, function, parameters):
        *facts, attributes, count = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
        sizes = self.sizes or self._sizes_of(function)
        self.launches.append(
            {
                "config": facts,
                "function": function,
                "attributes": [
                    ctypes.string_at(attributes + index * ATTRIBUTE_BYTES, ATTRIBUTE_BYTES).hex()
                    for index in range(count)
                ],
                "parameters": [
                    ctypes.string_at(parameters[index], size).hex()
                    for index, size in enumerate(sizes)
                ],
            }
        )

    def _sizes_of(self, function):
        from bundler.runtime.launch.plan_builder import read_layout

        image = self.images[function]
        return [slot.size for slot in read_layout(image, self.names[-1]).slots]

    @property
    def calls(self):
        return (
            (ctypes.c_char * (1 << 20))
            .in_dll(self.library, "fake_calls")
            .value.decode()
            .splitlines()
        )

    @property
    def names(self):
        return [call.split()[1] for call in self.calls if call.startswith("cuModuleGetFunction")]

    def forget(self):
        (ctypes.c_char * (1 << 20)).in_dll(self.library, "fake_calls").value = b""
        self.launches = []


class Maker:
    """Makes stand-ins for the tensors of tools/gpu/cases.py."""

    def __init__(self, calls, descriptor):
        self._calls, self._descriptor, self._next = calls, descriptor, calls.ADDRESS

    def _tensor(self, shape, dtype):
        self._next += 1 << 20
        return self._calls.Tensor(dtype, self._next, shape=tuple(shape))

    def random(self, *shape, dtype="float32"):
        return self._tensor(shape, dtype)

    empty = random

    def integers(self, size, limit):
        return self._tensor((size,), "int32")

    def zeros(self, *shape, dtype="int32"):
        return self._tensor(shape, dtype)

    def descriptor(self, tensor, *block):
        return self._descriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def activate():
    """Make Triton's CudaDriver code the active driver, without the devices and streams that it asks
    torch for.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver

    active = types.SimpleNamespace(
        utils=nvidia.CudaUtils(),
        launcher_cls=nvidia.CudaLauncher,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0x57,
        allocate_default_profile_scratch=lambda *_: None,
    )
    driver.set_active(active)
    return active


def by_jit(witness):
    """Launch every case of the GPU check, and every call of launch_calls.py, by the JIT."""
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    compile_calls, calls = (
        load(HERE.parent / "compile_calls.py"),
        load(HERE.parent / "launch_calls.py"),
    )
    kernels = load(HERE.parent / "launch_kernels.py")
    cases, gpu_kernels = load(ROOT / "tools/gpu/cases.py"), load(ROOT / "tools/gpu/kernels.py")
    calls.ITEM_BYTES.setdefault("float8_e4m3fn", 1)
    calls.DTYPES.setdefault("float8_e4m3fn", calls.DType("float8_e4m3fn"))
    triton.set_allocator(lambda size, align, stream: calls.Tensor(address=0xABC0000 + size * align))
    for case in cases.cases(1):
        maker = Maker(calls, TensorDescriptor)
        kernel = getattr(gpu_kernels, case.kernel)
        yield case.row, lambda k=kernel, c=case, m=maker: k[c.grid](*c.arguments(m), **c.options)
    for number, call in enumerate(calls.CALLS):
        args = compile_calls.for_triton(call.args, calls, kernels)
        kernel = kernels.FUNCTIONS[call.kernel]
        yield (
            f"{number} {call.kernel}",
            lambda k=kernel, a=args, c=call: k[(2, 3, 1)](*a, **c.keywords),
        )


SIZES = {
    "i1": 1,
    "i8": 1,
    "u1": 1,
    "u8": 1,
    "i16": 2,
    "u16": 2,
    "fp16": 2,
    "bf16": 2,
    "i32": 4,
    "u32": 4,
    "fp32": 4,
    "f32": 4,
    "i64": 8,
    "u64": 8,
    "fp64": 8,
}
INTEGERS = [
    0,
    1,
    -1,
    5,
    127,
    128,
    -128,
    -129,
    255,
    256,
    32767,
    32768,
    -32769,
    65535,
    65536,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**32 - 1,
    2**32,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64 - 1,
    2**64,
    True,
    1.5,
    "text",
    None,
]
FLOATS = [
    0.0,
    -0.0,
    1.5,
    1.2345678,
    65504.0,
    1e5,
    1e-8,
    3e38,
    1e39,
    -1e300,
    float("inf"),
    float("nan"),
    7,
    True,
    "text",
    None,
]


class Address:
    def __init__(self, answer):
        self.answer = answer

    def data_ptr(self):
        return self.answer


POINTERS = [
    None,
    0,
    1 << 40,
    2**64 - 1,
    2**64,
    -1,
    True,
    1.5,
    "text",
    Address(1 << 40),
    Address(0),
    Address(4096),
    Address(8),
    Address("text"),
    Address(1.5),
]


def by_hand(witness):
    """Launch by CudaLauncher alone: each type with values that fit and that do not, and everything
    a launch can have.
    """
    for kind, size in SIZES.items():
        values = FLOATS if kind in {"fp16", "bf16", "fp32", "f32", "fp64"} else INTEGERS
        for value in values:
            yield f"{kind} {value!r}", hand(witness, (kind,), (value,), [size])
    for value in POINTERS:
        yield (
            f"pointer {value if not isinstance(value, Address) else (value.answer,)!r}",
            hand(witness, ("*fp32",), (value,), [8]),
        )
    nested = ("*fp32", ("i32", ("fp16", "constexpr")), "constexpr", ("constexpr",), "i8", ())
    yield "tuples", hand(witness, nested, (1 << 40, (3, (1.5, "c")), 7, (9,), 12, ()), [8, 4, 2, 1])
    many = ("i32", "fp64", "*i8") * 60
    yield "180 values", hand(witness, many, (3, 2.5, 1 << 33) * 60, [4, 8, 8] * 60)
    yield "none", hand(witness, (), (), [])
    plain = (("i32",), (3,), [4])
    for grid in ((0, 1, 1), (1, 0, 1), (2, 3, 4), (-1, 1, 1), (1 << 20, 1 << 20, 1)):
        yield f"grid {grid}", hand(witness, *plain, grid=grid)
    for clusters in (2, 4, 16):
        yield f"{clusters} clusters", hand(witness, *plain, clusters=clusters)
    yield "cooperative and serial", hand(witness, *plain, cooperative=True, pdl=True, clusters=2)
    yield "refused", hand(witness, *plain, warps=64)
    yield "much shared memory", hand(witness, *plain, shared=240 * 1024, pdl=True)
    yield "scratch", hand(witness, *plain, scratch=(64, 128))
    yield "a hook that raises", hand(witness, *plain, enter=_raises)
    yield "a hook that raises afterwards", hand(witness, *plain, leave=_raises)
    yield (
        "a value that is none, behind a hook",
        hand(witness, ("fp16",), ("text",), [2], enter=witness.noted),
    )
    yield "hooks", hand(witness, *plain, enter=witness.noted, leave=witness.noted)
    yield "large numbers", hand(witness, *plain, stream=2**64 - 1)


def _raises(metadata):
    raise KeyError(metadata)


def hand(
    witness,
    signature,
    values,
    sizes,
    *,
    grid=(1, 2, 3),
    warps=4,
    clusters=1,
    shared=0,
    cooperative=False,
    pdl=False,
    scratch=(0, 0),
    enter=None,
    leave=None,
    stream=0x57,
):
    from triton.backends.nvidia.driver import CudaLauncher

    metadata = types.SimpleNamespace(
        num_ctas=clusters,
        global_scratch_size=scratch[0],
        global_scratch_align=16,
        profile_scratch_size=scratch[1],
        profile_scratch_align=8,
        launch_cooperative_grid=cooperative,
        launch_pdl=pdl,
        tensordesc_meta=None,
    )
    source = types.SimpleNamespace(
        constants={}, signature={f"a{index}": kind for index, kind in enumerate(signature)}
    )

    def launch():
        witness.sizes = [*sizes, 8, 8]
        launcher = CudaLauncher(source, metadata)
        launcher(
            *grid, stream, 0xF00D, (warps, clusters, shared), {"name": "k"}, enter, leave, *values
        )

    return launch


def helpers(witness, utils):
    """Call each function of the helpers as Triton does, and wrongly."""
    names = dir(utils)
    yield "properties", lambda: utils.get_device_properties(0)
    capability = (ctypes.c_int * 2).in_dll(witness.library, "fake_capability")

    def other_chip():
        capability[0], capability[1] = 10, 7
        try:
            return utils.get_device_properties(1)
        finally:
            capability[0], capability[1] = 9, 0

    yield "properties of 10.7", other_chip
    yield "clusters", lambda: utils.cuOccupancyMaxActiveClusters(0xF00D, 1000, 8)
    yield "fifo", lambda: utils.set_printf_fifo_size(123)
    yield "the same fifo", lambda: utils.set_printf_fifo_size(1 << 20)
    yield "negative fifo", lambda: utils.set_printf_fifo_size(-1)
    for name, args in (
        ("unload_module", (0x55,)),
        ("get_current_device", ()),
        ("set_current_device", (0,)),
        ("get_default_stream", (0,)),
        ("is_stream_capturing", (5,)),
        ("is_stream_capturing", (6,)),
        ("get_device_capability", (0,)),
    ):
        if name in names:
            yield f"{name}{args}", lambda n=name, a=args: getattr(utils, n)(*a)
    tiled = (
        "fill_tma_descriptor_tiled"
        if "fill_tma_descriptor_tiled" in names
        else "fill_tma_descriptor"
    )
    for args in (
        (1 << 40, 1, 2, 6, [64, 32], [100, 200], [200, 1], 0),
        (1 << 40, 3, 4, 7, (8, 16, 32), (9, 99, 999), (98901, 999, 1), 1),
        (1 << 40, 3, 4, 7, [16], [99], [1], 0),
        (1 << 40, 3, 4, 7, [16, 16], [99], [1], 0),
        (1 << 40, 3, 4, 7, [16], [99], [1, 1], 0),
        (1 << 40, 3, 4, 7, 5, [99], [1], 0),
        (1 << 40, 3, 4, 7, ["x"], [99], [1], 0),
        (1 << 40, 3, 4, 99, [16], [99], [1], 0),
    ):
        yield f"{tiled} {args}", lambda a=args: getattr(utils, tiled)(*a)
    if "fill_tma_descriptor_im2col" in names:
        yield from im2col(utils)


def im2col(utils):
    first = (1 << 40, 1, 2, 6, [64, 32], [8, 9, 10, 11], [990, 110, 11, 1], 1, [-1, -2], [1, 2])
    yield "im2col", lambda: utils.fill_tma_descriptor_im2col(*first, [1, 2, 2, 1])
    yield "im2col, apart", lambda: utils.fill_tma_descriptor_im2col(*first, 64, 32, [1, 2, 2, 1])
    yield "im2col, steps", lambda: utils.fill_tma_descriptor_im2col(*first, [1, 2])


def outcome(witness, work):
    """Run one piece of work; returns what it said, and what reached the library."""
    witness.forget()
    witness.hooked = []
    try:
        answer = work()
        said = answer if isinstance(answer, (int, bool, dict, tuple)) else type(answer).__name__
        if said == "PyCUtensorMap":
            said = ctypes.string_at(id(answer) + 128, 128).hex()
    except Exception as error:  # noqa: BLE001  # whatever it is, both must raise it
        said = [type(error).__name__, str(error)]
    return {
        "said": said,
        "launches": witness.launches,
        "calls": witness.calls,
        "hooked": witness.hooked,
    }


def main(way, fake):
    compile_calls = load(HERE.parent / "compile_calls.py")
    compile_calls.stand_in_for_torch()
    witness = Witness(fake)
    witness.noted = lambda metadata: witness.hooked.append(
        (metadata["name"], len(witness.launches))
    )
    answers = []
    if way == "bundler":
        import triton.backends.nvidia.driver  # noqa: F401

        from bundler.runtime.launch.jit.jit_modules import JitModules
        from bundler.toolchain.driver_modules import driver_modules

        driver_modules.supply(JitModules(answers.append))
    active = activate()
    found = {}
    for part in (by_jit(witness), by_hand(witness), helpers(witness, active.utils)):
        for name, work in part:
            assert name not in found, name
            found[name] = outcome(witness, work)
            witness.sizes = None
    print(json.dumps({"found": found, "answers": answers}, default=str))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
