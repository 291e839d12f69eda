# SPDX-License-Identifier: Apache-2.0
"""torch's compile workers, whose end runs neither exit handlers nor finalizers, publish what they
compile.
"""

import subprocess
import sys

import plugged
import pytest

pytest.importorskip("torch")

_WORK = """
def work(path, name):
    import importlib.util, sys
    spec = importlib.util.spec_from_file_location("kernels", path)
    kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    return [kernel.hash for kernel in kernels.compile_one(name, "cuda:90")]
"""
_POOLS = """
import sys
import torch
from torch._inductor.compile_worker.subproc_pool import SubprocKind, SubprocPool
import torch_work

def main():
    pool = SubprocPool(1, kind=SubprocKind.FORK)  # torch's default
    pool.submit(torch_work.work, sys.argv[1], "softmax").result(timeout=90)
    pool.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_torchs_compile_workers_publish_what_they_compile(store_url, tmp_path, recorded):
    """A worker of torch's own pool is shut down at once; the store has what it compiled."""
    (tmp_path / "torch_work.py").write_text(_WORK)
    (tmp_path / "pools.py").write_text(_POOLS)
    env = plugged.environment(store_url, tmp_path / "cache")
    line = [sys.executable, "-W", "ignore", str(tmp_path / "pools.py"), str(plugged.KERNELS)]
    done = subprocess.run(
        line, env=env, capture_output=True, text=True, timeout=plugged.PATIENCE_S, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert recorded(store_url) == ["softmax_kernel"]
