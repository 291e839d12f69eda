# SPDX-License-Identifier: Apache-2.0
"""`triton-bundler tune`: the winners of tuners listed, taken out, put in and compared."""

import dataclasses
import json
from pathlib import Path

import pytest

import bundler
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.candidate_timings import Timing, Tuning, id_of
from bundler.format.launch_spec import TuningRecord
from bundler.format.manifest import Content, Observed
from bundler.lifecycle.tuning_directory import TuningFolder, with_tunings
from bundler.runtime import Config, LookupTable
from bundler.runtime.tuning.tuning_winners import named_of

PARTS = {"source": "ab", "arguments": "1024", "device": "H200", "toolchain": "triton 3.7.1"}
TRITON = {
    "key": [64, "fp32"],
    "configs_timings": [
        [
            {
                "kwargs": {"BLOCK": 64},
                "num_warps": 4,
                "num_ctas": 1,
                "num_stages": 3,
                "maxnreg": None,
            },
            [0.5, 0.4, 0.6],
        ],
        [
            {
                "kwargs": {"BLOCK": 32},
                "num_warps": 4,
                "num_ctas": 1,
                "num_stages": 3,
                "maxnreg": None,
            },
            [float("inf")] * 3,
        ],
    ],
}
KEY = "C" * 52
INDUCTOR = {
    "XBLOCK": 512,
    "num_warps": 8,
    "num_stages": 1,
    "configs_hash": "ab" * 32,
    "found_by_coordesc": False,
    "time_taken_ms": 33,
    "triton_cache_hash": "D" * 52,
}


def made(kernel, block, *, tried=(64, 128), **parts):
    """Return a record of a kernel, and timings of which the winner's is the least."""
    record = TuningRecord(
        kernel, tuple({**PARTS, **parts}.items()), named_of(Config({"BLOCK": block})), "autotune"
    )
    timings = [
        Timing(named_of(Config({"BLOCK": b})), "", 1000 if b == block else 2500) for b in tried
    ]
    timings.append(
        Timing(named_of(Config({"BLOCK": 4096})), reason="OutOfResources: shared memory")
    )
    return record, Tuning(id_of(record), tuple(timings), 2_000_000, 500_000, 7)


@pytest.fixture
def bundle(tmp_path):
    """Make a bundle of records alone, and return its path."""

    def save(name, *pairs):
        path = tmp_path / f"{name}.tbundle"
        with_tunings(Bundle(Content(), Observed(), MemoryBlobs({})), pairs).save(path)
        return path

    return save


def test_show_lists_winners_and_with_all_every_config(cli, bundle):
    """A row a record; then each config with its time or why it has none, the winner marked."""
    path = bundle("a", made("add", 128), made("mul", 64, arguments="7"))
    shown = cli("tune", "show", path)
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()[2:4]] == ["add", "mul"]
    assert "BLOCK=128, num_warps=4, num_stages=3" in shown.stdout
    assert "1.00 us" in shown.stdout
    assert "2 records, 6 configs tried in 5.0 s" in shown.stdout
    everything = cli("tune", "show", path, "--all", "--kernel", "add").stdout
    assert "mul" not in everything
    assert "OutOfResources: shared memory" in everything
    assert [
        line.startswith("*") for line in everything.splitlines() if "2.50 us" in line or "*" in line
    ] == [
        True,
        False,
    ]


def test_show_tells_programs_everything(cli, bundle):
    """Parts, candidates and times spent, as one object."""
    told = json.loads(cli("tune", "show", bundle("a", made("add", 128)), "--json").stdout)
    (record,) = told["records"]
    assert (record["kernel"], record["config"]["kwargs"], record["time_ns"]) == (
        "add",
        {"BLOCK": 128},
        1000,
    )
    assert dict(record["parts"]) == PARTS
    assert [candidate["time_ns"] for candidate in record["candidates"]] == [2500, 1000, None]
    assert (record["compile_s"], record["measure_s"]) == (2.0, 0.5)


def test_show_reads_cache_directories_and_tells_when_there_is_nothing(cli, bundle, tmp_path):
    """Records beside Triton's kernels count; an empty bundle is no error."""
    TuningFolder(tmp_path / "cache").put(*made("add", 128))
    assert "1 record" in cli("tune", "show", tmp_path / "cache").stdout
    empty = cli("tune", "show", bundle("empty"))
    assert (empty.exit_code, "no tuning record" in empty.stdout) == (0, True)


def test_an_exported_table_overrides_a_list_and_comes_back(cli, bundle, tmp_path):
    """What export writes, a lookup table reads and import makes the same records of."""
    path, table, again = (
        bundle("a", made("add", 128)),
        tmp_path / "t.json",
        tmp_path / "again.tbundle",
    )
    assert cli("tune", "export", path, "-o", table).exit_code == 0
    assert LookupTable.load(table).find("add", "ab", "1024") == Config({"BLOCK": 128})
    assert LookupTable.load(table).find("add", "ab", "2048") is None
    assert cli("tune", "import", table, "-o", again).exit_code == 0
    with Bundle.load(again) as imported:
        assert imported.tuning_records == (made("add", 128)[0],)
    assert cli("tune", "diff", "--exit-code", path, again).exit_code == 0


