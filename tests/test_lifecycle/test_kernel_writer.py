# SPDX-License-Identifier: Apache-2.0
"""The writer of kernels, in C and in Python: whole kernels, the same answers, and nothing left
where it fails.
"""

import errno
import functools
import hashlib
import os
import stat
import struct
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler.format import device_elf
from bundler.lifecycle import kernel_writer
from bundler.lifecycle.kernel_writer import ALREADY_CHECKED

WHOLE = (
    ("k.source", b""),
    ("k.cubin", b"\x7fELF" * 5000),
    ("k.json", memoryview(b"x{}x")[1:3]),
)
WHOLE_NAMES = tuple(name for name, _ in WHOLE)
GROUP = ("__grp__k.json", b'{"\0": "/\0/k.json"}')
FIELDS = (
    "temporary",
    "key",
    "names",
    "contents",
    "digests",
    "edits",
    "binary",
    "metadata",
    "group_name",
    "group_text",
)


def writer_of(kind):
    """Return a writer: `plain` is the extension where it found no SHA-256."""
    if kind == "python":
        return kernel_writer.write_in_python
    extension = pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    )
    begin = kernel_writer.compiled_writer()
    if kind == "plain":

        def plain(*arguments):
            return extension.begin_writing(*arguments).finish

        begin = functools.partial(kernel_writer._compare_first, plain)
    return lambda *arguments: begin(*arguments)()


@pytest.fixture(params=["compiled", "plain", "python"])
def write(request):
    """Each of the writers."""
    return writer_of(request.param)


def new(
    temporary,
    key,
    files=WHOLE,
    *,
    digests=(),
    edits=(),
    binary=ALREADY_CHECKED,
    metadata=ALREADY_CHECKED,
):
    """A kernel for a writer, of names and bytes."""
    names, contents = tuple(name for name, _ in files), tuple(data for _, data in files)
    return (temporary, key, names, contents, digests, edits, binary, metadata, *GROUP)


def changed(kernel, **changes):
    """The same kernel with other fields."""
    return tuple(changes.get(name, value) for name, value in zip(FIELDS, kernel, strict=True))


def batch(count, files=WHOLE):
    return tuple(new(f"tmp.{number}", f"KEY{number}", files) for number in range(count))


def written(key, files=WHOLE):
    """What is in the directory of a kernel."""
    return {
        **{name: bytes(data) for name, data in files},
        GROUP[0]: f'{{"{key}": "/{key}/k.json"}}'.encode(),
    }


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("threads", [0, 1, 2, 4, 100])
def test_every_kernel_of_a_batch_is_there_whole(write, tmp_path, threads):
    """A batch is written to the last byte, and no temporary directory stays."""
    assert write(str(tmp_path), batch(70), threads) == [0] * 70
    assert sorted(os.listdir(tmp_path)) == sorted(f"KEY{number}" for number in range(70))
    for number in range(70):
        assert content(tmp_path / f"KEY{number}") == written(f"KEY{number}")


def test_an_empty_batch_is_nothing(write, tmp_path):
    assert write(str(tmp_path), (), 2) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [255, 256, 257, 511, 512, 5000, 100_000])
@pytest.mark.parametrize("field", ["temporary", "names", "group_name"])
def test_a_name_that_is_too_long_for_a_file_is_an_error(write, tmp_path, field, size):
    """Whichever name it is, as the system says it, and nothing stays; the longest that a file can
    have is fine.
    """
    name = "n" * size
    kernel = changed(
        new("tmp.0", "KEY0"), **{field: (name, *WHOLE_NAMES[1:]) if field == "names" else name}
    )
    (code,) = write(str(tmp_path), (kernel,), 1)
    assert code == (0 if size == 255 else errno.ENAMETOOLONG)
    assert os.listdir(tmp_path) == (["KEY0"] if size == 255 else [])


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_umask_decides_about_permissions(write, tmp_path, mask):
    """Files and directories have the permissions that the user's umask leaves, as Triton's own
    have.
    """
    before = os.umask(mask)
    try:
        write(str(tmp_path), batch(1), 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "KEY0").st_mode) == 0o777 & ~mask
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "KEY0").iterdir()} == {
        0o666 & ~mask
    }


