# SPDX-License-Identifier: Apache-2.0
import errno
import os
import re
import shutil

import pytest
import support

import bundler
from bundler.format.limits import Limits
from bundler.lifecycle import kernel_directory


def reason(directory, limits=None):
    """Why a kernel directory is rejected."""
    found = kernel_directory.read_kernel(str(directory), limits or Limits())
    assert isinstance(found, kernel_directory.Rejected), "accepted"
    return found.reason


@pytest.mark.parametrize("case", support.BROKEN)
def test_a_broken_kernel_directory_is_left_out_with_its_reason(planted, key, case):
    """A kernel whose directory is not whole is not in the bundle, and the report says what is wrong
    with it.
    """
    breaking, expected = support.BROKEN[case]
    breaking(planted / key)
    with bundler.pack(planted) as packed:
        assert packed.kernels == ()
        ((name, why),) = [pair for pair in packed.left_out if pair[0] == key]
    assert name == key
    assert expected in why


@pytest.mark.parametrize("target", support.TARGETS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99, "one byte less"])
def test_a_truncated_binary_of_either_vendor_is_left_out(compiled, tmp_path, target, share):
    """However much of it is there, a device binary that lost its end is not taken for one."""
    planted = support.plant(
        compiled.cache, tmp_path / "planted", compiled.keys_of("gelu_kernel", target)
    )
    (directory,) = planted.iterdir()
    binary = support.one(directory, ".cubin" if target.startswith("cuda") else ".hsaco")
    data = binary.read_bytes()
    binary.write_bytes(data[:-1] if share == "one byte less" else data[: int(len(data) * share)])
    assert re.search("truncated|empty|not an ELF", reason(directory))


def test_every_binary_that_triton_made_is_accepted(full_cache):
    """No kernel that Triton just compiled, for either vendor, is taken for a broken one."""
    with bundler.pack(full_cache) as packed:
        assert packed.left_out == ()
        assert {kernel.key for kernel in packed.kernels} == set(os.listdir(full_cache))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(file_bytes=4000), "over the limit of 4000 bytes"),
        (Limits(kernel_bytes=1000), "more than 1000 bytes in all"),
        (Limits(files_per_kernel=3), "over the limit of 3"),
    ],
)
def test_what_is_too_large_is_left_out(planted, key, limits, expected):
    """A file, a kernel or a number of files over its limit rejects the kernel and names the
    limit.
    """
    assert expected in reason(planted / key, limits)


