# SPDX-License-Identifier: Apache-2.0
"""A server's cache directory is packed as kernels and trees, and restored where its fingerprint
agrees; nothing leads out of its root.
"""

import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import support

import bundler
from bundler import Family, TreeOptions
from bundler.errors import AccessDenied, ConfigError, LimitExceeded, NotFound
from bundler.format.digest import digest_raw
from bundler.format.opaque_files import CHUNK_BYTES, TreeIndex
from bundler.lifecycle.family import FAMILIES, place_of, takes
from bundler.lifecycle.tree_plan import read_trees

MIB = 1 << 20
GOLDEN = Path(__file__).parents[1] / "data" / "v2.0" / "triton-3.7.1.tbundle"
AOT = "torch_compile_cache/torch_aot_compile/" + "ab" * 32
OTHERWISE = "torch_compile_cache/0123456789"
FACTORS = {
    "env": {"VLLM_USE_X": False, "VLLM_NAME": "a"},
    "config_hash": "c0",
    "code_hash": "c1",
    "compiler_hash": "c2",
}
FINGERPRINT = {
    "vllm": "0.33.0",
    "torch": "2.14.0",
    "triton": "3.8.0",
    "python": "CPython 3.12",
    "platform": "linux x86_64",
    "gpu": "NVIDIA H200",
    "target": "cuda:90",
    "driver": "nvidia 570.86.15",
    "cuda": "13.0",
}


