# SPDX-License-Identifier: Apache-2.0
"""Images in MCV's layout: what we write is what its documents ask for, what others wrote is read,
and what is hostile is refused.
"""

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from registry_server import digest_of

import bundler
from bundler import (
    Bundle,
    DigestMismatch,
    FormatError,
    LimitExceeded,
    Limits,
    UnsafeName,
    pull_image,
    push_image,
)
from bundler.backends.oci import open_image_place, parse_image_url
from bundler.images.kernel_cache_images import cache_files, layer_files, unpack_layer, write_layer

LABEL = "cache.triton.image"
DOCKER = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.container.image.v1+json",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
)
OCI = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.oci.image.layer.v1.tar+gzip",
)
KEY = "A" * 52


def tar(members, archive_format=tarfile.PAX_FORMAT):
    """Return a gzip-compressed archive of (name or TarInfo, bytes)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=archive_format) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name) if isinstance(name, str) else name
            if member.isreg():
                member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def special(name, kind, target="/etc/passwd"):
    """Return a member that is no regular file."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


class Images:
    """A directory of images in which tests put what others might have built."""

    def __init__(self, folder):
        self.url = f"oci-dir:{folder}/images:demo"
        self._place = open_image_place(parse_image_url(self.url), make=True)

    def put(self, layers, kinds=OCI, labels=None, diff_ids=None, summary=f"{LABEL}/summary"):
        """Store an image of these layers."""
        size = sum(_cache_bytes(layer) for layer in layers)
        labels = (
            {summary: "{}", f"{LABEL}/cache-size-bytes": str(size)} if labels is None else labels
        )
        plain = (
            [digest_of(gzip.decompress(layer)) for layer in layers]
            if diff_ids is None
            else diff_ids
        )
        config = json.dumps(
            {"config": {"Labels": labels}, "rootfs": {"type": "layers", "diff_ids": plain}}
        ).encode()
        described = [self._blob(kinds[2], layer) for layer in layers]
        manifest = {
            "schemaVersion": 2,
            "mediaType": kinds[0],
            "config": self._blob(kinds[1], config),
            "layers": described,
        }
        self._place.put_manifest(json.dumps(manifest).encode(), kinds[0], "demo")

    def _blob(self, kind, data):
        self._place.put_blob(digest_of(data), len(data), io.BytesIO(data))
        return {"mediaType": kind, "digest": digest_of(data), "size": len(data)}


def _cache_bytes(layer):
    try:
        with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
            return sum(
                m.size
                for m in archive
                if m.isreg() and m.name.removeprefix("./").startswith("io.triton.cache/")
            )
    except (tarfile.TarError, EOFError, OSError):
        return 0


@pytest.fixture
def images(tmp_path):
    """An empty directory of images."""
    return Images(tmp_path)


@pytest.fixture(scope="module")
def files():
    """What lies in the layer of an image of the bundle: name and bytes, in order."""
    with Bundle.load(
        Path(__file__).parents[1] / "data" / "v2.0" / "triton-3.7.1.tbundle"
    ) as bundle:
        return [
            (name, bytes(data))
            for name, data in layer_files(cache_files(bundle, "/cache", "/opt/triton"))
        ]


def test_an_image_is_what_mcv_reads(bundle_path, tmp_path):
    """Labels, entries and sizes are those that its documents describe, and Triton's group files
    name the place where it is mounted.
    """
    push_image(
        bundle_path,
        f"oci-dir:{tmp_path}/images:demo",
        layout="mcv",
        cache_root="/models/cache",
        triton_dir="/opt/triton",
    )
    place = open_image_place(parse_image_url(f"oci-dir:{tmp_path}/images:demo"))
    manifest = json.loads(place.manifest("demo").data)
    assert [layer["mediaType"] for layer in manifest["layers"]] == [OCI[2]]
    blobs = []
    for one in (manifest["config"], manifest["layers"][0]):
        out = io.BytesIO()
        place.read_blob(one["digest"], one["size"], out)
        blobs.append(out.getvalue())
    config, layer = json.loads(blobs[0]), blobs[1]
    assert config["rootfs"] == {"type": "layers", "diff_ids": [digest_of(gzip.decompress(layer))]}
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        members = {m.name: archive.extractfile(m).read() for m in archive if m.isreg()}
    labels = config["config"]["Labels"]
    cache = {name: data for name, data in members.items() if name.startswith("io.triton.cache/")}
    assert labels[f"{LABEL}/cache-size-bytes"] == str(sum(map(len, cache.values())))
    assert labels[f"{LABEL}/entry-count"] == "4"
    assert json.loads(labels[f"{LABEL}/summary"]) == {
        "targets": [
            {"backend": "cuda", "arch": "90", "warp_size": 32},
            {"backend": "hip", "arch": "gfx942", "warp_size": 64},
        ]
    }
    assert members.keys() - cache.keys() == {"io.triton.manifest/manifest.json"}
    entries = json.loads(members["io.triton.manifest/manifest.json"])["triton"]
    assert {(one["backend"], one["arch"], one["warp_size"]) for one in entries} == {
        ("cuda", "90", 32),
        ("hip", "gfx942", 64),
    }
    for name, data in cache.items():
        folder, base = name.rsplit("/", 1)
        if base.startswith("__grp__"):
            key = folder.rpartition("/")[2]
            assert json.loads(data)["child_paths"] == {
                other.rpartition("/")[2]: f"/models/cache/{key}/{other.rpartition('/')[2]}"
                for other in json.loads(data)["child_paths"] and cache
                if other.startswith(folder) and "__grp__" not in other
            }


