# SPDX-License-Identifier: Apache-2.0
"""A call launches the specialization that Triton itself chose for it, or says why it cannot."""

import subprocess
import sys
from dataclasses import replace

import launch_calls as calls
import pytest

from bundler.errors import CannotLaunchStatically, NotFound, ToolchainMismatch
from bundler.runtime import DeviceProperties, DryDriver, load
from bundler.runtime.launch.specialization_choice import Choices
from bundler.runtime.launch.specialization_match import Specialization

X, Y, OUT = calls.X, calls.Y, calls.OUT
GRID = (3,)


def launch(kernels, call):
    kernels[call.kernel][GRID](*map(calls.without_triton, call.args), **call.keywords)


@pytest.mark.release
@pytest.mark.toolchain
def test_each_call_launches_the_kernel_that_triton_chose(recorded, kernels, driver, target):
    """For each recorded call the dispatcher picks the same kernel key as the JIT, and again when it
    remembers the call.
    """
    both = zip(calls.CALLS, recorded.chosen[target], strict=True)
    made = [(call, key) for call, key in both if key is not None and call.kernel != "eighth"]
    for call, _ in made * 2:
        launch(kernels, call)
    assert [key for _, key in made] * 2 == [launch.plan.key for launch in driver.launches]


@pytest.mark.release
@pytest.mark.toolchain
def test_the_rules_of_specialization_are_those_of_this_triton(tmp_path):
    """Whatever is given for whatever parameter gets the type and the key that Triton's own binder
    gives it.
    """
    program = calls.__file__.replace("launch_calls", "compare_rules")
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", program], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_launching_imports_neither_triton_nor_torch(recorded):
    """A process that loads a bundle and launches from it has not imported the compiler."""
    code = """
import sys
sys.path.insert(0, sys.argv[2])
import launch_calls as calls
import bundler.runtime
driver = bundler.runtime.DryDriver("cuda")
with bundler.runtime.load(sys.argv[1], driver=driver) as kernels:
    kernels["add"][(16,)](calls.X, calls.Y, calls.OUT, 1024)
assert len(driver.launches) == 1
print(sorted({"triton", "torch", "redis", "numpy"} & set(sys.modules)))
"""
    folder = calls.__file__.rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, recorded.path, folder], capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_arguments_by_name_and_defaults_launch_the_same(cuda):
    """Keywords in any order, and a default given or left out, make the same call."""
    cuda["add"][GRID](X, Y, OUT, 1024)
    cuda["add"][GRID](n=1024, out=OUT, y=Y, x=X)
    cuda["add"][GRID](X, Y, n=1024, BLOCK=64, out=OUT, num_warps=4)
    first, *others = cuda.driver.launches
    assert [first, first] == others


def test_no_match_says_what_there_is_and_what_differs(cuda):
    """The closest specialization comes first, with the arguments that keep it from fitting."""
    with pytest.raises(NotFound) as raised:
        cuda["add"][GRID](calls.HALF, calls.HALF, calls.HALF, 1000)
    (_, words), *_ = raised.value.differences
    assert words == ("n is divisible by 16, here it is not",)
    assert "none of the 13 recorded specializations for cuda:90 fits" in str(raised.value)
    assert "fallback" in str(raised.value)


@pytest.mark.parametrize(
    ("args", "keywords", "words"),
    [
        ((X, Y, OUT, 1024), {"BLOCK": 32}, "BLOCK is 64, here 32"),
        ((X, Y, OUT, 1024), {"num_warps": 2}, "num_warps is 4, here 2"),
        ((X, Y, OUT, 1024), {"BLOCK": 64.0}, "BLOCK is 64, here 64.0"),
        ((X, Y, OUT, 1024), {"nonsense": 2}, "it has no parameter and no option 'nonsense'"),
        ((X, Y, OUT, 2.0), {}, "n is i32, here fp32"),
        ((X, Y, OUT, None), {}, "n is i32, here constexpr"),
        ((X, Y, (OUT,), 1024), {}, "out is *fp32, here ('*fp32',)"),
    ],
)
def test_what_triton_would_compile_anew_is_not_launched(cuda, args, keywords, words):
    """Another constant, option or type is another kernel."""
    with pytest.raises(NotFound) as raised:
        cuda["add"][GRID](*args, **keywords)
    assert words in str(raised.value)
    assert cuda.driver.launches == []


def test_an_option_that_is_left_out_means_tritons_default(recorded):
    """A kernel recorded with eight warps alone is not chosen for a call that does not ask
    for them.
    """
    eight = [
        Specialization(kernel)
        for kernel in recorded.bundle.kernels
        if kernel.name == "add" and kernel.launch.num_warps == 8 and str(kernel.target) == "cuda:90"
    ]
    args = (X, Y, OUT, 1024)
    with pytest.raises(NotFound, match="num_warps is 8, here Triton's default, 4"):
        Choices("add", eight).choose("cuda:90", args, {"BLOCK": 128})
    assert (
        eight[0] is Choices("add", eight).choose("cuda:90", args, {"BLOCK": 128, "num_warps": 8})[0]
    )


