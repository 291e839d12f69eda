# SPDX-License-Identifier: Apache-2.0
"""What a tuner tells people and programs: bandwidth, launch parameters, ranges in a profile, the
parts of a tuning key.
"""

from types import SimpleNamespace

import launch_calls as calls
import pytest

from bundler.errors import ConfigError, FormatError, NotFound
from bundler.format.constant_values import encode
from bundler.format.launch_spec import TuningRecord
from bundler.runtime import (
    BandwidthReport,
    Config,
    DryDriver,
    LaunchDump,
    ProfilerClock,
    TunedLaunch,
    TunerOptions,
)
from bundler.runtime.tuning import tuner_reports, tuning_winners
from bundler.runtime.tuning.descent import Descent, Space
from bundler.runtime.tuning.tuner_reports import Bandwidth, moved_bytes
from bundler.toolchain import profiler_hooks, tuner_toolchain


def test_a_line_has_time_size_and_speed():
    """Three decimals, three decimals, two decimals seven wide, with tabs between; red only where it
    is slow and wanted.
    """
    assert Bandwidth("add", 0.25, 0.5).line() == "0.250ms\t0.500 GB\t2000.00GB/s\tadd"
    assert Bandwidth("mul", 1.0, 0.1).line() == "1.000ms\t0.100 GB\t 100.00GB/s\tmul"
    assert Bandwidth("mul", 1.0, 0.1).line(color=True).startswith("\x1b[31m")
    assert not Bandwidth("tiny", 0.012, 0.0).slow
    assert Bandwidth("none", 0.0, 1.0).gb_per_s == 0.0


def test_the_table_is_sorted_by_time_and_goes_to_a_file(tmp_path):
    """Totals first, then each kernel with its part; every write appends."""
    report = BandwidthReport(tmp_path / "bandwidth.txt")
    report.add("fast", 1.0, 1.0)
    report.add("slow", 3.0, 1.0)
    lines = report.table("train.py").splitlines()
    assert lines[0] == "4.000ms\t2.000 GB\t 500.00GB/s\tSUMMARY (train.py)"
    assert [line.split("\t")[3:] for line in lines[1:]] == [["slow", " 75.0%"], ["fast", " 25.0%"]]
    report.write()
    report.write()
    assert (tmp_path / "bandwidth.txt").read_text().count("SUMMARY") == 2
    assert BandwidthReport().table() == "0.000ms\t0.000 GB\t   0.00GB/s\tSUMMARY"
    with pytest.raises(NotFound):
        BandwidthReport(tmp_path / "no" / "file").write()


def test_bytes_are_those_of_all_tensors_and_in_out_counts_twice():
    """Numbers and None do not count."""

    class Tensor(calls.Tensor):
        def numel(self):
            return 1000

    assert (
        moved_bytes({"x": Tensor(), "in_out_ptr0": Tensor("float16"), "n": 3, "y": None})
        == 4000 + 2 * 2000
    )


def test_a_dump_has_a_line_for_each_launch(tmp_path):
    """Bools and integers as they are; everything else is a T."""
    dump = LaunchDump(tmp_path / "dump")
    dump.add("add", (calls.X, 3, True, 2.5, None), {"k": "text"}, {"BLOCK": 64}, (4, 1))
    assert (tmp_path / "dump").read_text() == "add | T 3 True T T k=T BLOCK=64 | (4, 1)\n"


def tuned_launch(*values, kernel="add", key="KEY", **named):
    """A launch with these arguments by position, then by name."""
    arguments = {**{f"a{number}": value for number, value in enumerate(values)}, **named}
    return TunedLaunch(
        kernel, "", key, Config({"BLOCK": 64}), (4, 1, 1), 0, 0, arguments, len(values)
    )