def test_the_bytes_of_a_layer_are_a_function_of_its_files(files):
    """The same files make the same layer."""
    made = []
    for _ in range(2):
        out = io.BytesIO()
        made.append((write_layer(out, files), out.getvalue()))
    assert made[0] == made[1]
    assert made[0][0][0] == digest_of(gzip.decompress(made[0][1]))


@pytest.mark.slow
def test_kernels_come_back_as_they_were(bundle_path, tmp_path):
    """Each file of each kernel is what the bundle has, but for facts that a cache directory does
    not hold.
    """
    url = f"oci-dir:{tmp_path}/images:demo"
    push_image(bundle_path, url, layout="mcv")
    pull_image(url, tmp_path / "out.tbundle")
    restored = []
    for path in (bundle_path, tmp_path / "out.tbundle"):
        bundler.restore(path, tmp_path / "cache", only="all")
        restored.append(
            {p: p.read_bytes() for p in sorted((tmp_path / "cache").rglob("*")) if p.is_file()}
        )
        shutil.rmtree(tmp_path / "cache")
    assert restored[0] == restored[1]
    assert len(restored[0]) >= 20


@pytest.mark.parametrize(
    "kinds",
    [
        DOCKER,
        pytest.param(OCI, marks=pytest.mark.slow),
        (*OCI[:2], "application/cache.triton.content.layer.v1+triton"),
    ],
)
@pytest.mark.parametrize(
    "archive_format",
    [
        tarfile.PAX_FORMAT,
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in (tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)
        ),
    ],
)
def test_what_others_build_is_read(kinds, archive_format, images, files, tmp_path):
    """Docker's and Buildah's media types and the older artifact's, each format of tar, with folders
    and a leading ./
    """
    folders = [
        (special("io.triton.cache/", tarfile.DIRTYPE, ""), b""),
        (special("./", tarfile.DIRTYPE, ""), b""),
    ]
    images.put(
        [tar([*folders, *((f"./{name}", data) for name, data in files)], archive_format)], kinds
    )
    report = pull_image(images.url, tmp_path / "out.tbundle")
    assert (report.kernels, report.left_out) == (4, ())


def test_an_image_of_two_layers_is_read(images, files, tmp_path):
    """A simple Dockerfile makes one for the cache, and one for the manifest."""
    images.put([tar(files[:-1]), tar(files[-1:])])
    assert pull_image(images.url, tmp_path / "out.tbundle").kernels == 4


def test_long_names_are_read(files, tmp_path):
    """Names that a plain header has no room for come in a header of their own, of pax or of GNU."""
    name = f"io.triton.cache/{KEY}/{'k' * 190}.json"
    for archive_format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        folder = tmp_path / str(archive_format)
        folder.mkdir()
        found = unpack_layer(io.BytesIO(tar([(name, b"{}")], archive_format)), str(folder))
        assert found.cache_bytes == 2
        assert (folder / KEY / f"{'k' * 190}.json").read_bytes() == b"{}"


