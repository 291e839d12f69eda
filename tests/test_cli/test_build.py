# SPDX-License-Identifier: Apache-2.0
"""`triton-bundler build`: bundles for GPUs that are not here, what is reused, what fails, and how the command is misused."""

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from bundler.compile import importing
from bundler.errors import StoreFull
from bundler.format.bundle import Bundle
from bundler.store.records import KernelRecords

pytest.importorskip("triton")
BUILD_FILE = Path(__file__).parents[2] / "examples" / "build.toml"
FLEET = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
MODULE = """
import triton
import triton.language as tl

@triton.jit
def good(x):
    tl.store(x, 1.0)

@triton.jit
def bad(x):
    y = 1
    tl.store(x, undefined_name)

PREBUILD = [{"kernel": good, "signature": {"x": "*fp32:16"}}, {"kernel": bad, "signature": {"x": "*fp32:16"}}]
"""
SEVERAL = """
import triton
import triton.language as tl

@triton.jit
def scale(x, FACTOR: tl.constexpr):
    tl.store(x, tl.load(x) * FACTOR)

PREBUILD = [{"kernel": scale, "signature": {"x": "*fp32:16"}, "constants": {"FACTOR": [1, 2, 3, 4, 5, 6]}}]
"""
# The example's own launches, with tensors in memory, on a driver that only says which GPU it has and launches nothing.
_LAUNCH = """
import importlib.util, json, sys
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
class Gpu:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_benchmarker = staticmethod(lambda: lambda call, quantiles, **more: (call(), [1.0] * 3)[1])
    launcher_cls = staticmethod(lambda source, metadata: lambda *arguments: None)
    class utils:
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 1 << 20, "max_num_regs": 1 << 16, "warpSize": 32})
        load_binary = staticmethod(lambda *arguments: (1, 1, 32, 0, 1024))
driver.set_active(Gpu)
heard = []
knobs.compilation.listener = lambda **facts: heard.append([facts["metadata"]["name"], facts["cache_hit"]])
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
kernels.run_all("cpu")
print(json.dumps(heard))
"""


@pytest.fixture(autouse=True)
def forgotten_modules(monkeypatch):
    """The modules that a test builds are gone after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    importing.forget()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Build the examples for the whole fleet, with the command itself, once; returns (bundle, the command's answer)."""
    folder = tmp_path_factory.mktemp("fleet")
    targets = [word for target in FLEET for word in ("--target", target)]
    return folder / "fleet.tbundle", finish(
        start("build", examples(), *targets, "-o", folder / "fleet.tbundle", "--json")
    )


def examples():
    """The examples, as the package carries them."""
    import bundler

    return os.path.join(os.path.dirname(bundler.__file__), "cli", "demo_kernels.py")


