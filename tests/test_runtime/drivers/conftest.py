# SPDX-License-Identifier: Apache-2.0
"""A library that stands in for CUDA's and HIP's, the compiled launcher, and plans of kernels that
do not exist.
"""

import ctypes
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import compiling
import pytest

from bundler.format.entries import Target
from bundler.runtime.launch.drivers import launchers
from bundler.runtime.launch.drivers.cuda import CudaDriver
from bundler.runtime.launch.drivers.hip import HipDriver
from bundler.runtime.launch.plan import KIND_BYTES, LaunchPlan, Parameter

HERE = Path(__file__).parent
HIDDEN = ("global_scratch", "profile_scratch")
DRIVERS = {"cuda": CudaDriver, "hip": HipDriver}


class Launch(ctypes.Structure):
    """What the library was asked to launch last."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("attribute_count", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("function", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("attributes", ctypes.c_ubyte * (4 * 72)),
        ("parameters", ctypes.c_ubyte * 16384),
    )


@dataclass
class Fake:
    """The library, and what it noted."""

    path: str
    library: ctypes.CDLL

    def number(self, name):
        return ctypes.c_int.in_dll(self.library, name)

    @property
    def last(self):
        return Launch.in_dll(self.library, "fake_last")

    @property
    def calls(self):
        return (
            (ctypes.c_char * (1 << 16))
            .in_dll(self.library, "fake_calls")
            .value.decode()
            .split("\n")[:-1]
        )

    def forget(self):
        """Begin a new record."""
        (ctypes.c_char * (1 << 16)).in_dll(self.library, "fake_calls").value = b""
        for name in (
            "fake_launches",
            "fake_loaded",
            "fake_unloaded",
            "fake_live_scratch",
            "fake_torn",
        ):
            self.number(name).value = 0
        self.number("fake_max_threads").value = 1024
        self.number("fake_static_shared").value = 0
        (ctypes.c_char * 64).in_dll(self.library, "fake_failing").value = b""

    def fail(self, call, status):
        """Let the next call of this name fail."""
        (ctypes.c_char * 64).in_dll(self.library, "fake_failing").value = call.encode()
        self.number("fake_status").value = status

    def expect(self, plan):
        """Copy the parameters of this plan from each launch on."""
        count = len(plan.parameters)
        self.number("fake_parameter_count").value = count
        sizes = (ctypes.c_uint32 * 600).in_dll(self.library, "fake_parameter_sizes")
        offsets = (ctypes.c_uint32 * 600).in_dll(self.library, "fake_parameter_offsets")
        for index, parameter in enumerate(plan.parameters):
            sizes[index], offsets[index] = parameter.size, parameter.offset

    def parameters(self, plan):
        """Return the parameter buffer of the last launch."""
        return bytes(self.last.parameters)[: plan.buffer_bytes]


class Tensor:
    """Has an address, as torch's tensors have."""

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory):
    """Compile the library once."""
    path = tmp_path_factory.mktemp("fake") / "libfake.so"
    subprocess.run(
        [compiling.compiler(), "-shared", "-fPIC", "-O1", HERE / "fake_driver.c", "-o", path],
        check=True,
    )
    return Fake(str(path), ctypes.CDLL(str(path)))


@pytest.fixture
def fake(fake_library):
    """Return the library with nothing noted, and no context in this thread."""
    fake_library.forget()
    fake_library.library.cuCtxSetCurrent(None)
    fake_library.library.hipSetDevice(0)
    fake_library.forget()
    return fake_library


@pytest.fixture(scope="session")
def launcher_type(tmp_path_factory):
    """Return the compiled launcher: the installed one, or compiled now."""
    return (
        launchers.compiled_type()
        or compiling.compile_extension("_launch", tmp_path_factory.mktemp("extension")).Launcher
    )


@pytest.fixture(params=["compiled", "ctypes"])
def path(request, monkeypatch):
    """Take each of the two launch paths."""
    if request.param == "compiled":
        kind = request.getfixturevalue("launcher_type")
        monkeypatch.setattr(launchers, "compiled_type", lambda: kind)
    return request.param


@pytest.fixture
def open_driver(fake, path, monkeypatch):
    """Return a function that opens a driver over the library, with no torch in sight."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return lambda backend="cuda": DRIVERS[backend](fake.path, compiled=path == "compiled")


@pytest.fixture
def ready(open_driver, fake):
    """Return a function that loads a plan's kernel and returns its driver, module and launcher."""

    def load(plan, image=b"image", device=0):
        driver = open_driver(plan.target.backend)
        fake.expect(plan)
        module = driver.load(plan, image, device)
        return driver, module, driver.launcher(module)

    return load


def make_plan(*kinds, backend="cuda", hidden=HIDDEN, **fields):
    """Return a plan with a parameter of each kind, laid out as C would, and the hidden two."""
    parameters, at = [], 0
    for index, kind in enumerate([*kinds, *hidden]):
        size = KIND_BYTES[kind]
        at += -at % min(size, 64)
        argument = None if kind in HIDDEN else index
        parameters.append(Parameter(f"a{index}", kind, at, size, argument))
        at += size
    target = {"cuda": Target("cuda", "90"), "hip": Target("hip", "gfx942", 64)}[backend]
    plan = LaunchPlan(
        "kernel",
        "K" * 52,
        "entry",
        target,
        tuple(parameters),
        at,
        block_threads=128,
        cluster=1,
        shared_bytes=0,
        cooperative=False,
        pdl=False,
        global_scratch_bytes=0,
        global_scratch_align=1,
        profile_scratch_bytes=0,
        profile_scratch_align=1,
    )
    return replace(plan, **fields)


@pytest.fixture(scope="session")
def plan():
    """Return `make_plan`."""
    return make_plan


@pytest.fixture(scope="session")
def tensor():
    """Return `Tensor`."""
    return Tensor