def test_a_dump_keeps_the_tensors_of_the_last_launches(tmp_path):
    """In turn, by kernel and key, for kernels whose name matches; torch reads them without running
    anything.
    """
    torch = pytest.importorskip("torch")
    dump = LaunchDump(tmp_path / "dump", tensors=tmp_path / "tensors", runs=2, pattern="add|mul")
    for number in range(3):
        dump.write(tuned_launch(torch.full((2, 3), float(number)), 5, out=torch.arange(number + 1)))
    dump.write(tuned_launch(torch.ones(1), key="OTHER"))
    dump.write(tuned_launch(torch.ones(1), kernel="sub"))
    assert (tmp_path / "dump").read_text().splitlines()[
        2
    ] == "add | T 5 out=T BLOCK=64 num_warps=4 num_ctas=1 num_stages=3 | (4, 1, 1)"
    assert sorted(
        path.relative_to(tmp_path / "tensors").as_posix()
        for path in (tmp_path / "tensors").rglob("*.pt")
    ) == [
        "add-KEY_run_0/tensor_0.pt",
        "add-KEY_run_0/tensor_2.pt",
        "add-KEY_run_1/tensor_0.pt",
        "add-KEY_run_1/tensor_2.pt",
        "add-OTHER_run_0/tensor_0.pt",
    ]

    def kept(run, number):
        return torch.load(
            tmp_path / "tensors" / f"add-KEY_run_{run}" / f"tensor_{number}.pt", weights_only=True
        )

    assert (kept(0, 0).unique().tolist(), kept(1, 0).unique().tolist(), kept(0, 2).tolist()) == (
        [2.0],
        [1.0],
        [0, 1, 2],
    )
    for wrong in ({"runs": 0}, {"pattern": "("}):
        with pytest.raises(ConfigError, match=r"expected|regular expression"):
            LaunchDump(tmp_path / "dump", **wrong)


class Gpu:
    """Stands for a profiler: says of each launch what the list says next, and what lies
    around it.
    """

    def __init__(self, *times_us, launched="add"):
        self.times_us, self.launched, self.calls = list(times_us), launched, []

    def launch(self):
        self.calls.append("launch")

    def reset(self):
        self.calls.append("reset")

    def profile(self, run):
        self.calls.clear()
        run()
        found = []
        for call in self.calls:
            noise = [
                ("Context Sync", 700.0),
                ("Memset (Device)", 900.0),
                ("void at::native::vectorized_elementwise_kernel<4>", 800.0),
            ]
            found += (
                [(self.launched, self.times_us.pop(0))]
                if call == "launch" and self.times_us
                else noise
            )
        return found


def test_a_profiler_clock_counts_the_kernel_alone():
    """Not what restores tensors and empties the cache; the median of all launches, and the
    percentiles.
    """
    gpu = Gpu(*(float(us) for us in range(10, 20)))
    clock = ProfilerClock(warmups=2, runs=10, profile=gpu.profile)
    sample = clock.sample(gpu.launch, gpu.reset)
    assert (sample.median_ms, sample.low_ms, sample.high_ms) == pytest.approx(
        (0.0145, 0.012, 0.018)
    )
    assert gpu.calls == ["reset", "launch"] * 10
    other = Gpu(3.0, 5.0)
    as_bench = ProfilerClock(runs=2, profile=other.profile)
    assert as_bench(other.launch, quantiles=(0.5, 0.2, 0.8)) == pytest.approx([0.004, 0.003, 0.005])


def test_a_profiler_clock_takes_the_kernels_that_a_pattern_names():
    """Also torch's own, where the pattern names them; none at all is an error that says what was
    there.
    """
    gpu = Gpu(4.0, 4.0)
    clock = ProfilerClock("vectorized|add", warmups=0, runs=2, profile=gpu.profile)
    assert clock.sample(gpu.launch, gpu.reset).median_ms == pytest.approx(0.804)
    with pytest.raises(
        ConfigError,
        match=(
            r"no kernel that 'mul' matches, but Context Sync, Memset \(Device\), add, void"
            r" at::native"
        ),
    ):
        gpu.times_us = [1.0, 1.0]
        ProfilerClock("mul", runs=2, profile=gpu.profile).sample(gpu.launch, gpu.reset)
    with pytest.raises(ConfigError, match="no regular expression"):
        ProfilerClock("(")
    with pytest.raises(ConfigError, match="at least 1"):
        ProfilerClock(runs=0)


