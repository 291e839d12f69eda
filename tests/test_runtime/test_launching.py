# SPDX-License-Identifier: Apache-2.0
"""Grids, handles, hooks, and what reaches the driver and what does not."""

import hashlib
import subprocess
import sys
import threading
from dataclasses import replace

import launch_calls as calls
import pytest

from bundler.errors import (
    BundlerError,
    CannotLaunchStatically,
    DigestMismatch,
    DriverError,
    DriverUnavailable,
    FormatError,
    NotFound,
)
from bundler.runtime import DeviceProperties, DryDriver, load

X, Y, OUT = calls.X, calls.Y, calls.OUT
ARGS = (X, Y, OUT, 1024)


# -------------------------------------------------------------------------------------------- Grids


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (4, (4, 1, 1)),
        ((4,), (4, 1, 1)),
        ((4, 5), (4, 5, 1)),
        ((4, 5, 6), (4, 5, 6)),
        ([4, 5], (4, 5, 1)),
        (lambda meta: (meta["n"] // meta["BLOCK"], meta["y"] is Y), (16, 1, 1)),
        (lambda meta: meta["BLOCK"], (64, 1, 1)),
    ],
)
def test_a_grid_is_numbers_or_a_function_of_the_arguments(cuda, grid, expected):
    """One to three sizes in any form; a function gets all arguments by name, defaults too, and
    tensors as they came.
    """
    for _ in range(2):
        cuda["add"][grid](*ARGS)
    assert [expected, expected] == [launch.grid for launch in cuda.driver.launches]


def test_a_cluster_makes_the_grid_longer(cuda):
    """With two blocks to a program the driver gets twice as many along x."""
    cuda["add"][(4, 2)](*ARGS, num_ctas=2)
    assert cuda.driver.launches[0].grid == (8, 2, 1)


@pytest.mark.parametrize("grid", [0, (0,), (4, 0), (4, 1, 0), lambda meta: (0, 3)])
def test_a_grid_with_no_program_launches_nothing(cuda, grid):
    """No launch, no hook, no error, first time and again."""
    heard = []
    cuda.hooks.enter.append(heard.append)
    for _ in range(2):
        cuda["add"][grid](*ARGS)
    cuda["add"].handle(*ARGS).launch(0, 1, 1, 0, X, Y, OUT, 1024)
    assert (heard, cuda.driver.launches) == ([], [])


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ((1, 65536), "65536 blocks along y, expected 0 to 65535"),
        ((1, 1, 65536), "65536 blocks along z"),
        ((2**31,), "blocks along x"),
        ((-1,), "-1 blocks along x"),
        ((), "one to three integers"),
        ((1, 1, 1, 1), "one to three integers"),
        ((1.0,), "one to three integers"),
        ("4", "one to three integers"),
        (None, "one to three integers"),
        (lambda meta: None, "one to three integers"),
        ((True, "x"), "one to three"),
    ],
)
def test_a_grid_that_no_device_can_launch_is_refused(cuda, grid, words):
    """The axis, the size and the limit are named."""
    with pytest.raises(CannotLaunchStatically, match=words):
        cuda["add"][grid](*ARGS)
    assert cuda.driver.launches == []


def test_clusters_count_for_the_limit_along_x(cuda):
    """Half as many programs fit when each is two blocks."""
    with pytest.raises(CannotLaunchStatically, match="2147483648 blocks along x"):
        cuda["add"][(2**30,)](*ARGS, num_ctas=2)


# ------------------------------------------------------------------------------------------ Handles


def test_a_handle_launches_what_the_call_would(cuda):
    """The same kernel, grid, stream and bytes."""
    cuda.driver.handle = 77
    cuda["add"][(16,)](*ARGS)
    handle = cuda["add"].handle(*ARGS)
    for _ in range(3):
        handle.launch(16, 1, 1, 77, X, Y, OUT, 1024)
    first, *others = cuda.driver.launches
    assert [first] * 3 == others
    assert len(cuda.driver.modules) == 1
    assert cuda["add"].handle_of(handle.plan.key).plan is handle.plan