def start(*words, **environment):
    """Start the command in a new Python."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "bundler", *map(str, words)],
        env=clean | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process):
    """Wait for a command that worked; returns its answer."""
    out, error = process.communicate(timeout=110)
    assert process.returncode == 0, error
    return json.loads(out)


def counted_ptxas(folder):
    """Make wrappers for ptxas that note each kernel; returns the variables that bring Triton to them, and the notes."""
    tools = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    notes, variables = folder / "assembled", {}
    for name, variable in (("ptxas", "TRITON_PTXAS_PATH"), ("ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH")):
        wrapper = folder / name
        wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo kernel >> {notes}\nexec {tools / name} "$@"\n')
        wrapper.chmod(0o755)
        variables[variable] = str(wrapper)
    return variables, lambda: len(notes.read_text().splitlines())


@pytest.mark.toolchain
def test_the_examples_are_built_for_a_whole_fleet(fleet, cli):
    """All kernels of examples/kernels.py for sm_80, sm_90, sm_100 and gfx942 come from one command; `inspect` shows them."""
    path, told = fleet
    assert {row["target"]: row["kernels"] for row in told["targets"]} == dict.fromkeys(FLEET, 11)
    assert (told["failures"], len(told["compiled"])) == ([], 44)
    shown = json.loads(cli("inspect", path, "--json").output)
    assert Counter(kernel["target"] for kernel in shown["kernels"]) == dict.fromkeys(FLEET, 11)


def test_what_the_examples_launch_was_built(fleet, cli, tmp_path):
    """The example program itself, launching on such a GPU, asks for nothing that was not built."""
    pytest.importorskip("torch")
    cli("restore", fleet[0], "--cache-dir", tmp_path / "cache", "--only", "all")
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", _LAUNCH, examples()],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    heard = json.loads(done.stdout.splitlines()[-1])
    assert (len(heard), [name for name, hit in heard if not hit]) == (11, [])


@pytest.fixture
def module(tmp_path):
    """A module with a kernel that compiles and one that does not."""
    (tmp_path / "mixed_kernels.py").write_text(MODULE)
    return tmp_path / "mixed_kernels.py"


def test_a_kernel_that_does_not_compile_is_listed_with_its_line_and_the_rest_is_kept(cli, module, tmp_path):
    """One mistake does not cost the others: they are in the bundle, the mistake is told with file and line, the status is 1."""
    result = cli("build", module, "--target", "cuda:90", "-o", tmp_path / "b.tbundle", "--jobs", 1)
    assert result.exit_code == 1
    line = MODULE.splitlines().index("    tl.store(x, undefined_name)") + 1
    assert f"mixed_kernels.py:{line}: bad for cuda:90" in result.stderr
    assert "undefined_name is not defined" in result.stderr
    with Bundle.load(tmp_path / "b.tbundle") as bundle:
        assert [kernel.name for kernel in bundle.kernels] == ["good"]


def test_a_store_is_asked_first_and_filled(cli, module, tmp_path):
    """`--check` finds what is missing and compiles nothing; a second build takes everything from the store."""
    module.write_text(MODULE.replace("undefined_name", "2.0"))
    store = f"file://{tmp_path}/store"
    wanted = ("build", module, "--target", "cuda:90", "--jobs", 1)
    first = cli(*wanted, "-o", tmp_path / "1.tbundle", "--store", store, "--tag", "ci/kernels")
    assert first.exit_code == 0, first.output
    assert "compiled  2 kernels" in first.output
    check = json.loads(cli(*wanted, "--check", "--store", store, "--json").output)
    assert (check["ok"], check["missing"]) == (True, [])
    second = json.loads(cli(*wanted, "-o", tmp_path / "2.tbundle", "--store", store, "--json").output)
    assert (len(second["compiled"]), len(second["reused"])) == (0, 2)
    with Bundle.load(tmp_path / "1.tbundle") as one, Bundle.load(tmp_path / "2.tbundle") as two:
        assert one.digest == two.digest
    more = cli("build", module, "--target", "cuda:90", "--target", "cuda:80", "--check", "--store", store)
    assert more.exit_code == 1
    assert "2 of 4 kernels" in more.output
    assert not (tmp_path / "triton-cache").exists()


@pytest.mark.toolchain
def test_two_builds_at_once_compile_each_kernel_once(tmp_path):
    """Two commands with one store and one list, at the same time: ptxas assembles each kernel once, and both bundles have all."""
    (tmp_path / "several.py").write_text(SEVERAL)
    variables, assembled = counted_ptxas(tmp_path)
    (tmp_path / "store").mkdir(mode=0o700)
    words = [
        "build",
        tmp_path / "several.py",
        "--target",
        "cuda:90",
        "--jobs",
        2,
        "--store",
        f"file://{tmp_path}/store",
        "--json",
    ]
    both = [start(*words, "-o", tmp_path / f"{name}.tbundle", **variables) for name in "ab"]
    told = [finish(process) for process in both]
    assert assembled() == 6
    assert sum(len(one["compiled"]) for one in told) == 6
    assert [len(one["compiled"]) + len(one["reused"]) for one in told] == [6, 6]
    with Bundle.load(tmp_path / "a.tbundle") as one, Bundle.load(tmp_path / "b.tbundle") as two:
        assert one.digest == two.digest


def test_a_store_that_fails_meanwhile_costs_nothing_that_was_compiled(cli, module, tmp_path, monkeypatch):
    """What could not be sent is in the bundle, told with the store's name, and makes the status 1; the next build sends it."""
    module.write_text(MODULE.replace("undefined_name", "2.0"))

    def full(*_):
        raise StoreFull("the store is full")

    words = (
        "build",
        module,
        "--target",
        "cuda:90",
        "--jobs",
        1,
        "--store",
        f"file://{tmp_path}/store",
        "-o",
        tmp_path / "b.tbundle",
    )
    with monkeypatch.context() as patched:
        patched.setattr(KernelRecords, "publish", full)
        result = cli(*words)
    assert result.exit_code == 1
    assert f"2 kernels not sent to file://{tmp_path}/store" in result.stderr
    assert "the store is full; the program goes on without the store" in result.stderr
    with Bundle.load(tmp_path / "b.tbundle") as bundle:
        assert len(bundle.kernels) == 2
    assert cli(*words).exit_code == 0
    assert cli(*words[:6], *words[6:8], "--check").exit_code == 0


