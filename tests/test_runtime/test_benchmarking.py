# SPDX-License-Identifier: Apache-2.0
"""A benchmark leaves the caller's tensors as they were, and times nothing but the launch."""

import math
from types import SimpleNamespace

import pytest

from bundler.errors import ConfigError
from bundler.runtime.tuning import benchmark
from bundler.runtime.tuning.benchmark import GivenClock, Sample, Sandbox, span_bytes, usable

torch = pytest.importorskip("torch")


def add_one(values, *names):
    """Return a launch that adds one to tensors."""

    def launch():
        for name in names:
            values[name].add_(1)

    return launch


def test_each_launch_sees_what_the_caller_gave():
    """A changed tensor is restored before each launch, and the caller's own is never touched."""
    x = torch.arange(4.0)
    with Sandbox({"x": x, "n": 4}, ["x"], []).open() as sandbox:
        for _ in range(3):
            sandbox.reset()
            add_one(sandbox.values, "x")()
            assert sandbox.values["x"].tolist() == [1, 2, 3, 4]
    assert x.tolist() == [0, 1, 2, 3]
    assert sandbox.values["n"] == 4


def test_a_tensor_that_is_added_to_begins_with_zeros_and_the_callers_keeps_its_numbers():
    """The clones are zeroed, each time; what both lists name is zeroed."""
    x, y = torch.full((3,), 7.0), torch.full((3,), 5.0)
    with Sandbox({"x": x, "y": y}, ["y"], ["x", "y"]).open() as sandbox:
        for _ in range(2):
            sandbox.reset()
            add_one(sandbox.values, "x", "y")()
            assert sandbox.values["x"].tolist() == sandbox.values["y"].tolist() == [1, 1, 1]
    assert (x.tolist(), y.tolist()) == ([7, 7, 7], [5, 5, 5])


def test_clones_keep_strides_and_what_is_the_same_memory_stays_the_same():
    """A transposed and a sparse view have clones of their layout; two names of one tensor have one
    clone.
    """
    base = torch.arange(24.0).reshape(4, 6)
    values = {"t": base.t(), "sparse": base[:, ::2], "again": base.t()}
    sandbox = Sandbox(values, ["t", "sparse", "again"], [])
    assert sandbox.values["t"].stride() == (1, 6)
    assert sandbox.values["sparse"].stride() == (6, 2)
    assert sandbox.values["again"] is sandbox.values["t"]
    sandbox.reset()
    assert sandbox.values["sparse"].tolist() == base[:, ::2].tolist()


def test_above_the_budget_a_tensor_is_kept_on_the_host_and_put_back(monkeypatch):
    """The kernel works on the caller's tensor, which is restored before each launch and at the end,
    also after an error.
    """
    monkeypatch.setattr(benchmark, "free_budget", lambda: 20)
    small, large = torch.zeros(4), torch.arange(100.0)
    with (
        pytest.raises(RuntimeError, match="stop"),
        Sandbox({"a": small, "b": large}, ["a", "b"], []).open() as sandbox,
    ):
        assert sandbox.values["a"] is not small
        assert sandbox.values["b"] is large
        assert list(sandbox.staged) == ["b"]
        for _ in range(2):
            sandbox.reset()
            add_one(sandbox.values, "b")()
            assert large[0].item() == 1
        raise RuntimeError("stop")
    assert large.tolist() == list(range(100))


def test_without_staging_everything_is_cloned(monkeypatch):
    """The budget does not count then."""
    monkeypatch.setattr(benchmark, "free_budget", lambda: 0)
    x = torch.zeros(4)
    sandbox = Sandbox({"x": x}, ["x"], [], stage=False)
    assert sandbox.values["x"] is not x
    assert sandbox.staged == {}