def test_a_handle_takes_values_as_the_kernel_was_written(kernels, driver):
    """Tuples, descriptors and constants become the values that the binary takes."""
    pair, sizes = (X, Y), (2, (3, 16))
    handle = kernels["nested"].handle(pair, sizes, OUT)
    assert handle.values(pair, sizes, OUT) == (X, Y, 2, 3, 16, OUT)
    kernels["nested"][(1,)](pair, sizes, OUT)
    handle.launch(1, 1, 1, 0, *handle.values(pair, sizes, out=OUT))
    assert driver.launches[0] == driver.launches[1]
    descriptor = calls.Descriptor(calls.HALF, [64, 48], [48, 1], [16, 16])
    kernels["host_descriptor"][(1,)](descriptor, calls.HALF)
    handle = kernels["host_descriptor"].handle(descriptor, calls.HALF)
    handle.launch(1, 1, 1, 0, *handle.values(descriptor, calls.HALF))
    assert driver.launches[2] == driver.launches[3]
    with pytest.raises(
        CannotLaunchStatically,
        match="'source': expected a tensor descriptor of 2 dimensions, got Tensor",
    ):
        handle.values(calls.HALF, calls.HALF)
    with pytest.raises(CannotLaunchStatically, match="has no parameter 'num_warps'"):
        handle.values(descriptor, calls.HALF, num_warps=4)


@pytest.mark.parametrize(
    ("place", "values", "words"),
    [
        ((1, 1, 1, 0), (X, Y, OUT), "takes 4 values"),
        ((1, 1, 1, 0), (X, Y, OUT, 1.5), "argument 'n' has kind i32"),
        (
            (1, 1, 1, 0),
            (X, replace(Y, index=-1), OUT, 3),
            "argument 'y' is a tensor .* in host memory",
        ),
        (
            (1, 1, 1, 0),
            (X, Y, replace(OUT, index=1), 3),
            "argument 'out' is a tensor .* in device 1",
        ),
        ((1, 1, 1, 0), (X, Y, 4096, 3), "argument 'out' is the address 0x1000 in host memory"),
        ((1, 65536, 1, 0), (X, Y, OUT, 3), "blocks along y"),
    ],
)
def test_a_handle_checks_its_first_call(cuda, place, values, words):
    """What is wrong with it is said, and the next call is the first one then."""
    cuda.driver.host_addresses.add(4096)
    handle = cuda["add"].handle(*ARGS)
    for _ in range(2):
        with pytest.raises(CannotLaunchStatically, match=words):
            handle.launch(*place, *values)
    assert cuda.driver.launches == []


def test_a_handle_in_debug_mode_checks_every_call(recorded):
    """Without, a later call with another device's tensor reaches the driver; with debug it does
    not.
    """
    stray = replace(Y, index=1)
    for debug, launches in ((False, 2), (True, 1)):
        with load(recorded.bundle, driver=DryDriver(), debug=debug) as kernels:
            handle = kernels["add"].handle(*ARGS)
            handle.launch(1, 1, 1, 0, *ARGS)
            if debug:
                with pytest.raises(CannotLaunchStatically, match="argument 'y'"):
                    handle.launch(1, 1, 1, 0, X, stray, OUT, 1024)
            else:
                handle.launch(1, 1, 1, 0, X, stray, OUT, 1024)
            assert launches == len(kernels.driver.launches)


def test_addresses_are_asked_of_the_driver_at_every_call(cuda):
    """Where a pointer is declared an integer is an address, and has to lie on the device; elsewhere
    it is a number.
    """
    declared = cuda["declared"][(1,)]
    for _ in range(2):
        declared(calls.ADDRESS, OUT)
    cuda.driver.host_addresses.add(calls.ADDRESS + 32)
    for keywords in ({"x": calls.ADDRESS + 32, "out": OUT}, {"out": OUT, "x": calls.ADDRESS + 32}):
        with pytest.raises(
            CannotLaunchStatically,
            match=r"declared: argument 'x' is the address 0x.*20 in host memory",
        ):
            declared(**keywords)
        with pytest.raises(CannotLaunchStatically, match="argument 'x' is the address"):
            declared(calls.ADDRESS + 32, OUT)
    assert len(cuda.driver.launches) == 2
    with pytest.raises(NotFound, match=r"x is \*fp32, here i64"):
        cuda["add"][(1,)](calls.ADDRESS, Y, OUT, 1024)


def test_a_key_that_was_not_recorded_is_not_found(cuda):
    """The key is in the message."""
    with pytest.raises(NotFound, match="'QQQ'"):
        cuda["add"].handle_of("QQQ")


# -------------------------------------------------------------------------------------------- Hooks


