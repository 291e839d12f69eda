# SPDX-License-Identifier: Apache-2.0
"""Replays a program of a bundle on a driver without a GPU, with arrays that only have an address:
`replay_worker.py BUNDLE BACKEND`; prints JSON.
"""

import json
import sys

# Whoever imports one of these fails.
BANNED = ("torch", "triton", "sympy")
sys.modules |= dict.fromkeys(BANNED)

from bundler.runtime.launch.drivers.dry_driver import DryDriver  # noqa: E402
from bundler.runtime.program.bundle_programs import load_program  # noqa: E402
from bundler.runtime.program.device_tensors import DeviceTensor  # noqa: E402


class Array:
    """What another library calls an array: a shape and the address of its elements."""

    def __init__(self, address, shape):
        self.address, self.shape = address, shape

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "typestr": "<f4",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


class Memory:
    """Gives out addresses."""

    def __init__(self):
        self.addresses = []

    def allocate(self, dtype, sizes, strides):
        self.addresses.append(0x1000_0000 + 0x10000 * len(self.addresses))
        return DeviceTensor(self.addresses[-1], dtype, sizes, strides)


memory, driver = Memory(), DryDriver(sys.argv[2])
program = load_program(sys.argv[1], memory=memory, driver=driver)
inputs = [Array(0x7000_0000, (48, 64)), Array(0x7100_0000, (64, 48))]
outputs = program(*inputs)
launches = [
    {"kernel": launch.plan.kernel, "grid": launch.grid, "parameters": launch.parameters.hex()}
    for launch in driver.launches
]
print(
    json.dumps(
        {
            "launches": launches,
            "allocated": memory.addresses,
            "inputs": [array.address for array in inputs],
            "outputs": [output.address for output in outputs],
            "imported": [name for name in BANNED if sys.modules.get(name) is not None],
        }
    )
)