def test_tritons_files_are_read_and_written(cli, bundle, tmp_path):
    """A result file becomes a record that names what it knows; what export writes can be read
    again, infinite times too.
    """
    source, out = tmp_path / "add.autotune.json", tmp_path / "out.tbundle"
    source.write_text(json.dumps(TRITON))
    assert (
        cli("tune", "import", source, "--into", bundle("a", made("mul", 64)), "-o", out).exit_code
        == 0
    )
    shown = json.loads(cli("tune", "show", out, "--json").stdout)["records"]
    assert [(r["kernel"], r["found_by"], r["time_ns"]) for r in shown] == [
        ("add", "triton", 500_000),
        ("mul", "autotune", 1000),
    ]
    told = json.loads(
        cli("tune", "export", out, "--as", "triton", "-o", tmp_path / "files", "--json").stdout
    )
    written = {Path(path).name: json.loads(Path(path).read_text()) for path in told["files"]}
    assert written["add.autotune.json"]["key"] == ["64", "fp32"]
    times = [times for _, times in written["add.autotune.json"]["configs_timings"]]
    assert times == [[0.5] * 3, [float("inf")] * 3]
    path = next(path for path in told["files"] if path.endswith("add.autotune.json"))
    assert json.loads(cli("tune", "show", path, "--json").stdout)["records"][0]["config"][
        "kwargs"
    ] == {"BLOCK": 64}


@pytest.fixture
def inductor(tmp_path):
    """An Inductor cache with one kernel and three result files: of that kernel, of another one, and
    none.
    """
    cache = tmp_path / "torchinductor"
    for name, document in {
        "aa/1": INDUCTOR | {"triton_cache_hash": KEY},
        "bb/2": INDUCTOR | {"found_by_coordesc": True},
        "cc/3": {"XBLOCK": 4},
    }.items():
        path = cache / f"{name}.best_config"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(document))
    kernel = cache / "triton" / "0" / KEY
    kernel.mkdir(parents=True)
    for name in ("__grp__triton_poi_fused_0.json", "triton_poi_fused_0.json"):
        (kernel / name).write_text("{}")
    return cache


def test_results_of_inductors_tuner_are_listed(cli, inductor):
    """Kernel by name where it is beside them, config and how it was found; what is no result file
    is left out with the reason.
    """
    done = cli("tune", "show", inductor)
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[2:4]] == [
        "2",
        "triton_poi_fused_0",
    ]
    assert "XBLOCK=512, num_warps=8, num_stages=1" in done.stdout
    assert "inductor, coordinate descent" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 records, tuned in 66 ms"
    assert done.stderr.startswith(
        "warning: left out cc/3.best_config: not a result file of Inductor's tuner: "
    )
    told = json.loads(cli("tune", "show", inductor, "--kernel", KEY[:6], "--json").stdout)[
        "records"
    ]
    assert [
        (r["kernel"], r["config"]["kwargs"], r["time_ns"], dict(r["parts"])["file"]) for r in told
    ] == [
        ("triton_poi_fused_0", {"XBLOCK": 512}, None, "aa/1.best_config"),
    ]
    assert (
        "aa/1.best_config" in cli("tune", "show", inductor / "aa" / "1.best_config", "--all").stdout
    )
    assert cli("tune", "diff", "--exit-code", inductor, inductor).exit_code == 0


def test_results_of_inductors_tuner_are_no_records(cli, inductor, tmp_path):
    """They can be neither imported nor exported, and the error says where torch finds them."""
    path = inductor / "aa" / "1.best_config"
    done = cli("tune", "import", path, "-o", tmp_path / "o.tbundle")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"error: {path} is of Inductor's tuner, which says neither for which kernel"
    )
    assert "pack the cache directory" in done.stderr
    done = cli("tune", "export", inductor, "-o", tmp_path / "t.json")
    assert (done.exit_code, "its 2 files of Inductor's tuner are for torch" in done.stderr) == (
        1,
        True,
    )
    done = cli("tune", "show", inductor / "cc" / "3.best_config")
    assert (done.exit_code, "not a result file of Inductor's tuner" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "null",
        '{"num_warps": "4", "num_stages": 1}',
        '{"num_warps": 4}',
        "[" * 100_000,
        '{"num_warps": 4, "num_stages": 1, "time_taken_ms": []}',
        '{"num_warps": 4, "num_stages": 1, "extra_options": 3}',
        '{"num_warps": 4, "num_stages": 1, "time_taken_ms": Infinity}',
    ],
)
def test_what_is_no_result_of_inductors_tuner_is_told(cli, tmp_path, text):
    """One error line that names the file, whatever is in it."""
    path = tmp_path / "x.best_config"
    path.write_text(text)
    done = cli("tune", "show", path)
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith(
        f"error: {tmp_path.name}/x.best_config: not a result file of Inductor's tuner: "
    )