def test_hooks_are_called_around_a_launch(cuda):
    """Entering in order, leaving in reverse, each with the facts of the launch."""
    heard = []
    cuda.driver.handle = 5
    for name in ("a", "b"):
        cuda.hooks.enter.append(
            lambda facts, name=name: heard.append(("enter", name, len(cuda.driver.launches)))
        )
        cuda.hooks.leave.append(lambda facts, name=name: heard.append(("leave", name, facts)))
    cuda["add"][(4,)](*ARGS)
    facts = heard[2][2]
    assert [
        ("enter", "a", 0),
        ("enter", "b", 0),
        ("leave", "b", facts),
        ("leave", "a", facts),
    ] == heard
    assert (facts["name"], facts["grid"], facts["stream"], facts["device"]) == (
        "add",
        (4, 1, 1),
        5,
        0,
    )


def test_a_hook_that_raises_stops_the_launch(cuda):
    """Its error reaches the caller as it is."""

    def refuse(facts):
        raise LookupError("not today")

    cuda.hooks.enter.append(refuse)
    with pytest.raises(LookupError, match="not today"):
        cuda["add"][(4,)](*ARGS)
    assert cuda.driver.launches == []


@pytest.mark.release
@pytest.mark.toolchain
def test_hooks_that_hang_on_triton_are_called_too(cuda):
    """A profiler that listens to Triton's launches hears ours, in Triton's form, and nothing when
    it left.
    """
    knobs = pytest.importorskip("triton").knobs
    heard = []

    def enter(metadata):
        heard.append(("enter", metadata.get()["name"]))

    def leave(metadata):
        heard.append(("leave", metadata.get()["name"]))

    knobs.runtime.launch_enter_hook.add(enter)
    knobs.runtime.launch_exit_hook.add(leave)
    try:
        cuda["add"][(4,)](*ARGS)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
        knobs.runtime.launch_exit_hook.remove(leave)
    cuda["add"][(4,)](*ARGS)
    assert heard == [("enter", "add"), ("leave", "add")]
    assert len(cuda.driver.launches) == 2


# -------------------------------------------------------------------------- What reaches the driver


def test_a_function_in_place_of_tritons_chain_is_called(cuda, monkeypatch):
    """Older programs assign their hook, and such a function has no list of members."""
    knobs, heard = pytest.importorskip("triton").knobs, []
    for _ in range(3):
        cuda["add"][(4,)](*ARGS)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", heard.append)
    cuda["add"][(4,)](*ARGS)
    assert [facts.get()["name"] for facts in heard] == ["add"]


def test_kernels_are_loaded_when_they_are_first_launched(cuda):
    """Opening a bundle loads nothing; each kernel is loaded once."""
    assert cuda.driver.modules == []
    for _ in range(3):
        cuda["add"][(4,)](*ARGS)
        cuda["read_only"][(4,)](X, OUT)
    assert [module.plan.kernel for module in cuda.driver.modules] == ["add", "read_only"]


def test_threads_that_need_a_kernel_at_once_load_it_once(cuda):
    """Eight threads launch four kernels; each is loaded once and every launch happens."""
    start = threading.Barrier(8)

    def work():
        start.wait()
        for n in (1024, 1000, 1, 1 << 40):
            cuda["add"][(4,)](X, Y, OUT, n)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cuda.driver.modules) == 4
    assert len(cuda.driver.launches) == 32


def test_unloaded_kernels_are_loaded_again(cuda):
    """A handle of before is refused by the driver; a call loads anew."""
    cuda["add"][(4,)](*ARGS)
    handle = cuda["add"].handle(*ARGS)
    cuda.unload()
    assert [module.loaded for module in cuda.driver.modules] == [False]
    with pytest.raises(DriverError, match="unloaded"):
        handle.launch(4, 1, 1, 0, *ARGS)
    cuda["add"][(4,)](*ARGS)
    assert [module.loaded for module in cuda.driver.modules] == [False, True]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_threads_per_block": 64}, "needs 128 threads"),
        ({"max_shared_optin_bytes": 100}, "needs 520 bytes of shared memory"),
    ],
)
def test_a_kernel_that_is_too_large_for_the_device_is_not_loaded(recorded, limits, words):
    """Threads and shared memory are compared with what the device has."""
    properties = replace(DeviceProperties("90", 1024, 227 * 1024, 32, 132, True), **limits)
    with load(recorded.bundle, driver=DryDriver("cuda", properties)) as kernels:
        with pytest.raises(DriverError, match=f"device_descriptor: {words}"):
            kernels["device_descriptor"][(1,)](calls.HALF, calls.HALF, 64, 48)
        assert kernels.driver.modules == []


