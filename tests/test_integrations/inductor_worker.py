# SPDX-License-Identifier: Apache-2.0
"""A process that does with torch's own classes what torch.compile does on a GPU, where there is
none.

    python inductor_worker.py make CACHE BUNDLE [winners]     compile, tune and launch kernels; save a bundle
    python inductor_worker.py use CACHE BUNDLE TRUST          load it, take the graph entry from torch's cache, launch again
    python inductor_worker.py warm CACHE BUNDLE               take the entry of torch's own, launch again, save a bundle; then
                                                              save again with a torch that lacks
                                                              something

Triton compiles for a GPU that is not here, which is all the same to it.  What the driver does is
made up: loading a binary, launching it, and measuring, so that a configuration is the faster the
nearer its blocks are to a size that is no candidate.  Coordinate descent takes one step.  It prints
one JSON.
"""

import copy
import functools
import json
import os
import pickle
import sys
import warnings
from concurrent.futures import Future
from pathlib import Path

COMMAND, CACHE, BUNDLE = sys.argv[1:4]
OPTION = sys.argv[4] if len(sys.argv) > 4 else ""
os.environ |= {"TORCHINDUCTOR_CACHE_DIR": CACHE, "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import torch  # noqa: E402
import triton  # noqa: E402
from torch._inductor import codecache  # noqa: E402
from torch._inductor.async_compile import AsyncCompile  # noqa: E402
from torch._inductor.codecache import FxGraphCache, InductorCacheArtifact, PyCodeCache  # noqa: E402
from torch._inductor.runtime import (  # noqa: E402
    coordinate_descent_tuner,
    static_triton_launcher,
    triton_helpers,
    triton_heuristics,
)
from torch._inductor.triton_bundler import TritonBundler  # noqa: E402
from torch.compiler._cache import CacheArtifactManager  # noqa: E402

import bundler  # noqa: E402
from bundler.integrations import inductor  # noqa: E402

KEY = "f" + "a" * 51
COUNTS = {"compiles": 0, "hits": 0, "measured": 0}
LAUNCHED = []
# Generated modules keep their kernels alive.
LOADED = []
KEPT = []
HEAD = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties, ReductionHint
"""
DEVICE = (
    "DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9,"
    " regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32)"
)
POINTWISE = (
    HEAD
    + """
@triton_heuristics.pointwise(size_hints={{'x': 4096}}, filename=__file__,
    triton_meta={{'signature': {{'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}},
                 'device': {device}, 'constants': {{}}, 'configs': [{{(0,): [['tt.divisibility', 16]]}}]}},
    inductor_meta={{'grid_type': 'Grid1D', 'kernel_name': '{name}', 'autotune_local_cache': True,
                   'coordinate_descent_tuning': {descent}, 'mutated_arg_names': []}}, min_elem_per_thread=0)
@triton.jit
def {name}(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    tl.store(out_ptr0 + x, tl.load(in_ptr0 + x, x < xnumel) * {factor}, x < xnumel)
"""
)
REDUCTION = (
    HEAD
    + """
@triton_heuristics.reduction(size_hints={{'x': 1024, 'r0_': 2048}}, reduction_hint=ReductionHint.INNER, filename=__file__,
    triton_meta={{'signature': {{'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32', 'r0_numel': 'i32',
                               'XBLOCK': 'constexpr', 'R0_BLOCK': 'constexpr'}},
                 'device': {device}, 'constants': {{}}, 'configs': [{{(0,): [['tt.divisibility', 16]]}}]}},
    inductor_meta={{'grid_type': 'Grid1D', 'kernel_name': '{name}', 'autotune_local_cache': True, 'num_load': 1,
                   'num_reduction': 1, 'coordinate_descent_tuning': {descent}, 'mutated_arg_names': []}})
@triton.jit
def {name}(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    total = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
    for first in tl.range(0, r0_numel, R0_BLOCK):
        r = first + tl.arange(0, R0_BLOCK)[None, :]
        total += tl.load(in_ptr0 + r + r0_numel * x, (r < r0_numel) & (x < xnumel), 0.0) * {factor}
    tl.store(out_ptr0 + x, tl.sum(total, 1)[:, None], x < xnumel)
"""
)
TEMPLATE = (
    HEAD
    + """
@triton_heuristics.template(num_stages=2, num_warps=4,
    triton_meta={{'signature': {{{pointers}, 'xnumel': 'i32'}},
                 'device': {device}, 'constants': {{}}, 'configs': [{{(0,): [['tt.divisibility', 16]]}}]}},
    inductor_meta={{'grid_type': 'FixedGrid', 'fixed_grid': ['_grid_0', '_grid_1', '_grid_2'], 'kernel_name': '{name}',
                   'extra_launcher_args': ['_grid_0', '_grid_1', '_grid_2'], 'mutated_arg_names': [],
                   'coordinate_descent_tuning': True}})
@triton.jit
def {name}({arguments}, xnumel):
    x = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(out_ptr0 + x, tl.load(in_ptr0 + x, x < xnumel), x < xnumel)
"""
)
KINDS = {
    "tuned": (POINTWISE, False),
    "descended": (POINTWISE, True),
    "rescaled": (REDUCTION, False),
    "rescaled_and_descended": (REDUCTION, True),
    "template": (TEMPLATE, ["in_ptr0", "out_ptr0"]),
    "template_of_more": (TEMPLATE, ["in_ptr0", "in_ptr1", "out_ptr0"]),
    "never_ran": (POINTWISE, False),
}


def main():
    """Do the command."""
    stand_in()
    found = {"make": make, "use": use, "warm": warm}[COMMAND]()
    print(json.dumps({**found, "counts": COUNTS, "launched": LAUNCHED}))


def stand_in():
    """Make up the driver, and count what Triton is asked for."""
    static = static_triton_launcher.StaticallyLaunchedTritonKernel
    tuner = triton_heuristics.CachingAutotuner

    class Interface:
        exchange_device = staticmethod(lambda device: device)
        maybe_exchange_device = staticmethod(lambda device: device)

    def load(self, device):
        if self.function is None:
            if not os.path.exists(self.cubin_path):
                raise RuntimeError(f"no binary at {self.cubin_path}")
            # Enough registers that torch halves the block of each reduction.
            self.function, self.n_regs, self.n_spills = 1, 200, 0
            self.cubin_path = self.cubin_raw = None

    def bench(self, launcher, *args, **kwargs):
        COUNTS["measured"] += 1
        wanted = {"XBLOCK": 32, "R0_BLOCK": 32}
        return 1 + sum(
            abs(launcher.config.kwargs.get(name, size).bit_length() - size.bit_length())
            for name, size in wanted.items()
        )

    def descend(self, measure, start, *args, **kwargs):
        step = copy.deepcopy(start)
        step.kwargs["XBLOCK"] //= 2
        measure(step)
        return step

    def listen(*, cache_hit, **facts):
        COUNTS["hits" if cache_hit else "compiles"] += 1

    def note_file(self, fn):
        jit_made(self, fn)
        self.file_name = fn.__code__.co_filename  # as Triton does itself, from 3.8

    jit_made = triton.runtime.jit.JITCallable.__init__
    triton.runtime.jit.JITCallable.__init__ = note_file
    static.load_kernel = load
    static.run = lambda self, *args: LAUNCHED.append([self.name, self.hash])
    tuner.bench = bench
    coordinate_descent_tuner.CoordescTuner.autotune = descend
    tuner.get_device_interface = lambda self: Interface
    triton_helpers.set_driver_to_gpu = lambda: None
    triton.knobs.compilation.listener = listen


def kernels():
    """Ask torch for each kernel as its generated code does; yields the name, what to launch it
    with, and the kernel.
    """
    for name, (template, option) in KINDS.items():
        facts = {"name": name, "device": DEVICE, "factor": float(len(name)), "descent": option}
        count = 2
        if template is TEMPLATE:
            count = len(option)
            facts |= {
                "arguments": ", ".join(option),
                "pointers": ", ".join(f"'{pointer}': '*fp32'" for pointer in option),
            }
        sizes = {POINTWISE: [1024], REDUCTION: [1024, 2048], TEMPLATE: [1024, 16, 1, 1]}[template]
        kernel = AsyncCompile().triton(name, template.format(**facts))
        yield (
            name,
            [torch.zeros(4)] * count + sizes,
            kernel.result() if hasattr(kernel, "result") else kernel,
        )


def launch_all():
    """Launch each as generated code does."""
    for name, arguments, kernel in LOADED:
        if name != "never_ran":
            kernel.run(*arguments, stream=0)


def make():
    """Compile and tune, and note a graph entry as torch does, before anything is tuned."""
    TritonBundler.begin_compile()
    LOADED.extend(kernels())
    # torch keeps the graph, and with it the tuners as they were before any was tuned.
    KEPT.append(TritonBundler.collect()[0])
    content = pickle.dumps({"graph": KEPT[0]})
    CacheArtifactManager.record_artifact(InductorCacheArtifact.type(), KEY, content)
    FxGraphCache._write_to_local_cache(KEY, content)
    launch_all()
    compiled = dict(COUNTS)
    bundle = inductor.save(BUNDLE, winners_only=OPTION == "winners")
    return {
        "compiled": compiled,
        "entry_bytes": len(content),
        "left_out": bundle.left_out,
        "kernels": sorted(kernel.key for kernel in bundle.kernels),
        "digest": bundle.digest,
        "opaque": [entry.path for entry in bundle.opaque],
        "opaque_bytes": sum(e.artifact.size for e in bundle.opaque),
        "tuning_files": [entry.path for entry in bundle.tuning_files],
    }


def use():
    """Load, and launch what torch makes of it; kernels that torch builds from their source come
    from a compile worker.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = inductor.load(BUNDLE, trust=OPTION)
    AsyncCompile.use_process_pool = classmethod(lambda cls: True)
    AsyncCompile.process_pool = staticmethod(functools.lru_cache(CompileWorker))
    entries = take_entries()
    again = inductor.save() if entries else None
    return {
        "again": again and [entry.path for entry in again.opaque],
        "usable": report.usable,
        "entries": entries,
        "skipped": report.skipped,
        "warnings": [str(w.message) for w in caught],
    }


def warm():
    """Launch what torch makes of its own cache, under a recording, and save, twice."""
    with bundler.recording() as recording:
        entries = take_entries()
    bundle = inductor.save(BUNDLE)
    del codecache.sha256_hash
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = inductor.save()
    return {
        "entries": entries,
        "kernels": sorted(kernel.key for kernel in bundle.kernels),
        "recorded": sorted(kernel.key for kernel in recording.collect().kernels),
        "whole": sorted(kernel.key for kernel in whole.kernels),
        "warnings": [str(w.message) for w in caught],
        "whole_opaque": {entry.path: entry.artifact.size for entry in whole.opaque},
    }


def take_entries():
    """Do what torch does when it finds the graph in its cache, and launch; returns how many entries
    there were.
    """
    entries = [path.read_bytes() for path in Path(CACHE, "fxgraph").rglob("*") if path.is_file()]
    for entry in entries:
        CacheArtifactManager.record_artifact(InductorCacheArtifact.type(), KEY, entry)
        TritonBundler.read_and_emit(pickle.loads(entry)["graph"])
    LOADED.extend(kernels())
    launch_all()
    return len(entries)


class CompileWorker:
    """What torch's pool of compile workers does to a kernel: another process has its module, and
    pickles it on its way back.
    """

    def submit(self, work, *arguments):
        """Work at once."""
        future = Future()
        future.set_result(pickle.loads(pickle.dumps(work(*arguments))))
        PyCodeCache.cache_clear()
        return future

    def shutdown(self):
        """There is no process to end."""


if __name__ == "__main__":
    main()
