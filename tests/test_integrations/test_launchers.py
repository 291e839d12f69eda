# SPDX-License-Identifier: Apache-2.0
"""In a session Triton's first launch needs no C compiler; a library stands in for the driver's, and
the compiler refuses.
"""

import json
import shutil
import subprocess
from pathlib import Path

import plugged
import pytest

from bundler.runtime.launch.jit import jit_modules

FAKE = Path(__file__).resolve().parents[1] / "test_runtime" / "jit" / "fake_cuda.c"
pytestmark = [pytest.mark.slow, pytest.mark.toolchain]
# Triton's own driver code, but for what it asks torch; then one kernel, compiled by hand and
# launched as the JIT does.
LAUNCH = """
import types
def launch():
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver
    active = types.SimpleNamespace(
        utils=nvidia.CudaUtils(), launcher_cls=nvidia.CudaLauncher, get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0, get_current_stream=lambda _device: 7)
    driver.set_active(active)
    class Tensor:
        dtype = "fp32"
        def data_ptr(self):
            return 1 << 40
    import triton.language as tl
    kernels.gelu_kernel[(1,)](Tensor(), Tensor(), 1024, BLOCK=1024)
"""
SESSION = (
    "import bundler\nwith bundler.session(os.environ['STORE'], push=None) as session:\n   "
    " launch()\n    say([session.counters.launchers, dict(session.counters.launchers_of_triton)])\n"
)


@pytest.fixture(scope="module")
def fake_cuda(tmp_path_factory):
    """Compile the library; returns its folder, for LD_LIBRARY_PATH."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or jit_modules.compiled_driver() is None:
        pytest.skip("needs a C compiler and the extension _jit_driver")
    folder = tmp_path_factory.mktemp("cuda")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-w", str(FAKE), "-o", str(folder / "libcuda.so.1")],
        check=True,
    )
    return folder


def environment(tmp_path, fake_cuda, **more):
    """Return an environment without a C compiler, and the file that notes each try."""
    no_compiler, tried = plugged.failing_compiler(tmp_path / "cc")
    return (
        plugged.environment(
            f"file://{tmp_path}/store",
            tmp_path / "cache",
            LD_LIBRARY_PATH=fake_cuda,
            HOME=tmp_path,
            **no_compiler,
            **more,
        ),
        tried,
    )


def expected():
    """How many modules each release builds for one kernel: `cuda_utils`, and up to 3.6 a
    launcher.
    """
    import triton

    return 2 if triton.__version__.startswith("3.6.") else 1


def test_a_session_by_environment_needs_no_compiler(tmp_path, fake_cuda):
    """It begins in the middle of the build of `cuda_utils`, which it answers with our extension;
    the report counts.
    """
    report = tmp_path / "report.json"
    env, tried = environment(tmp_path, fake_cuda, TRITON_BUNDLER_REPORT=report)
    plugged.run(LAUNCH + "launch()\nsay(1)\n", env)
    assert not tried.exists()
    counted = json.loads(report.read_text())
    assert (counted["launchers"], counted["launchers_of_triton"]) == (expected(), {})


def test_a_session_in_code_needs_no_compiler(tmp_path, fake_cuda):
    """From its beginning to its end."""
    env, tried = environment(
        tmp_path,
        fake_cuda,
        STORE=f"file://{tmp_path}/store",
        TRITON_CACHE_MANAGER=None,
        TRITON_BUNDLER_STORE=None,
    )
    assert plugged.run(LAUNCH + SESSION, env)[0] == [expected(), {}]
    assert not tried.exists()


def test_the_user_may_choose_triton(tmp_path, fake_cuda):
    """TRITON_BUNDLER_LAUNCHER=triton: its own path, which starts with the compiler."""
    env, tried = environment(tmp_path, fake_cuda, TRITON_BUNDLER_LAUNCHER="triton")
    _, err = plugged.run(LAUNCH + "launch()\n", env, status=1)
    assert "CalledProcessError" in err
    assert "cuda_utils" in tried.read_text()


def test_what_is_not_covered_is_said(tmp_path, fake_cuda):
    """Without the extension Triton goes on by itself, and the session counts the reason."""
    code = LAUNCH + SESSION.replace(
        "    launch()\n", "    try:\n        launch()\n    except Exception:\n        pass\n"
    )
    env, tried = environment(
        tmp_path,
        fake_cuda,
        STORE=f"file://{tmp_path}/store",
        TRITON_CACHE_MANAGER=None,
        TRITON_BUNDLER_STORE=None,
    )
    hidden = (
        "from bundler.runtime.launch.jit import jit_modules\njit_modules.compiled_driver = lambda:"
        " None\n"
    )
    assert plugged.run(hidden + code, env)[0] == [
        0,
        {"the compiled extension was not built here": 1},
    ]
    assert "cuda_utils" in tried.read_text()
