# SPDX-License-Identifier: Apache-2.0
"""What a restore does with what is there already."""

import errno
import os
import shutil

import pytest
import support

import bundler
from bundler.lifecycle import cache_directory
from bundler.toolchain import directories


def restored(small, planted):
    """Restore one kernel into the planted cache; returns the report."""
    return bundler.restore(small, planted, only="all")


def test_a_kernel_that_is_there_is_left_alone(small, planted, key):
    """Our own bytes in place are present; nothing is written, not even a time changed."""
    before = {name: os.stat(planted / key / name) for name in os.listdir(planted / key)}
    report = restored(small, planted)
    assert (report.present, report.restored, report.repaired) == ((key,), (), ())
    assert (report.files, report.bytes, report.usable) == (0, 0, 1)
    after = {name: os.stat(planted / key / name) for name in os.listdir(planted / key)}
    assert {n: (s.st_ino, s.st_mtime_ns) for n, s in after.items()} == {
        n: (s.st_ino, s.st_mtime_ns) for n, s in before.items()
    }
    assert os.listdir(planted) == [key]


def test_restoring_twice_changes_nothing(compiled, tmp_path):
    """The second restore of a bundle finds every kernel present and writes nothing."""
    first = bundler.restore(compiled.bundle, tmp_path / "there", only="all")
    before = support.tree(tmp_path / "there")
    second = bundler.restore(compiled.bundle, tmp_path / "there", only="all")
    assert second.present == first.restored
    assert (second.restored, second.repaired, second.files, second.bytes) == ((), (), 0, 0)
    assert support.tree(tmp_path / "there") == before


def test_the_launch_set_that_is_there_counts_as_the_kernel(small, tmp_path, key):
    """A kernel restored as its launch set is present for a whole restore, and the other way
    round.
    """
    for first, second in (("launch", "all"), ("all", "launch")):
        there = tmp_path / first
        bundler.restore(small, there, only="all", keep=first)
        before = support.tree(there)
        assert bundler.restore(small, there, only="all", keep=second).present == (key,)
        assert support.tree(there) == before


@pytest.mark.toolchain
def test_another_complete_build_is_left_alone(compiled, bundle, tmp_path):
    """The same kernels compiled from another checkout, with other debug paths, are present and stay
    byte for byte.
    """
    shutil.copy(support.KERNELS, tmp_path / "kernels.py")
    there = tmp_path / "there"
    support.ask(there, "gelu,softmax", kernels=tmp_path / "kernels.py")
    before = support.tree(there)
    ours = bundle.select(names="[gs][eo][lf][ut]*_kernel")
    report = bundler.restore(ours, there, only="all")
    assert report.present == tuple(sorted({name.partition("/")[0] for name in before}))
    assert (report.restored, report.repaired, report.files) == ((), (), 0)
    assert support.tree(there) == before
    assert before != {
        name: data for name, data in support.tree(compiled.cache).items() if name in before
    }


@pytest.mark.parametrize("case", support.BROKEN)
def test_a_broken_directory_is_replaced_as_a_whole(small, planted, key, case, compiled):
    """Whatever is broken, the kernel is repaired: every file is ours, nothing of the old remains in
    it, and the old directory was renamed aside as it was.
    """
    (planted / key / "left over.txt").write_text("of the old directory")
    support.BROKEN[case][0](planted / key)
    broken = sorted(os.listdir(planted / key))
    report = restored(small, planted)
    assert (report.repaired, report.present, report.restored) == ((key,), (), ())
    assert support.is_whole(planted / key)
    expected = support.tree(support.plant(compiled.cache, planted.parent / "expected", [key]) / key)
    found = support.tree(planted / key)
    assert {n: d for n, d in found.items() if support.GROUP not in n} == {
        n: d for n, d in expected.items() if support.GROUP not in n
    }
    assert set(found) == set(expected)
    (aside,) = support.put_aside(planted)
    assert sorted(os.listdir(aside)) == broken
    assert support.temporaries(planted) == []


def test_a_group_file_that_leads_elsewhere_is_broken(small, planted, key, tmp_path):
    """A directory whose group file names another place would be read from there, so it is
    replaced.
    """
    support.name_group(planted / key, tmp_path / "old place")
    assert restored(small, planted).repaired == (key,)
    assert support.is_whole(planted / key)