def test_the_example_build_file_is_built(cli, tmp_path):
    """examples/build.toml lists kernels of examples/kernels.py: each for each of its targets."""
    (tmp_path / "store").mkdir(mode=0o700)
    told = json.loads(
        cli("build", "--spec", BUILD_FILE, "--check", "--store", f"file://{tmp_path}/store", "--json").output
    )
    assert told["failures"] == []
    assert Counter((kernel["name"], kernel["target"]) for kernel in told["missing"]) == {
        ("softmax_kernel", "cuda:90"): 4, ("softmax_kernel", "hip:gfx942"): 4,
        ("matmul_kernel", "cuda:90"): 2, ("swiglu_kernel", "cuda:90"): 4, ("swiglu_kernel", "hip:gfx942"): 4,
    }  # fmt: skip


def test_a_recording_is_built_for_another_target_from_the_command(fleet, cli, tmp_path):
    """`--from` with the module of the sources gives kernels that a JIT finds; what was assumed is told."""
    only = tmp_path / "80.tbundle"
    with Bundle.load(fleet[0]) as bundle:
        bundle.select(target="cuda:80", names="softmax*").save(only)
        wanted = {kernel.key for kernel in bundle.select(target="cuda:90", names="softmax*").kernels}
    answer = cli(
        "build", "--from", only, examples(), "--target", "cuda:90", "-o", tmp_path / "o.tbundle", "--json", "--jobs", 1
    )
    told = json.loads(answer.output)
    assert ({*told["compiled"]}, told["static_only"], told["notes"]) == (wanted, [], [])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("build", "-o", "b"), "give a MODULE"),
        (("build", "k.py"), "give -o FILE"),
        (("build", "k.py", "--check"), "give --store"),
        (("build", "k.py", "--spec", "s", "-o", "b"), "--spec names the modules"),
        (("build", "k.py", "-o", "b", "--tag", "t"), "--tag is for what is sent"),
        (("build", "k.py", "-o", "b", "--target", "sm_90"), "not a target"),
        (("build", "k.py", "-o", "b", "--jobs", "0"), "--jobs"),
    ],
)
def test_a_wrong_use_is_told_in_one_line_with_status_2(cli, words, told):
    """Options that do not go together are usage errors."""
    result = cli(*words)
    assert result.exit_code == 2
    assert told in result.output


def test_what_cannot_be_built_at_all_is_an_error(cli, tmp_path):
    """No such module, a module that declares nothing, no target: each is said in one line, with the way out, status 1."""
    (tmp_path / "empty_module.py").write_text("x = 1\n")
    for words, told in [
        ((tmp_path / "absent.py", "--target", "cuda:90"), "no such file"),
        (("no.such.module", "--target", "cuda:90"), "no module"),
        ((tmp_path / "empty_module.py", "--target", "cuda:90"), "bundler.prebuild"),
        ((tmp_path / "empty_module.py",), "--target"),
    ]:
        result = cli("build", *words, "-o", tmp_path / "b.tbundle")
        assert (result.exit_code, told in result.stderr) == (1, True), result.output