def test_torchs_profiler_is_asked_for_what_the_gpu_did(monkeypatch):
    """In the order of time, and not for what the CPU did; the queue is empty before, and at the
    end.
    """
    heard, device = [], SimpleNamespace(CUDA="cuda")

    def event(name, where, start, us):
        return SimpleNamespace(
            name=name,
            device_type=where,
            time_range=SimpleNamespace(start=start, elapsed_us=lambda: us),
        )

    class Profile:
        def __init__(self, activities):
            heard.append(activities)

        def __enter__(self):
            heard.append("start")
            return self

        def __exit__(self, *error):
            heard.append("stop")

        def events(self):
            return [
                event("second", "cuda", 9, 2.0),
                event("aten::add", "cpu", 0, 50.0),
                event("first", "cuda", 1, 3),
            ]

    cuda = SimpleNamespace(synchronize=lambda: heard.append("wait"))
    torch = SimpleNamespace(cuda=cuda, autograd=SimpleNamespace(DeviceType=device))
    profiler = SimpleNamespace(profile=Profile, ProfilerActivity=SimpleNamespace(CUDA="gpu"))
    monkeypatch.setitem(tuner_reports.sys.modules, "torch", torch)
    monkeypatch.setitem(tuner_reports.sys.modules, "torch.profiler", profiler)
    found = tuner_toolchain.profiled_kernels(lambda: heard.append("run"))
    assert found == [("first", 3.0), ("second", 2.0)]
    assert heard == ["wait", ["gpu"], "start", "run", "wait", "stop"]


def test_a_profiler_that_lost_a_kernel_gives_the_mean():
    """Turns cannot be told apart then."""
    lost = [("add", 3.0), ("add", 3.0), ("add", 6.0)]
    sample = ProfilerClock(warmups=0, runs=2, profile=lambda run: lost).sample(
        lambda: None, lambda: None
    )
    assert (sample.median_ms, sample.low_ms) == pytest.approx((0.006, 0.006))


def test_a_range_tells_what_inductors_tell(monkeypatch):
    """Name, config and tensors go to torch's profiler; without a profiler nothing is called."""
    assert not profiler_hooks.is_recording()
    made = []

    class Fast:
        def __init__(self, name, inputs, facts):
            made.append((name, inputs, facts))

        def __enter__(self):
            made.append("enter")

        def __exit__(self, *error):
            made.append("leave")

    torch = SimpleNamespace(_C=SimpleNamespace(_profiler=SimpleNamespace(_RecordFunctionFast=Fast)))
    monkeypatch.setitem(tuner_reports.sys.modules, "torch", torch)
    monkeypatch.setitem(
        tuner_reports.sys.modules,
        "torch.autograd.profiler",
        SimpleNamespace(_is_profiler_enabled=True),
    )
    assert profiler_hooks.is_recording()
    launch = TunedLaunch(
        "add",
        "/home/me/add.py",
        "KEY",
        Config({"BLOCK": 64}, num_warps=8),
        (4, 2, 1),
        7,
        0,
        {"x": calls.X, "n": 3},
    )
    with tuner_reports.launch_range(launch, {"kernel_num_gb": 0.5}):
        made.append("launch")
    facts = {
        "kernel_name": "add",
        "kernel_backend": "triton",
        "kernel_file": "/home/me/add.py",
        "kernel_hash": "KEY",
        "grid": "grid(4, 2, 1)",
        "stream": 7,
        "num_warps": 8,
        "num_stages": 3,
        "kernel_kwargs": "BLOCK=64",
        "kernel_num_gb": 0.5,
    }
    assert made == [("add", [calls.X], facts), "enter", "launch", "leave"]