def test_a_group_file_that_leads_here_by_another_name_is_sound(small, planted, key, tmp_path):
    """A group file that names the directory through a link leads to the same files, so the kernel
    is present.
    """
    (tmp_path / "link").symlink_to(planted)
    support.name_group(planted / key, tmp_path / "link" / key)
    assert restored(small, planted).present == (key,)


def test_another_kernel_under_the_same_key_is_replaced(small, planted, key):
    """A complete directory whose metadata differs is not this kernel, and is replaced."""
    path = support.one(planted / key, ".json")
    path.write_text(path.read_text().replace('"num_warps": 4', '"num_warps": 8'))
    assert restored(small, planted).repaired == (key,)


def test_an_empty_directory_becomes_the_kernel(small, tmp_path, key):
    """Triton makes the key's directory before it writes; while it is empty the restore takes its
    place.
    """
    (tmp_path / "there" / key).mkdir(parents=True)
    assert restored(small, tmp_path / "there").restored == (key,)
    assert os.listdir(tmp_path / "there") == [key]
    assert support.is_whole(tmp_path / "there" / key)


@pytest.mark.parametrize("kind", ["file", "dangling link", "link to a file"])
def test_what_is_no_directory_is_put_aside(small, tmp_path, key, kind):
    """A file or a link that leads nowhere, in the place of the kernel, is renamed aside and the
    kernel is there.
    """
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "file").write_text("a file")
    if kind == "file":
        (there / key).write_text("a file")
    else:
        (there / key).symlink_to(tmp_path / ("nowhere" if kind == "dangling link" else "file"))
    assert restored(small, there).repaired == (key,)
    assert support.is_whole(there / key)
    assert not (there / key).is_symlink()
    assert len(support.put_aside(there)) == 1
    assert (tmp_path / "file").read_text() == "a file"


def test_a_link_to_a_sound_kernel_is_present(small, planted, key, tmp_path):
    """A key that is a link to a directory with the kernel is used as it is."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / key).symlink_to(planted / key)
    assert restored(small, tmp_path / "there").present == (key,)


def test_what_was_put_aside_is_swept_a_day_later(small, planted, key, monkeypatch):
    """Directories put aside, and leftovers of killed restores, are removed when they are older than
    a day, not before.

    A change time cannot be set, so the test moves the limit: a day is made to pass by asking for
    less than nothing.
    """
    support.group_of(planted / key).unlink()
    restored(small, planted)
    (planted / "tmp.bundler.77.half").mkdir()
    (planted / "tmp.bundler.77.half" / "x.cubin").write_bytes(b"half")
    (planted / "tmp.bundler.77.single").write_text("a file of a killed restore")
    (planted / "tmp.pid_3_x").mkdir()
    before = sorted(os.listdir(planted))
    restored(small, planted)
    assert sorted(os.listdir(planted)) == before
    assert cache_directory.STALE_AFTER_S == 24 * 3600
    monkeypatch.setattr(cache_directory, "STALE_AFTER_S", -1)
    restored(small, planted)
    assert sorted(os.listdir(planted)) == sorted([key, "tmp.pid_3_x"])


def test_the_age_of_leftovers_is_told_by_the_file_systems_clock(small, planted, monkeypatch):
    """A local clock that is years ahead of the file system's sweeps nothing young."""
    (planted / "tmp.bundler.77.half").mkdir()
    monkeypatch.setattr("time.time", lambda: 4e9)
    monkeypatch.setattr("time.time_ns", lambda: 4 * 10**18)
    restored(small, planted)
    assert (planted / "tmp.bundler.77.half").is_dir()


def test_leftovers_in_a_read_only_cache_do_no_harm(small, planted, key, monkeypatch):
    """Where every kernel is present and nothing can be written, a leftover that cannot be swept is
    no error.
    """
    (planted / "tmp.bundler.77.half").mkdir()

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", read_only)
    support.write_in_python(monkeypatch)
    monkeypatch.setattr(os, "rename", read_only)
    assert restored(small, planted).present == (key,)


