# SPDX-License-Identifier: Apache-2.0
"""Stands in for Triton's own driver, so that its JIT runs where there is no GPU."""

from types import SimpleNamespace


class TritonDriver:
    """Triton's driver of a GPU that is not there: compiles, loads and launches.

    `launches` gets what `told` says of each launched kernel's metadata, and the grid.
    """

    def __init__(self, told):
        self.launches = []
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (1, 2, 16, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        )
        self.launcher_cls = lambda src, metadata: (
            lambda *args: self.launches.append((told(metadata), args[:3]))
        )

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0