def test_a_group_is_inherited_where_the_directory_says_so(write, tmp_path):
    """Below a directory with the group bit, what is made has its group and the bit, as everything
    there has.
    """
    other = next((group for group in (*os.getgroups(), 7) if group != os.getegid()), os.getegid())
    try:
        os.chown(tmp_path, -1, other)
    except PermissionError:
        other = os.getegid()
    os.chmod(tmp_path, 0o2775)
    write(str(tmp_path), batch(1), 1)
    made = os.stat(tmp_path / "KEY0")
    assert (made.st_gid, made.st_mode & stat.S_ISGID) == (other, stat.S_ISGID)
    assert {path.stat().st_gid for path in (tmp_path / "KEY0").iterdir()} == {other}


def test_what_is_in_the_place_stays_and_the_new_one_waits_beside_it(write, tmp_path):
    """Where another kernel or a file is in the way the rename is refused, the temporary directory
    stays whole, and the others are written all the same; an empty directory is replaced.
    """
    (tmp_path / "KEY0").mkdir()
    (tmp_path / "KEY1").mkdir()
    (tmp_path / "KEY1" / "k.cubin").write_bytes(b"theirs")
    (tmp_path / "KEY2").write_bytes(b"a file")
    (tmp_path / "KEY3").symlink_to(tmp_path / "nowhere")
    codes = write(str(tmp_path), batch(5), 2)
    assert (codes[0], codes[4]) == (0, 0)
    assert codes[1] in {-errno.ENOTEMPTY, -errno.EEXIST}
    assert codes[2:4] == [-errno.ENOTDIR] * 2
    assert content(tmp_path / "KEY1") == {"k.cubin": b"theirs"}
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("tmp")) == [
        "tmp.1",
        "tmp.2",
        "tmp.3",
    ]
    assert content(tmp_path / "tmp.1") == written("KEY1")


def test_a_directory_that_is_gone_is_told_for_every_kernel(write, tmp_path):
    codes = write(str(tmp_path / "gone"), batch(3), 2)
    assert codes[0] == errno.ENOENT
    assert set(codes) <= {errno.ENOENT, errno.ECANCELED}


def test_a_kernel_that_fails_leaves_nothing_and_stops_the_batch(write, tmp_path):
    """A file that occurs twice cannot be made the second time: nothing of that kernel stays, and
    those that were not begun are told apart from it.
    """
    twice = (*WHOLE, WHOLE[1])
    kernels = (*batch(2), new("tmp.bad", "BAD", twice), *(new("tmp.x", "X"),) * 50)
    codes = write(str(tmp_path), kernels, 1)
    assert codes == [0, 0, errno.EEXIST, *[errno.ECANCELED] * 50]
    assert sorted(os.listdir(tmp_path)) == ["KEY0", "KEY1"]


def test_a_temporary_name_that_is_taken_is_left_alone(write, tmp_path):
    """What another process has under that name is neither written into nor removed."""
    (tmp_path / "tmp.0").mkdir()
    (tmp_path / "tmp.0" / "theirs").write_bytes(b"x")
    assert write(str(tmp_path), batch(1), 1) == [errno.EEXIST]
    assert content(tmp_path / "tmp.0") == {"theirs": b"x"}


