# SPDX-License-Identifier: Apache-2.0
"""Of several implementations the fastest runs, or the one for the nearest shapes; each error names
what was wrong.
"""

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import ConfigError, NoValidConfig
from bundler.runtime.tuning.benchmark import Sample
from bundler.runtime.tuning.multi_kernel import (
    FALLBACK_DISTANCE,
    NO_MATCH,
    MultiKernel,
    ShapeKernel,
    distance,
    shapes_of,
    timed_on_clones,
)


class Tensor:
    def __init__(self, *shape):
        self.shape = shape

    def data_ptr(self):
        return 0


def kernels(*names):
    """Kernels that return their name and arguments."""
    return {name: lambda *args, _name=name, **kwargs: (_name, args, kwargs) for name in names}


class Stopwatch:
    """Gives each kernel the time that was set for its name, and counts."""

    def __init__(self, times):
        self.times, self.measured = times, []

    def __call__(self, kernel, args):
        name = kernel(*args)[0]
        self.measured.append((name, args))
        time = self.times[name]
        if isinstance(time, Exception):
            raise time
        return time


def test_the_fastest_runs_and_each_is_measured_once():
    """The first call measures every kernel, and this one and all later calls run the fastest; the
    first of equals.
    """
    watch = Stopwatch({"looped": 2.0, "persistent": 1.0, "split": 1.0})
    multi = MultiKernel("softmax", kernels("looped", "persistent", "split"), watch)
    assert multi.choice is None
    assert multi(1, 2, stream=5) == ("persistent", (1, 2), {"stream": 5})
    assert multi(3) == ("persistent", (3,), {})
    assert [name for name, _ in watch.measured] == ["looped", "persistent", "split"]
    assert multi.choice == "persistent"
    assert multi.times_ms == {"looped": 2.0, "persistent": 1.0, "split": 1.0}


def test_each_kernel_gets_its_own_arguments():
    """A kernel that takes fewer arguments gets those, also while it is measured."""
    watch = Stopwatch({"plain": 2.0, "with_workspace": 1.0})
    multi = MultiKernel(
        "sum", kernels("plain", "with_workspace"), watch, arguments={"plain": [0, 1]}
    )
    assert multi("x", "out", "workspace")[1] == ("x", "out", "workspace")
    assert watch.measured[0] == ("plain", ("x", "out"))


def test_a_choice_made_elsewhere_is_run_without_measuring():
    """A choice of another process, or a forced one, is run; a name that is not there is an
    error.
    """
    watch = Stopwatch({})
    multi = MultiKernel("softmax", kernels("looped", "persistent"), watch)
    multi.choose("looped")
    assert multi(1)[0] == "looped"
    assert watch.measured == []
    with pytest.raises(ConfigError, match="no kernel 'tiny'; expected one of looped, persistent"):
        multi.choose("tiny")


def test_kernels_that_fail_lose_and_when_all_fail_the_error_says_why():
    """An exception or an infinite time loses; when nothing is left, the error has each reason, and
    the next call tries again.
    """
    watch = Stopwatch({"a": RuntimeError("out of memory"), "b": math.inf, "c": 3.0})
    assert MultiKernel("m", kernels("a", "b", "c"), watch)(1)[0] == "c"
    multi = MultiKernel("m", kernels("a", "b"), watch)
    with pytest.raises(NoValidConfig, match="out of memory") as caught:
        multi(1)
    assert dict(caught.value.reasons) == {
        "a": "RuntimeError: out of memory",
        "b": "the measurement gave no time",
    }
    watch.times["b"] = 1.0
    assert multi(1)[0] == "b"


def test_threads_measure_once():
    """Of several first calls at once one measures."""
    watch, start = Stopwatch({"a": 2.0, "b": 1.0}), threading.Barrier(4)
    multi = MultiKernel("m", kernels("a", "b"), watch)
    found = []

    def call():
        start.wait()
        found.append(multi(1)[0])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["b"] * 4
    assert len(watch.measured) == 2


