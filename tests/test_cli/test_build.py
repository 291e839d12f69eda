# SPDX-License-Identifier: Apache-2.0
"""`triton-bundler build`: bundles for GPUs that are not here, what is reused, what fails, and how
the command is misused.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

import bundler
from bundler.compile import module_import
from bundler.errors import StoreFull
from bundler.format.bundle import Bundle
from bundler.store.kernel_records import KernelRecords

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
SOFTMAX = """
targets = ["cuda:80", "cuda:90"]
[[kernel]]
module = {module}
function = "softmax_kernel"
signature = {{ x_ptr = "*fp32:16", out_ptr = "*fp32:16", row_stride = "i32:16", n_columns = "i32:16" }}
constants = {{ BLOCK = 1024 }}
"""
# The example's own launches, with tensors in memory, on a driver that only says which GPU it has
# and launches nothing.
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
    module_import.forget()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Build the examples for the whole fleet, with the command itself, once; returns (bundle, the
    command's answer).
    """
    folder = tmp_path_factory.mktemp("fleet")
    targets = [word for target in FLEET for word in ("--target", target)]
    return folder / "fleet.tbundle", finish(
        start("build", examples(), *targets, "-o", folder / "fleet.tbundle", "--json")
    )


def examples():
    """The examples, as the package carries them."""
    return os.path.join(os.path.dirname(bundler.__file__), "cli", "demo_kernels.py")


def start(*words, **environment):
    """Start the command in a new Python."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "bundler", *map(str, words)],
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Wait for a command that worked; returns its answer."""
    out, error = process.communicate(timeout=110)
    assert process.returncode == 0, error
    return json.loads(out)


