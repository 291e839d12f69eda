# SPDX-License-Identifier: Apache-2.0
"""A program: makes each call of launch_calls.py through Triton's JIT without a GPU and records the
compiles.

    python compile_calls.py BUNDLE

prints, as JSON, the key of the kernel that Triton chose for each call on each target.
"""

import importlib.util
import inspect
import json
import sys
import types
from pathlib import Path

import bundler

HERE = Path(__file__).resolve().parent
TARGETS = {"cuda:90": ("cuda", 90, 32), "hip:gfx942": ("hip", "gfx942", 64)}


def load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_driver(target):
    from triton.backends.compiler import GPUTarget

    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget(*TARGETS[target]),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )


def for_triton(value, calls, kernels):
    """Return Triton's own object for a stand-in of launch_calls.py."""
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(value, tuple):
        return tuple(for_triton(item, calls, kernels) for item in value)
    if isinstance(value, calls.Dtype):
        return getattr(tl, value.name)
    if isinstance(value, calls.Function):
        return getattr(kernels, value.name)
    if isinstance(value, calls.Descriptor):
        known = inspect.signature(TensorDescriptor).parameters  # Triton 3.6 rounds nothing
        return TensorDescriptor(
            **{name: field for name, field in vars(value).items() if name in known}
        )
    return value


def stand_in_for_torch():
    """AMD's backend imports torch to ask whether a tensor is torch's; none here is, and the real
    one takes seconds.
    """
    sys.modules["torch"] = types.SimpleNamespace(Tensor=type("Tensor", (), {}))


def main(path):
    stand_in_for_torch()
    from triton.runtime.driver import driver

    from bundler.toolchain.events import kernel_key

    calls, kernels = load("launch_calls"), load("launch_kernels")
    chosen = {}
    with bundler.recording() as recording:
        for target in TARGETS:
            driver.set_active(fake_driver(target))
            for function in kernels.FUNCTIONS.values():
                function.device_caches.clear()
            chosen[target] = [None] * len(calls.CALLS)
            for number, call in enumerate(calls.CALLS):
                if call.only in {None, TARGETS[target][0]}:
                    args = for_triton(call.args, calls, kernels)
                    kernel = kernels.FUNCTIONS[call.kernel].run(
                        *args, grid=(1,), warmup=True, **call.keywords
                    )
                    chosen[target][number] = kernel_key(kernel.hash)
    with recording.collect() as bundle:
        assert bundle.left_out == (), bundle.left_out
        bundle.save(path)
    print(json.dumps(chosen))


if __name__ == "__main__":
    main(sys.argv[1])