@pytest.mark.parametrize("others", ["whole", "broken", "broken and still there"])
def test_losing_the_race_is_success(small, planted, key, tmp_path, monkeypatch, others):
    """When another process publishes the kernel between our look and our rename, it is present if
    whole, replaced if broken.
    """
    there, real = tmp_path / "there", os.rename
    if others != "whole":
        support.one(planted / key, ".cubin").write_bytes(b"")

    def late(source, target):
        if (
            os.path.basename(target) == key
            and not os.path.exists(target)
            and "won" not in late.__dict__
        ):
            late.won = True
            shutil.copytree(planted / key, target)
            support.name_group(there / key)
        return real(source, target)

    support.write_in_python(monkeypatch)
    monkeypatch.setattr(os, "rename", late)
    report = restored(small, there)
    assert late.won
    assert (report.present if others == "whole" else report.repaired) == (key,)
    assert support.is_whole(there / key)
    assert support.temporaries(there) == []
    assert len(support.put_aside(there)) == (0 if others == "whole" else 1)


def test_a_directory_that_is_broken_again_and_again_is_an_error(
    small, planted, key, tmp_path, monkeypatch
):
    """When another process breaks the directory each time we put it right, the restore says so and
    leaves no temporary.
    """
    there, real = tmp_path / "there", os.rename

    def hostile(source, target):
        if os.path.basename(target) == key and not os.path.exists(target):
            os.mkdir(target)
            (there / key / "rubbish").write_text("")
        return real(source, target)

    support.write_in_python(monkeypatch)
    monkeypatch.setattr(os, "rename", hostile)
    with pytest.raises(
        bundler.BundlerError, match="another process keeps writing a broken kernel there"
    ) as caught:
        restored(small, there)
    assert caught.value.report.usable == 0
    assert support.temporaries(there) == []


def test_a_single_file_that_is_there_stays(compiled, key, tmp_path, planted):
    """A tuning file with the same bytes counts as in place; other bytes there stay, and the report
    says so.
    """
    folder = "B" * 52
    (planted / folder).mkdir()
    (planted / folder / "gelu_kernel.autotune.json").write_text('{"ours": 1}')
    with bundler.pack(planted) as packed:
        same = bundler.restore(packed, planted, only="all")
        assert (same.companions, same.skipped, same.files) == (
            (f"{folder}/gelu_kernel.autotune.json",),
            (),
            0,
        )
        (planted / folder / "gelu_kernel.autotune.json").write_text('{"theirs": 2}')
        other = bundler.restore(packed, planted, only="all")
    assert other.skipped == (
        (f"{folder}/gelu_kernel.autotune.json", f"another file is there already, in {planted}"),
    )
    assert (planted / folder / "gelu_kernel.autotune.json").read_text() == '{"theirs": 2}'


@pytest.mark.parametrize(
    "obstacle", ["directory", "dangling link", "a file in place of its directory"]
)
def test_an_obstacle_to_a_single_file_skips_that_file(planted, key, tmp_path, obstacle):
    """Where something else is in the place of a single file, that file is skipped with a reason and
    the kernels are restored.
    """
    folder = "B" * 52
    (planted / folder).mkdir()
    (planted / folder / "gelu_kernel.autotune.json").write_text("{}")
    there = tmp_path / "there"
    there.mkdir()
    if obstacle == "a file in place of its directory":
        (there / folder).write_text("x")
    else:
        (there / folder).mkdir()
        place = there / folder / "gelu_kernel.autotune.json"
        place.mkdir() if obstacle == "directory" else place.symlink_to(tmp_path / "nowhere")
    with bundler.pack(planted) as packed:
        report = bundler.restore(packed, there, only="all")
    assert report.restored == (key,)
    assert [name for name, _ in report.skipped] == [f"{folder}/gelu_kernel.autotune.json"]
    assert support.temporaries(there) == []
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.toolchain
def test_a_repaired_kernel_hits(compiled, full_cache, tmp_path):
    """After a repair of kernels broken in every way, Triton finds all of them in a process that
    cannot compile.
    """
    cuda = [path for path in sorted(full_cache.iterdir()) if list(path.glob("*.cubin"))]
    for directory, (breaking, _) in zip(cuda, list(support.BROKEN.values())[:11], strict=True):
        breaking(directory)
    report = bundler.restore(compiled.bundle, full_cache)
    assert (len(report.repaired), len(report.present), report.skipped) == (11, 11, ())
    assert support.hits_without_compiler(full_cache, tmp_path / "ptxas") == (22, 0)


def test_present_is_where_triton_would_look(small, planted, key, monkeypatch):
    """Without cache_dir the kernels of this process's own cache are looked at."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(planted))
    assert directories.triton_cache_dir() == str(planted)
    report = bundler.restore(small, only="all")
    assert (report.present, report.directories) == ((key,), (str(planted),))