def counted_ptxas(folder):
    """Make wrappers for ptxas that note each kernel; returns the variables that bring Triton to
    them, and the notes.
    """
    tools = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    notes, variables = folder / "assembled", {}
    for name, variable in (
        ("ptxas", "TRITON_PTXAS_PATH"),
        ("ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH"),
    ):
        wrapper = folder / name
        wrapper.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] || echo kernel >> {notes}\nexec {tools / name} "$@"\n'
        )
        wrapper.chmod(0o755)
        variables[variable] = str(wrapper)
    return variables, lambda: len(notes.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.toolchain
def test_the_examples_are_built_for_a_whole_fleet(fleet, cli):
    """All kernels of examples/kernels.py for sm_80, sm_90, sm_100 and gfx942 come from one command;
    `inspect` shows them.
    """
    path, told = fleet
    assert {row["target"]: row["kernels"] for row in told["targets"]} == dict.fromkeys(FLEET, 11)
    assert (told["failures"], len(told["compiled"])) == ([], 44)
    shown = json.loads(cli("inspect", path, "--json").output)
    assert Counter(kernel["target"] for kernel in shown["kernels"]) == dict.fromkeys(FLEET, 11)


@pytest.mark.slow
def test_what_the_examples_launch_was_built(fleet, cli, tmp_path):
    """The example program itself, launching on such a GPU, asks for nothing that was not built."""
    pytest.importorskip("torch")
    cli("restore", fleet[0], "--cache-dir", tmp_path / "cache", "--only", "all")
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", _LAUNCH, examples()],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    heard = json.loads(done.stdout.splitlines()[-1])
    assert (len(heard), [name for name, hit in heard if not hit]) == (11, [])


@pytest.fixture
def module(tmp_path):
    """A module with a kernel that compiles and one that does not."""
    (tmp_path / "mixed_kernels.py").write_text(MODULE)
    return tmp_path / "mixed_kernels.py"


def test_a_kernel_that_does_not_compile_is_listed_with_its_line_and_nothing_is_written(
    cli, module, tmp_path
):
    """Without --keep-going the mistake is told with file and line, the status is 1, and the bundle
    of before stays.
    """
    (tmp_path / "b.tbundle").write_bytes(b"what was there")
    result = cli("build", module, "--target", "cuda:90", "-o", tmp_path / "b.tbundle", "--jobs", 1)
    assert result.exit_code == 1
    line = MODULE.splitlines().index("    tl.store(x, undefined_name)") + 1
    assert f"mixed_kernels.py:{line}: bad for cuda:90" in result.stderr
    assert "undefined_name is not defined" in result.stderr
    assert (
        f"{tmp_path}/b.tbundle was not written: bad for cuda:90 could not be built; --keep-going"
        in result.stderr
    )
    assert (tmp_path / "b.tbundle").read_bytes() == b"what was there"


def test_with_keep_going_the_rest_is_written_and_what_is_missing_is_told(cli, module, tmp_path):
    """One mistake does not cost the others then: they are in the bundle and under the tag, and the
    status is 1 all the same.
    """
    store = f"file://{tmp_path}/store"
    words = (
        "build",
        module,
        "--target",
        "cuda:90",
        "-o",
        tmp_path / "b.tbundle",
        "--jobs",
        1,
        "--keep-going",
    )
    result = cli(*words, "--store", store, "--tag", "t")
    assert (
        result.exit_code,
        f"{tmp_path}/b.tbundle lacks what could not be built: bad for cuda:90" in result.stderr,
    ) == (1, True)
    with Bundle.load(tmp_path / "b.tbundle") as bundle, bundler.open_store(store) as opened:
        assert [kernel.name for kernel in bundle.kernels] == ["good"]
        assert [(tag.name, tag.digest) for tag in opened.tags()] == [("t", bundle.digest)]


@pytest.mark.parametrize("keep_going", [(), ("--keep-going",)])
def test_a_build_of_nothing_costs_neither_bundle_nor_tag(
    cli, cli_json, module, tmp_path, keep_going
):
    """Where a module cannot be imported, what was written and published before stays, with
    --keep-going too; no object claims a file.
    """
    (tmp_path / "broken_module.py").write_text("import no_such_thing_here\n")
    module.write_text(MODULE.replace("undefined_name", "2.0"))
    output, store = tmp_path / "b.tbundle", f"file://{tmp_path}/store"
    there = ("--target", "cuda:90", "-o", output, "--jobs", 1, "--store", store, "--tag", "t")
    assert cli("build", module, *there).exit_code == 0
    before = output.read_bytes()
    result = cli("build", tmp_path / "broken_module.py", *there, *keep_going)
    assert (result.exit_code, output.read_bytes()) == (1, before)
    assert "broken_module.py:1: broken_module for cuda:90: cannot be imported" in result.stderr
    assert "b.tbundle was not written and tag t not set" in result.stderr
    status, told = cli_json("build", tmp_path / "broken_module.py", *there, *keep_going)
    assert (status, told["path"], told["digest"], told["pushed"], len(told["failures"])) == (
        1,
        None,
        None,
        None,
        1,
    )
    with bundler.open_store(store) as opened:
        assert [tag.kernels for tag in opened.tags()] == [2]


def test_a_module_that_fails_stops_the_others_unless_told_to_keep_going(cli, module, tmp_path):
    """What cannot be planned is told before anything is compiled; with --keep-going the other
    module is built.
    """
    (tmp_path / "broken_module.py").write_text("import no_such_thing_here\n")
    module.write_text(MODULE.replace("undefined_name", "2.0"))
    words = (
        "build",
        module,
        tmp_path / "broken_module.py",
        "--target",
        "cuda:90",
        "-o",
        tmp_path / "b.tbundle",
        "--jobs",
        1,
    )
    assert (cli(*words).exit_code, (tmp_path / "b.tbundle").exists()) == (1, False)
    assert cli(*words, "--keep-going").exit_code == 1
    with Bundle.load(tmp_path / "b.tbundle") as bundle:
        assert len(bundle.kernels) == 2


def test_a_build_for_a_target_that_nobody_declares_is_an_error(cli, module, tmp_path):
    """Kernels for other targets alone are nothing to build, and nothing to check: status 1, no
    file.
    """
    module.write_text(
        MODULE.replace("undefined_name", "2.0").replace('16"}}', '16"}, "targets": ["hip:gfx942"]}')
    )
    words = ("build", module, "--target", "cuda:90")
    (tmp_path / "store").mkdir(mode=0o700)
    for more in (
        ("-o", tmp_path / "b.tbundle"),
        ("--check", "--store", f"file://{tmp_path}/store"),
    ):
        result = cli(*words, *more)
        assert (result.exit_code, "no kernel is declared for cuda:90" in result.stderr) == (1, True)
    assert not (tmp_path / "b.tbundle").exists()


def test_without_a_target_every_kernel_has_to_name_its_own(cli, module, tmp_path):
    """One kernel's targets are not taken for another: a usage error that names the kernel, until
    each names its own.
    """
    both = MODULE.replace("undefined_name", "2.0")
    one = both.replace('"*fp32:16"}}', '"*fp32:16"}, "targets": ["cuda:90"]}', 1)
    module.write_text(one)
    words = ("build", module, "-o", tmp_path / "b.tbundle", "--jobs", 1)
    refused = cli(*words)
    assert (
        refused.exit_code,
        "no target for bad of" in refused.stderr,
        "--target" in refused.stderr,
    ) == (
        2,
        True,
        True,
    )
    assert not (tmp_path / "b.tbundle").exists()
    module_import.forget()
    module.write_text(
        one.replace(
            '"kernel": bad, "signature": {"x": "*fp32:16"}',
            '"kernel": bad, "signature": {"x": "*fp32:16"}, "targets": ["hip:gfx942"]',
        )
    )
    assert cli(*words).exit_code == 0
    with Bundle.load(tmp_path / "b.tbundle") as bundle:
        assert [(str(kernel.target), kernel.name) for kernel in bundle.kernels] == [
            ("cuda:90", "good"),
            ("hip:gfx942", "bad"),
        ]


def test_a_build_file_without_targets_is_a_usage_error_unless_each_kernel_has_its_own(
    cli, module, tmp_path
):
    """As for modules, and the kernel is named."""
    module.write_text(MODULE.replace("undefined_name", "2.0"))
    spec = tmp_path / "build.toml"
    kernel = (
        '[[kernel]]\nmodule = "mixed_kernels.py"\nfunction = "%s"\nsignature = { x = "*fp32:16" }\n'
    )
    spec.write_text(kernel % "good" + 'targets = ["cuda:90"]\n' + kernel % "bad")
    result = cli("build", "--spec", spec, "-o", tmp_path / "b.tbundle")
    assert (result.exit_code, "no target for bad" in result.stderr) == (2, True)


def test_an_argument_that_a_kernel_has_not_is_named(cli, module, tmp_path):
    """A name that is spelled wrongly is told, with those that there are."""
    module.write_text(MODULE.replace('{"x": "*fp32:16"}', '{"xx": "*fp32:16"}', 1))
    result = cli("build", module, "--target", "cuda:90", "-o", tmp_path / "b.tbundle")
    assert (
        "good for cuda:90: cannot be specialized: it has no argument xx; its arguments are x"
        in result.stderr
    )


@pytest.mark.toolchain
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_ptxas_says_is_told(cli, cli_json, module, tmp_path, jobs):
    """The line in which ptxas says what is wrong is the message; --json has its whole text, and
    nothing else on standard output.
    """
    module.write_text(MODULE.replace("undefined_name", "2.0"))
    words = ("build", module, "--target", "cuda:999", "-o", tmp_path / "b.tbundle", "--jobs", jobs)
    assert re.search(
        r"good for cuda:999: .* fatal: Value 'sm_999a?' is not defined", cli(*words).stderr
    )
    status, told = cli_json(*words)
    assert status == 1
    for failure in told["failures"]:
        assert re.search(r"fatal: Value 'sm_999a?' is not defined", failure["reason"])
        assert re.search(r"fatal +: Value 'sm_999a?' is not defined", failure["words"])
        assert "Repro command: " in failure["words"]


def test_what_a_module_prints_is_no_part_of_the_object(cli_json, module, tmp_path):
    """With --json, what an imported module prints goes to standard error."""
    module.write_text("print('hello from the module')\n" + MODULE.replace("undefined_name", "2.0"))
    status, told = cli_json(
        "build", module, "--target", "cuda:90", "-o", tmp_path / "b.tbundle", "--jobs", 1
    )
    assert (status, told["counts"]["kernels"]) == (0, 2)


def test_a_store_is_asked_first_and_filled(cli, module, tmp_path):
    """`--check` finds what is missing and compiles nothing; a second build takes everything from
    the store.
    """
    module.write_text(MODULE.replace("undefined_name", "2.0"))
    store = f"file://{tmp_path}/store"
    wanted = ("build", module, "--target", "cuda:90", "--jobs", 1)
    first = cli(*wanted, "-o", tmp_path / "1.tbundle", "--store", store, "--tag", "ci/kernels")
    assert first.exit_code == 0, first.output
    assert "compiled  2 kernels" in first.output
    check = json.loads(cli(*wanted, "--check", "--store", store, "--json").output)
    assert (check["ok"], check["missing"]) == (True, [])
    second = json.loads(
        cli(*wanted, "-o", tmp_path / "2.tbundle", "--store", store, "--json").output
    )
    assert (len(second["compiled"]), len(second["reused"])) == (0, 2)
    with Bundle.load(tmp_path / "1.tbundle") as one, Bundle.load(tmp_path / "2.tbundle") as two:
        assert one.digest == two.digest
    pushed = f"file://{tmp_path}/pushed"
    assert cli("push", tmp_path / "1.tbundle", "--store", pushed, "--tag", "lib").exit_code == 0
    check = json.loads(cli(*wanted, "--check", "--store", pushed, "--json").output)
    assert (check["ok"], check["missing"]) == (True, [])
    more = cli(
        "build", module, "--target", "cuda:90", "--target", "cuda:80", "--check", "--store", store
    )
    assert more.exit_code == 1
    assert "2 of 4 kernels" in more.output
    assert not (tmp_path / "triton-cache").exists()


@pytest.mark.slow
@pytest.mark.toolchain
def test_two_builds_at_once_compile_each_kernel_once(tmp_path):
    """Two commands with one store and one list, at the same time: ptxas assembles each kernel once,
    and both bundles have all.
    """
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


def test_a_store_that_fails_meanwhile_costs_nothing_that_was_compiled(
    cli, module, tmp_path, monkeypatch
):
    """What could not be sent is in the bundle, told with the store's name, and makes the status 1;
    the next build sends it.
    """
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
        cli(
            "build",
            "--spec",
            BUILD_FILE,
            "--check",
            "--store",
            f"file://{tmp_path}/store",
            "--json",
        ).output
    )
    assert told["failures"] == []
    assert Counter((kernel["name"], kernel["target"]) for kernel in told["missing"]) == {
        ("softmax_kernel", "cuda:90"): 4,
        ("softmax_kernel", "hip:gfx942"): 4,
        ("matmul_kernel", "cuda:90"): 2,
        ("swiglu_kernel", "cuda:90"): 4,
        ("swiglu_kernel", "hip:gfx942"): 4,
    }


