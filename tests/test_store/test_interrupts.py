# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C between any two steps of what writes files: no temporary file stays, and the work can be
done again.
"""

import contextlib
import gc
import os
import shutil
import sys

import oracle
import pytest

import bundler
from bundler.backends import file_steps, local
from bundler.backends.local import LocalBackend
from bundler.format import bundle_file as bundle_files
from bundler.lifecycle import cache_directory, kernel_writer, tuning_directory
from bundler.toolchain.recording import child_recording

# Python looks for signals where a function begins and where a built-in one returns.
_MOMENTS = ("call", "c_return")
WHERE = {
    module.__file__
    for module in (
        file_steps,
        local,
        bundle_files,
        cache_directory,
        kernel_writer,
        tuning_directory,
        child_recording,
        contextlib,
    )
}
# Where temporary files are made, and how their names begin or end.
PLACES = (
    ("store/tmp", ""),
    ("store/leases", ".new"),
    ("out", ".tmp"),
    ("cache", "tmp."),
    ("temporary", "triton-bundler-"),
)


def temporaries(place):
    """Return the temporary files and directories below a directory."""
    found = []
    for folder, mark in PLACES:
        with contextlib.suppress(FileNotFoundError):
            found += [f"{folder}/{name}" for name in os.listdir(place / folder) if mark in name]
    return found


def interrupted(work, place, at):
    """Do work and raise KeyboardInterrupt at one of the moments at which there is a temporary file,
    counted from 1.

    Returns whether there was such a moment.
    """
    moments, looking = 0, False

    def profile(frame, event, _argument):
        nonlocal moments, looking
        if looking or event not in _MOMENTS or frame.f_code.co_filename not in WHERE:
            return
        looking = True
        moments += bool(temporaries(place))
        looking = False
        if moments == at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def close_lost(place):
    """Close files below a directory that were opened when the interrupt came, before anybody had
    their number.
    """
    gc.collect()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(os.path.join(place, "")):
                os.close(int(number))


def push(place, made):
    with bundler.open_store(f"file://{place}/store") as store:
        store.push(made, "t")


def prune(place, made):
    with bundler.open_store(f"file://{place}/store") as store:
        store.prune()


def pull(place, made):
    with bundler.open_store(f"file://{place}/store") as store, store.pull("t") as pulled:
        pulled.save(place / "out" / "pulled.tbundle")


def restore(place, made):
    bundler.restore(made, place / "cache", only="all")


def restore_in_python(place, made):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel_writer, "compiled_writer", lambda: None)
        restore(place, made)


def pack(place, made):
    bundler.pack(place / "cache").save(place / "out" / "packed.tbundle")


def lease(place, made):
    taken = LocalBackend(str(place / "store")).lease("k", 60)
    assert taken is None or taken.renew(60)


def spool(place, made):
    recorded = child_recording.ChildSpool()
    bundle_files.cleaned_up(recorded.environ, recorded.close)


def _old_store(place, made):
    push(place, made)
    with bundler.open_store(f"file://{place}/store") as store:
        store.delete_tag("t")
    with bundler.open_store(f"file://{place}/store") as store:
        oracle.age(store, 10 * oracle.DAY_S)


BEFORE = {
    push: None,
    prune: _old_store,
    pull: push,
    restore: None,
    restore_in_python: None,
    pack: restore,
    lease: None,
    spool: None,
}


# What was being read is closed when its last reference goes.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "work",
    [
        work if work in {push, restore} else pytest.param(work, marks=pytest.mark.slow)
        for work in BEFORE
    ],
)
def test_an_interrupt_at_any_step_leaves_no_temporary(work, tmp_path, monkeypatch):
    """Stopped between any two steps, each operation leaves no temporary file, and does its work
    when it is called again.
    """
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "now" / "temporary"))
    monkeypatch.setattr("bundler.backends.file_steps.sync", lambda _: None)
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr(
        "bundler.toolchain.recording.child_recording.hidden_package_parent", lambda: ()
    )
    made = oracle.restorable("A")
    place, before = tmp_path / "now", tmp_path / "before"
    for folder in ("out", "temporary"):
        (before / folder).mkdir(parents=True)
    if BEFORE[work] is not None:
        BEFORE[work](before, made)
    at = 0
    stopped = True
    while stopped:
        at += 1
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(before, place)
        stopped = interrupted(lambda: work(place, made), place, at)
        assert temporaries(place) == [], f"after an interrupt at step {at}"
        if stopped and at % 7 == 0:
            work(place, made)  # and it can be done again
    close_lost(place)
    # The extension writes in another thread, and what this one sees of it depends on the time.
    assert work is restore or at > 5, "the work has fewer steps than this test thinks"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupted_prune_removes_nothing_that_was_just_touched(tmp_path, monkeypatch):
    """A prune that moved a file aside puts it back when it was touched meanwhile, also when it is
    stopped at any step.
    """
    rename = os.rename

    def rename_touched(source, target):
        os.utime(source)
        rename(source, target)

    monkeypatch.setattr("os.rename", rename_touched)
    stopped, at = True, 0
    while stopped:
        at += 1
        place = tmp_path / str(at)
        (place / "store" / "tmp").mkdir(parents=True)
        unit = place / "unit"
        unit.write_bytes(b"used")
        os.utime(unit, (0, 0))
        stopped = interrupted(
            lambda at=place: file_steps.remove_unmodified(
                str(at / "unit"), str(at / "store" / "tmp" / "aside"), 1.0
            ),
            place,
            at,
        )
        assert (unit.read_bytes(), temporaries(place)) == (b"used", [])
    assert at > 3, "the removal has fewer steps than this test thinks"