def test_a_really_full_disk(write, tmp_path):
    """Without room: the error of the system, whole kernels only, and nothing half-written beside
    them.
    """
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no small file system to fill up: mount is not permitted")
    try:
        codes = write(str(tmp_path), batch(40), 2)
        assert errno.ENOSPC in codes
        assert set(codes) <= {0, errno.ENOSPC, errno.ECANCELED}
        assert sorted(os.listdir(tmp_path)) == sorted(
            f"KEY{n}" for n, code in enumerate(codes) if code == 0
        )
        assert all(content(path) == written(path.name) for path in tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0b"])
@pytest.mark.parametrize("place", ["temporary", "key", "file", "group"])
def test_a_name_is_one_component_of_a_path(write, tmp_path, name, place):
    """Whatever a caller took for a name cannot lead elsewhere, and nothing is written."""
    names = {
        "temporary": "tmp.0",
        "key": "KEY",
        "file": "k.json",
        "group": "__grp__k.json",
        place: name,
    }
    kernel = changed(
        new(names["temporary"], names["key"], ((names["file"], b"x"),)), group_name=names["group"]
    )
    with pytest.raises(ValueError, match="not the name of a file"):
        write(str(tmp_path), (kernel,), 1)
    assert os.listdir(tmp_path) == []


def test_paths_in_any_encoding_are_written_to(write, tmp_path):
    root = tmp_path / os.fsdecode(b"caf\xc3\xa9 \xff")
    root.mkdir()
    assert write(str(root), batch(2), 2) == [0, 0]


def test_the_extension_takes_nothing_but_what_it_declares(tmp_path):
    """Wrong types are errors of Python, not of memory."""
    write = pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="it was not built here"
    ).begin_writing
    root = str(tmp_path)
    sound = new("t", "k", (("n", b""),))
    odd = [[], (), (1,), sound[:-1], (*sound, 1), [*sound]]
    odd += [
        changed(sound, **change)
        for change in (
            {"temporary": b"t"},
            {"key": b"k"},
            {"names": ["n"]},
            {"names": (b"n",)},
            {"contents": [b""]},
            {"contents": ("text",)},
            {"digests": [bytes(32)]},
            {"digests": ("d",)},
            {"edits": []},
            {"edits": (1,)},
            {"edits": ((0, []),)},
            {"edits": ((0, (1,)),)},
            {"edits": ((0, ((0, "", b""),)),)},
            {"edits": ((0, (("0", b"", b""),)),)},
            {"edits": (("0", ()),)},
            {"binary": "0"},
            {"metadata": "0"},
            {"group_name": 1},
            {"group_text": "text"},
            {"group_text": bytearray(b"")},
        )
    ]
    wrong = [
        (root, [], 1),
        (None, (), 1),
        (root, (), "1"),
        (root, ()),
        *((root, (kernel,), 1) for kernel in odd),
    ]
    for arguments in wrong:
        with pytest.raises(TypeError):
            write(*arguments)
    with pytest.raises(UnicodeEncodeError):
        write(root, (new("t\udcff", "k"),), 1)
    assert os.listdir(tmp_path) == []


def test_python_runs_while_the_extension_writes(tmp_path):
    """Who began a batch goes on at once, and the interpreter lock is free while somebody waits for
    it.
    """
    extension = pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    )
    kernels = batch(64, (("big", bytes(1 << 20)), ("k.json", b"{}")))
    writing = extension.begin_writing(str(tmp_path), kernels, 2)
    assert len(os.listdir(tmp_path)) < 64
    steps = []
    thread = threading.Thread(target=lambda: steps.append(writing.finish()))
    thread.start()
    count = 0
    while not steps:
        count += 1
        time.sleep(0)
    thread.join()
    assert count > 10
    assert steps == [[0] * 64] == [writing.finish()]


@pytest.mark.parametrize("threads", [1, 2])
def test_what_nobody_waits_for_is_written_to_the_end(tmp_path, threads):
    """A batch whose answer is dropped holds its bytes until it is written."""
    extension = pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    )
    extension.begin_writing(
        str(tmp_path), batch(32, (("big", bytes(1 << 20)), ("k.json", b"{}"))), threads
    )
    assert sorted(os.listdir(tmp_path)) == sorted(kernel[1] for kernel in batch(32))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_threads_write_one_batch_after_the_other(tmp_path, count):
    """Batches that are under way together share the threads, in whatever order they are waited for;
    then the threads end.
    """
    extension = pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    )
    before = len(os.listdir("/proc/self/task"))
    threads = extension.start_threads(count)
    for part in range(5):
        roots = [tmp_path / f"{part}.{number}" for number in range(7)]
        for root in roots:
            root.mkdir()
        writings = [extension.begin_writing(str(root), batch(9), threads) for root in roots]
        gone = extension.begin_writing(str(tmp_path / "gone"), batch(2), threads)
        assert len(os.listdir("/proc/self/task")) == before + min(count, 16)
        for writing in writings[:: 1 if part % 2 else -1]:
            assert writing.finish() == writing.finish() == [0] * 9
        assert gone.finish() == [errno.ENOENT] * 2
        assert {name: content(root / name) for root in roots for name in os.listdir(root)} == {
            f"KEY{number}": written(f"KEY{number}") for number in range(9)
        }
    writing = extension.begin_writing(str(roots[0]), (new("t", "last"),), threads)
    del threads  # what is under way keeps them
    assert writing.finish() == [0]
    del writing, writings, gone
    assert len(os.listdir("/proc/self/task")) == before