def test_a_recording_is_built_for_another_target_from_the_command(cli, tmp_path):
    """`--from` with the module of the sources gives kernels that a JIT finds; what was assumed is
    told.
    """
    spec, both, only = tmp_path / "softmax.toml", tmp_path / "both.tbundle", tmp_path / "80.tbundle"
    spec.write_text(SOFTMAX.format(module=json.dumps(examples())))
    cli("build", "--spec", spec, "-o", both, "--jobs", 1)
    with Bundle.load(both) as bundle:
        bundle.select(target="cuda:80", names="softmax*").save(only)
        wanted = {
            kernel.key for kernel in bundle.select(target="cuda:90", names="softmax*").kernels
        }
    answer = cli(
        "build",
        "--from",
        only,
        examples(),
        "--target",
        "cuda:90",
        "-o",
        tmp_path / "o.tbundle",
        "--json",
        "--jobs",
        1,
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
        (("build", "--from", "a", "k.py", "-o", "b"), "--from needs --target"),
        (
            ("build", "k.py", "--check", "--store", "memory:", "--keep-going"),
            "--keep-going is about what is written",
        ),
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
    """No such module, a module that declares nothing, no target: each is said in one line, with the
    way out, status 1.
    """
    (tmp_path / "empty_module.py").write_text("x = 1\n")
    for words, told in [
        ((tmp_path / "absent.py", "--target", "cuda:90"), "no such file"),
        (("no.such.module", "--target", "cuda:90"), "no module"),
        ((tmp_path / "empty_module.py", "--target", "cuda:90"), "bundler.prebuild"),
        ((tmp_path / "empty_module.py",), "--target"),
    ]:
        result = cli("build", *words, "-o", tmp_path / "b.tbundle")
        assert (result.exit_code, told in result.stderr) == (1, True), result.output


_PACKAGE = """
from pathlib import Path
import bundler
bundler.register(Path(__file__).with_name("kernels.tbundle"))
"""


def test_a_package_that_registers_what_is_built(cli, module, tmp_path):
    """The first build does not miss it, and no later one takes the kernels of the old bundle for
    its own.
    """
    package = tmp_path / "shipped"
    package.mkdir()
    (package / "__init__.py").write_text(_PACKAGE)
    kernels, output = package / "kernels.py", package / "kernels.tbundle"
    kernels.write_text(MODULE.replace("undefined_name", "2.0"))
    digests = []
    for jobs in (2, 1, 2):
        made = cli("build", kernels, "--target", "cuda:90", "--jobs", jobs, "-o", output, "--json")
        assert made.exit_code == 0, made.output
        told = json.loads(made.stdout)
        assert (len(told["compiled"]), told["reused"], "warnings" in told) == (2, [], False)
        digests.append(told["digest"])
    assert len(set(digests)) == 1