class Ran:
    """Unpickled, it would leave a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def root(compiled, tmp_path):
    """A cache root of vLLM with two ranks: a model compiled ahead of time, and one that was not,
    with kernels for each rank.
    """
    root, keys = tmp_path / "vllm", compiled.keys_of("gelu_kernel")
    for rank in ("rank_0_0", "rank_1_0"):
        _write(root / AOT / rank / "model", pickle.dumps(Ran(str(tmp_path / "executed"))))
        _write(
            root / OTHERWISE / rank / "backbone/cache_key_factors.json",
            json.dumps(FACTORS).encode(),
        )
        _write(root / OTHERWISE / rank / "inductor_cache/fxgraph/ab/cdef/entry", rank.encode())
        support.plant(compiled.cache, root / OTHERWISE / rank / "triton_cache", keys)
    _write(
        root / AOT / "inductor_cache/xy/cxyz.py",
        f"open({str(tmp_path / 'executed')!r}, 'w')".encode(),
    )
    _write(root / AOT / "rank_0_0/model.77.tmp", b"half")
    _write(root / "assets/picture", b"x")
    return root


def _write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _files(root):
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and "__grp__" not in p.name
    }


def _restore(bundle, root, **more):
    facts = {**FINGERPRINT, "ranks": "2", **more.pop("facts", {})}
    return bundler.restore(
        bundle,
        **{"trust": "code", "only": "usable", **more},
        trees=TreeOptions(roots={"vllm": root}, facts=facts),
    )


@pytest.fixture
def packed(root, tmp_path):
    """That root as a bundle file, made elsewhere."""
    with bundler.pack_family("vllm", root, facts=FINGERPRINT) as bundle:
        bundle.save(tmp_path / "vllm.tbundle")
    return tmp_path / "vllm.tbundle"


def test_a_root_comes_back_under_another_one_and_nothing_was_executed(
    root, packed, tmp_path, compiled
):
    """Every file of the family is equal, each rank has its kernels, and neither a model was
    unpickled nor code run.
    """
    report = _restore(packed, tmp_path / "copy", only="all")
    wanted = {
        name: data for name, data in _files(root).items() if not name.endswith((".tmp", "picture"))
    }
    assert _files(tmp_path / "copy") == wanted
    assert report.skipped == ()
    for rank in ("rank_0_0", "rank_1_0"):
        assert sorted(
            os.listdir(tmp_path / "copy" / OTHERWISE / rank / "triton_cache")
        ) == compiled.keys_of("gelu_kernel")
    assert not (tmp_path / "executed").exists()
    assert _restore(packed, tmp_path / "copy", only="all").files == 0


def test_kernels_of_several_ranks_are_stored_once_and_the_rest_is_named(packed, compiled):
    """One entry for each kernel, one tree for each hash, with its ranks; what was not taken is
    named with the reason.
    """
    with bundler.Bundle.load(packed) as bundle:
        assert [kernel.key for kernel in bundle.kernels] == compiled.keys_of("gelu_kernel")
        trees = list(read_trees(bundle))
    assert [(tree.place, tree.ranks, len(tree.files)) for tree in trees] == [
        (OTHERWISE, ("rank_0_0", "rank_1_0"), 4),
        (AOT, ("rank_0_0", "rank_1_0"), 3),
    ]
    assert trees[0].fingerprint == {**FINGERPRINT, "ranks": "rank_0_0 rank_1_0"}


def test_what_a_pack_left_out_is_named(root):
    """Files of other purposes, unfinished ones and links are in left_out."""
    (root / AOT / "elsewhere").symlink_to("/")
    (root / AOT / "linked").symlink_to("/etc/hostname")
    with bundler.pack_family("vllm", root) as bundle:
        reasons = dict(bundle.left_out)
    assert reasons["assets"] == "not of vllm"
    assert "unfinished" in reasons[f"{AOT}/rank_0_0/model.77.tmp"]
    assert "symbolic link" in reasons[f"{AOT}/elsewhere"]
    assert "symbolic link" in reasons[f"{AOT}/linked"]


def test_without_trust_only_kernels_are_restored(packed, tmp_path, compiled):
    """Kernels go to where the ranks look, and what would be executed or unpickled stays in the
    bundle, with the reason.
    """
    report = _restore(packed, tmp_path / "copy", only="all", trust="kernels")
    assert report.restored == tuple(compiled.keys_of("gelu_kernel"))
    assert {reason for _, reason in report.skipped} == {
        "it would be executed or unpickled; pass trust='code' if you trust who made the bundle"
    }
    assert not any(name.endswith(("model", ".py")) for name in _files(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (
            {"ranks": "4"},
            (
                "ranks: made for 2 ranks (rank_0_0 rank_1_0), here 4 ranks (rank_0_0 rank_1_0"
                " rank_2_0 rank_3_0)"
            ),
        ),
        (
            {"ranks": "1x2"},
            "ranks: made for 2 ranks (rank_0_0 rank_1_0), here 2 ranks (rank_0_0 rank_0_1)",
        ),
        ({"vllm": "0.34.0"}, "vllm: made for 0.33.0, here 0.34.0"),
        ({"gpu": "NVIDIA H100"}, "gpu: made for NVIDIA H200, here NVIDIA H100"),
        ({"driver": "nvidia 565.10"}, "driver: made for nvidia 570.86.15, here nvidia 565.10"),
        (
            {"cuda": "12.8", "torch": "2.15.0"},
            "cuda: made for 13.0, here 12.8; torch: made for 2.14.0, here 2.15.0",
        ),
    ],
)
def test_a_tree_for_something_else_is_refused_with_the_parts_that_differ(
    packed, tmp_path, fact, words
):
    """Versions, GPU, driver, CUDA and rank layout each decide, and the reason names both sides."""
    report = _restore(packed, tmp_path / "copy", facts=fact)
    assert set(report.skipped) >= {(f"vllm:{OTHERWISE}", words), (f"vllm:{AOT}", words)}
    assert report.companions == ()
    assert _restore(packed, tmp_path / "anyway", facts=fact, only="all").companions


def test_a_newer_driver_is_fine(packed, tmp_path):
    """A driver runs what was made for an older one."""
    assert _restore(packed, tmp_path / "copy", facts={"driver": "nvidia 580.1"}).companions


def test_what_is_not_known_excludes_nothing_and_is_said(packed, tmp_path):
    """Neither the ranks nor the GPU are known here: the trees are restored, and the report names
    what was not compared.
    """
    known = {name: FINGERPRINT[name] for name in FINGERPRINT if name not in {"gpu", "vllm"}}
    options = TreeOptions(roots={"vllm": tmp_path / "copy"}, facts=known)
    report = bundler.restore(packed, trust="code", trees=options)
    assert len(report.companions) == 7
    assert (
        "ranks of vllm: not known here; say it with --fact ranks=N, or facts=" in report.unchecked
    )
    assert "vllm of vllm: not known here" in report.unchecked


def test_a_bundle_that_does_not_say_excludes_nothing(root, tmp_path):
    """Packed where there was no GPU, a tree is restored anywhere, and the report says that the
    bundle does not say.
    """
    with bundler.pack_family("vllm", root) as bundle:
        report = bundler.restore(
            bundle, trust="code", trees=TreeOptions(roots={"vllm": tmp_path / "copy"})
        )
    assert len(report.companions) == 7
    assert "gpu of vllm: the bundle does not say" in report.unchecked


def test_ranks_of_several_hosts_are_one_layout(root, tmp_path):
    """Each of two hosts packs its own rank; merged, the tree is that of both, and of
    neither alone.
    """
    hosts = []
    for rank, other in (("rank_0_0", "rank_1_0"), ("rank_1_0", "rank_0_0")):
        host = shutil.copytree(root, tmp_path / f"host-{rank}", symlinks=True)
        for place in (AOT, OTHERWISE):
            shutil.rmtree(host / place / other)
        hosts.append(bundler.pack_family("vllm", host, facts=FINGERPRINT))
    with bundler.merge(hosts) as merged:
        assert len(merged.kernels) == 1
        _restore(merged, tmp_path / "both", only="all", facts={"ranks": "2"})
        places = {path.parent.parent.parent.name for path in (tmp_path / "both").rglob("__grp__*")}
        assert places == {"rank_0_0", "rank_1_0"}
        shutil.rmtree(tmp_path / "both")
        _restore(merged, tmp_path / "both")
        assert (tmp_path / "both" / AOT / "rank_0_0/model").exists()
        assert (tmp_path / "both" / AOT / "rank_1_0/model").exists()
        assert _restore(merged, tmp_path / "four", facts={"ranks": "4"}).companions == ()
    assert _restore(hosts[0], tmp_path / "one", facts={"ranks": "2"}).companions == ()


def test_check_says_what_is_missing_and_writes_nothing(packed, tmp_path):
    """Before a restore each file is missing; after it none; a file that was changed is left
    alone.
    """
    options = TreeOptions(roots={"vllm": tmp_path / "copy"}, facts={**FINGERPRINT, "ranks": "2"})
    before = bundler.check(packed, trust="code", only="all", trees=options)
    assert f"vllm:{AOT}/rank_0_0/model" in dict(before.missing)
    assert not (tmp_path / "copy").exists()
    _restore(packed, tmp_path / "copy", only="all")
    after = bundler.check(packed, trust="code", only="all", trees=options)
    assert (after.missing, after.complete) == ((), True)
    (tmp_path / "copy" / AOT / "rank_0_0/model").write_bytes(b"of a live server")
    changed = bundler.check(packed, trust="code", only="all", trees=options)
    assert "another file is there already" in dict(changed.skipped)[f"vllm:{AOT}/rank_0_0/model"]
    _restore(packed, tmp_path / "copy", only="all")
    assert (tmp_path / "copy" / AOT / "rank_0_0/model").read_bytes() == b"of a live server"


def test_links_below_the_root_that_lead_out_of_it_get_nothing(packed, tmp_path):
    """A directory of the root that is a link elsewhere is refused, for files and for kernels; the
    root itself may be a link.
    """
    outside, real = tmp_path / "outside", tmp_path / "real"
    outside.mkdir()
    (real / OTHERWISE).parent.mkdir(parents=True)
    (real / OTHERWISE).symlink_to(outside)
    (tmp_path / "copy").symlink_to(real)
    report = _restore(packed, tmp_path / "copy", only="all")
    assert os.listdir(outside) == []
    assert any("leads out of the root" in reason for _, reason in report.skipped)
    assert (real / AOT / "rank_0_0/model").exists()


def test_a_large_file_travels_in_chunks(root, tmp_path):
    """A compiled model that is larger than a file of a bundle may be comes back whole."""
    data = os.urandom(1000) * (CHUNK_BYTES // 1000 + 1) + b"end"
    (root / AOT / "rank_0_0/model").write_bytes(data)
    with bundler.pack_family("vllm", root, facts=FINGERPRINT) as bundle:
        _restore(bundle, tmp_path / "copy", only="all")
    assert (tmp_path / "copy" / AOT / "rank_0_0/model").read_bytes() == data


def _repeated(packed, size, count, files=1):
    """Return the bundle with a tree whose files repeat one chunk."""
    from bundler.format.bundle import MemoryBlobs
    from bundler.format.digest import digest_text, sha256
    from bundler.format.entries import Artifact, Opaque
    from bundler.format.manifest import Content

    chunk = os.urandom(size)
    raw = sha256(chunk)
    rows = [
        [
            f"{OTHERWISE}/rank_0_0/inductor_cache/fxgraph/ab/cdef/{n:04}",
            size * count,
            [digest_text(raw)] * count,
        ]
        for n in range(files)
    ]
    with _tampered(packed, files=rows) as bundle:
        blobs = {raw: chunk} | {
            digest_raw(e.artifact.digest): bundle.read(e.artifact) for e in bundle.opaque
        }
        path = f"@families/vllm/{raw.hex()}"
        entry = Opaque(path, Artifact(raw.hex(), digest_text(raw), size))
        return bundler.Bundle(
            Content.of([*bundle.opaque, entry]), bundle.observed, MemoryBlobs(blobs)
        )


@pytest.mark.parametrize(("count", "files"), [(1100, 1), (1, 1100), (100, 11)])
def test_a_chunk_that_is_named_often_does_not_fill_the_disk(packed, tmp_path, count, files):
    """An index of kilobytes that names a chunk of a megabyte a thousand times is refused before
    anything is written.
    """
    with _repeated(packed, MIB, count, files) as bundle:
        with pytest.raises(LimitExceeded, match=r"max_bytes=1153433600"):
            _restore(bundle, tmp_path / "copy", only="all")
        with pytest.raises(LimitExceeded, match="bytes on disk, made of"):
            bundler.check(bundle, tmp_path / "copy", only="all", trust="code")
    assert not (tmp_path / "copy").exists()


def test_a_chunk_that_is_named_often_takes_the_memory_of_one(packed, tmp_path):
    """What may be written is written chunk by chunk, and compared so when it is there already."""
    with _repeated(packed, MIB, 150) as bundle:
        options = TreeOptions(
            roots={"vllm": tmp_path / "copy"}, facts=FINGERPRINT, max_bytes=150 * MIB
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(2):
            report = bundler.restore(bundle, only="all", trust="code", trees=options)
            assert len(report.companions) == 1
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert grown < 60 * MIB
    (written,) = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert written.stat().st_size == 150 * MIB
    written.unlink()


def test_as_many_ranks_as_there_are_may_have_equal_files(packed, tmp_path):
    """Sixty ranks with one file of two megabytes are no attack."""
    with _repeated(packed, 2 * MIB, 1, 60) as bundle:
        assert len(_restore(bundle, tmp_path / "copy", only="all").companions) == 60


def test_an_empty_file_comes_back_empty(root, tmp_path):
    """A file without bytes has no chunk."""
    (root / AOT / "rank_0_0/marker").touch()
    with bundler.pack_family("vllm", root, facts=FINGERPRINT) as bundle:
        _restore(bundle, tmp_path / "copy", only="all")
    assert (tmp_path / "copy" / AOT / "rank_0_0/marker").read_bytes() == b""


def test_keep_launch_takes_kernels_alone(root, tmp_path, compiled):
    """A bundle for nodes that have no use for compiled models holds device binaries and metadata,
    and still knows each rank.
    """
    with bundler.pack_family("vllm", root, keep="launch", facts=FINGERPRINT) as bundle:
        assert all(len(kernel.artifacts) == 2 for kernel in bundle.kernels)
        report = _restore(bundle, tmp_path / "copy", only="all")
    assert report.restored == tuple(compiled.keys_of("gelu_kernel"))
    assert len(list((tmp_path / "copy").rglob("triton_cache"))) == 2


def test_a_root_of_sglang_comes_back(compiled, tmp_path, monkeypatch):
    """Triton's and Inductor's kernels as kernels, a tree for each other cache in the root, and what
    is no compile cache left out.
    """
    root, keys = tmp_path / "sglang", compiled.keys_of("gelu_kernel")
    for place in ("triton", "inductor/triton/0"):
        support.plant(compiled.cache, root / place, keys)
    files = (
        "inductor/ab/cab.py",
        "tilelang/0.1/k/kernel.so",
        "deep_gemm/cache/k/kernel.cubin",
        "cute_aot/f/o.o",
        "nv/1/2/3",
        "torch_compile_cache/ab/rank_0_0/backbone/graph.py",
        ".cache/flashinfer/0.4/90a/x/x.so",
        "flashinfer/autotune/1/rank.json",
    )
    for name in (*files, "ple/model/table", "deep_gemm/locks/a.lock"):
        _write(root / name, name.encode())
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(root))
    with bundler.pack_family("sglang") as bundle:
        assert [kernel.key for kernel in bundle.kernels] == keys
        assert [tree.place for tree in read_trees(bundle)] == sorted(
            [
                ".cache/flashinfer",
                "cute_aot",
                "deep_gemm",
                "flashinfer",
                "inductor",
                "nv",
                "tilelang",
                "torch_compile_cache/ab",
                "triton",
            ]
        )
        assert {"ple", "deep_gemm/locks/a.lock"} <= set(dict(bundle.left_out))
        report = bundler.restore(bundle, tmp_path / "copy", trust="code", only="all")
    assert report.skipped == ()
    assert set(files) < set(_files(tmp_path / "copy"))
    assert {
        path.parent.parent.name
        for path in (tmp_path / "copy").rglob("*.cubin")
        if path.parent.name == keys[0]
    } == {"triton", "0"}


# ---------------------------------------------------------------------------------------- Bad input


def test_a_root_that_is_not_there_or_holds_nothing_is_named(tmp_path):
    """Each is a typed error with the directory, and with what was expected."""
    with pytest.raises(NotFound, match="nowhere"):
        bundler.pack_family("vllm", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        NotFound, match=r"holds nothing of vllm: expected files such as torch_compile_cache/\*\*"
    ):
        bundler.pack_family("vllm", tmp_path / "empty")
    _write(tmp_path / "other/assets/x", b"x")
    with pytest.raises(NotFound, match="holds nothing of vllm"):
        bundler.pack_family("vllm", tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises((NotFound, AccessDenied, ConfigError)):
        bundler.pack_family("vllm", tmp_path / "file")
    with pytest.raises(
        NotFound, match=r"no family 'vlm' is declared, did you mean 'vllm'.; known are vllm, sglang"
    ):
        bundler.pack_family("vlm", tmp_path)
    with pytest.raises(ConfigError, match="keep='none'"):
        bundler.pack_family("vllm", tmp_path, keep="none")


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_root_that_cannot_be_read_is_named(tmp_path):
    """A directory without permission is AccessDenied."""
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(AccessDenied):
        bundler.pack_family("vllm", tmp_path / "closed")


@pytest.mark.parametrize("field", ["patterns", "kernels", "exclude", "trees", "factors"])
@pytest.mark.parametrize(
    "pattern", ["../other/**", "/etc/**", "a/../../b", "a//b", "", "a\\b", "a\0b"]
)
def test_a_declaration_that_could_lead_out_of_its_root_is_refused(field, pattern):
    """Whichever list it stands in: absolute, with .., or no name at all."""
    with pytest.raises(ConfigError, match="family mine"):
        Family("mine", root=("~/.cache/mine",), **{field: (pattern,)})


@pytest.mark.parametrize(
    "more",
    [
        {"name": "../x"},
        {"name": ""},
        {"root": ()},
        {"trust": "all"},
        {"trees": ("**",)},
        {"ranks": "../*"},
        {"patterns": "**"},
    ],
)
def test_other_values_that_a_declaration_cannot_have(more):
    """Each is a ConfigError that says which family."""
    with pytest.raises(ConfigError):
        Family(**{"name": "mine", "root": ("~/x",), **more})


def _tampered(packed, **changes):
    """Return the bundle with the index of its first tree changed, and in its right place."""
    from bundler.format.bundle import MemoryBlobs
    from bundler.format.digest import digest_raw, digest_text, sha256
    from bundler.format.entries import Artifact, Opaque
    from bundler.format.manifest import Content, Observed

    with bundler.Bundle.load(packed) as bundle:
        blobs = {digest_raw(e.artifact.digest): bundle.read(e.artifact) for e in bundle.opaque}
        entries = [entry for entry in bundle.opaque if not entry.path.endswith(".tree.json")]
    row = {
        "family": "vllm",
        "files": [],
        "fingerprint": {},
        "format": 1,
        "kernels": {},
        "place": "",
        "ranks": [],
        **changes,
    }
    data = json.dumps(dict(sorted(row.items())), separators=(",", ":")).encode()
    raw = sha256(data)
    path = f"@families/{row['family']}/{raw.hex()}.tree.json"
    entries.append(Opaque(path, Artifact(path.rpartition("/")[2], digest_text(raw), len(data))))
    return bundler.Bundle(Content.of(entries), Observed(), MemoryBlobs({**blobs, raw: data}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"files": [["../../evil", 0, []]]}, "unsafe path"),
        ({"files": [["/etc/evil", 0, []]]}, "unsafe path"),
        ({"place": "../up"}, "unsafe path"),
        ({"kernels": {"../../x": ["A" * 52]}}, "unsafe path"),
        ({"kernels": {"x": ["../A"]}}, "not a kernel key"),
        ({"files": [["a", 0, []], ["a", 0, []]]}, "a file twice"),
        ({"files": [["a", 0, []], ["a/b", 0, []]]}, "as a file and as a directory"),
        ({"files": [["a", -1, []]]}, "not an index"),
        ({"files": [["a", 5, ["sha256:00"]]]}, "not a digest"),
        ({"format": 2}, "newer than 1"),
        ({"ranks": 5}, "not an index"),
        ({"family": "Not-A-Family"}, "not the name of a family"),
    ],
)
def test_an_index_that_was_tampered_with_is_skipped_and_nothing_written(
    packed, tmp_path, changes, words
):
    """Whatever an index says, nothing is written outside the root; the reason says what is wrong,
    and it counts as damaged.
    """
    before = {str(path) for path in tmp_path.rglob("*")}
    bundle = _tampered(packed, **changes)
    with bundle:
        report = _restore(bundle, tmp_path / "copy", only="all")
    assert [words in reason for _, reason in report.skipped] == [True]
    assert report.damaged
    assert {str(path) for path in tmp_path.rglob("*")} - before <= {str(tmp_path / "copy")}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (["torch_compile_cache/aa/model", 3, ["sha256:" + "00" * 32]], "lacks part"),
        (["torch_compile_cache/aa/model", 3, []], "another size"),
        ([".ssh/authorized_keys", 0, []], "has no such file"),
        (["torch_compile_cache/aa/tmp.bundler.1", 0, []], "unsafe path"),
    ],
)
def test_files_that_an_index_gives_wrongly_are_skipped(packed, tmp_path, file, words):
    """A chunk that is not there, a wrong size, a file that the family as declared here does not
    have.
    """
    with _tampered(packed, files=[file]) as bundle:
        report = _restore(bundle, tmp_path / "copy", only="all")
    assert any(words in reason for _, reason in report.skipped)
    assert not any(path.is_file() for path in (tmp_path / "copy").rglob("*"))


def test_a_family_that_is_not_declared_here_needs_a_declaration(root, tmp_path):
    """Its root is not known; with a root it goes there, as code, whatever its own machine
    declared.
    """
    mine = Family(
        "mine",
        root=("$MY_CACHE",),
        patterns=("torch_compile_cache/**",),
        fingerprint=(),
        trust="kernels",
    )
    with bundler.pack_family(mine, root) as bundle:
        report = bundler.restore(bundle, trust="code")
        assert "no family 'mine' is declared" in report.skipped[0][1]
        elsewhere = TreeOptions(roots={"mine": tmp_path / "copy"})
        assert {reason[:12] for _, reason in bundler.restore(bundle, trees=elsewhere).skipped} == {
            "it would be "
        }
        assert bundler.restore(bundle, trust="code", trees=elsewhere).companions
        declared = TreeOptions(roots={"mine": tmp_path / "data"}, families=(mine,))
        assert bundler.restore(
            bundle, trees=declared
        ).companions  # trust="kernels" is the declaration of this machine


def test_one_directory_for_several_families_is_refused(root, tmp_path):
    """cache_dir is the root of the only family; with two it is ambiguous."""
    gemm = tmp_path / "gemm"
    _write(gemm / "cache/kernel/x.cubin", b"\x7fELF")
    with bundler.pack_family("vllm", root) as one, bundler.pack_family("deep_gemm", gemm) as two:
        bundler.restore(one, tmp_path / "alone", trust="code", only="all")
        assert (tmp_path / "alone" / AOT / "rank_0_0/model").exists()
        with (
            bundler.merge([one, two]) as both,
            pytest.raises(ConfigError, match="deep_gemm, vllm: give the root of each"),
        ):
            bundler.restore(both, tmp_path / "copy", trust="code")
        with pytest.raises(ConfigError, match="expected a directory"):
            TreeOptions(roots={"vllm": ""})
        with pytest.raises(ConfigError, match="not empty"):
            TreeOptions(facts={"gpu": ""})


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"roots": {"vlm": "x"}}, "root 'vlm': no family is called so, did you mean 'vllm'"),
        ({"roots": {"": "x"}}, "root ''"),
        ({"facts": {"rank": "2"}}, "fact 'rank': .*did you mean 'ranks'"),
        (
            {"facts": {"nothing like it": "2"}},
            "fact 'nothing like it': .*expected of cuda, deep_gemm",
        ),
    ],
)
def test_a_name_that_nothing_has_is_refused(root, tmp_path, choice, said):
    """A root or a fact under another name would be ignored: an error with the nearest one, before
    anything is written.
    """
    options = TreeOptions(**choice)
    with bundler.pack_family("vllm", root) as bundle:
        for call in (bundler.restore, bundler.check):
            with pytest.raises(ConfigError, match=said):
                call(bundle, tmp_path / "copy", trust="code", trees=options)
        if "facts" in choice:
            with pytest.raises(ConfigError, match=said):
                bundler.explain_trees(bundle, trees=options)
            with pytest.raises(ConfigError, match=r"fact .*no part of a fingerprint"):
                bundler.pack_family("vllm", root, facts=choice["facts"])
    with (
        bundler.Bundle.load(GOLDEN) as kernels,
        pytest.raises(ConfigError, match=said),
    ):
        bundler.restore(kernels, tmp_path / "copy", only="all", trees=options)
    assert not (tmp_path / "copy").exists()


def test_a_family_that_is_almost_one_is_named(tmp_path):
    """The nearest name is offered, those of a user's own file among them; a misspelled part of a
    fingerprint is refused.
    """
    with pytest.raises(NotFound, match="did you mean 'vllm'"):
        bundler.pack_family("vlllm", tmp_path)
    (tmp_path / "families.toml").write_text(_TOML.replace('"gpu"', '"pyton"'))
    with pytest.raises(
        ConfigError, match="'pyton' is no fact and no package here, did you mean 'python'"
    ):
        Family.load(tmp_path / "families.toml")


@pytest.mark.parametrize("installed", ["3.0.0", None])
def test_kernels_of_another_triton_are_told_when_a_family_is_packed(root, monkeypatch, installed):
    """Packed where another Triton is installed, or none: trees are marked as made for the one that
    compiled the kernels, with a warning.
    """
    here = {"triton": installed} if installed else {}
    monkeypatch.setattr("bundler.lifecycle.family_pack.machine_facts", lambda names: dict(here))
    with pytest.warns(bundler.BundlerWarning, match="compiled by Triton 3.*marked as made for 3"):
        bundle = bundler.pack_family("vllm", root)
    with bundle:
        release = {kernel.toolchain.release for kernel in bundle.kernels}
        assert {tree.fingerprint["triton"] for tree in read_trees(bundle)} == release
    with bundler.pack_family(
        "vllm", root, facts={"triton": "3.0.0"}
    ) as bundle:  # as was said: no warning
        assert {tree.fingerprint["triton"] for tree in read_trees(bundle)} == {"3.0.0"}


def test_files_that_are_in_place_beside_unusable_kernels_are_told(tmp_path):
    """Where no kernel can be used and other files were written, the warning says both."""
    golden = GOLDEN.with_name("synthetic.tbundle")
    with pytest.warns(bundler.BundlerWarning, match="none of the 3 kernels .*: 2 other files"):
        report = bundler.restore(golden, tmp_path / "copy")
    assert (report.usable, len(report.companions)) == (0, 2)


# ------------------------------------------------------------------------------------- Declarations

_TOML = """
[families.mine]
root = ["$MY_CACHE", "~/.cache/mine"]
patterns = ["objects/**/*.cubin", "index.json"]
fingerprint = ["gpu", "mylib"]
trust = "code"
"""


def test_a_users_family_from_a_file_is_packed_and_restored(tmp_path, monkeypatch):
    """A few lines of TOML are all that a cache of another kind needs."""
    (tmp_path / "families.toml").write_text(_TOML)
    (mine,) = Family.load(tmp_path / "families.toml")
    assert mine == Family(
        "mine",
        ("$MY_CACHE", "~/.cache/mine"),
        ("objects/**/*.cubin", "index.json"),
        fingerprint=("gpu", "mylib"),
    )
    monkeypatch.setenv("MY_CACHE", str(tmp_path / "one"))
    for name in ("objects/a/b/c.cubin", "objects/d.cubin", "index.json", "objects/log.txt"):
        _write(tmp_path / "one" / name, name.encode())
    with bundler.pack_family(mine, facts={"mylib": "7"}) as bundle:
        monkeypatch.setenv("MY_CACHE", str(tmp_path / "two"))
        report = bundler.restore(
            bundle, trust="code", trees=TreeOptions(families=(mine,), facts={"mylib": "7"})
        )
        assert report.companions == (
            "mine:index.json",
            "mine:objects/a/b/c.cubin",
            "mine:objects/d.cubin",
        )
        refused = bundler.restore(
            bundle, trust="code", trees=TreeOptions(families=(mine,), facts={"mylib": "8"})
        )
        assert refused.skipped == (("mine:.", "mylib: made for 7, here 8"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "declares no family"),
        ("[families]\n", "declares no family"),
        ("[families.mine", "is not TOML"),
        ("[families.mine]\n", "says no root"),
        ("[families.mine]\nroot = '~/x'\ntypo = 1\n", "unknown: typo"),
        ("[families.mine]\nroot = '~/x'\npatterns = ['../**']\n", "could lead out of the root"),
        ("[families.mine]\nroot = '~/x'\npatterns = [5]\n", "expected texts"),
        ("families.mine = 5\n", "unknown: 5"),
    ],
)
def test_a_file_that_declares_no_family_is_refused(tmp_path, text, words):
    """The error names the file and what is wrong with it."""
    (tmp_path / "families.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        Family.load(tmp_path / "families.toml")
    with pytest.raises(NotFound):
        Family.load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("family", "variables", "expected"),
    [
        ("vllm", {"VLLM_CACHE_ROOT": "/c/v"}, "/c/v"),
        ("vllm", {"XDG_CACHE_HOME": "/x"}, "/x/vllm"),
        ("vllm", {"HOME": "/h"}, "/h/.cache/vllm"),
        ("sglang", {"SGLANG_CACHE_DIR": "/c/s"}, "/c/s"),
        ("sglang", {"HOME": "/h"}, "/h/.cache/sglang"),
        ("deep_gemm", {"DG_JIT_CACHE_DIR": "/g"}, "/g"),
        ("tilelang", {"HOME": "/h"}, "/h/.tilelang/cache"),
        ("flashinfer", {"FLASHINFER_WORKSPACE_BASE": "/f"}, "/f/.cache/flashinfer"),
    ],
)
def test_each_known_family_is_where_its_owner_keeps_it(family, variables, expected, monkeypatch):
    """The variables of each server in its order, then its default."""
    for name in (
        "VLLM_CACHE_ROOT",
        "XDG_CACHE_HOME",
        "SGLANG_CACHE_DIR",
        "DG_JIT_CACHE_DIR",
        "SGLANG_DG_CACHE_DIR",
        "TILELANG_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert FAMILIES[family].find_root() == expected


def test_a_family_whose_place_is_not_known_says_so(monkeypatch):
    """CuTe DSL has no default of its own."""
    for variable in FAMILIES["cute_dsl"].root:
        monkeypatch.delenv(variable.removeprefix("$"), raising=False)
    with pytest.raises(NotFound, match=r"none of \$SGLANG_CUTE_AOT_CACHE_DIR"):
        FAMILIES["cute_dsl"].find_root()


@pytest.mark.parametrize(
    ("family", "path", "taken", "place"),
    [
        ("vllm", f"{AOT}/rank_0_0/model", True, AOT),
        ("vllm", f"{OTHERWISE}/rank_0_0/eagle_head/cache_key_factors.json", True, OTHERWISE),
        ("vllm", "deep_gemm/cache/k/kernel.cubin", True, "deep_gemm"),
        ("vllm", "modelinfos/x.json", False, "modelinfos"),
        ("sglang", "tilelang/0.1/x/kernel.so", True, "tilelang"),
        ("sglang", ".cache/flashinfer/0.4/90a/x.so", True, ".cache/flashinfer"),
        ("sglang", "torch_compile_cache/ab/rank_0_0/x.py", True, "torch_compile_cache/ab"),
        ("sglang", "ple/model/table", False, "ple"),
        ("deep_gemm", "kernel.lock", False, ""),
    ],
)
def test_paths_of_known_families(family, path, taken, place):
    """Which files are of a family, and which tree each is in."""
    assert (takes(FAMILIES[family], path), place_of(FAMILIES[family], path)) == (taken, place)


def test_an_index_reads_what_it_wrote():
    """Equal trees have equal bytes, in whichever order they were given."""
    one = TreeIndex(
        "vllm", "a", {"gpu": "x", "cuda": "1"}, ("rank_1_0", "rank_0_0"), (), {"k": ("A" * 52,)}
    )
    two = TreeIndex(
        "vllm", "a", {"cuda": "1", "gpu": "x"}, ("rank_0_0", "rank_1_0"), (), {"k": ("A" * 52,)}
    )
    assert one.encode() == two.encode()
    assert TreeIndex.decode(one.encode()) == two


# --------------------------------------------------------------------------------------- Explaining


def test_explain_names_what_differs_on_this_machine(packed):
    """One sentence a tree, with the part of the fingerprint that differs, and what is not known."""
    found = bundler.explain_trees(
        packed, trees=TreeOptions(facts={**FINGERPRINT, "vllm": "0.34.0"})
    )
    assert [one.fingerprint for one in found] == [(("vllm", "0.33.0", "0.34.0"),)] * 2
    assert (
        found[0].sentence
        == f"vllm:{OTHERWISE} differs from this machine: vllm is 0.34.0 here, 0.33.0 there"
    )
    assert found[0].unknown == ("ranks",)
    agreed = bundler.explain_trees(packed, trees=TreeOptions(facts={**FINGERPRINT, "ranks": "2x1"}))
    assert [(one.same, one.sentence.partition(" agrees")[1]) for one in agreed] == [
        (True, " agrees")
    ] * 2


def test_explain_names_the_factor_of_vllms_hash_that_differs(root, packed, tmp_path):
    """vLLM names a tree by a hash; its cache_key_factors.json says which factor gave the new tree
    another name.
    """
    other = tmp_path / "other"
    changed = {**FACTORS, "env": {**FACTORS["env"], "VLLM_USE_X": True}, "config_hash": "c9"}
    for rank in ("rank_0_0", "rank_1_0"):
        _write(
            other / "torch_compile_cache/9999999999" / rank / "backbone/cache_key_factors.json",
            json.dumps(changed).encode(),
        )
    (one,) = bundler.explain_trees(packed, f"vllm={other}")
    assert one.nearest == f"vllm:{OTHERWISE}"
    assert one.factors == (
        ("backbone config_hash", "c0", "c9"),
        ("backbone env.VLLM_USE_X", "false", "true"),
    )
    assert "backbone env.VLLM_USE_X is true here, false there" in one.sentence
    same = bundler.explain_trees(packed, f"vllm={root}", trees=TreeOptions(facts=FINGERPRINT))
    assert [found.same for found in same] == [True, True]


@pytest.mark.parametrize("factors", [b"\x80\x04", b"[" * 100_000, b'"text"', b""])
def test_factors_that_are_no_json_are_named(root, packed, tmp_path, factors):
    """A file that cannot be read explains nothing, and says so; nothing is raised."""
    _write(
        tmp_path / "other/torch_compile_cache/9999999999/rank_0_0/backbone/cache_key_factors.json",
        factors,
    )
    (one,) = bundler.explain_trees(packed, f"vllm={tmp_path / 'other'}")
    assert not one.same
    assert one.factors or one.unknown


def test_a_kernel_that_a_tree_has_in_many_places_does_not_fill_the_disk(packed, tmp_path):
    """Each place gets a copy of the kernel, so all of them count."""
    with bundler.Bundle.load(packed) as bundle:
        kernel, *_ = bundle.kernels
        folders = {f"{OTHERWISE}/rank_{n:02}_0/triton_cache": [kernel.key] for n in range(65)}
        with _tampered(packed, kernels=folders) as trees:
            joined = bundler.merge([bundle, trees])
        size = sum(one.size for one in kernel.artifacts)
        limit = TreeOptions(roots={"vllm": tmp_path / "copy"}, max_bytes=65 * size - 1)
        with pytest.raises(LimitExceeded, match="bytes on disk"):
            bundler.restore(joined, only="all", trees=limit)
    assert not (tmp_path / "copy").exists()