def test_no_kernels_is_an_error():
    """There must be something to choose from, and arguments only for what is there."""
    with pytest.raises(ConfigError):
        MultiKernel("m", {}, Stopwatch({}))
    with pytest.raises(ConfigError, match="b"):
        MultiKernel("m", kernels("a"), Stopwatch({}), arguments={"b": [0]})
    with pytest.raises(ConfigError):
        ShapeKernel("m", {})
    with pytest.raises(ConfigError):
        ShapeKernel("m", {None: min}, memo=0)


@pytest.mark.parametrize(
    ("made_for", "shapes", "expected"),
    [
        (((64, 64),), ((256, 64),), 2),
        (((100, 64),), ((64, 64),), 0.6439),
        (((0, 64),), ((64, 64),), 7),
        (((64,), (64,)), ((64,),), NO_MATCH),
        (((64,),), ((64, 128),), NO_MATCH),
        (None, ((64,),), FALLBACK_DISTANCE),
        (((),), ((),), 0),
    ],
)
def test_distance_table(made_for, shapes, expected):
    """Distances that were seen in torch; where ranks differ there is no match, while torch calls it
    distance 0.
    """
    assert distance(made_for, shapes) == pytest.approx(expected, abs=1e-4)


@given(
    st.lists(st.integers(0, 2**20), min_size=1, max_size=4).flatmap(
        lambda a: st.tuples(
            st.just(a), *[st.lists(st.integers(0, 2**20), min_size=len(a), max_size=len(a))] * 2
        )
    )
)
def test_distance_is_a_metric(three):
    """Zero to itself, the same both ways, and no shorter by a detour."""
    a, b, c = ((tuple(shape),) for shape in three)
    assert distance(a, a) == 0
    assert distance(a, b) == distance(b, a)
    assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-9


def test_the_kernel_for_the_nearest_shapes_runs():
    """Shapes decide, whatever else is among the arguments; the fallback is for those that no kernel
    can be compared with.
    """
    small, large = ((64, 64), (64,)), ((4096, 64), (64,))
    named = kernels("small", "large", "any")
    shape = ShapeKernel("m", {small: named["small"], large: named["large"], None: named["any"]})
    assert shape(Tensor(100, 64), 100, Tensor(64), "cfg", stream=1)[0] == "small"
    assert shape(Tensor(2048, 64), 100, Tensor(64))[0] == "large"
    assert shape(Tensor(512, 64), Tensor(64))[0] == "small"
    assert shape(Tensor(64, 64))[0] == "any"
    assert shapes_of((Tensor(2, 3), 4, Tensor())) == ((2, 3), ())
    strict = ShapeKernel("m", {small: named["small"]})
    with pytest.raises(ConfigError, match=r"ranks \(2,\)"):
        strict(Tensor(64, 64))


class Float:
    itemsize = 4


class Cells(Tensor):
    """A tensor that can be cloned and written to."""

    dtype = Float

    def __init__(self, *cells):
        super().__init__(len(cells))
        self.cells = list(cells)

    def data_ptr(self):
        return id(self)

    def size(self):
        return self.shape

    def stride(self):
        return (1,)

    def new_empty_strided(self, size, stride, **_kind):
        return Cells(*[None] * size[0])

    def copy_(self, other):
        self.cells[:] = other.cells


def test_measuring_leaves_the_callers_tensors_alone():
    """Each measured launch sees the tensors as the caller gave them, and none writes to the
    caller's.
    """
    seen = []

    def double(tensor, factor):
        seen.append(list(tensor.cells))
        tensor.cells[:] = [factor * cell for cell in tensor.cells]

    class Thrice:
        def sample(self, launch, reset):
            for _ in range(3):
                reset()
                launch()
            return Sample(7.0, 7.0, 7.0)

    mine = Cells(1, 2)
    assert timed_on_clones(Thrice())(double, (mine, 2)) == 7.0
    assert seen == [[1, 2]] * 3
    assert mine.cells == [1, 2]


def test_few_shapes_are_remembered():
    """The memo is bounded, and drops what was not asked for longest."""
    shape = ShapeKernel("m", {((1,),): min}, memo=2)
    for size in (1, 2, 1, 3):
        shape.kernel_for(((size,),))
    assert list(shape._memo) == [((1,),), ((3,),)]
