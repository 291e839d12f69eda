# SPDX-License-Identifier: Apache-2.0
"""The compiled dispatcher launches what the one in Python launches; every test of launching runs
with both.
"""

import gc
import subprocess
import sys
import weakref

import launch_calls as calls
import pytest

from bundler.errors import CannotLaunchStatically, NotFound
from bundler.runtime.launch import compiled_dispatch
from bundler.toolchain.profiler_hooks import CHAINS

X, Y, OUT = calls.X, calls.Y, calls.OUT
ARGS = (X, Y, OUT, 1024)


compiled_only = pytest.mark.parametrize("cuda", ["compiled"], indirect=True)


@pytest.fixture
def counted(cuda, monkeypatch):
    """Return the kernel `add` and a list that grows with each call that Python had to read."""
    kernel, seen = cuda["add"], []
    read = kernel._reader.read
    monkeypatch.setattr(kernel._reader, "read", lambda *args: (seen.append(1), read(*args))[1])
    kernel.forget()
    return kernel, seen


@compiled_only
def test_calls_that_look_alike_never_reach_python_again(cuda, counted):
    """After two calls of a kind the dispatcher launches alone: other tensors, other sizes of one
    class, another grid.
    """
    kernel, seen = counted
    for _ in range(2):
        kernel[(4,)](*ARGS, BLOCK=64)
    seen.clear()
    other = calls.Tensor(address=calls.ADDRESS + 4096)
    kernel[(4,)](other, Y, OUT, 2048, BLOCK=64)
    kernel[(5, 2)](other, Y, OUT, 2048, BLOCK=64)
    kernel[lambda meta: (meta["n"] // meta["BLOCK"],)](other, Y, OUT, 2048, BLOCK=64)
    assert seen == []
    launches = cuda.driver.launches[-3:]
    assert [launch.grid for launch in launches] == [(4, 1, 1), (5, 2, 1), (32, 1, 1)]
    assert {launch.parameters[:8] for launch in launches} == {other.address.to_bytes(8, "little")}


@compiled_only
@pytest.mark.parametrize(
    ("args", "keywords"),
    [
        ((calls.Tensor(index=1), Y, OUT, 1024), {}),
        ((X, Y, OUT, 2**70), {}),
        ((X, Y, OUT), {}),
        ((X, Y, OUT, 1024, 64, 5), {}),
        ((X, Y, object(), 1024), {}),
        ((X, Y, OUT, 1024), {"BLOCK": 77}),
        ((X, Y, OUT, 1024), {"nothing": 1}),
        ((calls.Tensor("float64"), Y, OUT, 1024), {}),
    ],
)
def test_what_does_not_fit_is_refused_after_calls_that_did(cuda, args, keywords):
    """A tensor elsewhere, a number too large, too few and too many arguments, an unknown constant
    or option, another type.
    """
    kernel = cuda["add"]
    for _ in range(3):
        kernel[(4,)](*ARGS)
    for _ in range(2):
        with pytest.raises((CannotLaunchStatically, NotFound)):
            kernel[(4,)](*args, **keywords)
    assert len(cuda.driver.launches) == 3


@pytest.mark.parametrize("where", ["python", "extension"])
def test_a_kernel_with_its_grid_is_called_with_the_grid_in_front(where, request):
    """Whatever is given by position or by name arrives behind the grid, however much it is; the
    pair lives on without its maker.
    """
    base = compiled_dispatch.PythonGridded
    if where == "extension":
        base = request.getfixturevalue("dispatch_extension").Gridded

    class Kernel(base):
        def __init__(self, launch):
            self._launch = launch

    grid = (4, 2)
    bound = Kernel(lambda *args, **keywords: (args, keywords))[grid]
    gc.collect()
    assert bound() == ((grid,), {})
    for count in (1, 63, 64, 65, 300):
        args, keywords = tuple(range(count)), {f"k{number}": number for number in range(count)}
        assert bound(*args) == ((grid, *args), {})
        assert bound(**keywords) == ((grid,), keywords)
        assert bound(7, *args, **keywords) == ((grid, 7, *args), keywords)
        assert list(map(bound, args)) == [((grid, value), {}) for value in args]
    with pytest.raises(ZeroDivisionError):
        Kernel(lambda grid: grid / 0)[1]()


def test_kernels_with_grids_that_hold_each_other_are_collected(dispatch_extension):
    """A kernel whose launch leads back to it goes away with what it made."""

    class Kernel(dispatch_extension.Gridded):
        pass

    kernel = Kernel()
    with pytest.raises(AttributeError):
        kernel[1]
    kernel._launch = kernel.__repr__  # a method holds its object
    kernel.made = kernel[(1,)]
    gone = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert gone() is None


@compiled_only
def test_the_current_device_is_asked_for_at_each_launch(cuda):
    """A call on another device, with tensors there, is another kind of call."""
    kernel = cuda["add"]
    there = [calls.Tensor(index=1) for _ in range(3)]
    for device, tensors in ((0, ARGS[:3]), (1, there)) * 3:
        cuda.driver.current = device
        kernel[(4,)](*tensors, 1024)
    assert [launch.device for launch in cuda.driver.launches] == [0, 1] * 3


@compiled_only
def test_hooks_that_come_later_are_called(cuda):
    """A hook added after many launches hears the next one, and none after it is gone."""
    kernel, heard = cuda["add"], []
    for _ in range(3):
        kernel[(4,)](*ARGS)
    cuda.hooks.enter.append(heard.append)
    kernel[(4,)](*ARGS)
    cuda.hooks.enter.clear()
    kernel[(4,)](*ARGS)
    assert (len(heard), len(cuda.driver.launches)) == (1, 5)


@compiled_only
def test_a_launch_after_unload_loads_again(cuda):
    """What was remembered of calls goes with the modules that it launched."""
    kernel = cuda["add"]
    for _ in range(3):
        kernel[(4,)](*ARGS)
    cuda.unload()
    kernel[(4,)](*ARGS)
    assert len(cuda.driver.launches) == 4


@compiled_only
def test_many_kinds_of_calls_are_forgotten_again(cuda, monkeypatch):
    """However many constants a program comes with, no more than the limit is remembered, and every
    call is launched.
    """
    monkeypatch.setattr("bundler.runtime.launch.static_kernel.MAX_REMEMBERED", 3)
    kernel = cuda["add"]
    kernel.forget()
    for _ in range(4):
        for block, warps in ((64, 4), (128, 8)):
            for grid in range(1, 4):
                kernel[(grid,)](*ARGS, BLOCK=block, num_warps=warps)
    assert len(cuda.driver.launches) == 24


@compiled_only
def test_nothing_is_kept_alive_by_launches(cuda):
    """References to arguments are given back, by launches, refusals and calls that Python reads; a
    kernel is collected.
    """
    kernel = cuda["add"]
    held, text = calls.Tensor(), "x" * 20
    kernel[(4,)](held, Y, OUT, 1024)
    before = sys.getrefcount(held), sys.getrefcount(text)
    for _ in range(50):
        kernel[(4,)](held, Y, OUT, 1024)
        with pytest.raises((CannotLaunchStatically, NotFound)):
            kernel[(4,)](held, Y, text, 1024)
        with pytest.raises(CannotLaunchStatically):
            kernel[("x",)](held, Y, OUT, 1024)
    gc.collect()
    assert (sys.getrefcount(held), sys.getrefcount(text)) == before
    gone = weakref.ref(kernel)
    cuda._kernels.clear()
    del kernel
    gc.collect()
    assert gone() is None


def test_the_wheel_has_the_dispatcher():
    """Where it was built, kernels use it without being asked."""
    from bundler.runtime.launch import compiled_dispatch

    if compiled_dispatch.dispatcher_type() is None:
        pytest.skip(
            "the extension is not built into this installation; `make test` installs a wheel that"
            " has it"
        )
    code = (
        "from bundler.runtime.launch import compiled_dispatch;"
        " print(compiled_dispatch.dispatcher_type().__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "bundler.runtime.launch._launch"


LEFT_TO_THE_LAST_COLLECTION = """
import gc, sys
import bundler.runtime.launch
from bundler.runtime.launch import _launch

class Kernel(_launch.Gridded):
    pass

class Holder:
    pass

kernel, holder = Kernel(), Holder()
kernel._launch = print
holder.all = [holder, Kernel, _launch, kernel[(1,)]]
del sys.modules["bundler.runtime.launch._launch"], bundler.runtime.launch._launch
del Kernel, kernel, holder, _launch
print(gc.collect() > 0)
"""


def test_a_kernel_with_its_grid_may_go_with_its_type():
    """As at the end of a process, which crashed where a collection took the type first."""
    if compiled_dispatch.dispatcher_type() is None:
        pytest.skip("the extension is not built")
    done = subprocess.run(
        [sys.executable, "-P", "-c", LEFT_TO_THE_LAST_COLLECTION], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "True\n")


@compiled_only
def test_another_constant_is_launched_without_a_call_of_python(cuda, counted):
    """The shape of the first call is enough: Python looks the constant up, and neither reads nor
    launches the call.
    """
    kernel, seen = counted
    kernel[(4,)](*ARGS, BLOCK=64, num_warps=4)
    seen.clear()
    kernel[(4,)](*ARGS, BLOCK=128, num_warps=4)
    assert seen == []
    kernel[(5,)](*ARGS, BLOCK=128, num_warps=4)
    kernel[(4,)](*ARGS, BLOCK=64, num_warps=4)
    assert seen == []
    first, other, again, last = cuda.driver.launches
    assert (first.plan, other.plan) == (last.plan, again.plan)
    assert [
        dict(s.facts.constants)[(4,)].payload
        for s in kernel.specializations
        if s.key == other.plan.key
    ] == [128]
    assert (other.parameters, again.grid) == (first.parameters, (5, 1, 1))
    with pytest.raises(NotFound):
        kernel[(4,)](*ARGS, BLOCK=77, num_warps=4)
    kernel[(4,)](*ARGS, BLOCK=128, num_warps=8)  # another option is another shape
    assert cuda.driver.launches[-1].plan.key not in {first.plan.key, other.plan.key}


@compiled_only
def test_hooks_hear_of_a_launch_by_shape(cuda, counted):
    """A call that is known by its shape alone goes to Python when there are hooks."""
    kernel, _ = counted
    kernel[(4,)](*ARGS, BLOCK=64)
    heard = []
    cuda.hooks.enter.append(lambda facts: heard.append(facts["key"]))
    kernel[(4,)](*ARGS, BLOCK=128)
    assert heard == [cuda.driver.launches[-1].plan.key]


class Sized:
    """A driver of one device, with a dispatcher whose grid has what it is told to have."""

    def __init__(self, extension, sizes):
        self.sizes, self.asked, self.launched = sizes, [], []
        self.dispatcher = extension.Dispatcher(
            driver=self,
            enter=[],
            leave=[],
            present=lambda: False,
            slow=self.slow,
            first=self.first,
            measure=lambda *_: self.sizes,
            positions=b"\0\0",
            names={},
            capacity=9,
            numbers=False,
            chains=CHAINS,
            recording=None,
        )

    def device(self):
        return 0

    def stream(self, device):
        return 7

    def slow(self, *args):
        self.asked.append(args)

    def first(self, grid, *args):
        return (lambda *values: self.launched.append(values), len(args), {}, "bound")


class Untold:
    """Has a truth value that nobody gets to know."""

    def __bool__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_error_of_a_size_is_raised(axis, dispatch_extension):
    """It is no size of nought, for which nothing would be launched, and the error be left
    behind.
    """
    made = Sized(dispatch_extension, tuple(Untold() if at == axis else 3 for at in range(3)))
    made.dispatcher((3,), 1)
    with pytest.raises(ZeroDivisionError):
        made.dispatcher((3,), 1)
    made.sizes = (3, 0, Untold())
    assert made.dispatcher((3,), 1) is None
    assert made.launched == []
    made.sizes = (3, 4, 5)
    made.dispatcher((3,), 1)
    assert made.launched == [(3, 4, 5, 7, 1)]


class Interrupted:
    """Looks like a tensor; whoever asks for its address is interrupted."""

    dtype = "float32"

    def __init__(self, error):
        self.error = error

    def get_device(self):
        return 0

    def data_ptr(self):
        raise self.error


def test_an_interrupt_is_not_forgotten(dispatch_extension):
    """Of an error Python is asked anew, and meets it again; an interrupt comes once."""
    made = Sized(dispatch_extension, (1, 1, 1))
    for error in (KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(error)):
            made.dispatcher((1,), Interrupted(error))
    assert made.asked == []
    made.dispatcher((1,), Interrupted(ValueError()))
    assert len(made.asked) == 1


class Unhashed:
    def __init__(self, error):
        self.error = error

    def __hash__(self):
        raise self.error


def test_an_interrupt_while_a_grid_is_looked_up_is_not_forgotten(dispatch_extension):
    """The same for sizes of a kind of its own."""
    made = Sized(dispatch_extension, (1, 1, 1))
    made.dispatcher((1,), 1)
    with pytest.raises(KeyboardInterrupt):
        made.dispatcher((Unhashed(KeyboardInterrupt()),), 1)
    made.dispatcher((Unhashed(TypeError()),), 1)
    assert len(made.launched) == 1