def test_scratch_is_asked_for_by_the_size_of_the_grid(cuda):
    """A kernel with descriptors of its own gets scratch for each program, and its address among the
    parameters.
    """
    cuda["device_descriptor"][(3, 2)](calls.HALF, calls.HALF, 64, 48)
    launch = cuda.driver.launches[0]
    assert (6 * launch.plan.global_scratch_bytes, 0) == launch.scratch_bytes
    offset = next(p.offset for p in launch.plan.parameters if p.kind == "global_scratch")
    assert any(launch.parameters[offset : offset + 8])


def test_a_damaged_binary_never_reaches_the_driver(recorded, tmp_path):
    """A byte flipped anywhere in the file: what is loaded has the recorded digest, and what is not
    raises a typed error.
    """
    data, path = bytearray(recorded.path.read_bytes()), tmp_path / "broken.tbundle"
    made = [
        call
        for call in calls.CALLS
        if call.only is None and call.kernel in {"add", "nested", "floats"}
    ]
    digests = {kernel.binary.digest for kernel in recorded.bundle.kernels}
    refused = 0
    for step in range(1, 40):
        at = len(data) * step // 40
        data[at] ^= 0x10
        path.write_bytes(data)
        data[at] ^= 0x10
        driver = DryDriver()
        try:
            with load(path, driver=driver) as kernels:
                for call in made:
                    try:
                        kernels[call.kernel][(1,)](*call.args, **call.keywords)
                    except BundlerError:
                        refused += 1
        except (DigestMismatch, FormatError):
            assert driver.modules == [], "a manifest that cannot be read names no kernel"
        assert {
            f"sha256:{hashlib.sha256(module.image).hexdigest()}" for module in driver.modules
        } <= digests
    assert refused > 0


def test_a_forked_process_gets_a_clear_error(recorded):
    """Neither a kernel that was loaded before the fork nor a new one is launched in the child."""
    code = """
import os, sys
sys.path.insert(0, sys.argv[2])
import launch_calls as calls
import bundler.runtime
from bundler.errors import DriverUnavailable
kernels = bundler.runtime.load(sys.argv[1], driver=bundler.runtime.DryDriver("cuda"))
launch = lambda n: kernels["add"][(1,)](calls.X, calls.Y, calls.OUT, n)
launch(1024)
child = os.fork()
if child == 0:
    for n in (1024, 1000):
        try:
            launch(n)
        except DriverUnavailable as error:
            print("refused", "forked" in str(error), flush=True)
    os._exit(0)
os.waitpid(child, 0)
launch(1024)
print(len(kernels.driver.launches))
"""
    folder = calls.__file__.rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", code, recorded.path, folder],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["refused", "True", "refused", "True", "2"], done.stderr


def test_a_machine_without_a_driver_says_so(recorded):
    """Neither CUDA nor HIP: one error with both reasons."""
    from bundler.runtime.launch.drivers import driver_opening

    def nobody(backend):
        raise DriverUnavailable(f"no {backend} here")

    before, driver_opening.open_driver = driver_opening.open_driver, nobody
    try:
        with pytest.raises(DriverUnavailable, match="no cuda here; no hip here"):
            load(recorded.bundle)
    finally:
        driver_opening.open_driver = before


def test_a_bundle_without_kernels_for_a_gpu_is_refused(recorded):
    """There is nothing to launch."""
    with pytest.raises(NotFound, match="no kernel for CUDA or HIP"):
        load(recorded.bundle.select(names="nobody*"))


def test_kernels_without_facts_are_listed_with_the_reason(compiled, tmp_path):
    """What came by pack cannot be chosen for a call; asking for it says what to do."""
    import bundler

    with bundler.pack(compiled.cache) as packed, load(packed, driver=DryDriver()) as kernels:
        assert len(kernels) == 0
        assert all("came by pack" in reason for _, reason in kernels.refused)
        with pytest.raises(
            NotFound, match=r"'gelu_kernel' can be launched.*record the compile instead"
        ):
            kernels["gelu_kernel"]


def test_a_bundle_opened_by_path_is_closed_again(recorded):
    """Also when there is no driver for it; the leak check of every test looks at open files."""
    with load(recorded.path, driver=DryDriver()) as kernels:
        kernels["add"][(1,)](*ARGS)
    with pytest.raises(NotFound):
        load(recorded.path, driver=DryDriver("hip"))["nobody"]