def test_an_older_profiler_gets_a_plain_range(monkeypatch):
    """Where torch has no quick range, the one of its public interface serves."""
    names = []

    class Range:
        def __init__(self, name):
            names.append(name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    monkeypatch.setitem(tuner_reports.sys.modules, "torch", SimpleNamespace())
    monkeypatch.setitem(
        tuner_reports.sys.modules,
        "torch.autograd.profiler",
        SimpleNamespace(record_function=Range),
    )
    with tuner_reports.launch_range(TunedLaunch("", "", "", Config(), (1, 1, 1), 0, 0, {})):
        pass
    assert names == ["triton kernel"]


# ---------------------------------------------------------------------------- Parts of a tuning key


def test_a_config_goes_into_a_record_and_comes_back():
    """Everything that reaches the compiler: parameters, counts, options; the order of parameters
    does not count.
    """
    config = Config({"B": 2, "A": True}, 8, 2, 2, 64, {"kpack": 2, "ir_override": "x.ttgir"})
    named = tuning_winners.named_of(config)
    assert tuning_winners.config_of(named) == config
    assert named == tuning_winners.named_of(
        Config({"A": True, "B": 2}, 8, 2, 2, 64, {"ir_override": "x.ttgir", "kpack": 2})
    )
    assert tuning_winners.plain_config(named) == {
        "kwargs": {"A": True, "B": 2},
        "num_warps": 8,
        "num_stages": 2,
        "num_ctas": 2,
        "maxnreg": 64,
        "options": {"kpack": 2, "ir_override": "x.ttgir"},
    }
    with pytest.raises(ConfigError, match="cannot travel"):
        tuning_winners.named_of(Config({"A": object()}))
    for wrong in (("num_warps", encode("four")), ("num_warps", encode(0))):
        with pytest.raises(FormatError, match="config that is none"):
            tuning_winners.config_of((wrong,))


def test_the_hash_of_configs_is_of_the_set_and_of_every_field():
    """Another order is the same; another register limit or cluster is not."""
    one, two = Config({"A": 1}), Config({"A": 2})
    assert tuning_winners.configs_part([one, two]) == tuning_winners.configs_part([two, one])
    others = [
        Config({"A": 1}, maxnreg=64),
        Config({"A": 1}, num_ctas=2),
        Config({"A": 1}, options={"x": 1}),
        two,
    ]
    assert len({tuning_winners.configs_part([config]) for config in (one, *others)}) == 5


def test_the_device_is_what_it_is_and_not_where():
    """Two equal GPUs share records; another model does not."""
    one, two = (
        DryDriver("cuda", devices=2).properties(0),
        DryDriver("cuda", devices=2).properties(1),
    )
    assert tuning_winners.device_part("cuda", one, "H200") == tuning_winners.device_part(
        "cuda", two, "H200"
    )
    assert tuning_winners.device_part("cuda", one, "H200") != tuning_winners.device_part(
        "cuda", one, "H100"
    )


def test_ways_of_searching_have_records_of_their_own():
    """What coordinate descent found does not count where it is off, nor with another radius."""
    plain = TunerOptions().search
    fine, wide = (TunerOptions(descent=Descent(radius=radius)).search for radius in (1, 2))
    bounded = TunerOptions(descent=Descent(), space=Space(max_blocks={"x": 64})).search
    assert len({plain, fine, wide, bounded}) == 4
    for wrong in ({"workers": 0}, {"spill_threshold": -1}):
        with pytest.raises(ConfigError, match="expected"):
            TunerOptions(**wrong)


def test_a_table_entry_comes_back_as_the_record_it_was_made_from():
    """All parts travel in it, so that an exported table can be imported again."""
    parts = (("source", "ab"), ("arguments", "1024"), ("device", "H200"))
    record = TuningRecord("add", parts, tuning_winners.named_of(Config({"BLOCK": 64})), "autotune")
    assert tuning_winners.record_of(tuning_winners.table_entry(record, None))[0] == record
    by_hand = {"kernel": "add", "config": {"kwargs": {"BLOCK": 64}}}
    assert dict(tuning_winners.record_of(by_hand)[0].parts) == {"source": "", "arguments": ""}
    for wrong in (
        {},
        {"kernel": "add"},
        {"kernel": "add", "config": 3},
        {"kernel": "add", "config": {}, "time_ns": "x"},
        *(
            {"kernel": "add", "config": {}, "time_ns": time_ns}
            for time_ns in (10**400, 2**63, -1, float("inf"), float("nan"))
        ),
    ):
        with pytest.raises(FormatError):
            tuning_winners.record_of(wrong)
