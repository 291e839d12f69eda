# SPDX-License-Identifier: Apache-2.0
"""Tuning records on disk and in bundles: looked up with a reason, restored, trimmed to the winners,
heard by recordings.
"""

import json
import math
import os
import threading
from pathlib import Path

import pytest

import bundler
from bundler.errors import AccessDenied, FormatError, NotFound
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.candidate_timings import Timing, Tuning, id_of
from bundler.format.constant_values import encode
from bundler.format.digest import sha256
from bundler.format.launch_spec import TuningRecord
from bundler.format.manifest import Content, Observed
from bundler.lifecycle.listeners import Listeners
from bundler.lifecycle.tuner_files import results_key, results_text, results_timings
from bundler.lifecycle.tuning_directory import (
    Hit,
    Miss,
    TuningFolder,
    place_tunings,
    tunings_of,
    winners_only,
    with_tunings,
)

PARTS = (("source", "ab"), ("arguments", "1024"), ("device", "H200"))


def made(block, time_ns, kernel="add", parts=PARTS):
    """Return a record with its tuning."""
    config = (("BLOCK", encode(block)),)
    record = TuningRecord(kernel, parts, config, "autotune")
    return record, Tuning(id_of(record), (Timing(config, "", time_ns),))


def bundle_of(*pairs):
    return with_tunings(Bundle(Content(), Observed(), MemoryBlobs({})), pairs)


def test_a_record_is_found_by_its_kernel_and_parts(tmp_path):
    """What was put is there, for whoever looks next; a newer one takes its place."""
    folder = TuningFolder(tmp_path)
    assert folder.find("add", PARTS) == Miss("add: no record of this kernel")
    path = folder.put(*made(128, 1500))
    assert folder.find("add", PARTS) == Hit(*made(128, 1500), path)
    folder.put(*made(256, 1000))
    assert folder.find("add", PARTS).record == made(256, 1000)[0]
    assert [name for name in os.listdir(folder.path) if name.startswith("tmp.")] == []
    assert list(folder.records()) == [made(256, 1000)]


def test_what_killed_writers_left_is_swept_after_a_day(tmp_path):
    """Unfinished files of ours go with a later write, young ones and those of others stay."""
    folder = TuningFolder(tmp_path)
    folder.put(*made(128, 1500))
    for name, age_s in (
        ("tmp.bundler.old", 90000),
        ("tmp.bundler.young", 60),
        ("tmp.theirs", 90000),
    ):
        path = Path(folder.path, name)
        path.write_bytes(b"half")
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    folder.put(*made(256, 1000))
    left = {name for name in os.listdir(folder.path) if name.startswith("tmp.")}
    assert left == {"tmp.bundler.young", "tmp.theirs"}


def test_a_miss_names_what_differs_from_the_closest_record(tmp_path):
    """The record with the fewest other parts is compared; a part that one side lacks is nothing."""
    folder = TuningFolder(tmp_path)
    folder.put(*made(128, 1, parts=(("source", "cd"), ("arguments", "2048"), ("device", "H100"))))
    folder.put(*made(128, 1, parts=(("source", "ab"), ("arguments", "1024"), ("device", "H100"))))
    folder.put(*made(128, 1, kernel="mul"))
    assert folder.find("add", PARTS).reason == (
        "add: no record fits; the closest differs in device: recorded H100, here H200"
    )
    longer = folder.find("add", (*PARTS[:2], ("toolchain", "3.7")))
    assert longer.reason.endswith(
        "device: recorded H100, here nothing; toolchain: recorded nothing, here 3.7"
    )


def test_what_is_no_record_is_a_miss_with_the_reason(tmp_path):
    """Bytes, a directory, a file of another record under this name: never an error."""
    folder = TuningFolder(tmp_path)
    path = folder.put(*made(128, 1500))
    good = Path(path).read_bytes()
    other = folder.put(*made(128, 1500, parts=(("source", "x"),)))
    other_place = tmp_path / "elsewhere"
    other_place.write_bytes(good)
    os.replace(other, path)
    assert "other parts" in folder.find("add", PARTS).reason
    for wrong in (b"", b"\x00" * 64, sha256(b"\x93\x02\x90\xc0") + b"\x93\x02\x90\xc0", good[:-1]):
        Path(path).write_bytes(wrong)
        assert "cannot be used" in folder.find("add", PARTS).reason
        assert list(folder.records()) == []
    for make in (os.mkdir, os.mkfifo, lambda place: os.symlink(other_place, place)):
        os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
        make(path)
        assert "cannot be used" in folder.find("add", PARTS).reason


def test_odd_kernel_names_stay_in_the_folder(tmp_path):
    """Nothing of a name becomes a path."""
    folder = TuningFolder(tmp_path)
    path = folder.put(*made(128, 1, kernel="../../x<y>" + "z" * 300))
    assert os.path.dirname(path) == folder.path
    assert isinstance(folder.find("../../x<y>" + "z" * 300, PARTS), Hit)


def test_a_folder_that_cannot_be_written_is_a_typed_error(tmp_path):
    """The tuner makes a warning of it."""
    (tmp_path / "bundler-tuning").write_text("in the way")
    with pytest.raises((AccessDenied, NotFound)):
        TuningFolder(tmp_path).put(*made(128, 1))


