# SPDX-License-Identifier: Apache-2.0
"""The choice among several kernels is a tuning record: it is looked up before anything is measured,
and travels.
"""

import ast
import json

import launch_calls as calls
import pytest

import bundler
from bundler.compile.source_modules import source_module
from bundler.errors import ConfigError, FormatError
from bundler.format.candidate_timings import Timing
from bundler.integrations.inductor_generated import multi_kernels_of
from bundler.integrations.inductor_kernels import TunerSettings
from bundler.lifecycle.tuning_directory import TuningFolder, tunings_of
from bundler.runtime import DeviceProperties, DryDriver, LookupTable, TunerOptions, heuristics
from bundler.runtime.heuristics.facts import Device, Setting
from bundler.runtime.tuning.benchmark import GivenClock
from bundler.runtime.tuning.multi_kernel import MultiKernel, MultiKernelRecords, ShapeKernel
from bundler.runtime.tuning.tuning_winners import plain_config

pytestmark = pytest.mark.toolchain
X, Y, OUT = calls.X, calls.Y, calls.OUT
TEXT = """import triton
import triton.language as tl


@triton.jit
def looped(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def whole(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(y + i, i < n) + tl.load(x + i, i < n), i < n)
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function that makes a multi-kernel of two kernels, its driver, and the kernels that were
    measured.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def make(times=(2.0, 1.0), text=TEXT, properties=None, block=64, **options):
        driver, measured = DryDriver("cuda", properties), []
        chosen = TunerOptions(driver=driver, workers=1, **options)
        module = source_module(text).load()
        kernels = {
            name: heuristics.user_autotune(
                [{"BLOCK": block}],
                Setting(Device("cuda", 132)),
                options=chosen,
                grid=lambda blocks, sizes: (-(-sizes["n"] // blocks["BLOCK"]), 1, 1),
            )(getattr(module, name))
            for name in ("looped", "whole")
        }

        def measure(kernel, args):
            measured.append(kernel.__self__.__name__)
            return dict(zip(kernels, times, strict=True))[measured[-1]]

        runs = {name: kernel.run for name, kernel in kernels.items()}
        records = MultiKernelRecords("sum", kernels, chosen)
        return MultiKernel("sum", runs, measure, records=records), driver, measured

    return make


def test_the_next_process_measures_nothing(make, tmp_path):
    """What was measured is written as a record with every time, and is the answer for the next
    object; the chosen kernel runs.
    """
    first, driver, measured = make()
    first(X, Y, OUT, 1024)
    assert (first.choice, first.how, measured) == ("whole", "measured", ["looped", "whole"])
    assert [launch.plan.kernel for launch in driver.launches] == ["whole"]
    again, driver, measured = make()
    again.run(X, Y, OUT, 1024, stream=0)
    assert (again.choice, again.how, measured, dict(again.times_ms)) == ("whole", "record", [], {})
    assert [launch.plan.kernel for launch in driver.launches] == ["whole"]
    ((record, tuning),) = TuningFolder(tmp_path / "cache").records("sum")
    assert (plain_config(record.config)["kwargs"], record.found_by) == (
        {"kernel": "whole"},
        "multi-kernel",
    )
    assert [(timing.time_ns, timing.reason) for timing in tuning.timings] == [
        (2_000_000, ""),
        (1_000_000, ""),
    ]
    assert isinstance(tuning.timings[0], Timing)


def test_the_choice_travels_in_a_bundle(make, tmp_path, monkeypatch):
    """A recording hears of it; with the bundle alone, in empty directories, nothing is measured,
    and after a restore neither.
    """
    with bundler.recording() as recording:
        make()[0](X, Y, OUT, 1024)
    bundle = bundler.winners_only(recording.collect())
    assert [record.kernel for record, _ in tunings_of(bundle)] == ["sum"]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    carried, _, measured = make(bundle=bundle)
    carried(X, Y, OUT, 1024)
    assert (carried.how, measured) == ("record", [])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "restored"))
    bundler.restore(bundle, tmp_path / "restored")
    restored, _, measured = make()
    restored(X, Y, OUT, 1024)
    assert (restored.how, measured) == ("record", [])


@pytest.mark.parametrize(
    "change",
    [
        {"text": TEXT.replace("tl.load(x + i, i < n) + ", "1 + tl.load(x + i, i < n) + ")},
        {"block": 128},
        {"properties": DeviceProperties("90", 1024, 232448, 32, 78, True)},
        {"reuse": "none"},
    ],
)
def test_a_choice_for_another_source_list_or_device_is_no_answer(make, change):
    """Each named part has to be equal, or the kernels are measured; with records switched off they
    always are.
    """
    make()[0](X, Y, OUT, 1024)
    other, _, measured = make(times=(1.0, 2.0), **change)
    other(X, Y, OUT, 1024)
    assert (other.choice, other.how, len(measured)) == ("looped", "measured", 2)


def test_a_table_and_determinism_decide_without_a_measurement(make):
    """A table is the user's word; a deterministic program takes the first kernel in every
    process.
    """
    entry = {"kernel": "sum", "config": {"kwargs": {"kernel": "looped"}}}
    by_table, _, measured = make(table=LookupTable([entry]))
    by_table(X, Y, OUT, 1024)
    assert (by_table.choice, by_table.how, measured) == ("looped", "table", [])
    same, _, measured = make(deterministic=True)
    same(X, Y, OUT, 1024)
    assert (same.choice, same.how, measured) == ("looped", "first", [])
    given, _, measured = make()
    given.choose("whole")
    given(X, Y, OUT, 1024)
    assert (given.how, measured) == ("given", [])


def test_a_kernel_that_cannot_be_measured_has_its_reason_in_the_record(make, tmp_path):
    """A time that is none, and an implementation that fails, are told to who reads the record."""
    one, _, _ = make(times=(float("inf"), 1.0))
    one(X, Y, OUT, 1024)
    ((_, tuning),) = TuningFolder(tmp_path / "cache").records("sum")
    assert [timing.reason for timing in tuning.timings] == ["the measurement gave no time", ""]


def test_a_record_that_names_no_kernel_of_these_is_no_answer(make, tmp_path):
    """A record may come from anybody: what it names has to be one of the kernels."""
    make()[0](X, Y, OUT, 1024)
    (path,) = [
        path
        for path in (tmp_path / "cache").rglob("*")
        if path.is_file() and path.name.startswith("sum")
    ]
    data = path.read_bytes()
    assert data.count(b"whole") > 0
    path.write_bytes(data.replace(b"whole", b"owner"))
    other, _, measured = make()
    other(X, Y, OUT, 1024)
    assert (other.how, len(measured)) == ("measured", 2)
    with pytest.raises(ConfigError, match="expected kernels"):
        MultiKernelRecords("sum", {})


# ----------------------------------------------------------------------------------------- Wrappers

WRAPPER = """
arg_index = {
    0: [slice(0, 4, None)],
    1: [slice(0, 3, None), slice(4, 5, None)],
}
multi_kernel_0 = async_compile.multi_kernel('multi_kernel_0', [
    looped,
    whole,
], arg_index=arg_index)
arg_index = {0: [slice(0, 4)], 1: [slice(0, 4)]}
multi_kernel_1 = async_compile.size_hint_multi_kernel('multi_kernel_1', {
    ((64, 64),): looped,
    None: whole,
}, arg_index=arg_index)
"""


class Kernel:
    """What a wrapper's kernel is to a dispatcher."""

    def __init__(self, name, options):
        self.__name__, self.calls = name, []
        self.tuned = type("Tuned", (), {"options": options})

    def run(self, *args, **kwargs):
        self.calls.append((args, kwargs))


