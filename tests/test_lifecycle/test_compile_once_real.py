# SPDX-License-Identifier: Apache-2.0
"""Four real processes compile the same twenty kernels at once with Triton's own compiler: twenty
compiles in all.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bundler.cli.demo import PTXAS
from bundler.toolchain.identity import triton_dir

pytestmark = pytest.mark.toolchain
HERE = Path(__file__).parent
PROCESSES, KERNELS = 4, 20
# Tells its version, which is part of every key; leaves a line for each thing that it assembles.
WRAPPER = """#!/bin/sh
case " $* " in *" --version "*) ;; *) echo "$$" >> {log};; esac
exec {real} "$@"
"""


def _redis_server():
    if "redis_server" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "redis_server", HERE.parent / "redis_server.py"
        )
        sys.modules["redis_server"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["redis_server"])
    return sys.modules["redis_server"]


@pytest.fixture
def watched(tmp_path):
    """Environment in which every run of ptxas leaves a line in a file, and that file."""
    pytest.importorskip("triton")
    log = tmp_path / "assembled"
    log.touch()
    variables = {}
    for variable, program in PTXAS.items():
        real = Path(triton_dir()) / "backends" / "nvidia" / "bin" / program
        if real.exists():
            wrapper = tmp_path / program
            wrapper.write_text(
                WRAPPER.format(log=shlex.quote(str(log)), real=shlex.quote(str(real)))
            )
            wrapper.chmod(0o755)
            variables[variable] = str(wrapper)
    return variables, log


@pytest.fixture(params=["local", "redis"])
def urls(request, tmp_path):
    """A directory that they share, or a server behind a near directory of the host."""
    if request.param == "local":
        yield [f"file://{tmp_path}/store"]
        return
    server = _redis_server()
    with server.running(server.NAMES[0]) as started:
        yield [f"file://{tmp_path}/near", started.url()]


@pytest.mark.slow
def test_twenty_kernels_are_compiled_twenty_times_by_four_processes(urls, watched, tmp_path):
    """Each process ends with the same bytes of every kernel, and ptxas ran once for each kernel."""
    variables, log = watched
    started = []
    for number in range(PROCESSES):
        env = {
            name: value for name, value in os.environ.items() if not name.startswith("TRITON_")
        } | variables
        env["TRITON_CACHE_DIR"] = str(tmp_path / f"cache{number}")
        # Two begin with the same kernel, and each pair meets the other half-way.
        line = [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            str(HERE / "once_compiler.py"),
            str(HERE.parent / "test_toolchain"),
            str(number // 2 * KERNELS // 2),
            *urls,
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(line, env=env, **pipes))
    try:
        for process in started:
            assert process.stdout.readline() == "ready\n"
        for process in started:
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [json.loads(process.communicate(timeout=100)[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert len(log.read_text().split()) == KERNELS
    hows = [how for came, _ in answers for how in came]
    assert hows.count("compiled") == KERNELS
    assert set(hows) <= {"compiled", "waited", "found"}
    assert len(answers[0][1]) == KERNELS
    assert all(digests == answers[0][1] for _, digests in answers)