def test_an_unreadable_file_rejects_the_kernel(planted, key, monkeypatch):
    """A file that we may not read rejects its kernel and is named; the others of the cache are
    taken.
    """
    real = os.open

    def denied(path, *args, **kwargs):
        if str(path).endswith(".ttgir"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", denied)
    assert reason(planted / key) == "gelu_kernel.ttgir: Permission denied"


def test_an_input_output_error_rejects_the_kernel(planted, key, monkeypatch):
    """A disk that fails while a kernel is read rejects that kernel."""

    def failing(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "open", failing)
    assert reason(planted / key) == "cannot read: Input/output error"


def test_a_file_that_vanishes_while_being_read_rejects_the_kernel(planted, key, monkeypatch):
    """A kernel that loses a file between the listing and the reading is left out, also when we try
    again.
    """
    real = kernel_directory.read_file

    def vanishing(directory, name, *more):
        if name.endswith(".llir"):
            os.unlink(os.path.join(directory, name))
        return real(directory, name, *more)

    monkeypatch.setattr(kernel_directory, "read_file", vanishing)
    assert "gelu_kernel.llir" in reason(planted / key)


def test_a_directory_that_vanishes_while_being_read_is_missing(planted, key, monkeypatch):
    """A kernel whose whole directory goes while we read is reported as gone."""
    real = kernel_directory.read_file

    def vanishing(directory, name, *more):
        shutil.rmtree(directory, ignore_errors=True)
        return real(directory, name, *more)

    monkeypatch.setattr(kernel_directory, "read_file", vanishing)
    found = kernel_directory.read_kernel(str(planted / key))
    assert found == kernel_directory.Rejected("the directory is gone", missing=True)


def rewritten(planted, key, times, monkeypatch):
    """Let another process replace the binary so many times while we read, each time with other
    bytes of equal size.
    """
    real, seen = kernel_directory.read_file, []

    def changing(directory, name, *more):
        data = real(directory, name, *more)
        if name.endswith(".json") and not name.startswith(support.GROUP) and len(seen) < times:
            seen.append(name)
            binary = support.one(planted / key, ".cubin")
            new = binary.with_suffix(".new")
            new.write_bytes(binary.read_bytes())
            new.replace(binary)
        return data

    monkeypatch.setattr(kernel_directory, "read_file", changing)


def test_a_directory_that_changed_while_being_read_is_read_again(planted, key, monkeypatch):
    """A kernel that another process replaced while we read is read once more, and taken when it is
    quiet.
    """
    rewritten(planted, key, 1, monkeypatch)
    assert isinstance(
        kernel_directory.read_kernel(str(planted / key)), kernel_directory.KernelFiles
    )


def test_a_directory_that_keeps_changing_is_left_out(planted, key, monkeypatch):
    """A kernel that another process writes to all the time is left out with that reason."""
    rewritten(planted, key, 1000, monkeypatch)
    assert reason(planted / key) == "another process keeps writing to it"


def test_a_moved_cache_is_read_from_where_it_is(compiled, key, tmp_path):
    """Of a copied cache, whose group file names the old place, the files beside the group file are
    taken.
    """
    old = support.plant(compiled.cache, tmp_path / "old", [key])
    shutil.copytree(old, tmp_path / "new")
    support.one(old / key, ".cubin").write_bytes(b"\x7fELF of another kernel")
    with bundler.pack(tmp_path / "new") as packed, bundler.pack(compiled.cache) as original:
        assert packed.left_out == ()
        (kernel,) = packed.kernels
        (same,) = [kernel for kernel in original.kernels if kernel.key == key]
        assert kernel == same


@pytest.fixture(scope="module")
def another_checkout(tmp_path_factory):
    """A cache with the layer norm kernels of another checkout: keys as in `compiled`, other
    bytes.
    """
    folder = tmp_path_factory.mktemp("another checkout")
    shutil.copy(support.KERNELS, folder / "kernels.py")
    support.ask(folder / "cache", "layer_norm", support.TARGETS, kernels=folder / "kernels.py")
    return folder / "cache"


@pytest.fixture
def two_builds(compiled, another_checkout, tmp_path):
    """Return a function that gives two directories of one kernel, compiled from two checkouts: one
    key, other bytes.
    """

    def builds(target):
        (key,) = compiled.keys_of("layer_norm_kernel", target)
        return (
            support.plant(compiled.cache, tmp_path / "ours", [key]) / key,
            support.plant(another_checkout, tmp_path / "theirs", [key]) / key,
        )

    return builds


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("target", "suffix"),
    [("cuda:90", suffix) for suffix in (".ttir", ".ttgir", ".llir", ".ptx", ".cubin")]
    + [("hip:gfx942", suffix) for suffix in (".ttir", ".ttgir", ".llir", ".amdgcn", ".hsaco")],
)
def test_files_of_two_compiles_are_never_mixed(two_builds, target, suffix):
    """A directory in which one file comes from a compile of another checkout is rejected, whichever
    file it is.
    """
    ours, theirs = two_builds(target)
    assert support.one(ours, suffix).read_bytes() != support.one(theirs, suffix).read_bytes()
    shutil.copy(support.one(theirs, suffix), support.one(ours, suffix))
    assert "come from two compiles" in reason(ours)


@pytest.mark.toolchain
@pytest.mark.parametrize("target", support.TARGETS)
def test_both_builds_alone_are_accepted(two_builds, target):
    """Each of the two builds that must not be mixed is a sound kernel by itself, and both have one
    key.
    """
    for directory in two_builds(target):
        found = kernel_directory.read_kernel(str(directory))
        assert isinstance(found, kernel_directory.KernelFiles)
        assert found.name == "layer_norm_kernel"


def test_reading_a_directory_leaves_no_file_open(planted, key):
    """Whatever is wrong with a kernel directory, its files are closed after it was read."""
    before = len(os.listdir("/proc/self/fd"))
    for breaking, _ in support.BROKEN.values():
        directory = planted.parent / "broken" / key
        shutil.rmtree(directory.parent, ignore_errors=True)
        shutil.copytree(planted / key, directory)
        breaking(directory)
        kernel_directory.read_kernel(str(directory))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_line_of_no_file_says_nothing_of_the_compile():
    """LLVM gives what it made itself the file `<unknown>`, which the text before it does
    not name.
    """
    from bundler.lifecycle import kernel_directory

    files = {
        "k.ttgir": b'#loc1 = loc("/src/k.py":1:1)\n#loc2 = loc("/src/lib.py":1:1)\n',
        "k.llir": (
            b'!1 = !DIFile(filename: "k.py", directory: "/src")\n!2 = !DIFile(filename:'
            b' "<unknown>", directory: "")\n'
        ),
        "k.cubin": b"",
    }
    assert kernel_directory._mixed(files, "k.cubin") is None
    files["k.llir"] = files["k.llir"].replace(b"<unknown>", b"other.py")
    assert "come from two compiles" in kernel_directory._mixed(files, "k.cubin")
