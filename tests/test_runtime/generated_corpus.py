# SPDX-License-Identifier: Apache-2.0
"""A program: loads every generated module of an Inductor cache, compiles each kernel for cuda:90,
and prints what came of it.

python generated_corpus.py CACHE OUT
"""

import hashlib
import json
import re
import sys
from pathlib import Path

import torch
import torch._inductor.runtime as package
from torch._inductor.runtime import triton_helpers, triton_heuristics

from bundler.integrations.inductor_generated import load_generated
from bundler.runtime import DryDriver
from bundler.runtime.heuristics.grid_expressions import GridExpressions
from bundler.runtime.tuning.benchmark import GivenClock
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain.targets import visible_targets

TYPES = {"*bf16": torch.bfloat16, "*fp32": torch.float32, "*i64": torch.int64, "*i1": torch.bool}
# One of each kind, and one that the compiler is told has a single row.
LAUNCHED = {
    "triton_poi_fused_embedding_dense_backward_26",
    "triton_red_fused_sum_view_6",
    "triton_per_fused__to_copy_mul_sum_view_4",
    "triton_per_fused__log_softmax__to_copy_nll_loss_forward_sub_view_12",
}
RANGE = re.compile(r"tt\.make_range \{end = (\d+)")


def hash_of(configs):
    """The hash that torch keeps beside a winner: of the whole list, in its order."""
    text = "".join(f"{sorted(c.kwargs.items())} {c.num_warps} {c.num_stages}\n" for c in configs)
    return hashlib.sha256(text.encode()).hexdigest()


def compiled(kernel, config, out):
    event = kernel.compile(config, out)
    folder = Path(event.directory)
    return {
        "key": event.key,
        "target": str(event.target),
        "files": sorted(path.suffix for path in folder.iterdir()),
        **facts(folder, kernel.__name__),
    }


def facts(folder, name):
    """What the compiler was told, as its own files say it."""
    data = json.loads((folder / f"{name}.json").read_text())
    sizes = sorted({int(size) for size in RANGE.findall((folder / f"{name}.ttir").read_text())})
    return {
        name: data[name]
        for name in ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion", "debug")
    } | {"ranges": sizes}


class Tensor:
    """What a tensor is to a launch and to a tuner that has to restore it."""

    shape = (64, 64)

    def __init__(self, dtype):
        self.dtype = dtype

    def data_ptr(self):
        return 0x7F00_0000_0000

    def get_device(self):
        return 0

    def size(self):
        return self.shape

    def stride(self):
        return (64, 1)

    def new_empty_strided(self, *_args, **_keywords):
        return Tensor(self.dtype)

    def copy_(self, _other):
        pass


def arguments_of(kernel, text):
    """The arguments of a call as a wrapper makes it; sizes are those in the kernel's text."""
    arguments = []
    for name in kernel.arguments:
        kind = kernel.triton_meta["signature"][name]
        size = re.search(rf"^    {name} = (\d+)$", text, re.MULTILINE)
        arguments.append(Tensor(TYPES[kind]) if kind.startswith("*") else int(size[1]))
    return arguments


def launched(kernel, driver, text):
    """The grids of one call, on a GPU that is not there."""
    kernel.run(*arguments_of(kernel, text), stream=0)
    return [launch.grid for launch in driver.launches]


def exported(kernel, driver, text, out):
    """What an export of the kernel of that call says, its files, and what its grid is for
    the call.
    """
    arguments = arguments_of(kernel, text)
    files = kernel.export(out, *arguments)
    facts = json.loads(files.parameters.read_text())
    call, told = dict(zip(kernel.arguments, arguments, strict=True)), facts["grid"]
    axes = GridExpressions(*told["expressions"], positive=told["positive"])
    return {
        "grid": axes.grid({name: call[name] for name in told["sizes"]}),
        "launched": driver.launches[-1].grid,
        "stages": sorted(files.stages),
        "header": files.header.read_text(),
        "metadata": facts["metadata"],
    }


def do_bench(launch, quantiles):
    """The first candidate is the fastest."""
    do_bench.time = getattr(do_bench, "time", 0.0) + 1.0
    launch()
    return [do_bench.time] * len(quantiles)


def main():
    cache, out = Path(sys.argv[1]), sys.argv[2]
    before = (
        package.triton_heuristics,
        sys.modules[triton_heuristics.__name__],
        triton_helpers.set_driver_to_gpu,
    )
    modules, wrappers = [], []
    for path in sorted(cache.glob("??/*.py")):
        driver = DryDriver("cuda")
        options = TunerOptions(driver=driver, workers=1, record=False)
        kernels = load_generated(path, options=options, clock=lambda: GivenClock(do_bench))
        if len(kernels) > 1:
            wrappers.append(
                {
                    "names": list(kernels),
                    "lists": [[str(c) for c in k.configs] for k in kernels.values()],
                }
            )
            continue
        (kernel,) = kernels.values()
        modules.append(
            {
                "name": kernel.__name__,
                "folder": path.parent.name,
                "kind": kernel.candidates.kind,
                "arguments": kernel.arguments,
                "configs": [config.to_dict() for config in kernel.configs],
                "shown": [str(config) for config in kernel.configs],
                "hash": hash_of(kernel.configs),
                "compiled": compiled(kernel, kernel.configs[0], out),
                "grids": (
                    launched(kernel, driver, path.read_text())
                    if kernel.__name__ in LAUNCHED
                    else None
                ),
                "exported": (
                    exported(kernel, driver, path.read_text(), out + "/exports")
                    if kernel.__name__ in LAUNCHED
                    else None
                ),
            }
        )
    after = (
        package.triton_heuristics,
        sys.modules[triton_heuristics.__name__],
        triton_helpers.set_driver_to_gpu,
    )
    print(
        json.dumps(
            {
                "modules": modules,
                "wrappers": wrappers,
                "undone": before == after,
                "left": [name for name in sys.modules if name.startswith("bundler_generated")],
                "gpus": visible_targets(),
            }
        )
    )


if __name__ == "__main__":
    main()