def test_an_unknown_kernel_is_named_with_those_there_are(cuda):
    """The message lists the kernels and what the bundle is for."""
    with pytest.raises(
        NotFound, match=r"no kernel 'sub' for cuda; there are add, .*cuda:90, hip:gfx942"
    ):
        cuda["sub"]
    assert "sub" not in cuda
    assert sorted(cuda) == list(cuda)


def test_a_binary_is_not_launched_on_another_architecture(recorded):
    """sm_90 code is refused on sm_80 and on sm_100, with both named."""
    for arch in ("80", "100"):
        properties = DeviceProperties(arch, 1024, 227 * 1024, 32, 108, True)
        with load(recorded.bundle, driver=DryDriver("cuda", properties)) as kernels:
            with pytest.raises(
                ToolchainMismatch, match=f"compiled for cuda:90, and this device is cuda:{arch}"
            ):
                kernels["add"][GRID](X, Y, OUT, 1024)
            assert kernels.driver.modules == []


@pytest.mark.parametrize(
    ("tensor", "where"), [(replace(X, index=-1), "host memory"), (replace(X, index=1), "device 1")]
)
def test_a_tensor_that_is_not_on_the_device_is_refused(cuda, tensor, where):
    """CPU tensors and tensors of another device are named, also when the kernel was launched
    before, and inside tuples.
    """
    cuda["add"][GRID](X, Y, OUT, 1024)
    with pytest.raises(
        CannotLaunchStatically, match=rf"add: argument 'y' is a tensor .* in {where}"
    ) as raised:
        cuda["add"][GRID](X, tensor, OUT, 1024)
    assert raised.value.argument == "y"
    with pytest.raises(CannotLaunchStatically, match=rf"argument 'pair\[1\]' .* in {where}"):
        cuda["nested"][GRID]((X, tensor), (2, (3, 16)), OUT)
    descriptor = calls.Descriptor(replace(tensor, name="float16"), [64, 48], [48, 1], [16, 16])
    with pytest.raises(CannotLaunchStatically, match=rf"argument 'source.base' .* in {where}"):
        cuda["host_descriptor"][GRID](descriptor, calls.HALF)
    assert len(cuda.driver.launches) == 1


def test_a_kernel_runs_on_the_device_that_is_current(cuda):
    """After the device changed the binary is loaded there too, once."""
    there = [replace(tensor, index=1) for tensor in (X, Y, OUT)]
    for _ in range(2):
        cuda.driver.current = 0
        cuda["add"][GRID](X, Y, OUT, 1024)
        cuda.driver.current = 1
        cuda["add"][GRID](*there, 1024)
    assert [launch.device for launch in cuda.driver.launches] == [0, 1, 0, 1]
    assert [module.device for module in cuda.driver.modules] == [0, 1]


def test_tensors_that_do_not_tell_their_device_are_asked_of_the_driver(cuda):
    """An object with no more than an address and a type is a tensor; its address decides."""

    class Plain:
        dtype = X.dtype

        def data_ptr(self):
            return calls.ADDRESS + 64

    cuda["add"][GRID](Plain(), Y, OUT, 1024)
    cuda.driver.host_addresses.add(calls.ADDRESS + 64)
    with pytest.raises(CannotLaunchStatically, match=r"argument 'x' is a tensor .* in host memory"):
        cuda["add"][GRID](Plain(), Y, OUT, 1024)


def test_constants_of_equal_value_and_other_type_are_apart(cuda):
    """3 and 3.0, which Python calls equal, are two kernels, also for what is remembered of
    calls.
    """
    for _ in range(2):
        cuda["optional"][GRID](X, Y, OUT, scale=3)
        with pytest.raises(NotFound, match=r"scale is 3, here 3\.0"):
            cuda["optional"][GRID](X, Y, OUT, scale=3.0)
        cuda["optional"][GRID](X, Y, OUT, scale=2.0)


def test_wrong_arguments_are_refused_by_name(cuda):
    """Too many, missing, doubled, and of no type that a kernel takes; also after calls that are
    right but for that.
    """
    add = cuda["add"][GRID]
    add(X, Y, OUT, 1024, 64)
    for args, keywords, words in (
        ((X, Y, OUT, 1024, 64, 1), {}, r"add: takes 5 arguments \(x, y, out, n, BLOCK\), got 6"),
        ((X, Y, OUT), {}, "add: argument 'n' is missing"),
        ((X, Y, OUT, 1024), {"x": X}, "add: argument 'x' is given twice"),
        ((X, Y, OUT, "1024"), {}, "argument 'n': expected a tensor, number.*got str"),
        ((X, Y, OUT, 1 << 64), {}, "argument 'n': 18446744073709551616 does not fit 64 bits"),
        ((X, Y, OUT, [1024]), {}, "argument 'n': expected .* got list"),
    ):
        with pytest.raises(CannotLaunchStatically, match=words):
            add(*args, **keywords)
    assert len(cuda.driver.launches) == 1


def test_a_number_out_of_its_parameters_range_is_refused(cuda):
    """300 is no 8-bit integer, even where such a call was made before."""
    call = next(call for call in calls.CALLS if call.kernel == "integers")
    cuda["integers"][GRID](*call.args)
    with pytest.raises(
        CannotLaunchStatically, match=r"integers: argument 'a' has kind i8.*got 301"
    ):
        cuda["integers"][GRID](call.args[0], 301, *call.args[2:])