def test_a_clone_that_finds_no_memory_is_kept_on_the_host_instead():
    """One tensor too many does not end a tuning."""

    class OutOfMemoryError(RuntimeError):
        pass

    class Full(torch.Tensor):
        def new_empty_strided(self, size, stride, **keywords):
            if "device" not in keywords:
                raise OutOfMemoryError("no memory")
            return torch.empty_strided(size, stride)

    x = torch.arange(3.0).as_subclass(Full)
    with Sandbox({"x": x}, ["x"], []).open() as sandbox:
        assert list(sandbox.staged) == ["x"]
        sandbox.reset()
        add_one(sandbox.values, "x")()
    assert x.tolist() == [0, 1, 2]


def test_the_span_of_a_tensor_is_that_of_its_strides():
    """Gaps count, zero-sized tensors have none."""
    base = torch.zeros(4, 6)
    assert span_bytes(base) == 96
    assert span_bytes(base[:, ::2]) == 4 * (3 * 6 + 2 * 2 + 1)
    assert span_bytes(torch.zeros(0, 5)) == 0
    assert span_bytes(torch.zeros(1).expand(1000)) == 4


def test_names_that_are_no_tensors_are_passed_by():
    """A None for an optional tensor is neither cloned nor zeroed."""
    sandbox = Sandbox({"x": None, "n": 3}, ["x", "n"], ["x"])
    sandbox.reset()
    assert sandbox.values == {"x": None, "n": 3}


def test_a_given_benchmark_is_asked_as_triton_asks():
    """It gets the launch with its reset, and the three quantiles; a number alone is a median."""
    calls = []

    def bench(fn, quantiles):
        fn()
        calls.append(quantiles)
        return [2.0, 1.0, 3.0]

    order = []
    sample = GivenClock(bench).sample(lambda: order.append("launch"), lambda: order.append("reset"))
    assert (sample, calls, order) == (Sample(2.0, 1.0, 3.0), [(0.5, 0.2, 0.8)], ["reset", "launch"])
    assert GivenClock(lambda fn, quantiles: 4).sample(int, int) == Sample(4.0, 4.0, 4.0)
    with pytest.raises(ConfigError, match="milliseconds"):
        GivenClock(lambda fn, quantiles: []).sample(int, int)


def test_on_a_gpu_events_enclose_the_launch_and_nothing_else(monkeypatch):
    """Reset and the emptying of the cache come before the first event; the buffer is made once and
    can be given back.
    """
    now, order, made = [0.0], [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("event")
            self.at = now[0]

        def elapsed_time(self, end):
            return end.at - self.at

    class Buffer:
        def zero_(self):
            order.append("flush")
            now[0] += 50.0

    fake = SimpleNamespace(
        int8="int8",
        empty=lambda size, dtype, device: made.append(size) or Buffer(),
        cuda=SimpleNamespace(is_available=lambda: True, Event=Event, synchronize=lambda: None),
    )
    monkeypatch.setitem(benchmark.sys.modules, "torch", fake)

    def work(name, time_ms):
        def call():
            order.append(name)
            now[0] += time_ms

        return call

    clock = benchmark.CudaClock(warmup_ms=280, rep_ms=700)
    assert clock.sample(work("launch", 2.0), work("reset", 30.0)) == Sample(2.0, 2.0, 2.0)
    assert order[-5:] == ["reset", "flush", "event", "launch", "event"]
    # Five rounds to estimate: 330 ms from the first event to the last; then 280 ms to warm up, and
    # 700 ms that count.
    assert order.count("launch") == 1 + 5 + 4 + 10
    assert order.count("flush") == 5 + 10
    clock.release()
    clock.sample(work("launch", 2.0), work("reset", 0.0))
    assert len(made) == 2


@pytest.mark.parametrize(
    ("median", "expected"), [(1.0, True), (0.0, True), (math.inf, False), (math.nan, False)]
)
def test_an_infinite_time_is_none(median, expected):
    """Benchmarks return infinity for a launch that failed."""
    assert usable(Sample(median, median, median)) == expected


def test_without_a_gpu_there_is_no_clock_of_its_own():
    """The error says what to give."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match="do_bench"):
        benchmark.CudaClock()