HOSTILE = {
    "parent": (f"io.triton.cache/{KEY}/../../../../tmp/x", b""),
    "absolute": ("/etc/cron.d/x", b""),
    "double slash": (f"io.triton.cache//{KEY}/x.json", b""),
    "dot": (f"io.triton.cache/./{KEY}/x.json", b""),
    "symlink": (special(f"io.triton.cache/{KEY}", tarfile.SYMTYPE), b""),
    "hard link": (special(f"io.triton.cache/{KEY}/x.json", tarfile.LNKTYPE), b""),
    "device": (special(f"io.triton.cache/{KEY}/x", tarfile.CHRTYPE), b""),
    "block device": (special("dev/sda", tarfile.BLKTYPE), b""),
    "pipe": (special(f"io.triton.cache/{KEY}/x", tarfile.FIFOTYPE), b""),
    "whiteout": (f"io.triton.cache/.wh.{KEY}", b""),
    "opaque whiteout": ("io.triton.cache/.wh..wh..opq", b""),
    "link elsewhere": (special("lib", tarfile.SYMTYPE, "usr/lib"), b""),
    "link with a long target": (special("lib", tarfile.SYMTYPE, "u" * 300), b""),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_member_condemns_the_layer(what, tmp_path):
    """It is refused, wherever it stands, in each format of tar."""
    for archive_format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        (tmp_path / str(archive_format)).mkdir()
        with pytest.raises(UnsafeName):
            unpack_layer(
                io.BytesIO(tar([HOSTILE[what]], archive_format)),
                str(tmp_path / str(archive_format)),
            )
        assert list((tmp_path / str(archive_format)).iterdir()) == []


def test_a_hostile_image_makes_no_bundle(images, files, tmp_path):
    """What came before the member that is refused is of no use, either."""
    images.put([tar([*files, HOSTILE["symlink"]])])
    with pytest.raises(UnsafeName, match="oci-dir:"):
        pull_image(images.url, tmp_path / "out.tbundle")
    assert not (tmp_path / "out.tbundle").exists()


def test_a_file_that_comes_twice_is_refused(images, files, tmp_path):
    """In one layer, or in two: which of them is meant nobody can say."""
    images.put([tar([*files, files[0]])])
    with pytest.raises(UnsafeName, match="twice"):
        pull_image(images.url, tmp_path / "out.tbundle")
    images.put([tar(files), tar(files)])
    with pytest.raises(FormatError, match="two layers"):
        pull_image(images.url, tmp_path / "out.tbundle")


def test_files_of_no_kernel_are_left_out_and_named(images, files, tmp_path):
    """A notebook's checkpoint, a lock: harmless, and not taken."""
    others = [
        ("io.triton.cache/notes.txt", b"x"),
        (f"io.triton.cache/{KEY}/a/b", b"x"),
        (f"io.triton.cache/{KEY}/a b", b"x"),
        ("etc/hosts", b"x"),
    ]
    images.put([tar([*files, *others])])
    report = pull_image(images.url, tmp_path / "out.tbundle")
    assert report.kernels == 4
    assert {name for name, _ in report.left_out} == {"notes.txt", f"{KEY}/a/b", f"{KEY}/a b"}


def test_a_wrong_size_label_is_told(images, files, tmp_path):
    """Digests decide; the label is somebody's word."""
    images.put([tar(files)], labels={f"{LABEL}/summary": "{}", f"{LABEL}/cache-size-bytes": "7"})
    assert dict(pull_image(images.url, tmp_path / "out.tbundle").left_out)[
        f"{LABEL}/cache-size-bytes"
    ].startswith("says 7")


def test_a_layer_that_unpacks_to_something_else_is_refused(images, files, tmp_path):
    """The config names the archive before it was compressed."""
    images.put([tar(files)], diff_ids=["sha256:" + "0" * 64])
    with pytest.raises(DigestMismatch):
        pull_image(images.url, tmp_path / "out.tbundle")


@pytest.mark.parametrize(
    ("labels", "word"), [({}, "no cache"), ({"cache.vllm.image/summary": "{}"}, "vLLM")]
)
def test_an_image_without_a_triton_cache_is_refused(labels, word, images, files, tmp_path):
    """The message says what it is."""
    images.put([tar(files)], labels=labels)
    with pytest.raises(FormatError, match=word):
        pull_image(images.url, tmp_path / "out.tbundle")


def test_an_archive_that_is_cut_is_refused(images, files, tmp_path):
    """Wherever the compressed bytes end, or are no archive at all, it is a typed error."""
    whole = tar(files)
    for data in (
        b"",
        b"x" * 2000,
        whole[:100],
        whole[: len(whole) // 2],
        whole[:-12],
        gzip.compress(b"y" * 5000),
        gzip.compress(b"z" * 100),
    ):
        (tmp_path / digest_of(data)[-8:]).mkdir()
        with pytest.raises(FormatError):
            unpack_layer(io.BytesIO(data), str(tmp_path / digest_of(data)[-8:]))


def test_bombs_are_refused_before_they_go_off(tmp_path):
    """A gigabyte of zeros in a megabyte, a name or pax header without end, and a file over the
    limit.
    """
    small = Limits(raw_bytes=4 << 20, file_bytes=1 << 20)
    big = tar([(f"io.triton.cache/{KEY}/a.cubin", b"\0" * (2 << 20))])
    with pytest.raises(LimitExceeded):
        unpack_layer(io.BytesIO(big), str(tmp_path), small)
    with pytest.raises(LimitExceeded):
        unpack_layer(io.BytesIO(tar([("other", b"\0" * (8 << 20))])), str(tmp_path), small)
    for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
        header = tarfile.TarInfo("x")
        header.type, header.size = kind, 1 << 33
        with pytest.raises(LimitExceeded):
            unpack_layer(io.BytesIO(gzip.compress(header.tobuf(tarfile.GNU_FORMAT))), str(tmp_path))


def pax(fields):
    """Return a layer with one file, after a pax header of these bytes."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(fields)
    member = tarfile.TarInfo("io.triton.manifest/manifest.json")
    plain = header.tobuf() + fields + b"\0" * (-len(fields) % 512) + member.tobuf() + b"\0" * 1024
    return gzip.compress(plain)


@pytest.mark.parametrize(
    "fields",
    [
        b"5 path=x\n",
        b"99 path=x\n",
        b"path",
        b"-1 path=x\n",
        b"13 size=-700\n",
        b"12 size=abc\n",
        b"22 GNU.sparse.major=1\n",
        b"10 path=..\n",
    ],
)
def test_a_damaged_pax_header_is_refused(fields, tmp_path):
    """What it gives the next member is believed in no respect."""
    (tmp_path / "out").mkdir()
    with pytest.raises(FormatError):
        unpack_layer(io.BytesIO(pax(fields)), str(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_every_flipped_byte_is_found_or_harmless(files, tmp_path):
    """Whatever one byte of the archive is changed to, the layer is refused, or its digest is
    another than the config names.
    """
    plain = gzip.decompress(tar(files[:3]))
    for place in range(0, 1600, 37):
        folder = tmp_path / str(place)
        folder.mkdir()
        spoilt = plain[:place] + bytes([plain[place] ^ 0x41]) + plain[place + 1 :]
        try:
            found = unpack_layer(io.BytesIO(gzip.compress(spoilt, 1)), str(folder))
        except FormatError:
            continue
        assert found.diff_id == f"sha256:{hashlib.sha256(spoilt).hexdigest()}" != digest_of(plain)


def test_what_mcv_extracts_is_a_cache_that_triton_reads(bundle_path, tmp_path):
    """By MCV's own rules: members by their prefix, sizes added up and compared with the label; then
    each file is where Triton's group file says.
    """
    cache = tmp_path / "cache"
    report = push_image(
        bundle_path, f"oci-dir:{tmp_path}/images:demo", layout="mcv", cache_root=str(cache)
    )
    place = open_image_place(parse_image_url(f"oci-dir:{tmp_path}/images:demo"))
    manifest = json.loads(place.manifest("demo").data)
    out = io.BytesIO()
    place.read_blob(manifest["layers"][0]["digest"], report.size_bytes, out)
    extracted = 0
    with tarfile.open(fileobj=io.BytesIO(out.getvalue()), mode="r:gz") as archive:
        for member in archive:
            if member.isreg() and member.name.startswith("io.triton.cache/"):
                path = cache / member.name.removeprefix("io.triton.cache/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())
                extracted += member.size
    assert str(extracted) == manifest["annotations"][f"{LABEL}/cache-size-bytes"]
    groups = [json.loads(path.read_text())["child_paths"] for path in cache.glob("*/__grp__*")]
    assert len(groups) == 4
    assert all(
        Path(path).is_file() and Path(path).name == name
        for group in groups
        for name, path in group.items()
    )
    checked = bundler.check(bundle_path, cache, only="all")
    assert (checked.missing, len(checked.present)) == ((), 4)
