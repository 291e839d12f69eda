# SPDX-License-Identifier: Apache-2.0
"""`Machine`: AMD GPUs that are not there: what `hip_stand_in.c` answers, and the record of what it
was asked.

Its images are kernels that Triton compiled.  `hip_scenarios.py` drives it.
"""

import contextlib
import ctypes
import importlib.util
import subprocess
from pathlib import Path

import compiling
import msgpack
import pytest

from bundler.runtime import build_plan
from bundler.runtime.launch.drivers.hip import HipDriver

HERE = Path(__file__).resolve().parent
# e_flags of a code object: the machine in the lowest byte, then two bits for xnack and two for
# sramecc.
MACHINES = {"gfx942": 0x4C, "gfx950": 0x4F, "gfx1100": 0x41}
OFF, ON = 2, 3
_FLAGS_AT = 48
# A stream of device 1, by the stand-in's own numbers.
STREAM_OF_1 = 0x5001


def headers():
    """Return the folder of AMD's headers that come with Triton, or skip."""
    found = importlib.util.find_spec("triton")
    folder = Path(found.origin).parent / "backends" / "amd" / "include" if found else Path("none")
    if not (folder / "hip" / "hip_runtime_api.h").exists():
        pytest.skip("needs the HIP headers of a Triton, and there are none")
    return folder


def compile_stand_in(folder, *, lacking=False):
    """Compile the library against AMD's headers; with `lacking` it is one without the functions
    that are optional.
    """
    path = folder / ("lacking" if lacking else "whole") / "libamdhip64.so"
    path.parent.mkdir(exist_ok=True)
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
    command = [
        compiling.compiler(),
        "-shared",
        "-fPIC",
        *warnings,
        "-D__HIP_PLATFORM_AMD__",
        "-isystem",
        headers(),
        *(["-DLACKING"] if lacking else []),
        HERE / "hip_stand_in.c",
        "-o",
        path,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return path


def declared_sizes(image):
    """Return the sizes of a kernel's parameters as its code object declares them, read without the
    code under test.
    """
    name = image.index(b"AMDGPU\0\0")
    length = int.from_bytes(image[name - 8 : name - 4], "little")
    (kernel,) = msgpack.unpackb(image[name + 8 : name + 8 + length])["amdhsa.kernels"]
    return [argument[".size"] for argument in kernel[".args"]]


def retargeted(image, arch, *, xnack=0, sramecc=0):
    """Return a code object that says it is for another architecture, or wants a feature on
    or off.
    """
    flags = MACHINES[arch] | xnack << 8 | sramecc << 10
    return image[:_FLAGS_AT] + flags.to_bytes(4, "little") + image[_FLAGS_AT + 4 :]


class Machine:
    """One machine, and the record of a scenario on it: calls, errors, and what the scenario says of
    them.
    """

    def __init__(self, path, kind, recorded):
        self.path, self._compiled, self.recorded = path, kind == "compiled", recorded
        self._library = ctypes.CDLL(str(path))
        self._library.stand_in_text.restype = ctypes.c_char_p
        self._library.stand_in_reset()
        self._taken, self._lines = 0, []

    # -------------------------------------------------------------------------------- What there is

    def device(
        self, arch="gfx942:sramecc+:xnack-", *, shared=65536, units=304, warp=64, cooperative=True
    ):
        """Add a GPU."""
        numbers = [MACHINES[arch.partition(":")[0]]]
        numbers += [ON if f"{feature}+" in arch else OFF for feature in ("xnack", "sramecc")]
        self._library.stand_in_device(
            arch.encode(), *numbers, 1024, shared, units, warp, int(cooperative)
        )

    def memory(self, start, end, kind, device=0, *, managed=False):
        """Add memory of one of HIP's types."""
        self._library.stand_in_memory(
            ctypes.c_uint64(start), ctypes.c_uint64(end), kind, device, int(managed)
        )

    def fail(self, call, status):
        """Let the next call of a name fail."""
        self._library.stand_in_fail(call.encode(), status)

    def limits(self, *, threads=1024, blocks=1 << 30):
        """Set the threads that a block of any kernel may have, and the blocks of a cooperative
        launch.
        """
        self._library.stand_in_limits(threads, blocks)

    def open(self, *, named=False):
        """Open the driver; `named`: with the library as a user's environment names it."""
        if not named:
            return HipDriver(str(self.path), compiled=self._compiled)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_LIBHIP_PATH", str(self.path))
            return HipDriver(compiled=self._compiled)

    def kernel(self, **wanted):
        """Return plan and image of the recorded `add` whose plan has these fields, and four
        wavefronts where nothing is said.
        """
        # Which kernel is the first is luck: their order is that of their keys.
        bundle, wanted = self.recorded.bundle, {"block_threads": 256, **wanted}
        for kernel in bundle.kernels:
            if kernel.name == "add" and str(kernel.target) == "hip:gfx942":
                image = bundle.read(kernel.binary)
                plan = build_plan(kernel, image)
                if plan.parameters[3].kind == "i32" and all(
                    getattr(plan, name) == wanted[name] for name in wanted
                ):
                    return plan, self.expect(image)
        raise AssertionError(f"no such kernel was recorded: {wanted}")

    def expect(self, image):
        """Let launches write down their parameters as this image declares them; returns the
        image.
        """
        sizes = declared_sizes(image)
        self._library.stand_in_parameters((ctypes.c_uint * len(sizes))(*sizes), len(sizes))
        return image

    # -------------------------------------------------------------------------------- What happened

    def say(self, words):
        """Write a line of the record."""
        self._take()
        self._lines.append(f"# {words}")

    @contextlib.contextmanager
    def refuses(self, kind):
        """Expect an error, and write it down."""
        with pytest.raises(kind) as caught:
            yield
        self._take()
        self._lines.append(f"raises {type(caught.value).__name__}: {caught.value}")

    def record(self):
        """Return the record of the scenario."""
        self._take()
        return "\n".join(self._lines) + "\n"

    @property
    def last_error(self):
        """What torch would raise after its next launch."""
        return self._library.stand_in_last_error()

    @property
    def allocated(self):
        """How many allocations were not given back."""
        self._library.stand_in_allocated.restype = ctypes.c_uint64
        return self._library.stand_in_allocated()

    def _take(self):
        text = self._library.stand_in_text().decode()
        self._lines += text[self._taken :].splitlines()
        self._taken = len(text)
