# SPDX-License-Identifier: Apache-2.0
"""What every place of images does: a registry that lists referrers, one that does not, a directory,
and Debian's registry.
"""

import io
import json

import pytest
import registry_server

from bundler.backends.backend_errors import NotThere, WrongBytes
from bundler.backends.oci import open_image_place, parse_image_url
from bundler.backends.oci.image_port import digest_of

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
KIND = "application/vnd.test.thing"


@pytest.fixture(
    params=[
        "referrers",
        "directory",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("no-referrers", "debian")),
    ]
)
def place(request, tmp_path):
    """An empty place."""
    if request.param == "directory":
        yield open_image_place(parse_image_url(f"oci-dir:{tmp_path}/images"), make=True)
    elif request.param == "debian":
        with registry_server.debian_registry(tmp_path) as host:
            opened = open_image_place(parse_image_url(f"oci://{host}/team/kernels?plain_http=1"))
            yield opened
            opened.close()
    else:
        with registry_server.SmallRegistry().serving() as server:
            server.lists_referrers = request.param == "referrers"
            opened = open_image_place(parse_image_url(server.url()))
            yield opened
            opened.close()


def put(place, data):
    """Store a blob."""
    return place.put_blob(digest_of(data), len(data), io.BytesIO(data))


def manifest(place, note="", subject=None):
    """Return a manifest whose blobs are in the place."""
    put(place, b"{}")
    blob = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest_of(b"{}"), "size": 2}
    content = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": KIND,
        "config": blob,
        "layers": [blob],
    }
    content |= {"annotations": {"note": note}} if note else {}
    content |= {"subject": subject} if subject else {}
    return json.dumps(content).encode()


def test_a_blob_comes_back(place):
    """What was stored is read, is there the second time, and is found by its digest alone."""
    data = b"kernel" * 1000
    assert [put(place, data), put(place, data)] == [True, False]
    out = io.BytesIO()
    place.read_blob(digest_of(data), len(data), out)
    assert out.getvalue() == data


def test_an_absent_blob_is_not_there(place):
    """Reading it is an error of its own."""
    with pytest.raises(NotThere):
        place.read_blob(digest_of(b"x"), 1, io.BytesIO())


@pytest.mark.parametrize("size", [5, 7])
def test_a_blob_of_another_size_is_wrong(place, size):
    """Fewer or more bytes than a manifest says are an error, whatever the digest."""
    put(place, b"kernel")
    with pytest.raises(WrongBytes):
        place.read_blob(digest_of(b"kernel"), size, io.BytesIO())


def test_a_tag_names_the_latest_manifest(place):
    """A tag moves; the manifest that it named stays under its digest."""
    first, second = manifest(place, "first"), manifest(place, "second")
    for data in (first, second):
        place.put_manifest(data, MANIFEST, "demo")
    assert place.manifest("demo").data == second
    assert place.manifest(digest_of(first)).data == first
    assert place.manifest("demo").media_type == MANIFEST
    assert place.tags() == ["demo"]


def test_an_unknown_tag_is_not_there(place):
    """Neither is an unknown digest."""
    place.put_manifest(manifest(place), MANIFEST, "demo")
    for reference in ("other", digest_of(b"nothing")):
        with pytest.raises(NotThere):
            place.manifest(reference)


def test_referrers_are_listed_or_said_to_be_unknown(place):
    """A place that says that it lists a manifest by its subject does so."""
    data = manifest(place)
    place.put_manifest(data, MANIFEST, "demo")
    subject = {"mediaType": MANIFEST, "digest": digest_of(data), "size": len(data)}
    about = manifest(place, "about", subject)
    listed = place.put_manifest(about, MANIFEST)
    found = place.referrers(digest_of(data), KIND)
    assert (found is None) is not listed
    assert [one.digest for one in found or ()] == [digest_of(about)] * listed
    assert not place.referrers(digest_of(data), "application/vnd.test.other")


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("oci://user:hush@registry.example/team/kernels:x", "user or password"),
        ("oci://registry.example/Team/kernels", "repository"),
        ("oci://registry.example/team/../kernels", "repository"),
        ("oci://registry.example/team/kernels:a b", "tag"),
        ("oci://registry.example/team/kernels@sha256:12", "digest"),
        ("oci://registry.example/team/kernels?timeout_s=0", "timeout_s"),
        ("oci://registry.example/team/kernels?tls=off", "tls"),
        ("oci://registry.example:port/team/kernels", "host"),
        ("oci:///team/kernels", "host"),
        ("oci-dir:relative", "expected"),
    ],
)
def test_what_is_no_url_of_an_image_is_refused(url, word):
    """The message says what is wrong, and holds no password."""
    from bundler.backends.backend_errors import BadSettings

    with pytest.raises(BadSettings, match=word) as caught:
        parse_image_url(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "host", "repository", "reference"),
    [
        ("oci://registry.example/kernels", "registry.example", "kernels", "latest"),
        ("oci://registry.example:5000/a/b-c/d:v1.0", "registry.example:5000", "a/b-c/d", "v1.0"),
        ("oci://[::1]:5000/a:v1", "[::1]:5000", "a", "v1"),
        (
            f"oci://registry.example/a:v1@sha256:{'0' * 64}",
            "registry.example",
            "a",
            f"sha256:{'0' * 64}",
        ),
        ("oci://docker.io/busybox", "registry-1.docker.io", "library/busybox", "latest"),
        ("oci-dir:///tmp/images:v1", "", "", "v1"),
        ("oci-dir:/tmp/im.ages", "", "", "latest"),
    ],
)
def test_a_url_says_which_image(url, host, repository, reference):
    """Host, repository, and tag or digest are taken apart as docker does it."""
    found = parse_image_url(url)
    assert (found.host, found.repository, found.reference) == (host, repository, reference)


@pytest.mark.parametrize("name", ["index.json", "blob"])
def test_a_link_or_pipe_in_a_directory_is_not_followed(name, tmp_path):
    """What lies in a directory that somebody brought is read only where it is a file of it."""
    import os

    from bundler.backends.backend_errors import BackendError

    url = parse_image_url(f"oci-dir:{tmp_path}/images")
    place = open_image_place(url, make=True)
    put(place, b"kernel")
    path = (
        tmp_path
        / "images"
        / (name if name != "blob" else f"blobs/sha256/{digest_of(b'kernel')[7:]}")
    )
    path.unlink()
    if name == "blob":
        (tmp_path / "outside").write_bytes(b"kernel")
        path.symlink_to(tmp_path / "outside")
    else:
        os.mkfifo(path)
    with pytest.raises(BackendError):
        place.tags() if name != "blob" else place.read_blob(digest_of(b"kernel"), 6, io.BytesIO())


def test_writers_of_a_directory_at_once_lose_nothing(tmp_path):
    """Each replaces the index under a lock."""
    import threading

    url = parse_image_url(f"oci-dir:{tmp_path}/images")
    open_image_place(url, make=True)

    def write(number):
        place = open_image_place(url, make=True)
        place.put_manifest(manifest(place, str(number)), MANIFEST, f"t{number}")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert open_image_place(url).tags() == [f"t{number}" for number in range(8)]
    assert [
        path.name for path in (tmp_path / "images").iterdir() if path.name.endswith(".tmp")
    ] == []
