# SPDX-License-Identifier: Apache-2.0
"""What lies in a directory store and is no object: every operation ends, in little memory, and the
next push mends it.
"""

import contextlib
import os
import re
import resource
import signal
from pathlib import Path

import oracle
import pytest

import bundler
from bundler.backends.port import Unread
from bundler.errors import BundlerError, FormatError, StoreUnavailable
from bundler.format.limits import DEFAULT_LIMITS
from bundler.store import store_layout
from tools.fuzz import directory as fuzz_directory

DEADLINE_S = 10
SPARE_BYTES = 400 << 20
LETTERS = {"unit": "u", "manifest": "m", "dictionary": "d", "record": "k", "file": "s"}
KINDS = (*LETTERS, "tag", "failure", "lease")
OBJECTS = ("named pipe", "socket", "sparse file", "link to a device", "directory", "full directory")
BUNDLE = oracle.restorable("A", "B", "C")
RECORD = oracle.restorable("R")
(KEY,) = oracle.real_keys("R")


@pytest.fixture(autouse=True)
def in_bounds():
    """No test here takes long, or much memory; what is blocked in the system is interrupted."""

    def late(number, frame):
        raise AssertionError(f"still busy after {DEADLINE_S} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE_S)
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, before[1])
    )
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


@pytest.fixture
def filled(local):
    """A store with an object of each kind."""
    local.push(BUNDLE, "t")
    local.kernel_records().publish(RECORD)
    local.kernel_records().tell_failure(KEY, "it did not compile")
    local.kernel_records().lease(KEY, 60)
    local.file_records().publish("name", "f.so", b"data")
    local._backend.put(
        {store_layout.dictionary_key(store_layout.sha256(b"d")): store_layout.encode_object(b"d")}
    )
    return local


def place(root, kind):
    """Return the path of something of a kind in a store."""
    if kind in LETTERS:
        prefix = f"v1/{LETTERS[kind]}/"
        unit = store_layout.units_of(BUNDLE.content).__next__().key
        return next(
            path
            for key, path in sorted(oracle.files(root).items())
            if key == unit or (kind != "unit" and key.startswith(prefix))
        )
    if kind == "lease":
        return next(path for path in Path(root, "leases").iterdir() if path.suffix != ".lock")
    (path,) = Path(root, "refs", "v1", "t" if kind == "tag" else "f").rglob("0*")
    return path


def calls(store, cache):
    """Return what a user could do, by name."""
    records, files = store.kernel_records(), store.file_records()
    return {
        "restore": lambda: store.restore("t", cache_dir=cache, only="all"),
        "pull": lambda: oracle.contents(store.pull("t")),
        "pull, read-only": lambda: store.pull("t", read_only=True).verify(),
        "tags": store.tags,
        "stats": store.stats,
        "verify": store.verify,
        "prune": lambda: store.prune(grace_s=0, dry_run=True),
        "look up": lambda: records.look_up([KEY]),
        "recorded": lambda: list(records.recorded(10)),
        "failure": lambda: records.failure(KEY),
        "tell failure": lambda: records.tell_failure(KEY, "again"),
        "lease": lambda: records.lease(KEY, 0.1),
        "file": lambda: files.look_up("name"),
        "publish file": lambda: files.publish("name", "f.so", b"data"),
        "push": lambda: store.push(BUNDLE, "t"),
        "publish": lambda: records.publish(RECORD),
        "delete tag": lambda: store.delete_tag("t"),
        "repair": lambda: store.verify(repair=True),
    }


CALLS = tuple(calls(bundler.open_store("memory:"), None))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_ends_whatever_lies_there(filled, root, tmp_path, kind, call):
    """With each hostile object in place of each kind, each operation returns or raises an error of
    ours; none hangs or dies.
    """
    path = place(root, kind)
    for name in OBJECTS:
        fuzz_directory.replace(path, name)
        with contextlib.suppress(BundlerError):
            calls(filled, str(tmp_path / "cache"))[call]()
        path.parent.mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("kind", ["unit", "manifest", "record", "file"])
@pytest.mark.parametrize("name", fuzz_directory.HOSTILE)
def test_a_push_mends_what_is_no_object(filled, root, kind, name):
    """What is in an object's place is damage that is named; the next push, or build, puts the
    object there again.
    """
    fuzz_directory.replace(place(root, kind), name)
    key = next((key for key, reason in filled.verify().damaged), None)
    assert name == "dangling link" or key is not None
    if name == "full directory":
        assert filled.verify(repair=True).removed == ()
        return
    filled.verify(repair=True)
    filled.push(BUNDLE, "t")
    filled.kernel_records().publish(RECORD)
    filled.file_records().publish("name", "f.so", b"data")
    assert filled.verify().sound
    assert oracle.contents(filled.pull("t")) == oracle.contents(BUNDLE)
    assert oracle.contents(filled.kernel_records().look_up([KEY]).bundle) == oracle.contents(RECORD)
    assert filled.file_records().look_up("name") == b"data"