def test_a_forked_child_writes_without_the_threads_of_its_parent(tmp_path):
    """They are not there; what the child begins with them is written while it waits."""
    extension = pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    )
    threads = extension.start_threads(2)
    assert extension.begin_writing(str(tmp_path), (new("t", "parent"),), threads).finish() == [0]
    child = os.fork()
    if child == 0:
        codes = extension.begin_writing(str(tmp_path), (new("t", "child"),), threads).finish()
        del threads
        os._exit(0 if codes == [0] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert extension.begin_writing(str(tmp_path), (new("t", "again"),), threads).finish() == [0]
    assert sorted(os.listdir(tmp_path)) == ["again", "child", "parent"]


def test_a_child_forked_meanwhile_waits_for_nothing(tmp_path):
    """It has no such threads; it says that nothing is known to be written, and ends."""
    extension = pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    )
    writing = extension.begin_writing(
        str(tmp_path), batch(64, (("big", bytes(1 << 20)), ("k.json", b"{}"))), 2
    )
    child = os.fork()
    if child == 0:
        codes = writing.finish()
        del writing
        os._exit(0 if set(codes) <= {0, errno.ECANCELED} else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert writing.finish() == [0] * 64


def test_without_another_thread_the_caller_writes(tmp_path):
    """Where the system gives no thread, a restore is slower and nothing else."""
    pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    )
    program = f"""
import resource
from bundler.lifecycle.kernel_writer import begin_writing
begin_writing({os.fspath(tmp_path)!r}, (), 1)()
kernels = tuple((f"t{{n}}", f"k{{n}}", ("k.json",), (b"{{}}",), (), (), -1, -1, "g", b"{{}}") for n in range(40))
# What the heaps of Python and of malloc have free, so that neither asks for more.
held = [[bytes(size) for _ in range(8000)][::3000] for size in (300, 2000)]
room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 240 * 1024
resource.setrlimit(resource.RLIMIT_AS, (room, room))  # no stack
finish = begin_writing({os.fspath(tmp_path)!r}, kernels, 4)
print(finish().count(0))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "40\n", done.stderr
    assert len(os.listdir(tmp_path)) == 40


def digests_of(files):
    return tuple(hashlib.sha256(data).digest() for _, data in files)


def test_digests_are_compared_before_a_kernel_is_visible(write, tmp_path):
    """A kernel of which one file does not have its digest is refused and leaves nothing; the others
    are written.
    """
    right = digests_of(WHOLE)
    name, data = WHOLE[1]
    changed = (WHOLE[0], (name, data[:-1] + b"x"), WHOLE[2])
    kernels = (
        new("tmp.0", "KEY0", digests=right),
        new("tmp.1", "BAD", changed, digests=right),
        new("tmp.2", "KEY1"),  # the caller compared its digests
        new("tmp.3", "BAD", digests=right[:2] + right[:1]),
        new("tmp.4", "KEY2", digests=right),
    )
    for threads in (1, 2):
        root = tmp_path / str(threads)
        root.mkdir()
        assert write(str(root), kernels, threads) == [
            0,
            kernel_writer.DAMAGED,
            0,
            kernel_writer.DAMAGED,
            0,
        ]
        assert {key: content(root / key) for key in os.listdir(root)} == {
            key: written(key) for key in ("KEY0", "KEY1", "KEY2")
        }


def test_a_damaged_kernel_is_refused_before_the_disk_is_looked_at(write, tmp_path):
    """Where the directory is gone too, the extension may have found either; nothing is made."""
    codes = write(str(tmp_path / "gone"), (new("t", "k", (("a", b"x"),), digests=(bytes(32),)),), 1)
    assert codes[0] in {kernel_writer.DAMAGED, errno.ENOENT}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("digest", [b"", bytes(31), bytes(33)])
def test_a_digest_has_32_bytes(write, tmp_path, digest):
    with pytest.raises(ValueError, match="not a SHA-256 digest"):
        write(str(tmp_path), (new("t", "k", (("a", b"x"),), digests=(digest,)),), 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "change", [{"contents": (b"",)}, {"contents": (b"",) * 4}, {"digests": (bytes(32),)}]
)
def test_each_name_has_its_bytes_and_all_have_digests_or_none(write, tmp_path, change):
    kernel = new("t", "k")
    with pytest.raises(ValueError, match="for each name"):
        write(str(tmp_path), (changed(kernel, **change),), 1)
    assert os.listdir(tmp_path) == []


def test_what_is_to_be_changed_is_changed_after_it_was_compared(write, tmp_path):
    """The digest is that of the bytes that are given; what is there in the end has the others,
    shorter or longer, in their places.
    """
    data = b"head [a] middle [b][c]"
    edits = (
        (0, ((5, b"[a]", b"/a/longer/path"), (16, b"[b]", b""), (19, b"[c]", b"c" * 100_000))),
    )
    files = (("k.json", memoryview(data)), ("other", b"x"))
    right = digests_of(files)
    kernels = tuple(
        new(f"t{number}", f"K{number}", files, digests=digests, edits=edits)
        for number, digests in enumerate([right, (bytes(32), right[1]), right, ()])
    )
    assert write(str(tmp_path), kernels, 2) == [0, kernel_writer.DAMAGED, 0, 0]
    changed = b"head /a/longer/path middle " + b"c" * 100_000
    assert {key: content(tmp_path / key) for key in os.listdir(tmp_path)} == {
        key: written(key, (("k.json", changed), ("other", b"x"))) for key in ("K0", "K2", "K3")
    }


@given(
    data=st.binary(max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    put=st.binary(max_size=9),
)
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("kind", ["compiled", "plain", "python"])
def test_anything_is_changed_as_python_changes_it(kind, data, cuts, put, tmp_path_factory):
    """Any places in any bytes, also empty ones, at the beginning and at the end."""
    root = tmp_path_factory.mktemp("there")
    ends = sorted(min(cut, len(data)) for cut in cuts)
    edits = tuple((a, data[a:b], put) for a, b in zip(ends[::2], ends[1::2], strict=False))
    expected, copied = b"", 0
    for offset, old, _ in edits:
        expected += data[copied:offset] + put
        copied = offset + len(old)
    kernel = new(
        "t", "K", (("a", data),), digests=(hashlib.sha256(data).digest(),), edits=((0, edits),)
    )
    assert writer_of(kind)(str(root), (kernel,), 1) == [0]
    assert (root / "K" / "a").read_bytes() == expected + data[copied:]


@given(
    key=st.text("KEY0", min_size=1, max_size=9),
    parts=st.lists(st.binary(max_size=5).map(lambda p: p.replace(b"\0", b"-")), max_size=6),
)
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("kind", ["compiled", "python"])
def test_the_key_is_filled_in_wherever_it_stands(kind, key, parts, tmp_path_factory):
    """At the beginning, at the end, twice in a row, or nowhere."""
    root = tmp_path_factory.mktemp("there")
    kernel = changed(new("t", key), group_name="g", group_text=b"\0".join(parts))
    assert writer_of(kind)(str(root), (kernel,), 1) == [0]
    assert (root / key / "g").read_bytes() == key.encode().join(parts)


@pytest.mark.parametrize(
    "edits",
    [
        ((0, b"b", b""),),
        ((-1, b"c", b""),),
        ((3, b"c", b""),),
        ((1, b"bcd", b""),),
        ((4, b"", b"x"),),
        ((1, b"b", b""), (0, b"a", b"")),
        ((0, b"ab", b""), (1, b"b", b"")),
        (((1 << 63) - 1, b"a", b""),),
        ((1 << 63, b"a", b""),),
        ((-1 << 70, b"a", b""),),
    ],
)
def test_only_what_is_there_is_changed(write, tmp_path, edits):
    """A kernel with other bytes in a place that is to be changed, or with places outside of the
    file or out of order, is damaged; the kernels beside it are written.
    """
    file = (("a", b"abc"),)
    kernels = [
        new(f"t{n}", f"k{n}", file, digests=digests_of(file), edits=((0, some),))
        for n, some in enumerate([(), edits, ()])
    ]
    assert write(str(tmp_path), tuple(kernels), 1) == [0, kernel_writer.DAMAGED, 0]
    assert sorted(os.listdir(tmp_path)) == ["k0", "k2"]


@pytest.mark.parametrize("number", [-1, 1, 1 << 40])
def test_what_is_changed_is_one_of_the_files(write, tmp_path, number):
    with pytest.raises(ValueError, match="what is to be changed is none of the files"):
        write(str(tmp_path), (new("t", "k", (("a", b"x"),), edits=((number, ()),)),), 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [-2, 2, 1 << 40])
def test_the_binary_is_one_of_the_files(write, tmp_path, number):
    with pytest.raises(ValueError, match="the binary is none of the files"):
        write(str(tmp_path), (new("t", "k", (("a", b"x"), ("b", b"y")), binary=number),), 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("binary", "metadata"), [(0, -2), (0, 2), (0, 1 << 40), (-1, 1)])
def test_the_metadata_is_one_of_the_files_beside_a_binary(write, tmp_path, binary, metadata):
    """Which kind of binary it has to be says the metadata, so one is not looked at without the
    other.
    """
    kernel = new("t", "k", (("a", b"x"), ("b", b"y")), binary=binary, metadata=metadata)
    with pytest.raises(ValueError, match="the metadata is none of the files"):
        write(str(tmp_path), (kernel,), 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["compiled", "plain", "python"])
@given(
    data=st.binary(max_size=300)
    | st.integers(0, 70_000).map(
        lambda size: bytes(range(256)) * (size // 256) + bytes(size % 256)
    ),
    bit=st.integers(0, 255),
)
@settings(max_examples=60, deadline=None)
def test_the_digest_is_that_of_hashlib(kind, data, bit, tmp_path_factory):
    """Of any bytes each writer takes the digest that hashlib gives, and no other one."""
    root = tmp_path_factory.mktemp("there")
    right = hashlib.sha256(data).digest()
    wrong = (int.from_bytes(right) ^ 1 << bit).to_bytes(32)
    kernels = (
        new("t", "right", (("a", data),), digests=(right,)),
        new("u", "wrong", (("a", memoryview(data)),), digests=(wrong,)),
    )
    assert writer_of(kind)(str(root), kernels, 1) == [0, kernel_writer.DAMAGED]


def binary_of(header, tables, size):
    """An ELF file of 64 bits with such offsets, row sizes and counts, and rows from 64 on."""
    segments, sections, segment_bytes, segment_count, section_bytes, section_count = header
    head = (
        b"\x7fELF\2"
        + bytes(27)
        + struct.pack(
            "<QQ6xHHHH2x",
            segments,
            sections,
            segment_bytes,
            segment_count,
            section_bytes,
            section_count,
        )
    )
    return (head + b"".join(struct.pack("<IIQQQQQQQ", *row) for row in tables)).ljust(size, b"\0")


numbers = st.integers(0, 700) | st.sampled_from(
    [0, 64, 128, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
)
rows = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 8, 8]), *[numbers] * 7), max_size=6
)  # a row is long enough for a segment and for a section, and so may be read as either
headers = st.tuples(
    st.sampled_from([0, 64, 120]) | numbers,
    st.sampled_from([0, 64, 128]) | numbers,
    st.sampled_from([56, 64, 0, 7, 80]),
    st.integers(0, 8) | st.just(65535),
    st.sampled_from([64, 56, 0, 7, 80]),
    st.integers(0, 8) | st.just(65535),
)


@given(header=headers, tables=rows, size=st.integers(0, 800), cut=st.integers(0, 90))
@settings(max_examples=400, deadline=None)
def test_the_extension_reads_binaries_as_python_does(header, tables, size, cut, tmp_path_factory):
    """Whatever the headers say, the extension refuses the binaries that `device_elf.why_unusable` refuses,
    and no others.
    """
    data = binary_of(header, tables, size)
    root = str(tmp_path_factory.mktemp("there"))
    images = [data, data[:cut], data[:4] + b"\1" + data[5:], b"x" + data[1:]]
    kernels = tuple(
        new(f"t{n}", f"k{n}", (("a.json", b"{}"), ("a.cubin", image)), binary=1)
        for n, image in enumerate(images)
    )
    expected = [
        kernel_writer.NO_BINARY if device_elf.why_unusable(image) else 0 for image in images
    ]
    assert (
        writer_of("compiled")(root, kernels, 1)
        == expected
        == kernel_writer.write_in_python(f"{root}/", _renamed(kernels), 1)
    )


def _renamed(kernels):
    return tuple((f"p{temporary}", f"p{key}", *more) for temporary, key, *more in kernels)


def test_the_extension_finds_the_sha256_of_python(tmp_path):
    """Where hashlib uses OpenSSL from a library of its own, the extension uses the same."""
    extension = pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    )
    hashing = pytest.importorskip("_hashlib")
    if not hasattr(hashing, "__file__"):
        pytest.skip("OpenSSL is built into this Python")
    assert extension.COMPARES_DIGESTS
