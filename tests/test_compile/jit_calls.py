# SPDX-License-Identifier: Apache-2.0
"""A program that calls the kernels of built_kernels.py through Triton's JIT, on a driver that only
says which GPU it has.

    python jit_calls.py KERNELS [helpers] TARGET...

With `helpers` it calls two further kernels on sm_90, which share a function that uses a constant of
their module.

It uses nothing of what builds them, and prints what Triton's listener heard for each call: [target,
name, hash, hit].
"""

import importlib.util
import json
import sys
from types import ModuleType

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

# Triton imports torch when it is there, which takes seconds and changes nothing here; 3.6 and 3.7
# do not ask whether it is.
sys.modules["torch"] = torch = ModuleType("torch")
torch.Tensor = type("Tensor", (), {})


class Gpu:
    def __init__(self, target):
        backend, _, arch = target.partition(":")
        self.target = GPUTarget(
            backend, int(arch) if arch.isdigit() else arch, 64 if backend == "hip" else 32
        )

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Dtype:
    def __init__(self, name):
        self.name = name

    def __str__(self):
        return self.name


class Tensor:
    def __init__(self, dtype, address, size=4096):
        self.dtype, self.address, self.size = Dtype(f"torch.{dtype}"), address, size

    def data_ptr(self):
        return self.address

    def ptr_range(self):
        return self.size


def calls(kernels):
    half, single = Tensor("float16", 256), Tensor("float32", 512)
    for block in (32, 64):
        yield kernels.classes, (half, Tensor("float32", 4), 48, 1, None, 0.25, False, block), {}
    yield (
        kernels.classes,
        (Tensor("float16", 64, 1 << 31), single, 1 << 33 | 1, 5, Tensor("int8", 3), 2.5, True, 32),
        {"num_warps": 2, "num_stages": 1},
    )
    yield kernels.constants, (single, kernels.plain, triton.language.float16, (16, None)), {}
    yield kernels.tuples, ((single, 32),), {}
    for config in kernels.tuned.configs:
        yield kernels.tuned.fn, (single, 37), config.all_kwargs()


def helpers(kernels):
    single = Tensor("float32", 512)
    yield kernels.with_helper, (single,), {}
    yield kernels.same_helper, (single,), {}


def main(path, *targets):
    heard = []
    for target in [word for word in targets if word != "helpers"]:
        driver.set_active(Gpu(target))
        spec = importlib.util.spec_from_file_location("kernels", path)
        kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernels)
        knobs.compilation.listener = lambda target=target, **facts: heard.append(
            [target, facts["metadata"]["name"], facts["metadata"]["hash"], facts["cache_hit"]]
        )
        for kernel, arguments, keywords in [
            *calls(kernels),
            *(helpers(kernels) if (target, targets[0]) == ("cuda:90", "helpers") else ()),
        ]:
            kernel.run(*arguments, grid=(1,), warmup=True, **keywords)
    print(json.dumps(heard))


if __name__ == "__main__":
    main(*sys.argv[1:])