@pytest.mark.parametrize("name", [*fuzz_directory.HOSTILE, "grown"])
def test_a_restore_leaves_out_what_is_no_object_and_says_why(filled, root, tmp_path, name):
    """One kernel's unit is something else: the others are restored, that one is skipped with what
    is there, and sent again.
    """
    path = place(root, "unit")
    if name == "grown":
        fuzz_directory.grow(path)
    else:
        fuzz_directory.replace(path, name)
    report = filled.restore("t", cache_dir=str(tmp_path / "cache"), only="all")
    ((_, reason),) = report.skipped
    assert len(report.restored) == 2
    what = {
        "grown": "bytes, expected at most",
        "sparse file": "bytes, expected at most",
        "empty file": "not a value of this store",
    }
    words = what.get(name, "is a " if "directory" not in name else "is a directory")
    assert words in reason
    assert str(path) in reason or name == "empty file"
    if name == "full directory":
        with pytest.raises(StoreUnavailable, match="remove it by hand"):
            filled.push(BUNDLE, "t")
        return
    assert filled.push(BUNDLE, "t").blobs_sent == 1
    assert oracle.contents(filled.pull("t")) == oracle.contents(BUNDLE)


@pytest.mark.parametrize("name", fuzz_directory.HOSTILE)
def test_a_tag_that_is_no_file_is_named_and_can_be_set_again(filled, root, name):
    """A tag whose latest value is something else cannot be read, holds back prune, and is replaced
    or deleted like any other.
    """
    path = place(root, "tag")
    fuzz_directory.replace(path, name)
    if name == "dangling link" or name == "empty file":
        return  # a link is no file either; a damaged value counts as none
    with pytest.raises(FormatError, match=r"tag t cannot be read .*expected"):
        filled.pull("t")
    (tag,) = filled.tags()
    assert (tag.name, tag.digest, str(path) in tag.problem) == ("t", None, True)
    assert [unread for unread, _ in filled.prune(grace_s=0).unfollowed] == ["t"]
    with pytest.raises(FormatError, match="push it with mode replace"):
        filled.push(BUNDLE, "t")
    filled.push(BUNDLE, "t", mode="replace")
    assert oracle.contents(filled.pull("t")) == oracle.contents(BUNDLE)
    assert filled.delete_tag("t")
    assert filled.tags() == ()


NAMES = (
    "7",
    "000000009",
    "00000000099",
    "\u0660" * 10,
    "\u0663",
    "\u00b2" * 10,
    "9" * 16,
    "9" * 250,
    "-000000001",
    "0000000009 ",
    "1e9",
)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_are_no_numbers_of_values_are_none_of_ours(filled, root, name):
    """A name that is too short, too long, or of other digits than 0 to 9 stands for no value: the
    tag is what it was.
    """
    folder = place(root, "tag").parent
    (folder / name).write_bytes(b"odd")
    assert [(tag.name, tag.problem) for tag in filled.tags()] == [("t", None)]
    assert oracle.contents(filled.pull("t")) == oracle.contents(BUNDLE)
    filled.push(oracle.restorable("D"), "t")
    assert oracle.kernels(filled.pull("t")) == oracle.real_keys("A", "B", "C", "D")
    assert filled.delete_tag("t")


def test_a_value_with_the_highest_number_is_an_error_and_not_lost(filled, root):
    """After a number that no writer reaches there is none that a reader would find, so setting the
    tag fails and says so.
    """
    folder = place(root, "tag").parent
    os.link(folder / "0000000001", folder / ("9" * 15))
    assert oracle.contents(filled.pull("t")) == oracle.contents(BUNDLE)
    with pytest.raises(StoreUnavailable, match="no number after"):
        filled.push(oracle.restorable("D"), "t")


def test_a_value_that_is_listed_and_never_there_ends(filled, monkeypatch):
    """A file system that lists what it then does not have is an error after a number of attempts,
    not a loop.
    """
    from bundler.backends import file_steps

    real = file_steps.read
    monkeypatch.setattr(
        file_steps, "read", lambda path, *limit: None if "+gen" in path else real(path, *limit)
    )
    for call in (lambda: filled.pull("t"), filled.tags, lambda: filled.push(BUNDLE, "t")):
        with pytest.raises(StoreUnavailable, match="64 times in a row"):
            call()


