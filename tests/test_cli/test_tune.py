# SPDX-License-Identifier: Apache-2.0
"""`triton-bundler tune`: the winners of tuners listed, taken out, put in and compared."""

import json
from pathlib import Path

import pytest

from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.launch import TuningRecord
from bundler.format.manifest import Content, Observed
from bundler.format.tuning import Timing, Tuning, id_of
from bundler.lifecycle.tuning import TuningFolder, with_tunings
from bundler.runtime import Config, LookupTable
from bundler.runtime.tuning.winners import named_of

PARTS = {"source": "ab", "arguments": "1024", "device": "H200", "toolchain": "triton 3.7.1"}
TRITON = {"key": [64, "fp32"], "configs_timings": [
    [{"kwargs": {"BLOCK": 64}, "num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": None}, [0.5, 0.4, 0.6]],
    [{"kwargs": {"BLOCK": 32}, "num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": None}, [float("inf")] * 3],
]}  # fmt: skip


def made(kernel, block, *, tried=(64, 128), **parts):
    """Return a record of a kernel, and timings of which the winner's is the least."""
    record = TuningRecord(kernel, tuple({**PARTS, **parts}.items()), named_of(Config({"BLOCK": block})), "autotune")
    timings = [Timing(named_of(Config({"BLOCK": b})), "", 1000 if b == block else 2500) for b in tried]
    timings.append(Timing(named_of(Config({"BLOCK": 4096})), reason="OutOfResources: shared memory"))
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
    assert [line.startswith("*") for line in everything.splitlines() if "2.50 us" in line or "*" in line] == [
        True,
        False,
    ]


def test_show_tells_programs_everything(cli, bundle):
    """Parts, candidates and times spent, as one object."""
    told = json.loads(cli("tune", "show", bundle("a", made("add", 128)), "--json").stdout)
    (record,) = told["records"]
    assert (record["kernel"], record["config"]["kwargs"], record["time_ns"]) == ("add", {"BLOCK": 128}, 1000)
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
    path, table, again = bundle("a", made("add", 128)), tmp_path / "t.json", tmp_path / "again.tbundle"
    assert cli("tune", "export", path, "-o", table).exit_code == 0
    assert LookupTable.load(table).find("add", "ab", "1024") == Config({"BLOCK": 128})
    assert LookupTable.load(table).find("add", "ab", "2048") is None
    assert cli("tune", "import", table, "-o", again).exit_code == 0
    with Bundle.load(again) as imported:
        assert imported.tuning_records == (made("add", 128)[0],)
    assert cli("tune", "diff", "--exit-code", path, again).exit_code == 0


def test_tritons_files_are_read_and_written(cli, bundle, tmp_path):
    """A result file becomes a record that names what it knows; what export writes can be read again, infinite times too."""
    source, out = tmp_path / "add.autotune.json", tmp_path / "out.tbundle"
    source.write_text(json.dumps(TRITON))
    assert cli("tune", "import", source, "--into", bundle("a", made("mul", 64)), "-o", out).exit_code == 0
    shown = json.loads(cli("tune", "show", out, "--json").stdout)["records"]
    assert [(r["kernel"], r["found_by"], r["time_ns"]) for r in shown] == [
        ("add", "triton", 500_000),
        ("mul", "autotune", 1000),
    ]
    told = json.loads(cli("tune", "export", out, "--as", "triton", "-o", tmp_path / "files", "--json").stdout)
    written = {Path(path).name: json.loads(Path(path).read_text()) for path in told["files"]}
    assert written["add.autotune.json"]["key"] == ["64", "fp32"]
    times = [times for _, times in written["add.autotune.json"]["configs_timings"]]
    assert times == [[0.5] * 3, [float("inf")] * 3]
    path = next(path for path in told["files"] if path.endswith("add.autotune.json"))
    assert json.loads(cli("tune", "show", path, "--json").stdout)["records"][0]["config"]["kwargs"] == {"BLOCK": 64}


def test_winners_alone_make_a_smaller_bundle(cli, bundle, tmp_path):
    """The timings of what lost are left out, and said to be."""
    out = tmp_path / "w.tbundle"
    done = cli("tune", "export", bundle("a", made("add", 128)), "--as", "winners", "-o", out)
    assert done.exit_code == 0
    with Bundle.load(out) as slim:
        assert [len(tuning.timings) for tuning in slim.observed.tunings] == [1]


def test_diff_says_what_was_added_removed_and_chosen_otherwise(cli, bundle):
    """The same kernel for the same size and device is compared, also when its toolchain is another."""
    before = bundle("a", made("add", 128), made("mul", 64), made("same", 64))
    after = bundle("b", made("add", 64, toolchain="triton 3.9.0"), made("div", 64), made("same", 64))
    done = cli("tune", "diff", before, after)
    assert done.exit_code == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line[:1] in "+-~" and line[1:2] == " "}
    assert ["div" in rows["+"], "mul" in rows["-"], "add" in rows["~"]] == [True] * 3
    assert "another toolchain" in rows["~"]
    assert "1 added; 1 removed; 1 changed; 1 same" in done.stdout
    assert cli("tune", "diff", "--exit-code", before, after).exit_code == 1
    assert json.loads(cli("tune", "diff", before, after, "--json").stdout)["changed"] == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.json", "{}"), ("x.json", '{"tuning": [3]}'), ("x.json", '{"tuning": [{"kernel": "a"}]}'),
        ("x.autotune.json", "[]"), ("x.autotune.json", '{"configs_timings": []}'), ("x.tuning", "no record"),
        ("x.tbundle", "no bundle"),
    ],
)  # fmt: skip
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
    """Who looks into a bundle or restores it sees that winners are in it, also when no kernel is."""
    path = bundle("a", made("add", 128), made("mul", 64))
    assert "2 tuning records" in cli("inspect", path).stdout
    restored = cli("restore", path, "--cache-dir", tmp_path / "cache")
    assert (restored.exit_code, "2 tuning records" in restored.stdout) == (0, True)