def test_writers_at_once_leave_one_whole_record(tmp_path):
    """Of many threads one wins, and no temporary file stays."""
    folder = TuningFolder(tmp_path)
    threads = [threading.Thread(target=folder.put, args=made(2**i, i)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(folder.find("add", PARTS), Hit)
    assert len(os.listdir(folder.path)) == 1


def test_of_two_winners_for_one_key_the_faster_one_is_kept():
    """In a bundle, in a merge of bundles, and when a restore finds a record in place."""
    slow, fast = made(128, 2000), made(256, 1000)
    assert tunings_of(bundle_of(slow, fast)) == tunings_of(bundle_of(fast, slow)) == [fast]
    merged = bundler.merge([bundle_of(slow), bundle_of(fast)])
    assert [record for record, _ in tunings_of(merged)] == [fast[0]]


def test_a_restore_places_records_and_keeps_a_faster_one(tmp_path):
    """What is there already, or faster, is left alone; the report counts what was written."""
    slow, fast = made(128, 2000), made(256, 1000)
    assert bundler.restore(bundle_of(slow), tmp_path).tuned == 1
    assert bundler.restore(bundle_of(slow), tmp_path).tuned == 0
    assert place_tunings(bundle_of(fast), tmp_path) == 1
    assert place_tunings(bundle_of(slow), tmp_path) == 0
    assert TuningFolder(tmp_path).find("add", PARTS).record == fast[0]


def test_records_go_through_a_store(tmp_path):
    """Pushed with a bundle and restored elsewhere, winner and timings."""
    with bundler.open_store(f"file://{tmp_path}/store") as store:
        store.push(bundle_of(made(128, 2000)), tag="t")
        store.push(bundle_of(made(64, 500, kernel="mul")), tag="t")
        assert store.restore("t", cache_dir=tmp_path / "cache").tuned == 2
    assert TuningFolder(tmp_path / "cache").find("add", PARTS) == Hit(
        *made(128, 2000), TuningFolder(tmp_path / "cache").find("add", PARTS).source
    )


def test_winners_only_leaves_out_what_lost(tmp_path):
    """Losers' timings go, records stay, and the digest of a bundle without losers is the same."""
    record, _ = made(128, 1)
    loser = Timing((("BLOCK", encode(64)),), "L" * 52, 9)
    whole = bundle_of((record, Tuning(id_of(record), (Timing(record.config, "W" * 52, 5), loser))))
    slim = winners_only(whole)
    assert [timing.key for timing in slim.observed.tunings[0].timings] == ["W" * 52]
    assert slim.tuning_records == whole.tuning_records
    assert slim.digest == whole.digest


def test_listeners_hear_records_and_their_faults_are_theirs():
    """What one raises does not keep another from hearing."""
    heard, listeners = [], Listeners()

    def broken(record, tuning):
        raise FormatError("no")

    def hear(record, tuning):
        heard.append(record)

    listeners.attach(broken)
    listeners.attach(hear)
    listeners.tell(*made(128, 1))
    listeners.detach(hear)
    listeners.detach(hear)
    listeners.tell(*made(256, 1))
    assert heard == [made(128, 1)[0]]


# ------------------------------------------------------------------------------- Triton's own files

FIELDS = {
    "kwargs": {"BLOCK": 64},
    "num_warps": 4,
    "num_ctas": 1,
    "num_stages": 3,
    "maxnreg": None,
    "pre_hook": None,
    "ir_override": None,
}


def test_a_result_file_is_read_with_its_infinite_times():
    """A config that failed has no time; a single number is a median too."""
    text = json.dumps(
        {
            "key": [1024, "fp32"],
            "configs_timings": [
                [FIELDS, [1.5, 1.4, 1.6]],
                [{**FIELDS, "num_warps": 8}, [math.inf] * 3],
                [{**FIELDS, "maxnreg": 64}, 2.5],
            ],
        }
    )
    assert "Infinity" in text
    timings = results_timings(text)
    assert [time for _, time in timings] == [1.5, None, 2.5]
    assert dict(timings[2][0])["maxnreg"].plain() == 64
    assert results_key(text) == "1024, fp32"


def test_what_we_write_is_what_we_read():
    """Medians and percentiles in milliseconds, infinite for what failed."""
    config = (("BLOCK", encode(64)),)
    text = results_text(
        (1024,),
        [
            (FIELDS, Timing(config, "", 1_500_000, 1_400_000, 1_600_000)),
            (FIELDS, Timing(config, reason="failed")),
        ],
    )
    assert json.loads(text)["configs_timings"][0][1] == [1.5, 1.4, 1.6]
    assert [time for _, time in results_timings(text)] == [1.5, None]


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "{",
        "[]",
        "3",
        '{"configs_timings": 3}',
        '{"configs_timings": [[1, 2]]}',
        '{"configs_timings": [[{"kwargs": []}, [1]]]}',
        '{"configs_timings": [[{"kwargs": {}, "num_warps": "4"}, [1]]]}',
        '{"configs_timings": [[{"kwargs": {}}, []]]}',
        '{"configs_timings": [[{"kwargs": {}}, ["1"]]]}',
        '{"configs_timings": [[{"kwargs": {}}, [true]]]}',
        "[" * 5000,
        *(
            f'{{"configs_timings": [[{{"kwargs": {{}}}}, [{number}]]]}}'
            for number in ("9" * 400, "-" + "9" * 400, "1e308", "1e14")
        ),
    ],
)
def test_what_is_no_result_file_is_a_miss(wrong):
    """Whatever stands in it, with the reason and never an exception."""
    assert isinstance(results_timings(wrong), Miss)
    assert results_key(wrong) == ""