# --------------------------------------------------------------------------------- How much is read


def test_no_more_is_read_than_an_object_may_have(filled, root, monkeypatch):
    """Of a unit no byte is read when it is larger than its kernel says, and nothing else is asked
    for more than its kind has.
    """
    from bundler.backends import file_steps

    asked = {}
    real = file_steps.read

    def read(path, max_bytes):
        asked[Path(path)] = max(asked.get(Path(path), 0), max_bytes)
        return real(path, max_bytes)

    monkeypatch.setattr(file_steps, "read", read)
    filled.pull("t").verify()
    filled.kernel_records().look_up([KEY])
    filled.tags()
    read_objects = {key: asked[path] for key, path in oracle.files(root).items() if path in asked}
    units = {unit.key: unit.size for unit in store_layout.units_of(BUNDLE.content)}
    assert units.keys() <= read_objects.keys()
    for key, most in read_objects.items():
        size = units.get(key)
        # Others may have higher limits for manifests, whose objects are not to be taken for
        # damaged.
        kind = (
            store_layout.most_object_bytes(DEFAULT_LIMITS.manifest_bytes)
            if key.startswith(f"{store_layout.MANIFESTS}/")
            else 2 << 20
        )
        assert most <= kind if size is None else most < size + 2000


def test_a_value_larger_than_we_read_is_left_alone_unless_it_cannot_be_right(filled):
    """Another may have higher limits: what its head says it is stays, what its head denies is
    damage.
    """
    sound = store_layout.encode_object(os.urandom(3000))
    value = Unread.too_large(sound[:128], "there", len(sound), 1000)
    with pytest.raises(bundler.errors.LimitExceeded, match=r"3,0.. bytes, expected at most 1,000"):
        store_layout.checked_frame(value, "v1/m/x")
    for wrong in (
        Unread.too_large(sound[:128], "there", 1 << 40, 1000),
        Unread.too_large(b"\0" * 128, "there", 3000, 1000),
        Unread.too_large(b"TBV1", "there", 3000, 1000),
        Unread(b"", "there is a named pipe"),
    ):
        with pytest.raises(bundler.errors.DigestMismatch, match="there"):
            store_layout.checked_frame(wrong, "v1/m/x")
    with pytest.raises(bundler.errors.DigestMismatch):
        store_layout.checked_frame(value, "v1/u/x", 10)


def test_a_manifest_over_our_limits_stays(root, url, opened):
    """Who reads with smaller limits is told, and removes nothing."""
    opened(url).push(BUNDLE, "t")
    small = opened(url, limits=bundler.Limits(manifest_bytes=10))
    before = oracle.raw(small)
    with pytest.raises(bundler.errors.LimitExceeded):
        small.pull("t")
    assert small.verify(repair=True).removed == ()
    assert oracle.raw(small) == before


# -------------------------------------------------------------------------------------------- Tiers


@pytest.mark.parametrize("name", OBJECTS)
def test_a_near_tier_with_something_else_is_filled_from_the_next(
    filled, url, root, tmp_path, opened, name
):
    """What is no object in the near tier is asked of the far one, and nothing of it gets there."""
    near = f"file://{tmp_path}/near"
    with bundler.open_store(near, url) as tiers:
        oracle.contents(tiers.pull("t"))
    path = place(tmp_path / "near", "unit")
    fuzz_directory.replace(path, name)
    with bundler.open_store(near, url) as tiers, pytest.warns(bundler.BundlerWarning) as told:
        assert oracle.contents(tiers.pull("t")) == oracle.contents(BUNDLE)
    words = [str(warning.message) for warning in told]
    assert any("is not what was stored" in text and str(path) in text for text in words)
    assert len(words) == (2 if name == "full directory" else 1)
    assert path.is_file() or name == "full directory"
    assert opened(url).verify().sound


# -------------------------------------------------------------------------------------- All at once


@pytest.mark.slow
def test_whatever_lies_in_store_and_cache_gives_only_typed_errors(run_tool):
    """Stores and caches with several hostile objects at once, used in any order, in processes whose
    memory and time are limited.
    """
    signal.alarm(0)
    done = run_tool("fuzz directory", "--count", 60, "--seed", 3, "--jobs", 2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    outcomes = dict(re.findall(r"^(\w+) +([\d,]+) +[\d.]+%$", done.stdout, re.MULTILINE))
    assert {"fine", "NotFound", "StoreUnavailable"} <= outcomes.keys()