def test_a_bundle_of_a_real_inductor_cache_lists_its_winners(cli, unpacked, tmp_path):
    """Each of the fifteen result files, by the name of its kernel, and what it chose."""
    root = unpacked("inductor-transformer-h200")
    with bundler.pack(root) as packed:
        packed.save(tmp_path / "b.tbundle")
    told = json.loads(cli("tune", "show", tmp_path / "b.tbundle", "--json").stdout)["records"]
    assert len(told) == 15
    assert all(record["kernel"].startswith("triton_poi_fused_") for record in told)
    assert {(r["config"]["kwargs"]["XBLOCK"], r["config"]["num_warps"]) for r in told} == {
        (512, 8),
        (1024, 4),
    }
    assert told == json.loads(cli("tune", "show", root, "--json").stdout)["records"]


def test_kernels_are_chosen_by_prefix(cli, bundle):
    """--kernel takes the beginning of a name, or of the key of the kernel that won; what matches
    nothing is an error.
    """
    record, tuning = made("matmul_kernel", 128)
    won = dataclasses.replace(
        tuning, timings=tuple(dataclasses.replace(t, key=KEY) for t in tuning.timings)
    )
    path = bundle("a", (record, won), made("add", 128))
    for wanted in ("mat", "matmul_kernel", "*mul*", KEY[:8]):
        told = json.loads(cli("tune", "show", path, "--kernel", wanted, "--json").stdout)["records"]
        assert [record["kernel"] for record in told] == ["matmul_kernel"]
    done = cli("tune", "show", path, "--kernel", "div")
    assert (done.exit_code, done.stderr) == (
        1,
        f"error: no kernel in {path} matches 'div'; it has add, matmul_kernel\n",
    )


def test_winners_alone_make_a_smaller_bundle(cli, bundle, tmp_path):
    """The timings of what lost are left out, and said to be."""
    out = tmp_path / "w.tbundle"
    done = cli("tune", "export", bundle("a", made("add", 128)), "--as", "winners", "-o", out)
    assert done.exit_code == 0
    with Bundle.load(out) as slim:
        assert [len(tuning.timings) for tuning in slim.observed.tunings] == [1]


def test_diff_says_what_was_added_removed_and_chosen_otherwise(cli, bundle):
    """The same kernel for the same size and device is compared, also when its toolchain is
    another.
    """
    before = bundle("a", made("add", 128), made("mul", 64), made("same", 64))
    after = bundle(
        "b", made("add", 64, toolchain="triton 3.9.0"), made("div", 64), made("same", 64)
    )
    done = cli("tune", "diff", before, after)
    assert done.exit_code == 0
    rows = {
        line.split()[0]: line
        for line in done.stdout.splitlines()
        if line[:1] in "+-~" and line[1:2] == " "
    }
    assert ["div" in rows["+"], "mul" in rows["-"], "add" in rows["~"]] == [True] * 3
    assert "another toolchain" in rows["~"]
    assert "1 added; 1 removed; 1 changed; 1 same" in done.stdout
    assert cli("tune", "diff", "--exit-code", before, after).exit_code == 1
    assert json.loads(cli("tune", "diff", before, after, "--json").stdout)["changed"] == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.json", "{}"),
        ("x.json", '{"tuning": [3]}'),
        ("x.json", '{"tuning": [{"kernel": "a"}]}'),
        ("x.autotune.json", "[]"),
        ("x.autotune.json", '{"configs_timings": []}'),
        ("x.tuning", "no record"),
        ("x.tbundle", "no bundle"),
    ],
)
def test_files_that_hold_no_records_are_typed_errors(cli, tmp_path, name, text):
    """One line that names the file, exit status 1."""
    (tmp_path / name).write_text(text)
    done = cli("tune", "import", tmp_path / name, "-o", tmp_path / "o.tbundle")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "o.tbundle").exists()


def test_misuse_is_told(cli, bundle, tmp_path):
    """Nothing to export, and files that are not there."""
    assert cli("tune", "export", bundle("empty"), "-o", tmp_path / "t.json").exit_code == 1
    assert cli("tune", "show", tmp_path / "absent.tbundle").exit_code == 1
    assert cli("tune", "import", "-o", tmp_path / "o").exit_code == 2


def test_inspect_and_restore_tell_of_records(cli, bundle, tmp_path):
    """Who looks into a bundle or restores it sees that winners are in it, also when no
    kernel is.
    """
    path = bundle("a", made("add", 128), made("mul", 64))
    assert "2 tuning records" in cli("inspect", path).stdout
    restored = cli("restore", path, "--cache-dir", tmp_path / "cache")
    assert (restored.exit_code, "2 tuning records" in restored.stdout) == (0, True)