def read(text, told=None):
    told = told or TunerSettings(
        TunerOptions(), lambda: GivenClock(lambda fn, quantiles: fn() or [1.0] * 3)
    )
    kernels = {name: Kernel(name, told.options) for name in ("looped", "whole")}
    return multi_kernels_of(ast.parse(text), kernels, told, "w.py"), kernels


def test_a_wrappers_multi_kernels_run_its_kernels_with_their_own_arguments(monkeypatch):
    """Slices say which arguments each kernel gets; those that are keyed by shapes choose by shapes;
    `run` takes a stream.
    """
    monkeypatch.setattr(MultiKernelRecords, "find", lambda self: ("whole", "record"))
    found, kernels = read(WRAPPER)
    assert list(found) == ["multi_kernel_0", "multi_kernel_1"]
    assert isinstance(found["multi_kernel_0"], MultiKernel)
    assert isinstance(found["multi_kernel_1"], ShapeKernel)
    found["multi_kernel_0"].run(1, 2, 3, 4, 5, stream=9)
    assert kernels["whole"].calls == [((1, 2, 3, 5), {"stream": 9})]
    square = calls.Tensor(shape=(128, 64))
    found["multi_kernel_1"].run(square, 2, 3, 4)
    assert kernels["looped"].calls == [((square, 2, 3, 4), {})]
    assert read("x = 1\n")[0] == {}


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (
            WRAPPER.replace("slice(0, 4, None)", "slice(n)"),
            FormatError,
            "arg_index is not understood",
        ),
        (
            WRAPPER.replace("slice(0, 4, None)", "open('x')"),
            FormatError,
            "arg_index is not understood",
        ),
        (
            WRAPPER.replace("[\n    looped,\n    whole,\n]", "kernels"),
            FormatError,
            "a multi-kernel is not understood",
        ),
        (
            WRAPPER.replace("    whole,\n", "    other,\n"),
            ConfigError,
            "chooses from other, and there is no such kernel",
        ),
        (WRAPPER.replace("    whole,\n", "    looped,\n"), ConfigError, "names a kernel twice"),
    ],
)
def test_a_multi_kernel_that_is_written_in_another_way_is_a_typed_error(text, error, words):
    """Nothing of a wrapper is run, so what is not understood is named."""
    assert json.dumps(text) != json.dumps(WRAPPER)
    with pytest.raises(error, match=words):
        read(text)
