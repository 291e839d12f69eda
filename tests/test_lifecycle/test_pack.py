# SPDX-License-Identifier: Apache-2.0
import errno
import os
import shutil

import pytest
import support

import bundler
from bundler.errors import AccessDenied, CannotLaunchStatically, ConfigError, NotFound


@pytest.fixture
def inductor(compiled, tmp_path):
    """An Inductor cache of two devices, with files of each kind beside the kernels."""
    root = tmp_path / "inductor"
    cuda, amd = compiled.keys_of("gelu_kernel"), compiled.keys_of("softmax_kernel")
    support.plant(compiled.cache, root / "triton" / "0", cuda)
    support.plant(compiled.cache, root / "triton" / "1", cuda + amd)
    for path, text in {
        "ab/cabc.py": "print()",
        "ab/cabc.best_config": "{}",
        "fxgraph/xy/fxyz/entry": "pickle",
        "locks/one.lock": "",
        "tmpabc/half": "",
        "ab/bad name": "x",
        "a/b/c/d/e/f/g": "deep",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_a_packed_triton_cache_has_its_kernels_and_nothing_else(full_cache, compiled):
    """Each kernel directory becomes a kernel; launch facts and key parts are not there, and asking
    for them says why.
    """
    with bundler.pack(full_cache) as packed:
        assert sorted(kernel.key for kernel in packed.kernels) == compiled.keys
        assert packed.left_out == ()
        kernel = packed.kernels[0]
        with pytest.raises(CannotLaunchStatically, match="came by pack"):
            kernel.launch.require_facts()
        with pytest.raises(NotFound, match="came by pack"):
            kernel.require_parts()


def test_who_watches_a_pack_is_told_how_many_were_read(full_cache, compiled):
    """Each kernel once, of all that there are."""
    told, total = [], len(compiled.keys)
    with bundler.pack(full_cache, watch=lambda *numbers: told.append(numbers)) as packed:
        assert (told, len(packed.kernels)) == (
            [(done, total) for done in range(1, total + 1)],
            total,
        )


def test_an_inductor_cache_is_packed_whole_or_reported(inductor):
    """Kernels are stored once for both devices; each other file is an entry of its kind or in
    left_out with its reason.
    """
    with bundler.pack(inductor) as packed:
        assert len(packed.kernels) == 2
        assert sorted(seen.devices for seen in packed.observed.kernels.values()) == [(0, 1), (1,)]
        assert {seen.layouts for seen in packed.observed.kernels.values()} == {("inductor",)}
        assert [file.path for file in packed.tuning_files] == ["ab/cabc.best_config"]
        assert [file.path for file in packed.opaque] == ["ab/cabc.py", "fxgraph/xy/fxyz/entry"]
        reasons = dict(packed.left_out)
    assert reasons["locks/one.lock"] == reasons["tmpabc/half"] == "a lock or temporary file"
    assert "unsafe file name 'bad name'" in reasons["ab/bad name"]
    assert "7 components, at most 6 allowed" in reasons["a/b/c/d/e/f/g"]
    assert len(reasons) == 4


def test_the_launch_set_of_an_inductor_cache(inductor):
    """keep='launch' takes binaries, metadata and tuning files, and says of the rest that a launch
    does not need it.
    """
    with bundler.pack(inductor, keep="launch") as packed:
        assert {a.kind for k in packed.kernels for a in k.artifacts} == {"cubin", "json"}
        assert (packed.opaque, len(packed.tuning_files)) == ((), 1)
        assert dict(packed.left_out)["ab/cabc.py"] == "not needed to launch (keep='launch')"


def test_each_file_is_an_entry_or_in_the_report_under_launch_too(full_cache, key):
    """keep='launch' names the helper libraries that it leaves out."""
    (full_cache / key / "helper.so").write_bytes(b"\x7fELF")
    with bundler.pack(full_cache, keep="launch") as packed:
        assert packed.helpers == ()
        assert dict(packed.left_out) == {f"{key}/helper.so": "not needed to launch (keep='launch')"}


@pytest.mark.parametrize("kind", ["absolute", "relative", "trailing slash", "link", "path object"])
def test_any_spelling_of_the_directory_gives_the_same_bundle(
    full_cache, tmp_path, monkeypatch, kind
):
    """However the directory is spelled, the packed bundle has the same digest."""
    with bundler.pack(full_cache) as packed:
        expected = packed.digest
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(full_cache)
    spelling = {
        "absolute": str(full_cache),
        "relative": full_cache.name,
        "trailing slash": f"{full_cache}/",
        "link": "link",
        "path object": full_cache,
    }[kind]
    with bundler.pack(spelling) as packed:
        assert packed.digest == expected


def test_what_is_no_kernel_directory_is_reported(planted, key):
    """Files and directories that Triton did not name are in left_out, those of an interrupted
    restore too.
    """
    (planted / "README").write_text("mine")
    (planted / "tmp.bundler.1.ab").mkdir()
    (planted / ("B" * 52)).write_text("a file with a key's name")
    with bundler.pack(planted) as packed:
        assert [kernel.key for kernel in packed.kernels] == [key]
        assert dict(packed.left_out) == dict.fromkeys(
            ["README", "tmp.bundler.1.ab", "B" * 52], "not a kernel directory"
        )


def test_single_files_are_entries_of_their_kind(planted):
    """A key directory with a launcher or a tuning result alone becomes a helper library or a tuning
    file.
    """
    for name, file in (("B" * 52, "launcher.so"), ("C" * 52, "gelu_kernel.autotune.json")):
        (planted / name).mkdir()
        (planted / name / file).write_text("{}")
    with bundler.pack(planted) as packed:
        assert [helper.path for helper in packed.helpers] == [f"{'B' * 52}/launcher.so"]
        assert [file.path for file in packed.tuning_files] == [
            f"{'C' * 52}/gelu_kernel.autotune.json"
        ]
        assert packed.left_out == ()


def test_of_two_devices_one_broken_kernel_does_not_hide_the_other(inductor, compiled):
    """A kernel that is broken for device 0 and sound for device 1 is in the bundle, and the broken
    one is reported.
    """
    (key,) = compiled.keys_of("gelu_kernel")
    support.one(inductor / "triton" / "0" / key, ".cubin").write_bytes(b"")
    with bundler.pack(inductor) as packed:
        assert key in {kernel.key for kernel in packed.kernels}
        assert packed.observed.kernels[key].devices == (1,)
        assert dict(packed.left_out)[key] == "gelu_kernel.cubin is empty"


def test_an_entry_that_is_a_link_or_a_pipe_is_reported(inductor):
    """A link or a pipe among the files beside kernels is left out with its reason, and nobody waits
    for it.
    """
    (inductor / "ab" / "link.py").symlink_to("cabc.py")
    os.mkfifo(inductor / "ab" / "pipe.py")
    with bundler.pack(inductor) as packed:
        reasons = dict(packed.left_out)
    assert reasons["ab/link.py"] == "link.py is a symbolic link"
    assert reasons["ab/pipe.py"] == "pipe.py is not a regular file"


def test_a_linked_directory_beside_kernels_is_reported(inductor, tmp_path):
    """A link to a directory is not followed, and not passed over in silence."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("x")
    (inductor / "linked").symlink_to(tmp_path / "outside")
    with bundler.pack(inductor) as packed:
        assert "linked/secret" not in {entry.path for entry in packed.opaque}
        assert dict(packed.left_out)["linked"] == "linked is a symbolic link"


def test_what_lies_beside_the_devices_directories_is_reported(inductor, monkeypatch):
    """In Inductor's `triton` directory, what is no device's directory is an entry or in the report,
    never passed over.
    """
    (inductor / "triton" / "README").write_text("mine")
    (inductor / "triton" / "tmp12").mkdir()
    (inductor / "triton" / "tmp12" / "half").write_text("x")
    with bundler.pack(inductor) as packed:
        assert "triton/README" in {entry.path for entry in packed.opaque}
        assert dict(packed.left_out)["triton/tmp12/half"] == "a lock or temporary file"


def test_a_directory_beside_kernels_that_may_not_be_read_is_reported(inductor, monkeypatch):
    """A directory beside the kernels that may not be listed is in the report, and the rest is
    packed.
    """
    real = os.scandir

    def denied(path="."):
        if str(path).endswith("fxgraph"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    monkeypatch.setattr(os, "scandir", denied)
    with bundler.pack(inductor) as packed:
        assert dict(packed.left_out)["fxgraph"] == "cannot read: Permission denied"
        assert [entry.path for entry in packed.opaque] == ["ab/cabc.py"]


@pytest.mark.parametrize("content", [[], ["notes"], ["triton"]])
def test_a_directory_without_kernels_is_an_error(tmp_path, content):
    """A directory that is no cache is NotFound, with what was expected there."""
    for name in content:
        (tmp_path / "empty" / name).mkdir(parents=True)
    (tmp_path / "empty").mkdir(exist_ok=True)
    with pytest.raises(NotFound, match="expected directories named by a kernel key"):
        bundler.pack(tmp_path / "empty")


def test_bad_arguments_are_errors(tmp_path, planted, key):
    """No such directory, a file in its place, and a wrong keep each give their error."""
    with pytest.raises(NotFound):
        bundler.pack(tmp_path / "nowhere")
    with pytest.raises(NotFound):
        bundler.pack(support.one(planted / key, ".json"))
    with pytest.raises(ConfigError, match="expected 'all' or 'launch'"):
        bundler.pack(planted, keep="ir")


def test_a_directory_that_may_not_be_read_is_access_denied(planted, monkeypatch):
    """A cache directory that may not be listed is AccessDenied."""

    def denied(*args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(AccessDenied, match="Permission denied"):
        bundler.pack(planted)


def test_a_kernel_directory_that_may_not_be_read_is_left_out(full_cache, key, monkeypatch):
    """One kernel directory that may not be listed is left out, and the rest is packed."""
    scandir, listdir = os.scandir, os.listdir

    def denied(real):
        def listing(path="."):
            if str(path).endswith(key):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return real(path)

        return listing

    support.read_in_python(monkeypatch)
    monkeypatch.setattr(os, "scandir", denied(scandir))
    monkeypatch.setattr(os, "listdir", denied(listdir))
    with bundler.pack(full_cache) as packed:
        assert len(packed.kernels) == 21
        assert packed.left_out == ((key, "cannot read: Permission denied"),)


def test_two_kernels_under_one_key_are_reported(inductor, compiled):
    """When a damaged cache holds different kernels under one key, the first stays and the other
    device's is reported.
    """
    (key,) = compiled.keys_of("gelu_kernel")
    path = support.one(inductor / "triton" / "1" / key, ".json")
    path.write_text(path.read_text().replace('"num_warps": 4', '"num_warps": 8'))
    with bundler.pack(inductor) as packed:
        (kernel,) = [kernel for kernel in packed.kernels if kernel.key == key]
        assert kernel.launch.num_warps == 4
        assert len(packed.kernels) == 2, "a conflict must not take the other kernels with it"
        assert any("num_warps: 4 and 8" in why for _, why in packed.left_out)


def test_packing_changes_nothing(inductor):
    """Packing reads: the directory is as it was."""
    before = support.tree(inductor)
    bundler.pack(inductor).close()
    assert support.tree(inductor) == before
    shutil.rmtree(inductor)
