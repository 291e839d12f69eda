# SPDX-License-Identifier: Apache-2.0
"""Programs whose Triton goes through our cache manager, by environment alone; nothing here uses the
code under test.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tools.shared import measurement

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "examples" / "kernels.py"
MANAGER = "bundler.integrations.triton:BundlerCacheManager"
PATIENCE_S = 90

# argv[1] is the file of kernels; `compile_one(name)` compiles for cuda:90 and prints what Triton's
# own listener heard.
PRELUDE = """
import importlib.util, json, os, sys, time
import triton
from triton import knobs
heard = []
knobs.compilation.listener = lambda **facts: heard.append([facts["metadata"]["name"], facts["cache_hit"]])
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)

def compile_one(name):
    kernels.compile_one(name, "cuda:90")

def say(what):
    print(json.dumps(what), flush=True)
"""


def environment(store, cache, **more):
    """Return the environment of a program: store is a URL or several, cache Triton's directory."""
    ours = {
        "TRITON_CACHE_MANAGER": MANAGER,
        "TRITON_BUNDLER_STORE": store,
        "TRITON_CACHE_DIR": cache,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return {
        **os.environ,
        **{name: str(value) for name, value in {**ours, **more}.items() if value is not None},
    }


def start(code, env, *args, kernels=KERNELS):
    """Start a program: the prelude, then this code."""
    line = [
        sys.executable,
        "-P",
        "-W",
        "always::UserWarning",
        "-c",
        PRELUDE + code,
        str(kernels),
        *map(str, args),
    ]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    return subprocess.Popen(line, env=env, **pipes)


def run(code, env, *args, kernels=KERNELS, status=0):
    """Run a program to its end; returns what it said last, and its standard error."""
    process = start(code, env, *args, kernels=kernels)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, err
    lines = out.splitlines()
    return (json.loads(lines[-1]) if lines else None), err


def refusing(folder):
    """Return an environment in which ptxas answers --version and nothing else, and the file that
    notes the rest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return measurement.refusing_ptxas(folder)


def failing_compiler(folder):
    """Return a PATH and CC on which no C compiler works, and the file that notes each try."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "tried"
    program = folder / "cc"
    program.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(log))}\nexit 1\n')
    program.chmod(0o755)
    return {"CC": str(program), "CXX": str(program)}, log


_FORKS = """
from triton.runtime.cache import triton_key
triton_key()  # the slow part of a start, once for all
together, started = sys.argv[5] == "True", []
for number, case in enumerate(json.loads(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for descriptor, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{sys.argv[3]}/{number}.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
            os.environ.update(case)
            exec(compile(sys.argv[4], "case", "exec"))
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    started.append(pid)
    if not together:
        assert os.waitpid(started.pop(), 0)[1] == 0, number
assert [os.waitpid(pid, 0)[1] for pid in started] == [0] * len(started)
"""


def run_forks(code, cases, folder, *, together=False):
    """Run a program once for each environment, in forks of one process; returns what each said
    last, and its standard error.

    One after the other, or together.
    """
    folder.mkdir()
    ours = dict.fromkeys(("TRITON_CACHE_MANAGER", "TRITON_BUNDLER_STORE"))
    env = environment(None, folder, **ours)
    texts = [
        {name: str(value) for name, value in case.items() if value is not None} for case in cases
    ]
    process = start(_FORKS, env, json.dumps(texts), folder, code, together)
    _, err = process.communicate(timeout=PATIENCE_S)
    told = [
        (folder / f"{number}.err").read_text()
        for number in range(len(cases))
        if (folder / f"{number}.err").exists()
    ]
    assert process.returncode == 0, [err, *told]
    return [
        (json.loads((folder / f"{number}.out").read_text().splitlines()[-1]), err)
        for number, err in enumerate(told)
    ]


def opened(url):
    """Open a store for reading."""
    import bundler

    return bundler.open_store(url, read_only=True)


# A GPU that takes launches and runs nothing, for a child process that compiles for real.
STAND_IN_GPU = """
from types import SimpleNamespace
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor

class Gpu:
    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0
    utils = SimpleNamespace(load_binary=lambda *_: (1, 2, 16, 0, 1024), unload_module=lambda module: None,
                            get_device_properties=lambda device: {"max_shared_mem": 1 << 20})
    def launcher_cls(self, src, metadata):
        return lambda *_: None

driver.set_active(Gpu())
x = MockTensor("float32")
"""
